"""What ZeRO-Offload and ZeRO-Infinity state about memory outside the GPU: cuts and bandwidth.

ZeRO-Offload (Ren+ 2021, arXiv:2101.06840, sec. 3) draws a step of mixed-precision Adam as a graph:
circles hold data, boxes compute, and an edge weighs what flows along it in a step, for M parameters
2M bytes where 16-bit numbers leave a node and 4M where 32-bit ones do (figure 2):

    fwd-bwd --2M--> g16 --2M--> update <--4M each way--> p32, m32, v32
       ^                                                  |
       +------4M------ p16 <------2M------ float2half <-4M-+

Forward and backward are one node, and p16 feeds it twice, 2M each time. A strategy puts every node
on GPU or CPU, and what crosses per step is the sum over the edges that it cuts: `cut_volume`. With
fwd-bwd on the GPU (sec. 3.2: it costs O(M B), all the rest O(M)), the four cheapest cuts are
table 1's, 0 with everything on the GPU and 4M for three, and any other crosses 6M or more (3.3):

    p16  g16  update and 32 bits    on the GPU    as printed    crosses
    gpu  gpu  gpu                   16M           16M           0
    gpu  cpu  gpu                   14M           14M           4M
    gpu  gpu  cpu                    4M            4M           4M
    gpu  cpu  cpu                    2M            4M (8x)      4M      ZeRO-Offload

The last row contradicts itself: an eighth of 16M is 2M, and at 4M the 13 B parameters of figure 7
would not fit its 32 GB.

ZeRO-Infinity (Rajbhandari+ 2021, arXiv:2104.07857) asks in sec. 4 which bandwidth is enough. The
1.5 TB/s that it prints for 90 % would give 91.6 %: 1.23 are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from paralab.checks import choice, illegal, real, whole

GPU, CPU = "gpu", "cpu"

# ---- ZeRO-Offload: the graph and its cuts ----
# Bytes per parameter that a node holds; what computes holds none.
HELD = {"fwd-bwd": 0, "p16": 2, "g16": 2, "update": 0, "float2half": 0}
HELD |= {"p32": 4, "m32": 4, "v32": 4}
# Bytes per parameter and step that flow from one node to another.
FLOWS = {
    ("p16", "fwd-bwd"): 2 * 2,  # forward reads it, backward reads it again
    ("fwd-bwd", "g16"): 2,
    ("g16", "update"): 2,
    **{("update", state): 4 for state in ("p32", "m32", "v32")},
    **{(state, "update"): 4 for state in ("p32", "m32", "v32")},
    ("p32", "float2half"): 4,
    ("float2half", "p16"): 2,
}


def cut_volume(assignment: Mapping[str, str]) -> int:
    """Bytes per parameter that cross between GPU and CPU in a step; ZeRO-Offload, sec. 3.3.

    The paper also prints 28M for L2L, seven times ZeRO-Offload's (sec. 6.2), and no sum. This graph
    gives 28 where the GPU computes forward, backward and update, and all but g16 is held by the
    CPU, which rounds to 16 bits: 4 for p16, 8 for each of p32, m32 and v32.
    """
    at = _checked(assignment)
    return sum(width for (source, to), width in FLOWS.items() if at[source] != at[to])


def gpu_memory(assignment: Mapping[str, str]) -> int:
    """Bytes per parameter of the model states held on the GPU; ZeRO-Offload, table 1."""
    at = _checked(assignment)
    return sum(width for name, width in HELD.items() if at[name] == GPU)


def cuts(update: str = CPU) -> list[dict[str, str]]:
    """Every assignment with fwd-bwd on the GPU and the update on the device ``update``: 64."""
    choice("update", update, (GPU, CPU))
    free = [name for name in HELD if name not in ("fwd-bwd", "update")]
    return [
        {"fwd-bwd": GPU, "update": update, **dict(zip(free, devices, strict=True))}
        for devices in product((GPU, CPU), repeat=len(free))
    ]


def _checked(assignment: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(assignment, Mapping):
        raise illegal("assignment", assignment, "not {node: device}", "one of cuts()")
    for name, device in assignment.items():
        choice("node", name, tuple(HELD))
        choice(name, device, (GPU, CPU))
    missing = [name for name in HELD if name not in assignment]
    if missing:
        why = f"no device for {', '.join(missing)}"
        raise illegal("assignment", dict(assignment), why, "a device for every node")
    if assignment["fwd-bwd"] == CPU:
        raise illegal("fwd-bwd", CPU, "its work grows with the batch, too much for a CPU", "'gpu'")
    return dict(assignment)


# ---- ZeRO-Infinity, sec. 4: bandwidth ----
def ait_optimizer(batch: float, seq_len: int) -> float:
    """FLOPs per byte moved of optimizer states, b s / 4: 16 P bytes, read and written; eq. 10."""
    return real("batch", batch, above=0.0) * whole("seq_len", seq_len, at_least=1) / 4


def bandwidth_needed(efficiency: float, ait: float, peak_flops: float) -> float:
    """Bytes/s at which so large a share of time is spent computing: e / (1 - e) peak / ait.

    ait         FLOPs per byte moved
    peak_flops  FLOP/s that one device reaches when it waits for nothing; the paper takes 70e12
    """
    share = real("efficiency", efficiency, above=0.0)
    if share >= 1:
        why = "without overlap every transfer costs time"
        raise illegal("efficiency", efficiency, why, "a number above 0 and below 1")
    peak = real("peak_flops", peak_flops, above=0.0)
    return share / (1 - share) * peak / real("ait", ait, above=0.0)


def efficiency(
    flops_per_step: float, bytes_per_step: float, peak_flops: float, bandwidth: float
) -> float:
    """compute / (compute + transfer): transfers wait for the computation, and it for them.

    This is the paper's assumption, for any precision; with ait the FLOPs of one byte it is eq. 6,
    ait bw / (ait bw + peak). bytes_per_step is what crosses: with gradients down and parameters up,
    4 bytes per parameter in 16 bits, and 8 in paralab's fp32.
    """
    compute, transfer = _seconds(flops_per_step, bytes_per_step, peak_flops, bandwidth)
    return compute / (compute + transfer)


def efficiency_overlapped(
    flops_per_step: float, bytes_per_step: float, peak_flops: float, bandwidth: float
) -> float:
    """compute / max(compute, transfer): all that can be hidden is hidden.

    Not the paper's, which is `efficiency`; at most twice that, and 1 where that is 1/2 or more.
    """
    compute, transfer = _seconds(flops_per_step, bytes_per_step, peak_flops, bandwidth)
    return compute / max(compute, transfer)


def _seconds(flops: float, num_bytes: float, peak: float, bandwidth: float) -> tuple[float, float]:
    compute = real("flops_per_step", flops, above=0.0) / real("peak_flops", peak, above=0.0)
    moved = real("bytes_per_step", num_bytes, at_least=0.0)
    return compute, moved / real("bandwidth", bandwidth, above=0.0)
