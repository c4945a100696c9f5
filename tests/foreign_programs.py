"""Programs of plain PyTorch that know nothing of paralab, and what theory says they send.

Each is ``make(n) -> step``: a function that builds the program on a rank and returns what one
training step does. `THEORY` has the bytes that all ranks together send in a step, by operation.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from trainings import sharded

DIN, DOUT, LAYERS = 384, 480, 3  # a matrix has 0.74 MB
PSI = LAYERS * 2 * DIN * DOUT * 4  # bytes of parameters
BATCH, MICROBATCHES, CHUNKS = 24, 4, 2
SEQ = 480
TP_BYTES = SEQ * DIN * 4  # an activation of one sample
SURPLUS = "gloo surplus"  # a reduce-scatter of gloo gathers what it has scattered
ROWS = 576  # of a micro-batch of a pipeline
MESSAGE = ROWS * DIN * 4  # what a stage hands to the next for one micro-batch


def block():
    up, down = nn.Linear(DIN, DOUT, bias=False), nn.Linear(DOUT, DIN, bias=False)
    return nn.Sequential(up, nn.ReLU(), down)


def blocks():
    return nn.Sequential(*(block() for _ in range(LAYERS)))


def training(model, optimizer, batch=BATCH):
    def step():
        model(torch.randn(batch, DIN)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(n):
    model = DistributedDataParallel(blocks())
    return training(model, torch.optim.SGD(model.parameters(), 0.1))


def fsdp(n, reshard=True):
    model = sharded(blocks(), reshard_after_forward=reshard)
    return training(model, torch.optim.SGD(model.parameters(), 0.1))


def fsdp_kept(n):
    return fsdp(n, reshard=False)


def zero(n):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(blocks())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return training(model, optimizer)


def tensor(n):
    from torch.distributed.tensor import Shard, parallel

    mesh = init_device_mesh(torch.get_default_device().type, (n,), mesh_dim_names=("tp",))
    model = blocks()
    for block in model:
        first = parallel.ColwiseParallel(input_layouts=Shard(1))
        plan = {"0": first, "2": parallel.RowwiseParallel(output_layouts=Shard(1))}
        parallel.parallelize_module(block, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        x = torch.randn(1, SEQ // n, DIN, requires_grad=True)
        model(x).square().mean().backward()
        x.grad.sum()  # waits for the last message
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline(n, kind="ScheduleGPipe"):
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, chunks = dist.get_rank(), CHUNKS if "Interleaved" in kind else 1
    parts = [nn.Linear(DIN, DIN, bias=False) for _ in range(chunks)]
    device = torch.get_default_device()
    stages = [PipelineStage(p, rank + i * n, chunks * n, device) for i, p in enumerate(parts)]
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    own = stages if chunks > 1 else stages[0]
    loss = nn.functional.mse_loss
    schedule = getattr(schedules, kind)(own, MICROBATCHES, loss_fn=loss)

    def step():
        x = torch.randn(ROWS * MICROBATCHES, DIN)
        first = (x,) if rank == 0 else ()
        last = {"target": x} if rank == n - 1 else {}
        schedule.step(*first, **last)
        optimizer.step()
        optimizer.zero_grad()

    return step


def one_f_one_b(n):
    return pipeline(n, "Schedule1F1B")


def interleaved(n):
    return pipeline(n, "ScheduleInterleaved1F1B")


def ring(n):
    rank = dist.get_rank()
    tensor = torch.ones(n, 300_000)

    def step():
        """Reduce-scatter, then all-gather: n - 1 messages each."""
        for half in (0, 1):
            for i in range(n - 1):
                out, into = (rank - i + half) % n, (rank - i - 1 + half) % n
                got = torch.empty_like(tensor[0])
                send = dist.P2POp(dist.isend, tensor[out], (rank + 1) % n)
                receive = dist.P2POp(dist.irecv, got, (rank - 1) % n)
                for work in dist.batch_isend_irecv([send, receive]):
                    work.wait()
                tensor[into] = got if half else tensor[into] + got

    return step


PROGRAMS = {
    make.__name__: make
    for make in (ddp, fsdp, fsdp_kept, zero, tensor, pipeline, one_f_one_b, interleaved, ring)
}


def theory(name, n, backend="gloo"):
    """{(operation, phase): bytes that all ranks send in a step}."""
    found = _on_gloo(name, n)
    return {key: size for key, size in found.items() if backend == "gloo" or SURPLUS not in key}


def _on_gloo(name, n):
    of = n - 1  # all n ranks together: n (n-1)/n S
    reduced = {("all_reduce", "backward"): 2 * of * PSI}
    scattered = {("reduce_scatter", "backward"): of * PSI, ("all_gather", SURPLUS): of * PSI}
    gathered = scattered | {("all_gather", "forward"): of * PSI}
    sent = (CHUNKS * n if name == "interleaved" else n) - 1  # boundaries between stages
    activations = LAYERS * of * TP_BYTES
    return {
        "ddp": reduced,
        "zero": reduced | {("broadcast", "optimizer"): of * PSI},
        "fsdp": gathered | {("all_gather", "backward"): of * PSI},
        "fsdp_kept": gathered,
        "tensor": {
            (op, phase): activations
            for op in ("all_gather", "reduce_scatter")
            for phase in ("forward", "backward")
        }
        | {("all_gather", SURPLUS): 2 * activations},
        "ring": {("send", "data"): 2 * of * n * 300_000 * 4},
    }.get(name, {("send", "data"): 2 * sent * MICROBATCHES * MESSAGE})
