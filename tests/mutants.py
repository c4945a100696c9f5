"""Mutants: the core with one text replaced, and which guard notices.

A mutant is what somebody could write by mistake and what Python would run without a word: a sum
left out, a division done twice, a wait too late. Each says on which case it shows, and what every
guard has to say of it. The guards:

    check   programs/checks.py refuses the compiled program, without a process
    frozen  the program sends something else than what tests/oracles have
    equal   gradients, or weights after SGD, differ from the reference's
    late    they do where a call's result is there when it is waited for, and not before

A mutant swaps the code of the functions that it changes, where they are: so all that has imported
them runs it, and it is undone by putting the code back.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple


class Case(NamedTuple):
    """What is trained: fields of a plan, and of the model what is not as in test_mutants.py.

    With AdamW, which hides a wrong factor, the other side is the same plan without offload.
    """

    plan: dict[str, Any]
    model: dict[str, Any] = {}
    clip_norm: float | None = None
    optimizer: str = "sgd"
    steps: int = 2


class Mutant(NamedTuple):
    """``old`` stands once in the module and becomes ``new``.

    case    on which it shows: a key of `CASES`, or for ``frozen`` of `FROZEN`
    check, equal, late  a pattern of what the guard has to say; "": it is not asked
    frozen  the phase of the messages that are others
    """

    case: str
    module: str
    old: str
    new: str
    check: str = ""
    frozen: str = ""
    equal: str = ""
    late: str = ""


@contextlib.contextmanager
def applied(mutant: Mutant | None) -> Iterator[None]:
    """The core is the mutant in here; None: it is as it is."""
    swaps = [] if mutant is None else list(_swaps(mutant))
    for function, _, mutated in swaps:
        function.__code__ = mutated
    _forget()
    try:
        yield
    finally:
        for function, code, _ in swaps:
            function.__code__ = code
        _forget()


def _swaps(mutant: Mutant) -> Iterator[tuple[FunctionType, CodeType, CodeType]]:
    """(function, its code, the mutant's) of all functions that are not the same."""
    module = importlib.import_module(mutant.module)
    source, name = Path(module.__file__).read_text(), module.__file__
    count = source.count(mutant.old)
    assert count == 1, f"{mutant.old!r} stands {count} times in {mutant.module}"
    made = compile(source.replace(mutant.old, mutant.new), name, "exec", dont_inherit=True)
    found = []
    for code in _functions(made):
        with contextlib.suppress(KeyError):  # a function that a decorator has made is left
            function = _function(module, code.co_qualname)
            if function.__code__ != code:
                found.append((function, function.__code__, code))
    assert found, f"{mutant.old!r} stands in no function of {mutant.module}"
    yield from found


def _functions(code: CodeType) -> Iterator[CodeType]:
    """The code of functions and methods, but not of what is inside them."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and "<" not in inner.co_qualname:
            if inner.co_flags & inspect.CO_OPTIMIZED:
                yield inner
            else:
                yield from _functions(inner)


def _function(module: ModuleType, qualified: str) -> FunctionType:
    found: Any = module
    for name in qualified.split("."):
        found = vars(found)[name]
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    return inspect.unwrap(getattr(found, "__func__", found))


def _forget() -> None:
    """What functions of the library remember was made by other code."""
    for name, module in list(sys.modules.items()):
        if name.startswith("paralab."):
            for held in list(vars(module).values()):
                if hasattr(held, "cache_clear"):
                    held.cache_clear()


# ---- what is trained -----------------------------------------------------------------------------
SMALL = 40_000  # bytes of a bucket: so there are several
DROPS = {"dropout": 0.1}
ONCE: dict[str, Any] = {"model": {"layers": 1}, "steps": 1}  # what is wrong at the first look
CASES = {
    "accumulation": Case({"microbatches": 3}),
    "data parallel": Case({"dp": 2, "microbatches": 2, "bucket_bytes": SMALL}, DROPS),
    "naive": Case({"dp": 2, "grad_sync": "naive"}),
    "bucketed": Case({"dp": 2, "grad_sync": "bucketed", "bucket_bytes": SMALL}),
    "ZeRO-1": Case({"dp": 2, "zero_stage": 1, "bucket_bytes": SMALL}),
    "ZeRO-2": Case({"dp": 2, "zero_stage": 2, "microbatches": 2, "bucket_bytes": SMALL}),
    "ZeRO-3": Case({"dp": 2, "zero_stage": 3, "microbatches": 2}),
    "HSDP": Case({"dp": 4, "shard": 2, "zero_stage": 3}),
    "hpZ": Case({"dp": 4, "zero_stage": 3, "secondary_shard": 2}),
    "pipeline": Case({"pp": 2, "microbatches": 3}, {}, 0.05),
    "zero bubble": Case({"pp": 2, "microbatches": 3, "schedule": "zb-h1"}),
    "zero bubble, recomputed": Case({"pp": 2, "microbatches": 2, "schedule": "zb-h1",
                                     "recompute": "full"}),
    "recomputed": Case({"recompute": "full", "microbatches": 2}, DROPS),
    "selective": Case({"recompute": "selective", "microbatches": 2}, DROPS),
    "tensor parallel": Case({"tp": 2, "microbatches": 2}, DROPS, 0.05),
    "tensor and data parallel": Case({"tp": 2, "dp": 2, "grad_sync": "naive"}),
    "sequence parallel": Case({"tp": 2, "sequence_parallel": True, "microbatches": 2}),
    "parts": Case({"tp": 2, "recompute": "full", "partition_activations": True}),
    "messages in parts": Case({"tp": 2, "pp": 2, "microbatches": 2, "partition_messages": True}),
    "2D": Case({"tp": 4, "tp_mode": "2d"}, **ONCE),
    "2.5D": Case({"tp": 8, "tp_mode": "2.5d", "tp_depth": 2, "microbatch_size": 4}, **ONCE),
    "3D": Case({"tp": 8, "tp_mode": "3d", "microbatch_size": 4}, **ONCE),
    "bf16": Case({"dp": 2, "precision": "bf16"}),
    "fp16": Case({"dp": 2, "precision": "fp16", "zero_stage": 3}),
    "fp16, clipped": Case({"dp": 2, "precision": "fp16", "zero_stage": 1}, {}, 0.05),
    "gradients on the host": Case({"dp": 2, "zero_stage": 2, "microbatches": 2, "offload": "cpu",
                                   "bucket_bytes": SMALL}, {}, 0.05),
    "files": Case({"dp": 2, "zero_stage": 3, "microbatches": 2, "offload": "nvme"}),
    "host, AdamW": Case({"dp": 2, "zero_stage": 1, "offload": "cpu"}, {}, None, "adamw"),
    "files, AdamW": Case({"dp": 2, "zero_stage": 3, "offload": "nvme"}, {}, None, "adamw"),
    "files of gradients": Case({"dp": 2, "zero_stage": 2, "microbatches": 2,
                                "offload": {"optimizer": "nvme", "gradients": "nvme"}}),
    "replicas on the host": Case({"dp": 4, "shard": 2, "zero_stage": 2, "offload": "cpu"}),
    "sequence parallel on the host": Case({"tp": 2, "dp": 2, "sequence_parallel": True,
                                           "zero_stage": 2, "offload": "cpu"}),
    "inputs on the host": Case({"recompute": "full", "microbatches": 2,
                                "offload": {"activations": "cpu"}}),
    "relay": Case({"zero_stage": 3, "offload": "cpu", "recompute": "full", "microbatches": 2,
                   "schedule": "l2l"}, DROPS),
}  # fmt: skip
FROZEN = {  # by their names in tests/oracles
    "frozen buckets": "dp=2 pp=2 schedule=zb-h2",
    "frozen ZeRO-3": "dp=4 pp=2 schedule=gpipe zero_stage=3 shard=2 prefetch=0",
    "frozen f-bar": "tp=2 pp=2 sequence_parallel schedule=gpipe zero_stage=1 recompute=selective "
    "offload=cpu",
    "frozen selective": "dp=2 tp=4 tp_mode=2d microbatches=1 recompute=selective",
    "frozen relay": "dp=4 tp=2 schedule=l2l microbatches=1 zero_stage=3 shard=2 recompute=full "
    "partition_activations offload=cpu",
}

# ---- the list ------------------------------------------------------------------------------------
DATA_PARALLEL = "paralab.parallel.data_parallel"
ZERO = "paralab.parallel.zero"
UPDATES = "paralab.parallel.optimizer"
RECOMPUTE = "paralab.parallel.recompute"
TENSOR = "paralab.parallel.tensor_parallel"
OFFLOAD = "paralab.parallel.offload"
OPS = "paralab.model.ops"
GRIDS = "paralab.model.grid_ops"
BUILD = "paralab.model.build"
DRAWS = "paralab.model.draws"
RUN = "paralab.interpret.run"
STATE = "paralab.interpret.state"
FLAT = "paralab.interpret.flat"
TRAIN = "paralab.interpret.train"
WORKERS = "paralab.interpret.workers"
OFFLOADED = "paralab.interpret.offloaded"
DERIVE = "paralab.programs.derive"
COMPILE = "paralab.programs.compile"
PROGRAM = "paralab.programs.program"
INSTRUCTIONS = "paralab.programs.instructions"
LOWERING = "paralab.parallel.lowering"
LAYOUTS = "paralab.parallel.layouts"
BUCKETS = "paralab.parallel.buckets"
BATCHES = "paralab.batches"
GRADIENTS, WEIGHTS = "gradients of", "weights of"


def wrong(*how: str, **guards: str) -> Mutant:
    """A mutant by which gradients differ from the reference's, whatever else notices."""
    return Mutant(*how, equal=GRADIENTS, **guards)


DIVISOR = BUILD, "plan.microbatches * plan.dp * loss_parts(plan)"
NO_WAIT = DERIVE, "if not written.isdisjoint(reads):", "if not reads:"
# fmt: off
MUTANTS = {
    # ---- the data-parallel sum, and the divisions
    "overlapped: no sum": Mutant("data parallel", DATA_PARALLEL,
        "for position, units in completed(code).items()", "for position, units in ()",
        check="never summed over the data-parallel ranks"),
    "overlapped: the last bucket stays": wrong("data parallel", DATA_PARALLEL,
        "for position, units in completed(code).items()",
        "for position, units in list(completed(code).items())[:-1]",
        check="never summed over the data-parallel ranks"),
    "overlapped: summed after every micro-batch": Mutant("data parallel", DATA_PARALLEL,
        "units in completed(code).items()", "units in completed(code, per_microbatch=True).items()",
        check="is summed over dp already"),
    "bucketed: one bucket is not summed": Mutant("bucketed", DATA_PARALLEL,
        "return code + [all_reduce(u) for u in gradients(code)]",
        "return code + [all_reduce(u) for u in gradients(code)[1:]]",
        check="never summed over the data-parallel ranks"),
    "bucketed: summed twice": wrong("bucketed", DATA_PARALLEL,
        "return code + [all_reduce(u) for u in gradients(code)]",
        "return code + 2 * [all_reduce(u) for u in gradients(code)]",
        check="is summed over 'dp' already"),
    "naive: one parameter is not summed": Mutant("naive", DATA_PARALLEL,
        "in sorted(gradients(code))]", "in sorted(gradients(code))[1:]]",
        check="never summed over the data-parallel ranks"),
    "naive: summed over the tensor-parallel ranks": wrong("tensor and data parallel", DATA_PARALLEL,
        "[all_reduce(u) for u in sorted", "[all_reduce(u, 'tp') for u in sorted",
        check="is not partial over 'tp'"),
    "buckets twice as large as asked for": Mutant("frozen buckets", BUCKETS,
        "missing = closing_size", "missing = 2 * closing_size", frozen="grad_sync"),
    "no division by the data-parallel ranks": wrong("data parallel", *DIVISOR,
        "plan.microbatches * loss_parts(plan)"),
    "no division by the micro-batches": wrong("accumulation", *DIVISOR,
        "plan.dp * loss_parts(plan)"),
    "a division by the ranks done twice": wrong("ZeRO-1", *DIVISOR,
        "plan.microbatches * plan.dp**2 * loss_parts(plan)"),
    "every rank takes the first rank's micro-batches": wrong("ZeRO-1", BATCHES,
        "first = rank * plan.microbatches", "first = 0"),
    # ---- accumulation
    "later micro-batches take the place of earlier ones": wrong("accumulation", FLAT,
        "flat.fresh.remove(name)", "pass"),
    "gradients of the last step are still there": wrong("accumulation", DERIVE,
        "freed_at.setdefault(position, []).append(v)",
        "freed_at.setdefault(position, []).extend([v] * (v[0] != 'grad'))", check="is never freed"),
    # ---- ZeRO
    "ZeRO-1: the last reduce-scatter is left out": Mutant("ZeRO-1", ZERO,
        "new_code.append(in_flight)", "new_code += [in_flight] * (u > 0)",
        check="reads gshard bucket 0, which no instruction has written"),
    "ZeRO-1: updated shares are not gathered": wrong("ZeRO-1", ZERO, 'if v[0] == "shard"',
        'if v[0] == "shards"', check="each rank updates its shard of"),
    "ZeRO-1: every rank owns the first share": wrong("ZeRO-1", STATE,
        "shard = low.chunk(n)[self.index]", "shard = low.chunk(n)[0]"),
    "ZeRO-2: the last share is not added": Mutant("ZeRO-2", ZERO, "return new_code + pending_adds",
        "return new_code", check="that it writes is never read"),
    "ZeRO-2: the last micro-batch alone, kept": Mutant("ZeRO-2", ZERO, "ADD if u in seen else KEEP",
        "KEEP", check="writes gshard bucket 0 again"),
    "ZeRO-2: the last micro-batch alone, added": wrong("ZeRO-2", RUN,
        "flat_of(self.store[ins.writes[0]]).add_(", "flat_of(self.store[ins.writes[0]]).copy_("),
    "ZeRO-2: gradients of all micro-batches leave as one": Mutant("ZeRO-2", ZERO,
        "pending_adds, seen = completed(code, per_microbatch=True), [], set()",
        "pending_adds, seen = completed(code), [], set()", check="that it writes is never read"),
    "ZeRO-3: what forward gathered is kept for backward": Mutant("frozen ZeRO-3", COMPILE,
        "(back, ins.mb, stage_of[ins.at[0]])", "(ins.mb, stage_of[ins.at[0]])",
        frozen="param_gather"),
    "HSDP: a share is not summed over the replicas": wrong("HSDP", ZERO, "(gradients(code))]",
        "(gradients(code))[1:]]", check="never summed over the ranks that keep the same shard"),
    "HSDP: shares are summed over the wrong axis": wrong("HSDP", ZERO, '(u, "replica"',
        '(u, "dp"', check="is summed over 'dp' already"),
    "hpZ: every neighbour keeps the first part": wrong("hpZ", RUN,
        ".flat.chunk(group.size)[group.index].clone()", ".flat.chunk(group.size)[0].clone()"),
    # ---- what other axes owe, the norm, the update
    "tied: the ends' gradients are not summed": wrong("pipeline", UPDATES, "return code + new_code",
        "return code", check="never summed over the first and the last pipeline rank"),
    "norms: the first unit is forgotten in the sum": Mutant("sequence parallel", UPDATES,
        "reads=values, writes=values, lane=axis", "reads=values[1:], writes=values[1:], lane=axis",
        check="never summed over the tensor-parallel ranks"),
    "clip: the norm is this rank's alone": wrong("pipeline", UPDATES, "for axis in axes",
        "for axis in ()", check="norm is a partial sum"),
    "clip: the norm is summed twice": wrong("pipeline", UPDATES, "for axis in axes",
        "for axis in [*axes, *axes]", check="norm is not partial over 'pp'"),
    "clip: no update reads the norm": wrong("pipeline", UPDATES, "if ins.op == UPDATE else ins for",
        "if ins.op == 'none' else ins for"),
    "clip: what tp ranks hold the same is counted by each": wrong("tensor parallel", PROGRAM,
        "elsewhere or any(at[c]", "elsewhere or any(at[c] < 0"),
    "clip: a tied copy is counted too": wrong("pipeline", PROGRAM,
        "elsewhere = self.spec.tied and name == TIED[1]",
        "elsewhere = not self.spec.tied and name == TIED[1]"),
    "a unit is not updated": Mutant("data parallel", UPDATES, "for u in gradients(code):",
        "for u in gradients(code)[1:]:", check="is updated 0 times"),
    "fp16: the norm is that of the scaled gradients": wrong("fp16, clipped", STATE,
        "            norm = norm / divisor\n", ""),
    "fp16: gradients are not unscaled": wrong("fp16", STATE, "divisor = self.loss_scale",
        "divisor = torch.ones_like(self.loss_scale)"),
    "fp16: the loss is not scaled, and what is divided by is": wrong("fp16", OPS,
        "env.share / len(kept[1])", "float(env.share) / 2**16 / len(kept[1])"),
    "bf16: weights are not refreshed from the master": wrong("bf16", STATE,
        'target.copy_(self.store["master", u, 0])', "pass"),
    # ---- recomputation, and dropout's masks
    "recomputed: forward keeps all the same": Mutant("recomputed", RECOMPUTE,
        "ins.mb, n, keeps=False)", "ins.mb, n, keeps=True)", check="writes saved blocks.1 again"),
    "recomputed: not before the first half of a backward": Mutant("zero bubble, recomputed",
        RECOMPUTE, "ins.op in (BACKWARD, BACKWARD_INPUT):", "ins.op == BACKWARD:",
        check="reads saved blocks.0, which no instruction has written"),
    "recomputed: masks of the first micro-batch": wrong("recomputed", RUN,
        "env.sample = self.first_sample + k",
        "env.sample = self.first_sample + k * (ins.op != RECOMPUTE)"),
    "masks of the first rank": wrong("data parallel", TRAIN,
        "self.grid.dp.index * plan.microbatches", "0"),
    "parts: every rank keeps the first": wrong("parts", RUN, "source.shape[1])[:, group.index]",
        "source.shape[1])[:, 0]"),
    "messages in parts: every rank sends the first": wrong("messages in parts", RUN,
        "source.shape[1])[:, group.index]", "source.shape[1])[:, 0]"),
    "parts: samples come back mixed": wrong("parts", RUN,
        "return parts.transpose(0, 1).reshape(whole.shape)", "return parts.reshape(whole.shape)"),
    "selective: whole blocks are computed again": Mutant("frozen selective", RECOMPUTE,
        'if kind == "full":', "if kind:", frozen="linear_forward"),
    # ---- tensor parallelism
    "g: no sum behind a pair of layers": Mutant("tensor parallel", TENSOR, "if last.message == G:",
        "if last.message == F:",
        check="x embedding.position is a partial sum: it is not summed over the tensor-parallel"),
    "f: no sum of the input's gradient": wrong("tensor parallel", TENSOR,
        "return [*gathers, input_half, message, weight_half]",
        "return [*gathers, input_half, weight_half]",
        check="g head.enter is a partial sum: it is not summed over the tensor-parallel"),
    "a weight half split off is forgotten": Mutant("tensor parallel", TENSOR,
        "return [*gathers, input_half, message, weight_half]",
        "return [*gathers, input_half, message]", check="is computed 0 times"),
    "a weight half is no part of its backward": Mutant("tensor parallel", TENSOR,
        'writes=grads, phase="backward")', "writes=grads)", check="the schedule has BACKWARD"),
    "f-bar: what comes back is summed and not scattered": Mutant("frozen f-bar", TENSOR,
        '("g", i - 1, k))', '("g", i - 1, k))._replace(op=ALL_REDUCE)', frozen="linear_backward"),
    "samples of a sequence in parts are mixed": wrong("sequence parallel", RUN,
        "return whole.view(samples, n, -1, whole.shape[1]).transpose(0, 1).contiguous()",
        "return whole.view(samples, n, -1, whole.shape[1]).contiguous()"),
    "norms of a part of the sequence are not summed": wrong("sequence parallel", LAYOUTS,
        'frozenset(("norm",) if sequence_parallel else ())', "frozenset()"),
    "norms are summed where every rank has all of it": wrong("tensor parallel", LAYOUTS,
        'frozenset(("norm",) if sequence_parallel else ())', 'frozenset(("norm",))'),
    "a row's bias on every rank": wrong("tensor parallel", OPS,
        "if self.bias and not self.late_bias else None", "if self.bias else None"),
    "embedding: entries of others are found at 0": wrong("tensor parallel", OPS,
        ".masked_fill_(elsewhere.unsqueeze(1), 0.0)\n        return", "\n        return"),
    "embedding: gradients of others' entries go to 0": wrong("tensor parallel", OPS,
        "g = g.masked_fill(elsewhere.unsqueeze(1), 0.0)", "g = g * 1"),
    "loss: the own logits alone": wrong("tensor parallel", OPS, "total = torch.logsumexp(sums, 0)",
        "total = sums[0]"),
    "loss: every rank takes the target off": wrong("tensor parallel", OPS,
        "-local.unsqueeze(1).to(g.dtype)", "-torch.ones_like(index, dtype=g.dtype)"),
    # ---- ops
    "the gradient does not pass by a branch": wrong("accumulation", OPS, "g += grads[0]",
        "g += 0 * grads[0]"),
    "a bias has the mean of its gradients": wrong("accumulation", OPS, 'into.add("bias", g.sum(0))',
        'into.add("bias", g.mean(0))'),
    "positions have the first sample's gradient": wrong("accumulation", OPS, "g.shape[1]).sum(0))",
        "g.shape[1])[0])"),
    "attention: queries' gradients are not scaled": wrong("accumulation", OPS,
        "torch.div(gs @ k, root, out=gq)", "torch.div(gs @ k, 1.0, out=gq)"),
    "attention: values of dropped scores": wrong("selective", OPS,
        "gv.copy_(weighting.transpose(-2, -1) @ g)",
        "gv.copy_(probabilities.transpose(-2, -1) @ g)"),
    "GELU: the other form's derivative": wrong("accumulation", OPS,
        'gelu_backward.default(g, x, approximate="tanh")',
        'gelu_backward.default(g, x, approximate="none")'),
    "dropout does not scale up": wrong("recomputed", OPS, "return (x * mask).mul_(1 / (1 - p))",
        "return x * mask"),
    "loss: a sum over tokens, no mean": wrong("accumulation", OPS, "env.share / len(kept[1])",
        "env.share"),
    # ---- grids
    "2D: a block's product is not added": wrong("2D", GRIDS, "total.addmm_(left, right)", "total"),
    "2D: the wrong column's weights": wrong("2D", GRIDS,
        "self.received_block(method, 2 * step + 1, b, env)", "b"),
    "2D: norm of the own features": wrong("2D", GRIDS, "mean = means.mean(0)", "mean = means[0]"),
    "2D: a norm's gradient of the own features": wrong("2D", GRIDS,
        'env.call(self, "input", 0, sums)', "pass"),
    "2D: tokens of one row taken for all": wrong("2D", LAYOUTS,
        "return math.prod(sizes[name] for name in mode_of(plan).logits[0])", "return 1"),
    "2D: what rows share is not summed": wrong("2D", UPDATES, "return code + new_code",
        "return code", check="never summed over the tensor-parallel ranks"),
    "2.5D: weights are not summed over depth": wrong("2.5D", LAYOUTS, "kind in mode.partial)",
        "kind in mode.partial and not thirds)"),
    "2.5D: every grid looks all samples up": wrong("2.5D", LAYOUTS,
        "return slice(grid * count, (grid + 1) * count)", "return slice(0, count)"),
    "3D: the input's gradient is not summed": wrong("3D", GRIDS,
        'env.start_overlapped(self, "input", 1, gx, g_rows @ w)',
        "gx.copy_((g_rows @ w).chunk(self.q)[0])"),
    "3D: the weight's gradient is not summed": wrong("3D", GRIDS,
        'env.call(self, "weight", 0, shard, parts)',
        "shard.copy_(parts.view(self.q, *shard.shape)[0])"),
    "3D: a bias has the first rank's gradient": wrong("3D", GRIDS,
        "[env.groups[self.sum_axis].index].sum(0)", "[0].sum(0)"),
    # ---- pipelines
    "half the gradient is sent on": wrong("pipeline", RUN, 'store["g", i, k] = grads',
        'store["g", i, k] = tuple(0.5 * g for g in grads)'),
    "a tied copy of its own": wrong("pipeline", DRAWS, "name = TIED[0]", "pass"),
    "messages of neighbouring micro-batches are swapped": Mutant("pipeline", INSTRUCTIONS,
        "else ((), (v,))", "else ((), ((*v[:2], k ^ 1),))",
        check="reads g blocks.1, which no instruction has written"),
    "weight halves of all micro-batches at once": Mutant("zero bubble", INSTRUCTIONS,
        "return Instr(BACKWARD_WEIGHT, at, k, -1, (deferred,), ())",
        "return Instr(BACKWARD_WEIGHT, at, 0, -1, (deferred,), ())", check="computed 3 times"),
    "weight halves overwrite each other": wrong("zero bubble", FLAT, "view.addmm_(a, b)",
        "torch.mm(a, b, out=view)"),
    "a send in front of what it sends": Mutant("pipeline", LOWERING,
        "np.where(sends, action + 1, 0)", "np.where(sends, action, 0)",
        check="reads x blocks.1, which no instruction has written"),
    "messages in another order than results": Mutant("pipeline", LOWERING,
        "order.kind[source] != F, ready))", "ready, order.kind[source] != F))",
        check="reads g blocks.1, which no instruction has written"),
    "the stage's other end is sent": Mutant("pipeline", INSTRUCTIONS, "== (op == SEND)",
        "!= (op == SEND)", check="reads x embedding, which no instruction has written"),
    # ---- other memory
    "host: a later micro-batch in the place of an earlier": wrong("gradients on the host", WORKERS,
        "last.add_(first)", "last.copy_(first)"),
    "host: only first micro-batches leave as the sum": wrong("gradients on the host", OFFLOAD,
        "first, last = ins.op == KEEP, last_at[ins.unit] == position",
        "first, last = True, last_at[ins.unit] == position"),
    "host: the norm of the first micro-batch": wrong("gradients on the host", OFFLOAD,
        "if measured and last:", "if measured and first:"),
    "host: updated parameters stay there": wrong("gradients on the host", OFFLOAD,
        'if self.tiers.parameters == "device" and not self.tiers.delayed:',
        "if self.tiers.delayed:"),
    "host: parameters do not come up": wrong("gradients on the host", WORKERS,
        "lambda: target.copy_(source, non_blocking=True)", "lambda: target.numel()"),
    "host: AdamW's first moment in the place of the second": Mutant("host, AdamW", OFFLOADED,
        '"exp_avg_sq": [states[1]]', '"exp_avg_sq": [states[0]]', equal=WEIGHTS),
    "host: AdamW's steps are not counted": Mutant("host, AdamW", OFFLOADED, '"step": [count]',
        '"step": [count.clone()]', equal=WEIGHTS),
    "host: gradients leave before the replicas' sum": Mutant("replicas on the host", COMPILE,
        "if unit.waits}", "if not unit.waits}",
        check="reads gshard bucket 0, which no instruction has written"),
    "host: what waits for others never leaves": Mutant("replicas on the host", OFFLOAD,
        "for u in sorted(u for u in last_at if u in waits):", "for u in ():",
        check="that it writes is never read"),
    "host: norms' gradients leave before they are summed": Mutant("sequence parallel on the host",
        BUCKETS, "holding(model, plan, name, 0).partial", "not model.layers",
        check="reads gshard bucket 0, which no instruction has written"),
    "files: what is updated is not written": wrong("files", OFFLOAD,
        "_copy(buffer, home) for home, buffer in pairs if home != buffer",
        "_copy(buffer, home) for home, buffer in pairs if home == buffer"),
    "files: states are not read": Mutant("files, AdamW", OFFLOAD, '"opt": self.states, "gshard"',
        '"opt": False, "gshard"',
        check="reads host.opt embedding, which no instruction has written"),
    "files: the sum so far is not read": Mutant("files of gradients", OFFLOAD,
        "new_code.append(_copy(in_file, total, k))", "pass",
        check="reads host.sum bucket 0, which no instruction has written"),
    "inputs: the first micro-batch's comes back": wrong("inputs on the host", OFFLOAD,
        'new_code.append(_copy_state((source, *x[1:]), "back"))',
        'new_code.append(_copy_state((source, *x[1:]), "back")._replace('
        'reads=((source, x[1], 0),)))'),
    "relay: masks of the first micro-batch": wrong("relay", RUN,
        "env.sample = self.first_sample + k", "env.sample = self.first_sample"),
    "relay: what the head uses leaves before embedding's backward": Mutant("frozen relay", COMPILE,
        "units_of_head(program, rank) if plan.relays", "() if plan.relays", frozen="param_gather"),
    # ---- waits and frees
    "no WAIT before what a call brings is read: data parallel": Mutant("data parallel", *NO_WAIT,
        check="reads grad bucket 0, which a call in flight uses", late=GRADIENTS),
    "no WAIT before what a call brings is read: ZeRO-3": Mutant("ZeRO-3", *NO_WAIT,
        check="reads w embedding, which a call in flight uses", late=GRADIENTS),
    "no WAIT before what a call brings is read: sequence parallel": Mutant("sequence parallel",
        *NO_WAIT, check="reads x embedding.position, which a call in flight uses"),
    "no WAIT before what a call brings is read: pipeline": Mutant("pipeline", *NO_WAIT,
        check="reads g blocks.1, which a call in flight uses", late=GRADIENTS),
    "WAIT behind the instruction that it is for": Mutant("ZeRO-3", DERIVE,
        "new_code.append(ins)\n        if lane:",
        "new_code.insert(len(new_code) - (bool(new_code) and new_code[-1].op == WAIT), ins)\n"
        "        if lane:",
        check="reads w embedding, which a call in flight uses", late=GRADIENTS),
    "no WAIT at the end": Mutant("ZeRO-1", DERIVE, "for call in tuple(in_flight.values()):",
        "for call in ():", check="no WAIT for ALL_GATHER"),
    "what forward kept is never freed": Mutant("accumulation", DERIVE, "if not lasts(v):",
        "if not lasts(v) and v[0] != 'saved':", check="is never freed"),
    "freed while a call uses it": Mutant("pipeline", DERIVE,
        "used = held_by_call.pop(ins.reads, ())", "used = ()",
        check="frees x blocks.1, which a call in flight uses"),
    "freed behind the first use": Mutant("pipeline", DERIVE,
        "last_use[v] = position", "last_use.setdefault(v, position)",
        check="reads x blocks.0, which was freed"),
}
# fmt: on
