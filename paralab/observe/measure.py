"""The calibration's measurements, as they run inside ranks: small GPTs, products, collectives.

[Note: rounds] Everything is measured in rounds over all shapes and sizes, not one after the other:
a second in which the machine was busy with something else then spoils a few repetitions of all, not
all repetitions of a few.

Called by paralab/observe/calibrate.py, which turns the seconds into a Cluster. Torch is imported
inside the functions: the caller of a calibration reads the shapes and sizes without it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median
from typing import Any

from paralab.spec import ModelSpec, Plan

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
SIZES = tuple(2**k for k in (10, 13, 16, 18, 20, 21, 22, 23))  # payload bytes
PRODUCT_SHAPES = ((128, 64, 192), (128, 128, 512), (128, 256, 768), (128, 512, 256))
TIER_SIZES = tuple(2**k for k in (16, 18, 20, 22, 23))
# (layers, hidden, heads, seq_len, samples): thin and wide, short and long, one sample and several
SHAPES = (
    (2, 64, 2, 64, 1),
    (2, 64, 2, 128, 8),
    (2, 128, 4, 64, 2),
    (2, 128, 4, 128, 4),
    (2, 192, 6, 64, 4),
    (2, 256, 8, 64, 1),
    (2, 256, 8, 128, 2),
    (1, 384, 12, 64, 4),
)


def _one_rank(shape: tuple[int, ...]) -> tuple[Any, Any, dict[str, float]]:
    """(a rank of one device, a text of zeros, thread CPU seconds by what the step spends them on).

    The seconds are those of the step that was made last: forward, backward, optimizer.
    """
    import torch

    from paralab.interpret.run import Env, Rank
    from paralab.interpret.state import Optimizer, State
    from paralab.observe.recorder import Recorder
    from paralab.programs.compile import compiled
    from paralab.programs.instructions import BACKWARD, FORWARD, UPDATE

    layers, hidden, heads, seq_len, samples = shape
    spec = ModelSpec(layers=layers, hidden=hidden, heads=heads, seq_len=seq_len)
    program, recorder = (
        compiled(spec, Plan(microbatch_size=samples)),
        Recorder(rank=0, world_size=1),
    )
    common = {"tp": 0, "seed": 0, "device": "cpu"}
    state = State(program, pp=0, index=0, optimizer=Optimizer("adamw", 1e-3), recorder=recorder,
                  clip_norm=None, dtype=torch.float32, host=None, **common)  # fmt: skip
    env = Env(program, {}, recorder, **common)
    rank = Rank(state, {}, env=env)
    spent: dict[str, float] = defaultdict(float)
    names = {FORWARD: "forward", BACKWARD: "backward", UPDATE: "optimizer"}

    def timed(method: Any, what: str) -> Any:
        def run(ins: Any) -> None:
            began = time.thread_time()
            method(ins)
            spent[what] += time.thread_time() - began

        return run

    rank.steps = [
        (timed(method, names[ins.op]) if ins.op in names else method, ins, None)
        for method, ins, _ in rank.steps
    ]
    return rank, torch.zeros(samples, seq_len + 1, dtype=torch.int64), spent


def measure_device(context: Any, *, rounds: int = 2) -> list[dict[str, Any]]:
    """In a rank: median thread CPU seconds of forward, backward and optimizer of every shape.

    rounds  over the shapes, of which the first warms up. See [Note: rounds]
    """
    from paralab.interpret.costs import small
    from paralab.programs.instructions import UPDATE
    from paralab.theory.work import Work

    ranks = [_one_rank(shape) for shape in SHAPES]
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for number, (rank, text, spent) in enumerate(ranks):
            for _ in range(2):  # the second finds its weights in the cache, as training does
                spent.clear()
                rank.step(lambda k, text=text: text)
            for what, some in spent.items():
                seconds[number, what].append(some)
    points = []
    for number, (rank, _, _) in enumerate(ranks):
        layers, hidden, heads, seq_len, samples = SHAPES[number]
        ops, nothing = rank.model.ops, Work()
        updates = [ins for ins in rank.code if ins.op == UPDATE]
        works = {
            "forward": sum((op.work[0] for op in ops), nothing),
            "backward": sum((half for op in ops for half in op.work[1:]), nothing),
            "optimizer": sum((small(rank.program, 0, ins) for ins in updates), nothing),
        }
        for what, work in works.items():
            points.append({
                "layers": layers, "hidden": hidden, "heads": heads, "seq_len": seq_len,
                "samples": samples, "what": what, "flops": work.flops, "bytes": work.bytes,
                "kernels": work.kernels, "seconds": median(seconds[number, what][1:]),
            })  # fmt: skip
    return points


def measure_products(context: Any, *, budget: float = 0.3) -> list[dict[str, Any]]:
    """In a rank: median thread CPU seconds of matrix products in 16 bits, by precision and kind.

    x W^T, g W and g^T x as blocks of several widths have them. See [Note: rounds]
    """
    import torch

    from paralab.interpret.run import DTYPES

    rows: dict[tuple[str, str, int], Any] = {}
    for precision in ("bf16", "fp16"):
        for tokens, inputs, outputs in PRODUCT_SHAPES:
            x, g, w = (
                torch.zeros(size, dtype=DTYPES[precision])
                for size in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
            )
            flops = 2 * tokens * inputs * outputs
            rows[precision, "forward", flops] = lambda x=x, w=w: torch.nn.functional.linear(x, w)
            rows[precision, "input", flops] = lambda g=g, w=w: g @ w
            rows[precision, "weight", flops] = lambda g=g, x=x: g.t() @ x
    seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    deadline, rounds = time.perf_counter() + budget, 0
    while rounds < 3 or time.perf_counter() < deadline:
        for key, multiply in rows.items():
            began = time.thread_time()
            multiply()
            seconds[key].append(time.thread_time() - began)
        rounds += 1
    return [
        {"precision": precision, "what": what, "flops": flops, "seconds": median(found[1:])}
        for (precision, what, flops), found in seconds.items()
    ]


def measure_links(context: Any, *, budget: float = 0.8) -> list[dict[str, Any]]:
    """In a rank: launch and end of every repetition of every collective and size, on its clock.

    budget  seconds in all; from 3 to 12 rounds, of which the first warms up. See [Note: rounds]
    """
    import torch

    from paralab.comm import Group
    from paralab.observe.recorder import Recorder

    recorder = Recorder(rank=context.rank, world_size=context.world_size)
    group = Group(range(context.world_size), axis="dp", context=context, recorder=recorder)
    largest, over = torch.zeros(SIZES[-1] // 4), torch.zeros(1)
    sizes = [size - size % (4 * group.size) for size in SIZES]  # every member has an equal part
    rows = [
        {"op": op, "ranks": group.size, "payload_bytes": size, "marks": []}
        for op in OPS
        for size in sizes
    ]
    deadline = time.perf_counter() + budget
    for done in range(1, 13):
        for row in rows:
            tensor = largest[: row["payload_bytes"] // 4]
            part = torch.zeros(tensor.numel() // group.size)
            group.barrier(phase="setup")
            launched = time.perf_counter()
            _call(group, row["op"], tensor, part)
            row["marks"].append((launched, time.perf_counter()))
        over.fill_(time.perf_counter() > deadline)
        group.all_reduce(over, phase="setup").wait()  # all ranks stop after the same round
        if done >= 3 and over.item():
            break
    for row in rows:
        row["marks"] = row["marks"][1:]
    return rows


def measure_calls(context: Any, *, rounds: int = 12) -> list[dict[str, Any]]:
    """In a rank: median thread CPU seconds of posting a call, and by how much a forward and a
    backward take longer right after a wait for one than in a step without.

    The model is the smallest: what a wait adds hardly grows with the work after it. See [Note:
    rounds]; the first quarter warms up
    """
    import torch

    from paralab.comm import Group
    from paralab.observe.recorder import Recorder

    recorder = Recorder(rank=context.rank, world_size=context.world_size)
    group = Group(range(context.world_size), axis="dp", context=context, recorder=recorder)
    rank, text, spent = _one_rank(SHAPES[0])
    _, hidden, _, seq_len, _ = SHAPES[0]
    message, usual = torch.zeros(seq_len * hidden), rank.steps
    found: dict[str, list[float]] = defaultdict(list)

    def after_a_wait(method: Any) -> Any:
        def run(ins: Any) -> None:
            began = time.thread_time()
            call = group.all_reduce(message, phase="setup")
            found["post"].append(time.thread_time() - began)
            call.wait()
            method(ins)

        return run

    ops = [ins.op for _, ins, _ in usual]
    firsts = {ops.index(op) for op in ("FORWARD", "BACKWARD")}
    waiting = [
        (after_a_wait(method) if at in firsts else method, ins, span)
        for at, (method, ins, span) in enumerate(usual)
    ]

    def train(steps: list) -> dict[str, float]:
        rank.steps = steps
        spent.clear()
        rank.step(lambda k: text)
        return dict(spent)

    for _ in range(rounds):
        train(usual)  # still feels the last one's waits
        inside, after = train(usual), train(waiting)
        for what in ("forward", "backward"):
            found[what].append(inside[what])
            found[f"{what} after a wait"].append(after[what] - inside[what])
    return [
        {"what": what, "seconds": median(some[len(some) // 4 :])} for what, some in found.items()
    ]


def measure_tiers(context: Any, *, budget: float = 0.4) -> list[dict[str, Any]]:
    """In a rank: seconds of copies between tiers, in the lanes that offload uses, and of the
    optimizer on the host's processor.

    One row for each op ("host" for a copy either way, "disk" for a file written, or read, past the
    page cache, "optimizer") and size. See [Note: rounds]
    """
    import tempfile

    import torch
    from torch.optim.adamw import adamw

    from paralab.interpret.files import Files
    from paralab.interpret.lanes import Lane
    from paralab.observe.recorder import Recorder

    recorder = Recorder(rank=context.rank, world_size=context.world_size)
    host, disk = Lane("h2d", recorder), Lane("disk", recorder)
    there, here = (torch.zeros(TIER_SIZES[-1] // 4) for _ in "12")
    moments = torch.zeros(2, TIER_SIZES[-1] // 4)
    rows: dict[tuple[str, int], list[float]] = defaultdict(list)

    def timed(lane: Lane, op: str, size: int, work: Any) -> None:
        began = time.perf_counter()
        lane.submit(work).wait()
        rows[op, size].append(time.perf_counter() - began)

    def update(size: int) -> None:
        adamw(
            [there[:size]], [here[:size]], [moments[0, :size]], [moments[1, :size]], [],
            [torch.ones(())], fused=True, amsgrad=False, beta1=0.9, beta2=0.999, lr=1e-9,
            weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        files = Files(folder)
        for size in TIER_SIZES:
            files.create(str(size), size)
        deadline = time.perf_counter() + budget
        while len(rows["host", TIER_SIZES[0]]) < 4 or time.perf_counter() < deadline:
            for size in TIER_SIZES:
                to, values, name = there[: size // 4], here[: size // 4], str(size)
                timed(host, "host", size, lambda to=to, values=values: to.copy_(values))
                timed(host, "optimizer", size, lambda size=size: update(size // 4))
                timed(disk, "disk", size, lambda n=name, v=values: files.write(n, v))
                timed(disk, "disk", size, lambda n=name, v=values: files.read(n, v))
    return [
        {"op": op, "payload_bytes": size, "wire_bytes": size, "seconds": median(found)}
        for (op, size), found in rows.items()
    ]


def _call(group: Any, op: str, tensor: Any, part: Any) -> None:
    """One collective of ``tensor``, finished."""
    if op == "all_reduce":
        group.all_reduce(tensor, phase="setup").wait()
    elif op == "all_gather":
        group.all_gather(tensor, part, phase="setup").wait()
    elif op == "reduce_scatter":
        group.reduce_scatter(part, tensor, phase="setup").wait()
    elif op == "all_to_all":
        group.all_to_all(tensor.new_empty(tensor.shape), tensor, phase="setup").wait()
    elif op == "broadcast":
        group.broadcast(tensor, root=0, phase="setup").wait()
    elif group.index == 0:
        group.send(tensor, to=1, phase="setup").wait()
    elif group.index == 1:
        group.recv(tensor, source=0, phase="setup").wait()
