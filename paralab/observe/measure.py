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

from paralab.spec import ModelSpec
from paralab.theory.formulas import backward_parts, forward_parts, optimizer_work, total

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


def measure_device(context: Any, *, rounds: int = 2) -> list[dict[str, Any]]:
    """In a rank: median thread CPU seconds of forward, backward and optimizer of every shape.

    rounds  over the shapes, of which the first warms up. See [Note: rounds]
    """
    import torch

    from paralab.model import GPT

    specs = [
        ModelSpec(layers=layers, hidden=hidden, heads=heads, seq_len=seq_len)
        for layers, hidden, heads, seq_len, _ in SHAPES
    ]
    models = [GPT(spec) for spec in specs]
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)

    def train(number: int) -> None:
        spec, samples = specs[number], SHAPES[number][-1]
        tokens = torch.zeros(samples, spec.seq_len, dtype=torch.int64)
        marks = [time.thread_time()]
        loss = models[number](tokens, tokens)
        marks.append(time.thread_time())
        loss.backward()
        marks.append(time.thread_time())
        optimizers[number].step()
        optimizers[number].zero_grad(set_to_none=True)
        marks.append(time.thread_time())
        for i, what in enumerate(("forward", "backward", "optimizer")):
            seconds[number, what].append(marks[i + 1] - marks[i])

    for _ in range(rounds):
        for number in range(len(SHAPES)):
            train(number)
            train(number)  # the second finds its weights in the cache, as a training loop does
    points = []
    for number, (spec, (*_, samples)) in enumerate(zip(specs, SHAPES, strict=True)):
        works = {
            "forward": total(forward_parts(spec, samples).values()),
            "backward": total(w for w, _ in backward_parts(spec, samples, accumulate=False)),
            "optimizer": optimizer_work(spec, optimizer="adamw"),
        }
        for what, work in works.items():
            points.append({
                "layers": spec.layers, "hidden": spec.hidden, "heads": spec.heads,
                "seq_len": spec.seq_len, "samples": samples, "what": what, "flops": work.flops,
                "bytes": work.bytes, "kernels": work.kernels,
                "seconds": median(seconds[number, what][2:][1::2]),
            })  # fmt: skip
    return points


def measure_products(context: Any, *, budget: float = 0.3) -> list[dict[str, Any]]:
    """In a rank: median thread CPU seconds of matrix products in 16 bits, by precision and kind.

    x W^T, g W and g^T x as blocks of several widths have them. See [Note: rounds]
    """
    import torch

    from paralab.parallel.precision import DTYPES

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
    backward take longer right after a wait for one than in a loop without.

    The model is the smallest: what a wait adds hardly grows with the work after it. See [Note:
    rounds]; the first quarter warms up
    """
    import torch

    from paralab.comm import Group
    from paralab.model import GPT
    from paralab.observe.recorder import Recorder

    recorder = Recorder(rank=context.rank, world_size=context.world_size)
    group = Group(range(context.world_size), axis="dp", context=context, recorder=recorder)
    layers, hidden, heads, seq_len, samples = SHAPES[0]
    model = GPT(ModelSpec(layers=layers, hidden=hidden, heads=heads, seq_len=seq_len))
    tokens = torch.zeros(samples, seq_len, dtype=torch.int64)
    message = torch.zeros(seq_len * hidden)
    found: dict[str, list[float]] = defaultdict(list)

    def timed(work: Any) -> tuple[Any, float]:
        began = time.thread_time()
        made = work()
        return made, time.thread_time() - began

    def train(waits: bool) -> list[float]:
        seconds = []
        for what in ("forward", "backward"):
            if waits:
                call, posted = timed(lambda: group.all_reduce(message, phase="setup"))
                found["post"].append(posted)
                call.wait()
            if what == "forward":
                loss, spent = timed(lambda: model(tokens, tokens))
            else:
                _, spent = timed(loss.backward)
            seconds.append(spent)
        return seconds

    for _ in range(rounds):
        train(waits=False)  # still feels the last one's waits
        inside, after = train(waits=False), train(waits=True)
        for what, less, more in zip(("forward", "backward"), inside, after, strict=True):
            found[what].append(less)
            found[f"{what} after a wait"].append(more - less)
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

    from paralab.observe.recorder import Recorder
    from paralab.parallel.files import Files
    from paralab.parallel.lanes import Lane

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
