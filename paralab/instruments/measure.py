"""The calibration's measurements, as they run inside ranks: small GPTs, products, collectives.

[Note: rounds] Each round measures every shape and size. If the machine is busy with something else
for a second, that spoils a few repetitions of every size, which the median leaves out, and not all
repetitions of a few sizes.

[Note: devices] The same code measures processors and GPUs. The rank's context says where tensors
are. The recorder's clock (instruments/marks.py) says what a call cost: CPU seconds of the thread,
or device time between two events. Groups communicate over gloo or NCCL. A GPU first fills ``ahead``
bytes: while it does, the host launches the kernels that are timed, so that the time to launch them
is not part of the measurement.

Called by instruments/calibrate.py, which makes a Cluster of the seconds. Torch is imported inside
the functions, so that the process that asks for a calibration never imports it.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from statistics import median
from typing import Any, NamedTuple

from paralab.spec import ModelSpec, Plan
from paralab.theory.traffic import ROOTED

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
ROUNDS = 12  # repetitions of what is not measured for a given time
LINKS_S, TIERS_S = 0.8, 0.4  # seconds for which links and tiers are measured


class Workloads(NamedTuple):
    """The shapes and sizes that are measured on one kind of device; sizes are bytes."""

    models: tuple[tuple[int, ...], ...]  # layers, hidden, heads, seq_len and samples of each GPT
    products: tuple[tuple[int, int, int], ...]  # (tokens, inputs, outputs) of matrix products
    precisions: tuple[str, ...]  # those of the products
    messages: tuple[int, ...]  # payload of collectives
    tiers: tuple[int, ...]  # of a copy, of a file, and of the weights that the optimizer updates
    kernels: tuple[int, ...] = ()  # what a GPU kernel reads; it writes as many
    odd: tuple[tuple[int, int, int], ...] = ()  # products with an odd dimension, in 16 bits only
    ahead: int = 0  # what a GPU fills before the kernels that are timed: see [Note: devices]


WORKLOADS = {
    "cpu": Workloads(
        # thin and wide, short and long, one sample and several
        models=(
            (2, 64, 2, 64, 1),
            (2, 64, 2, 128, 8),
            (2, 128, 4, 64, 2),
            (2, 128, 4, 128, 4),
            (2, 192, 6, 64, 4),
            (2, 256, 8, 64, 1),
            (2, 256, 8, 128, 2),
            (1, 384, 12, 64, 4),
        ),
        products=((128, 64, 192), (128, 128, 512), (128, 256, 768), (128, 512, 256)),
        precisions=("bf16", "fp16"),
        messages=tuple(2**k for k in (10, 13, 16, 18, 20, 21, 22, 23)),
        tiers=tuple(2**k for k in (16, 18, 20, 22, 23)),
    ),
    "cuda": Workloads(
        models=((2, 256, 4, 64, 1),),
        products=((256, 2048, 2048), (1024, 2048, 8192), (4096, 4096, 4096), (8192, 8192, 2048)),
        precisions=("fp32", "tf32", "bf16", "fp16"),
        messages=tuple(2**k for k in (10, 14, 18, 20, 22, 24, 26, 28)),
        tiers=tuple(2**k for k in (16, 20, 24, 26, 28)),  # the host's caches hold 50 MB and more
        kernels=tuple(2**k for k in (10, 14, 18, 26, 28)),  # the GPU's caches hold up to 50 MB
        odd=((8192, 2048, 2047),),
        ahead=2**29,
    ),
}


def workloads(context: Any) -> Workloads:
    return WORKLOADS["cuda" if context.device.startswith("cuda") else "cpu"]


def see_gpus(context: Any) -> list[tuple[str, int]]:
    """Runs in a rank: (name, bytes of memory) of every GPU that can be given to a rank."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return list({str(gpu.uuid): (gpu.name, gpu.total_memory) for gpu in gpus}.values())


def one_rank(shape: tuple[int, ...], device: str) -> tuple[Any, Any, dict[str, list]]:
    """(a rank that trains a GPT of this shape, a batch of token ids, the marks of its last step as
    {"forward" | "backward" | "optimizer": pairs of marks before and after}).
    """
    import torch

    from paralab.instruments.recorder import Recorder
    from paralab.interpret.run import Rank
    from paralab.interpret.state import State
    from paralab.programs.compile import compiled
    from paralab.programs.instructions import BACKWARD, FORWARD, UPDATE

    layers, hidden, heads, seq_len, samples = shape
    spec = ModelSpec(layers=layers, hidden=hidden, heads=heads, seq_len=seq_len)
    program = compiled(spec, Plan(microbatch_size=samples))
    recorder = Recorder(rank=0, world_size=1, device=device)
    settings = {"lr": 1e-3, "clip_norm": None, "seed": 0}
    rank = Rank(State(program, 0, recorder=recorder, device=device, **settings), {})
    marks: dict[str, list] = defaultdict(list)
    names = {FORWARD: "forward", BACKWARD: "backward", UPDATE: "optimizer"}

    def timed(method: Any, part: str) -> Any:
        return lambda ins: marks[part].append(_marked(recorder.clock, method, ins))

    rank.steps = [
        (timed(method, names[ins.op]) if ins.op in names else method, ins, None)
        for method, ins, _ in rank.steps
    ]
    return rank, torch.zeros(samples, seq_len + 1, dtype=torch.int64, device=device), marks


def _marked(clock: Any, work: Any, *args: Any) -> tuple[Any, Any]:
    """Call ``work(*args)``, and return the marks before and after it."""
    began = clock.mark()
    work(*args)
    return began, clock.mark()


def one_step(rank: Any, batch: Any, marks: dict[str, list]) -> dict[str, float]:
    """Train a step with what `one_rank` returned: {"forward", "backward", "optimizer": seconds}."""
    clock = rank.recorder.clock
    marks.clear()
    clock.anchor()
    rank.step(lambda k: batch)
    seconds = {part: sum(clock.cost(*pair) for pair in pairs) for part, pairs in marks.items()}
    clock.resolve()
    return seconds


def measure_device(context: Any) -> list[dict[str, Any]]:
    """Runs in a rank: work and seconds of forward, backward and optimizer of every model."""
    models = [one_rank(shape, context.device) for shape in workloads(context).models]
    for model in models:
        one_step(*model)
    points = []
    for model in models:
        one_step(*model)
        seconds = one_step(*model)  # its weights are in the cache, as in training
        for part, work in _work_of_step(model[0]).items():
            point = {"flops": work.arithmetic, "bytes": work.bytes + work.exact}
            points.append(point | {"kernels": work.kernels, "seconds": seconds[part]})
    return points


def _work_of_step(rank: Any) -> dict[str, Any]:
    """{"forward", "backward", "optimizer": the `Work` of one step, by theory/work.py}."""
    from paralab.interpret.costs import small
    from paralab.programs.instructions import UPDATE
    from paralab.theory.work import Work

    ops, nothing = rank.model.ops, Work()
    updates = [ins for ins in rank.code if ins.op == UPDATE]
    return {
        "forward": sum((op.work[0] for op in ops), nothing),
        "backward": sum((half for op in ops for half in op.work[1:]), nothing),
        "optimizer": sum((small(rank.program, 0, ins) for ins in updates), nothing),
    }


def measure_kernels(context: Any) -> list[dict[str, Any]]:
    """Runs in a rank on a GPU: median seconds of a kernel that only reads and writes, by size (op
    "kernel"), and of the host per kernel that it launches in a small GPT's step (op "launch").
    """
    import torch

    sizes, count = workloads(context), 16
    rank, batch, step_marks = one_rank(sizes.models[0], context.device)
    kernels = sum(work.kernels for work in _work_of_step(rank).values())
    clock = rank.recorder.clock
    ahead, whole = (
        torch.zeros(size // 4, device=context.device) for size in (sizes.ahead, sizes.kernels[-1])
    )
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        clock.anchor()
        began = clock.now()
        rank.step(lambda k: batch)
        times["launch", 0].append((clock.now() - began) / kernels)
        step_marks.clear()
        marks = {}
        for size in sizes.kernels:
            values = whole[: size // 4]
            ahead.zero_()
            ahead.zero_()
            began = clock.mark()
            for _ in range(count):
                torch.neg(values)
            marks[size] = began, clock.mark()
        for size, pair in marks.items():
            times["kernel", 2 * size].append(clock.cost(*pair) / count)
        clock.resolve()
    return _by_size({kind: seconds[1:] for kind, seconds in times.items()})  # the first warms up


def _by_size(times: dict[tuple[str, int], list[float]]) -> list[dict[str, Any]]:
    """The rows of what sends no message, from {(op, bytes): seconds of all repetitions}."""
    return [
        {"op": op, "payload_bytes": size, "wire_bytes": size, "seconds": median(seconds)}
        for (op, size), seconds in times.items()
    ]


def measure_products(context: Any, *, budget: float) -> list[dict[str, Any]]:
    """Runs in a rank: seconds of matrix products, by precision, kind and size. The kinds are those
    of a linear layer: x W^T (forward), g W (gradient of the input), g^T x (of the weight).

    budget  seconds in all; at least 3 rounds, of which the first warms up
    """
    import torch

    from paralab.instruments.marks import clock_of
    from paralab.interpret.run import DTYPES

    sizes, clock = workloads(context), clock_of(context.device)
    ahead, rows = torch.zeros(sizes.ahead // 4, device=context.device), []
    linear = torch.nn.functional.linear
    for precision in sizes.precisions:
        options = {"dtype": DTYPES.get(precision, torch.float32), "device": context.device}
        odd = sizes.odd if precision in ("bf16", "fp16") else ()
        for tokens, inputs, outputs in (*sizes.products, *odd):
            x, g, w = (
                torch.randn(shape, **options)
                for shape in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
            )
            row = {"precision": precision, "tokens": tokens, "flops": 2 * tokens * inputs * outputs}
            row["odd"] = bool(inputs % 2 or outputs % 2)
            rows.append(({**row, "what": "forward"}, lambda x=x, w=w: linear(x, w)))
            rows.append(({**row, "what": "input"}, lambda g=g, w=w: g @ w))
            rows.append(({**row, "what": "weight"}, lambda g=g, x=x: g.t() @ x))
    costs: list[list[float]] = []
    deadline = time.perf_counter() + budget
    while len(costs) < 3 or time.perf_counter() < deadline:
        clock.anchor()
        ahead.zero_()
        marks = []
        for row, multiply in rows:
            torch.backends.cuda.matmul.allow_tf32 = row["precision"] == "tf32"
            marks.append(_marked(clock, multiply))
        costs.append([clock.cost(*pair) for pair in marks])
        clock.resolve()
    return [
        {**row, "seconds": median(seconds[1:])}
        for (row, _), seconds in zip(rows, zip(*costs, strict=True), strict=True)
    ]


def measure_links(context: Any) -> list[dict[str, Any]]:
    """Runs in a rank: `links_of` the group of all ranks, for every collective."""
    from paralab.comm import everyone

    return links_of(everyone(context, axis="dp"), OPS, workloads(context).messages)


def links_of(
    group: Any, ops: tuple[str, ...], messages: tuple[int, ...], budget: float = 1.0
) -> list[dict[str, Any]]:
    """A row per collective and size, whose "marks" are the (launch, end) of every repetition in
    seconds of this rank's clock. Takes ``budget`` times `LINKS_S`, but from 3 to 12 rounds.
    """
    import torch

    context = group.context
    clock, workload = group.recorder.clock, workloads(context)
    largest, is_over, ahead = (
        torch.zeros(size // 4, device=context.device) for size in (messages[-1], 4, workload.ahead)
    )
    # multiples of the group's size, so that the parts of all members are equal
    sizes = [size - size % (4 * group.size) for size in messages]
    rows = [{"op": op, "payload_bytes": size, "marks": []} for op in ops for size in sizes]
    deadline = time.perf_counter() + budget * LINKS_S
    for done in range(1, ROUNDS + 1):
        clock.anchor()
        for row in rows:
            tensor = largest[: row["payload_bytes"] // 4]
            part = tensor.new_zeros(tensor.numel() // group.size)
            group.barrier(phase="setup")
            ahead.zero_()
            launched = clock.mark()
            call(group, row["op"], tensor, part, end=group.ranks[1], phase="setup")
            row["marks"].append((launched, clock.mark()))
        for row in rows:
            row["marks"][-1] = tuple(map(clock.seconds, row["marks"][-1]))
        clock.resolve()
        is_over.fill_(time.perf_counter() > deadline)
        group.all_reduce(is_over, phase="setup").wait()  # all ranks stop after the same round
        if done >= 3 and is_over.item():
            break
    for row in rows:
        row["marks"] = row["marks"][1:]  # the first round warms up
    return rows


def measure_calls(context: Any) -> list[dict[str, Any]]:
    """Runs in a rank: seconds of posting a collective ("post"), and by how much a computation takes
    longer right after a wait for a collective: a forward and a backward, compared with a step
    without waits, and a small product, compared with the same product right after itself. The model
    is the smallest one: with larger ones the extra time hardly grows.
    """
    import torch

    from paralab.comm import everyone

    group = everyone(context, axis="dp")
    smallest = workloads(context).models[0]
    rank, batch, marks = one_rank(smallest, context.device)
    _, hidden, _, seq_len, _ = smallest
    message, usual = torch.zeros(seq_len * hidden, device=context.device), rank.steps
    clock = rank.recorder.clock
    times: dict[str, list[float]] = defaultdict(list)

    def after_a_wait(method: Any, ins: Any) -> None:
        began = clock.mark()
        call = group.all_reduce(message, phase="setup")
        marks["post"].append((began, clock.mark()))
        call.wait()
        method(ins)

    ops = [ins.op for _, ins, _ in usual]
    firsts = {ops.index(op) for op in ("FORWARD", "BACKWARD")}
    waiting = [
        (functools.partial(after_a_wait, method) if index in firsts else method, ins, span)
        for index, (method, ins, span) in enumerate(usual)
    ]

    def train(steps: list) -> dict[str, float]:
        rank.steps = steps
        return one_step(rank, batch, marks)

    x, w = message.view(seq_len, hidden), torch.zeros(hidden, hidden, device=context.device)

    def multiplied() -> float:
        return clock.cost(*_marked(clock, torch.nn.functional.linear, x, w))

    for _ in range(ROUNDS):
        train(usual)  # not measured: it is still slowed down by the waits of the round before
        without, after = train(usual), train(waiting)
        times["post"].append(after["post"] / len(firsts))
        for part in ("forward", "backward"):
            times[part].append(without[part])
            times[f"{part} after a wait"].append(after[part] - without[part])
        multiplied()
        times["product"].append(multiplied())
        group.all_reduce(message, phase="setup").wait()
        times["product after a wait"].append(multiplied() - times["product"][-1])
    warm = ROUNDS // 4  # rounds that warm up
    return [{"what": name, "seconds": median(seconds[warm:])} for name, seconds in times.items()]


def measure_tiers(context: Any, *, ranks: int) -> list[dict[str, Any]]:
    """Runs in a rank: seconds by op and size, in the lanes that offload uses: "host" is a copy
    between tiers in either direction, "disk" a write or a read of a file past the page cache,
    "optimizer" an AdamW step on the host's processor, whose cores ``ranks`` ranks share. A GPU's
    copies are timed on their stream.
    """
    import tempfile

    import torch

    from paralab.instruments.recorder import Recorder
    from paralab.interpret.files import Files
    from paralab.interpret.host import host_threads
    from paralab.interpret.lanes import Lane
    from paralab.interpret.state import Optimizer
    from paralab.spec.cluster import available_cores

    recorder = Recorder(rank=context.rank, world_size=context.world_size, device=context.device)
    link = Lane("h2d", recorder, device=context.device)
    host = Lane("host", recorder, threads=host_threads(context, available_cores() // ranks))
    disk, clock = Lane("disk", recorder), recorder.clock
    sizes, cuda = workloads(context).tiers, link.stream is not None
    on_device = torch.zeros(sizes[-1] // 4, device=context.device)
    on_host = torch.empty(sizes[-1] // 4, pin_memory=cuda).zero_()
    states, optimizer = torch.zeros(3, sizes[-1] // 4), Optimizer("adamw", 1e-9)
    rows: dict[tuple[str, int], list[float]] = defaultdict(list)

    def timed(lane: Lane, op: str, size: int, work: Any) -> None:
        began, marks, by_host = time.perf_counter(), [], lane.stream is None
        lane.submit(work if by_host else lambda: marks.extend(_marked(clock, work))).wait()
        passed = time.perf_counter() - began
        rows[op, size].append(passed if by_host else clock.cost(*marks))

    def update(size: int) -> None:
        weights, first, second = (row[:size] for row in states)
        moments = {"exp_avg": [first], "exp_avg_sq": [second], "step": [torch.ones(())]}
        optimizer.step([weights], [on_host[:size]], moments, (None, None))

    with tempfile.TemporaryDirectory() as folder:
        files = Files(folder)
        for size in sizes:
            files.create(str(size), size)
        deadline = time.perf_counter() + TIERS_S
        while len(rows["optimizer", sizes[0]]) < 4 or time.perf_counter() < deadline:
            clock.resolve()
            for size in sizes:
                remote, local, name = on_device[: size // 4], on_host[: size // 4], str(size)
                for a, b in ((remote, local), (local, remote)):
                    timed(link, "host", size, lambda a=a, b=b: a.copy_(b, non_blocking=True))
                timed(host, "optimizer", size, lambda size=size: update(size // 4))
                timed(disk, "disk", size, lambda n=name, v=local: files.write(n, v))
                timed(disk, "disk", size, lambda n=name, v=local: files.read(n, v))
    return _by_size(rows)


def call(group: Any, op: str, whole: Any, part: Any, *, end: int, phase: str | None = None) -> None:
    """Make one collective on ``whole``, of which each rank has one ``part``, and wait for it. The
    rank ``end`` is the root of a broadcast or reduce, or receives what the first rank sends.
    """
    if op == "all_gather":
        group.all_gather(whole, part, phase=phase).wait()
    elif op == "reduce_scatter":
        group.reduce_scatter(part, whole, phase=phase).wait()
    elif op == "all_to_all":
        group.all_to_all(whole.new_empty(whole.shape), whole, phase=phase).wait()
    elif op != "send":
        root = {"root": end} if op in ROOTED else {}
        getattr(group, op)(whole, phase=phase, **root).wait()
    elif group.index == 0:
        group.send(whole, to=end, phase=phase).wait()
    elif group.context.rank == end:
        group.recv(whole, source=group.ranks[0], phase=phase).wait()
