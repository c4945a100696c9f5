"""Lab 03: how long a pipeline warms up, and its executor, with one stage or several per rank.

`warmup` is asked for many sizes, and held against the schedules themselves. The executors run a
step of the reference GPT on real ranks, by lists that the checker gives them: gradients are those
of one process, messages exact in bytes, the order of the work that of the list. What one
micro-batch keeps is measured on each rank first; the list then says how many may be in flight, and
their bytes are the limit. GPipe (Huang+ 2019, arXiv:1811.06965, sec. 2.3) and 1F1B (Narayanan+
2021, arXiv:2006.09503, sec. 3.2) differ in that alone. Messages of two ranks are matched by their
order, so with two ranks and several stages each an executor has to know what its neighbour sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from paralab.exercises.diagnose import first_wrong
from paralab.exercises.exercise import Exercise
from paralab.exercises.questions import asked, plain, wrong_number
from paralab.exercises.tries import Found, Takes, Try, on_ranks
from paralab.exercises.verdict import Notes
from paralab.parallel.schedules import Schedule, build
from paralab.spec import ModelSpec

# ---- the warm-up ---------------------------------------------------------------------------------
SIZES = [
    (rank, p, m, v)
    for p, m, v in ((4, 8, 1), (2, 5, 1), (3, 1, 1), (8, 3, 1), (4, 8, 2), (2, 2, 3), (3, 9, 4))
    for rank in range(p)
]
COUNT = "forwards before the first backward"


def check_warmup(tries: Sequence[Try], timeout: float) -> None:
    questions = [(0, size) for size in SIZES]
    for notes, found in on_ranks(tries, asked, 1, (questions,), timeout=timeout):
        for size, reply in zip(SIZES, found.results[0], strict=True):
            where = "rank {}, p={}, m={}, v={}".format(*size)
            if reply.trouble:
                notes.end(reply.trouble, where=where)
                break
            right, what = counted(*size), "required: a number of forwards"
            known = [(words, number) for words, number in _miscounted(*size) if number != right]
            wrong = wrong_number(reply.value, right, "{:g}".format, known, what=what)
            wrong = wrong if wrong.startswith(what) or not wrong else f"required: {wrong}"
            notes.look(COUNT, where, wrong, "right")


def counted(rank: int, p: int, m: int, v: int) -> int:
    """Forwards that the schedule itself has before the first backward of this rank."""
    return [action.kind for action in lists_of("1f1b", p, m, v)[rank]].index("B")


def _miscounted(rank: int, p: int, m: int, v: int) -> Iterable[tuple[str, int]]:
    chunks, other = 2 * (p - rank - 1) + (v - 1) * p + 1, p - 1 - rank
    yield "the first forward of the steady phase is missing", counted(rank, p, m, v) - 1
    yield f"there are no more than {m * v} forwards to run", chunks if v > 1 else p - rank
    yield "that is the interleaved warm-up, and this is 1F1B", min(v * m, chunks)
    yield f"that is the count of rank {other}", counted(other, p, m, v)
    yield "the factor of 2 is missing", chunks - (p - rank - 1)
    yield "(v-1) p forwards are missing", chunks - (v - 1) * p
    yield "the distance to the last rank does not grow with v", v * (p - rank - 1) + 1


def lists_of(name: str, p: int, m: int, v: int) -> Schedule:
    """The lists of a schedule by name. With `BACKWARD_FIRST` the steady pairs of rank 0 change
    places: what it needs from rank 1 is then no longer in the order in which rank 1 sends it.
    """
    made = build("interleaved" if v > 1 else name, pp=p, microbatches=m, virtual_stages=v)
    if name == BACKWARD_FIRST:
        row = made[0]
        for at in range(counted(0, p, m, v) - 1, len(row) - 1, 2):
            if row[at].kind == "F":
                row[at : at + 2] = row[at + 1], row[at]
    return made


# ---- the executors -------------------------------------------------------------------------------
Run = tuple[str, int, int, int]  # schedule, p, m, v
RUNS: tuple[Run, ...] = (("gpipe", 2, 4, 1), ("1f1b", 4, 8, 1), ("1f1b", 3, 2, 1))
BACKWARD_FIRST = "interleaved, backwards first on rank 0"
CHUNKED: tuple[Run, ...] = ((BACKWARD_FIRST, 2, 4, 2), ("interleaved", 3, 6, 2))
MODEL = ModelSpec(layers=1, hidden=32, heads=2, seq_len=16, tied=False)  # a block per stage
SAMPLES = 2  # of a micro-batch
SHAPE = (SAMPLES, MODEL.seq_len, MODEL.hidden)
MESSAGE = 4 * SAMPLES * MODEL.seq_len * MODEL.hidden  # bytes
MARGIN = 1.1  # of what is measured for one micro-batch


def _asked(runs: Sequence[Run]) -> dict[str, str]:
    sizes = ", ".join(f"{name} p={p} m={m}" + f" v={v}" * (v > 1) for name, p, m, v in runs)
    return {
        "gradients": f"{sizes}: those of one process, mean over the micro-batches",
        "loss": "on the last rank: the mean over the micro-batches",
        "order of work": "that of the rank's list, each action once",
        "bytes per rank": "exactly 4 b s h per activation and per gradient that crosses a border",
        "in flight": "activations of no more micro-batches than the list has, and all messages",
    }


GRADIENTS, LOSS, ORDER, BYTES, FLIGHT = _asked(RUNS)


def check_step(tries: Sequence[Try], timeout: float) -> None:
    _check(tries, timeout, RUNS)


def check_chunks(tries: Sequence[Try], timeout: float) -> None:
    _check(tries, timeout, CHUNKED)


def _check(tries: Sequence[Try], timeout: float, runs: Sequence[Run]) -> None:
    for run in runs:
        name, p, m, v = run
        where = f"{name}, p={p}, m={m}" + f", v={v}" * (v > 1)
        for notes, found in on_ranks(tries, one_step, p, run, where=where, timeout=timeout):
            _look(notes, found, where, run)


def one_step(
    watch: Any, answer: tuple, seed: int, name: str, p: int, m: int, v: int
) -> dict[str, Any]:
    """What every rank runs: one step of its stages by its list, once it is known what one
    micro-batch keeps in each of them.
    """
    from paralab.exercises.watched import array
    from paralab.model import reference

    rank, lists = watch.group.index, lists_of(name, p, m, v)
    model = MODEL.replace(layers=v * p)
    sizes = {"microbatches": m, "microbatch_size": SAMPLES}
    batches = reference.batches(model, step=0, seed=seed, **sizes)
    right, mean = _alone(model, seed, batches)
    stages = {s: reference.Stage(model, s, v * p, seed) for s in range(rank, v * p, p)}
    kept, passing = zip(
        *(_measured(watch, stage, batches[0]) for stage in stages.values()), strict=True
    )
    done: list[str] = []
    for s, stage in stages.items():
        _write_down(stage, s, done)
    with watch.section() as section:
        if v > 1:
            texts = [list(map(str, row)) for row in lists]
            loss = answer[0](stages, texts, batches, SHAPE)
        else:
            own = [f"{action.kind}{action.microbatch}" for action in lists[rank]]
            around = (rank - 1 if rank else None), (rank + 1 if rank < p - 1 else None)
            loss = answer[0](stages[rank], own, *around, batches, SHAPE)
    named = {n: p for stage in stages.values() for n, p in stage.named_parameters()}
    weights = sum(parameter.nbytes for parameter in named.values())
    return {
        "gradients": {n: None if p.grad is None else array(p.grad) for n, p in named.items()},
        "right": {n: right[n] for n in named},
        "loss": plain(loss.detach() if hasattr(loss, "detach") else loss),
        "mean": mean,
        "done": done,
        "peak": section.peak - weights,
        "weights": weights,
        "kept": max(kept),
        "passing": max(passing),
    }


def _alone(model: ModelSpec, seed: int, batches: Sequence[tuple]) -> tuple[dict[str, Any], float]:
    """(gradients, loss) of one process."""
    from paralab.model import reference

    gpt = reference.GPT(model, seed)
    loss = sum(gpt(*batch) / len(batches) for batch in batches)
    loss.backward()
    return {n: p.grad.numpy() for n, p in gpt.named_parameters()}, loss.item()


def _measured(watch: Any, stage: Any, batch: tuple) -> tuple[int, int]:
    """Bytes of one micro-batch on this stage: kept for its backward, and at most in addition."""
    import torch

    tokens, targets = batch
    with watch.section() as section:
        x = torch.zeros(SHAPE, requires_grad=True) if stage.embedding is None else tokens
        y = stage(x, targets)
        kept = section.now()
        y.backward(torch.ones_like(y))
    stage.zero_grad()
    return kept, section.peak - kept


def _write_down(stage: Any, number: int, done: list[str]) -> None:
    """Note every forward of the stage, and every backward that begins in it, in ``done``."""
    calls = iter(range(10**6))

    def hook(module: Any, given: Any, y: Any) -> None:
        k = next(calls)
        done.append(f"{number}F{k}")
        if y.requires_grad:
            y.register_hook(lambda _: done.append(f"{number}B{k}"))

    stage.register_forward_hook(hook)


def _look(notes: Notes, found: Found, where: str, run: Run) -> None:
    """One run against every limit."""
    name, p, m, v = run
    lists, sent = lists_of(*run), found.sent()
    from paralab.theory.schedule_check import peak_live

    alive, wrong = peak_live(lists), dict.fromkeys((GRADIENTS, LOSS, ORDER, BYTES, FLIGHT), "")
    for rank, result in enumerate(found.results):
        wrong[GRADIENTS] = wrong[GRADIENTS] or _wrong_gradient(rank, result)
        asked = list(map(str, lists[rank]))
        wrong[ORDER] = wrong[ORDER] or _wrong_order(rank, result["done"], asked)
        border = v * p - 1
        crossings = sum((s > 0) + (s < border) for s in range(rank, v * p, p))
        required = m * crossings * MESSAGE
        if sent[rank] != required:
            times = f", {sent[rank] / required:.3g} times as many"
            said = f"rank {rank} sends {sent[rank]:,} bytes, required: {required:,}{times}"
            wrong[BYTES] = wrong[BYTES] or said
        room = MARGIN * (alive[rank] * result["kept"] + result["passing"])
        room += 2 * m * crossings * MESSAGE  # what was sent and what was received
        room += result["weights"]  # gradients of one micro-batch before they are added
        if result["peak"] > room:
            said = f"rank {rank} holds {result['peak']:,} bytes of activations and messages at once"
            least = f"the list has {alive[rank]} in flight, of {result['kept']:,} bytes each"
            wrong[FLIGHT] = wrong[FLIGHT] or f"{said}; {least}"
    last = found.results[-1]
    if not isinstance(last["loss"], float) or abs(last["loss"] - last["mean"]) > 1e-4:
        wrong[LOSS] = f"rank {p - 1} returns {last['loss']!r}, required: {last['mean']:.5g}"
        if isinstance(last["loss"], float):
            factor = last["loss"] / last["mean"]
            wrong[LOSS] += f"; it is {factor:.3g} times what is required"
    for limit, said in wrong.items():
        notes.look(limit, where, said, "kept")


def _wrong_gradient(rank: int, result: dict[str, Any]) -> str:
    for name, right in result["right"].items():
        got = result["gradients"][name]
        if got is None:
            return f"rank {rank}: {name} has no gradient"
        wrong = first_wrong(name, [got], [right], ranks=lambda _: f"rank {rank}")
        if wrong:
            return wrong
    return ""


def _wrong_order(rank: int, done: Sequence[str], asked: Sequence[str]) -> str:
    for place, (mine, listed) in enumerate(zip_longest(done, asked, fillvalue="nothing")):
        if mine != listed:
            return f"rank {rank}: action {place + 1} of its list is {listed}, yours does {mine}"
    return ""


warmup = Exercise(
    name="warmup",
    lab="03",
    asked={COUNT: f"right for {len(SIZES)} ranks of 7 pipelines, 3 of them interleaved"},
    takes=(Takes("a function", "warmup(rank, p, m, v)"),),
    checker=check_warmup,
)
pipeline_executor = Exercise(
    name="pipeline_executor",
    lab="03",
    asked=_asked(RUNS),
    takes=(
        Takes("a function", "pipeline_step(stage, actions, previous, following, batches, shape)"),
    ),
    checker=check_step,
)
interleaved_executor = Exercise(
    name="interleaved_executor",
    lab="03",
    asked=_asked(CHUNKED),
    takes=(Takes("a function", "interleaved_step(stages, lists, batches, shape)"),),
    checker=check_chunks,
)
