"""The calibration's measurements, as they run inside ranks: small GPTs, products, collectives.

[Note: rounds] Everything is measured in rounds over all shapes and sizes, not one after the other:
a second in which the machine was busy with something else then spoils a few repetitions of all, not
all repetitions of a few.

[Note: devices] One code measures processors and GPUs. The rank's context says where tensors are;
the recorder's clock (instruments/marks.py) says what something cost: CPU seconds of the thread, or
device time between two events. Groups are gloo's or NCCL's. A GPU first fills ``ahead`` bytes, so
that the host has launched what is timed before the device comes to it. What the host takes to ask
for a kernel is its own time, and passes while the device computes.

Called by instruments/calibrate.py, which turns the seconds into a Cluster. Torch is imported
inside the functions: the caller of a calibration reads the shapes and sizes without it.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from statistics import median
from typing import Any, NamedTuple

from paralab.spec import ModelSpec, Plan
from paralab.theory.traffic import ROOTED

SHAPE = ("layers", "hidden", "heads", "seq_len", "samples")  # of a small GPT
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


class Asked(NamedTuple):
    """What is measured on a kind of device.

    models      GPTs, `SHAPE` of each
    products    (tokens, inputs, outputs) of blocks of several widths, in these ``precisions``
    odd         the same with an odd number, in 16 bits
    messages    payload bytes
    tiers       bytes of a copy, a file, or what the optimizer updates
    kernels     bytes that a kernel of a GPU reads, and writes
    ahead       bytes; see [Note: devices]
    """

    models: tuple[tuple[int, int, int, int, int], ...]
    products: tuple[tuple[int, int, int], ...]
    precisions: tuple[str, ...]
    messages: tuple[int, ...]
    tiers: tuple[int, ...]
    kernels: tuple[int, ...] = ()
    odd: tuple[tuple[int, int, int], ...] = ()
    ahead: int = 0


ASKED = {
    "cpu": Asked(
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
    "cuda": Asked(
        models=((2, 256, 4, 64, 1),),
        products=((256, 2048, 2048), (1024, 2048, 8192), (4096, 4096, 4096), (8192, 8192, 2048)),
        precisions=("fp32", "tf32", "bf16", "fp16"),
        messages=tuple(2**k for k in (10, 14, 18, 20, 22, 24, 26, 28)),
        tiers=tuple(2**k for k in (16, 20, 24, 26, 28)),  # 50 MB and more stay in its host's caches
        kernels=tuple(2**k for k in (10, 14, 18, 26, 28)),  # 50 MB would stay in its caches
        odd=((8192, 2048, 2047),),
        ahead=2**29,
    ),
}


def asked(context: Any) -> Asked:
    """What is measured on this rank's device."""
    return ASKED["cuda" if context.device.startswith("cuda") else "cpu"]


def see_gpus(context: Any) -> list[tuple[str, int]]:
    """In a rank: (name, bytes of memory) of every GPU that a rank can have for itself."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    return list({str(one.uuid): (one.name, one.total_memory) for one in found}.values())


def one_rank(shape: tuple[int, ...], device: str) -> tuple[Any, Any, dict[str, list]]:
    """(a rank of one device, a text of zeros, marks by what the step spends its time on).

    The pairs of marks are those of the step that was made last: forward, backward, optimizer.
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
    own = {"lr": 1e-3, "clip_norm": None, "seed": 0}
    rank = Rank(State(program, 0, recorder=recorder, device=device, **own), {})
    spent: dict[str, list] = defaultdict(list)
    names = {FORWARD: "forward", BACKWARD: "backward", UPDATE: "optimizer"}

    def timed(method: Any, what: str) -> Any:
        return lambda ins: spent[what].append(_marked(recorder.clock, method, ins))

    rank.steps = [
        (timed(method, names[ins.op]) if ins.op in names else method, ins, None)
        for method, ins, _ in rank.steps
    ]
    return rank, torch.zeros(samples, seq_len + 1, dtype=torch.int64, device=device), spent


def _marked(clock: Any, work: Any, *args: Any) -> tuple[Any, Any]:
    """Call ``work(*args)``; the marks before and after it."""
    began = clock.mark()
    work(*args)
    return began, clock.mark()


def one_step(rank: Any, text: Any, spent: dict[str, list]) -> dict[str, float]:
    """Make a step: seconds by what it spends them on."""
    clock = rank.recorder.clock
    spent.clear()
    clock.anchor()
    rank.step(lambda k: text)
    seconds = {what: sum(clock.cost(*pair) for pair in marks) for what, marks in spent.items()}
    clock.resolve()
    return seconds


def measure_device(context: Any) -> list[dict[str, Any]]:
    """In a rank: cost of forward, backward and optimizer of every model, in seconds; after a step
    of each that warms up. See [Note: rounds]
    """
    shapes = asked(context).models
    ranks = [one_rank(shape, context.device) for shape in shapes]
    for one in ranks:
        one_step(*one)
    measured = []
    for one in ranks:
        one_step(*one)
        measured.append(one_step(*one))  # its weights are in the cache, as in training
    points = []
    for sizes, (rank, _, _), seconds in zip(shapes, ranks, measured, strict=True):
        shape = dict(zip(SHAPE, sizes, strict=True))
        for what, work in _works(rank).items():
            asks = {
                "flops": work.arithmetic,
                "bytes": work.bytes + work.exact,
                "kernels": work.kernels,
            }
            points.append({**shape, "what": what, **asks, "seconds": seconds[what]})
    return points


def _works(rank: Any) -> dict[str, Any]:
    """What a step of this rank asks of the device, as theory has it."""
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


def measure_kernels(context: Any, *, rounds: int = 12) -> list[dict[str, Any]]:
    """In a rank on a GPU: median seconds of kernels that only read and write, by size, op "kernel";
    and, op "launch", of the host for each kernel of a small GPT's step. The first round warms up.
    """
    import torch

    wanted, count = asked(context), 16
    rank, text, spent = one_rank(wanted.models[0], context.device)
    kernels = sum(work.kernels for work in _works(rank).values())
    clock = rank.recorder.clock
    ahead, largest = torch.zeros(wanted.ahead // 4, device=context.device), wanted.kernels[-1]
    whole = torch.zeros(largest // 4, device=context.device)
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        clock.anchor()
        began = clock.now()
        rank.step(lambda k: text)
        found["launch", 0].append((clock.now() - began) / kernels)
        spent.clear()
        marks = {}
        for size in wanted.kernels:
            values = whole[: size // 4]
            ahead.zero_()
            ahead.zero_()
            began = clock.mark()
            for _ in range(count):
                torch.neg(values)
            marks[size] = began, clock.mark()
        for size, pair in marks.items():
            found["kernel", 2 * size].append(clock.cost(*pair) / count)
        clock.resolve()
    return [
        {"op": op, "payload_bytes": size, "wire_bytes": size, "seconds": median(seconds[1:])}
        for (op, size), seconds in found.items()
    ]


def measure_products(context: Any, *, budget: float) -> list[dict[str, Any]]:
    """In a rank: median cost of matrix products, in seconds, by precision, kind and size.

    x W^T, g W and g^T x as blocks of several widths have them. See [Note: rounds]

    budget  seconds in all; at least 3 rounds, of which the first warms up
    """
    import torch

    from paralab.instruments.marks import clock_of
    from paralab.interpret.run import DTYPES

    wanted, clock = asked(context), clock_of(context.device)
    ahead, rows = torch.zeros(wanted.ahead // 4, device=context.device), []
    linear = torch.nn.functional.linear
    for precision in wanted.precisions:
        how = {"dtype": DTYPES.get(precision, torch.float32), "device": context.device}
        odd = wanted.odd if precision in ("bf16", "fp16") else ()
        for tokens, inputs, outputs in (*wanted.products, *odd):
            x, g, w = (
                torch.randn(size, **how)
                for size in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
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
        {**row, "seconds": median(found[1:])}
        for (row, _), found in zip(rows, zip(*costs, strict=True), strict=True)
    ]


def measure_links(context: Any, *, budget: float = 0.8) -> list[dict[str, Any]]:
    """In a rank: launch and end of every repetition of every collective and size, on its clock.

    budget  seconds in all; from 3 to 12 rounds, of which the first warms up. See [Note: rounds]
    """
    import torch

    from paralab.comm import everyone

    group = everyone(context, axis="dp")
    clock, wanted = group.recorder.clock, asked(context)
    largest, over, ahead = (
        torch.zeros(size // 4, device=context.device)
        for size in (wanted.messages[-1], 4, wanted.ahead)
    )
    # every member has an equal part
    sizes = [size - size % (4 * group.size) for size in wanted.messages]
    rows = [{"op": op, "payload_bytes": size, "marks": []} for op in OPS for size in sizes]
    deadline = time.perf_counter() + budget
    for done in range(1, 13):
        clock.anchor()
        for row in rows:
            tensor = largest[: row["payload_bytes"] // 4]
            part = tensor.new_zeros(tensor.numel() // group.size)
            group.barrier(phase="setup")
            ahead.zero_()
            launched = clock.mark()
            call(group, row["op"], tensor, part, end=1, phase="setup")
            row["marks"].append((launched, clock.mark()))
        for row in rows:
            row["marks"][-1] = tuple(map(clock.seconds, row["marks"][-1]))
        clock.resolve()
        over.fill_(time.perf_counter() > deadline)
        group.all_reduce(over, phase="setup").wait()  # all ranks stop after the same round
        if done >= 3 and over.item():
            break
    for row in rows:
        row["marks"] = row["marks"][1:]
    return rows


def measure_calls(context: Any, *, rounds: int = 12) -> list[dict[str, Any]]:
    """In a rank: median cost of posting a call, in seconds, and by how much a forward and a
    backward take longer right after a wait for one than in a step without, and a small product
    than right after itself.

    The model is the smallest: what a wait adds grows little beyond it. See [Note: rounds]; the
    first quarter warms up
    """
    import torch

    from paralab.comm import everyone

    group = everyone(context, axis="dp")
    smallest = asked(context).models[0]
    rank, text, spent = one_rank(smallest, context.device)
    _, hidden, _, seq_len, _ = smallest
    message, usual = torch.zeros(seq_len * hidden, device=context.device), rank.steps
    clock = rank.recorder.clock
    found: dict[str, list[float]] = defaultdict(list)

    def after_a_wait(method: Any, ins: Any) -> None:
        began = clock.mark()
        call = group.all_reduce(message, phase="setup")
        spent["post"].append((began, clock.mark()))
        call.wait()
        method(ins)

    ops = [ins.op for _, ins, _ in usual]
    firsts = {ops.index(op) for op in ("FORWARD", "BACKWARD")}
    waiting = [
        (functools.partial(after_a_wait, method) if at in firsts else method, ins, span)
        for at, (method, ins, span) in enumerate(usual)
    ]

    def train(steps: list) -> dict[str, float]:
        rank.steps = steps
        return one_step(rank, text, spent)

    x, w = message.view(seq_len, hidden), torch.zeros(hidden, hidden, device=context.device)

    def multiplied() -> float:
        return clock.cost(*_marked(clock, torch.nn.functional.linear, x, w))

    for _ in range(rounds):
        train(usual)  # still feels the last one's waits
        inside, after = train(usual), train(waiting)
        found["post"].append(after["post"] / len(firsts))
        for what in ("forward", "backward"):
            found[what].append(inside[what])
            found[f"{what} after a wait"].append(after[what] - inside[what])
        multiplied()
        found["product"].append(multiplied())
        group.all_reduce(message, phase="setup").wait()
        found["product after a wait"].append(multiplied() - found["product"][-1])
    return [
        {"what": what, "seconds": median(some[len(some) // 4 :])} for what, some in found.items()
    ]


def measure_tiers(context: Any, *, ranks: int, budget: float = 0.4) -> list[dict[str, Any]]:
    """In a rank: seconds of copies between tiers, in the lanes that offload uses, and of the
    optimizer on its share of the host's processor, which ``ranks`` with a GPU each have together.

    One row for each op ("host" for a copy either way, "disk" for a file written, or read, past the
    page cache, "optimizer") and size. A GPU's copies are timed on their stream. See [Note: rounds]
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
    sizes, cuda = asked(context).tiers, link.stream is not None
    there = torch.zeros(sizes[-1] // 4, device=context.device)
    here = torch.empty(sizes[-1] // 4, pin_memory=cuda).zero_()
    states, optimizer = torch.zeros(3, sizes[-1] // 4), Optimizer("adamw", 1e-9)
    rows: dict[tuple[str, int], list[float]] = defaultdict(list)

    def timed(lane: Lane, op: str, size: int, work: Any) -> None:
        began, marks, on_host = time.perf_counter(), [], lane.stream is None
        lane.submit(work if on_host else lambda: marks.extend(_marked(clock, work))).wait()
        passed = time.perf_counter() - began
        rows[op, size].append(passed if on_host else clock.cost(*marks))

    def update(size: int) -> None:
        weights, first, second = (row[:size] for row in states)
        moments = {"exp_avg": [first], "exp_avg_sq": [second], "step": [torch.ones(())]}
        optimizer.step([weights], [here[:size]], moments, (None, None))

    with tempfile.TemporaryDirectory() as folder:
        files = Files(folder)
        for size in sizes:
            files.create(str(size), size)
        deadline = time.perf_counter() + budget
        while len(rows["optimizer", sizes[0]]) < 4 or time.perf_counter() < deadline:
            clock.resolve()
            for size in sizes:
                to, values, name = there[: size // 4], here[: size // 4], str(size)
                for a, b in ((to, values), (values, to)):
                    timed(link, "host", size, lambda a=a, b=b: a.copy_(b, non_blocking=True))
                timed(host, "optimizer", size, lambda size=size: update(size // 4))
                timed(disk, "disk", size, lambda n=name, v=values: files.write(n, v))
                timed(disk, "disk", size, lambda n=name, v=values: files.read(n, v))
    return [
        {"op": op, "payload_bytes": size, "wire_bytes": size, "seconds": median(found)}
        for (op, size), found in rows.items()
    ]


def call(group: Any, op: str, whole: Any, part: Any, *, end: int, phase: str | None = None) -> None:
    """One collective of ``whole``, finished; ``part`` is a member's share of it.

    end  the global rank that is a broadcast's or a reduce's root, or gets what the first one sends
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
