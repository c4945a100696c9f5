"""The formulas of ZeRO-Offload and ZeRO-Infinity for memory outside the GPU: cuts and bandwidth.

ZeRO-Offload (Ren+ 2021, arXiv:2101.06840, sec. 3) draws a step of mixed-precision Adam as a graph.
Circles hold data and boxes compute. The weight of an edge is the bytes that flow along it in a
step: for M parameters 2M bytes of 16-bit numbers, or 4M bytes of 32-bit numbers (figure 2):

    fwd-bwd --2M--> g16 --2M--> update <--4M each way--> p32, m32, v32
       ^                                                  |
       +------4M------ p16 <------2M------ float2half <-4M-+

Forward and backward are one node, which reads p16 twice, 2M each time. A strategy assigns every
node to GPU or CPU, and the bytes that cross per step are the sum over the edges that it cuts:
`cut_volume`. fwd-bwd stays on the GPU (sec. 3.2: it computes O(M B), all other nodes O(M)). Then
the four cheapest cuts are those of table 1, and every other cut crosses 6M or more (sec. 3.3):

    p16  g16  update and 32 bits    on the GPU    as printed    crosses
    gpu  gpu  gpu                   16M           16M           0
    gpu  cpu  gpu                   14M           14M           4M
    gpu  gpu  cpu                    4M            4M           4M
    gpu  cpu  cpu                    2M            4M (8x)      4M      ZeRO-Offload

The last row contradicts itself: an eighth of 16M is 2M, and at 4M the 13 billion parameters of
figure 7 would not fit in its GPU's 32 GB.

ZeRO-Infinity (Rajbhandari+ 2021, arXiv:2104.07857, sec. 4) derives the bandwidth that an efficiency
requires. For 90 % it prints 1.5 TB/s, which would give 91.6 %: 1.23 TB/s are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from paralab.checks import choice, illegal, instance

GPU, CPU = "gpu", "cpu"

# ---- ZeRO-Offload: the graph and its cuts ----
# Bytes per parameter that a node holds; nodes that compute hold none.
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

    The paper also prints 28M for L2L, seven times ZeRO-Offload's (sec. 6.2), without a derivation.
    This graph gives 28 if the GPU computes forward, backward and the update, the CPU rounds to 16
    bits, and the CPU holds all data but g16: 4 for p16, 8 for each of p32, m32 and v32.
    """
    at = _checked(assignment)
    return sum(width for (source, to), width in FLOWS.items() if at[source] != at[to])


def gpu_memory(assignment: Mapping[str, str]) -> int:
    """Bytes per parameter of the model states held on the GPU; ZeRO-Offload, table 1."""
    at = _checked(assignment)
    return sum(width for name, width in HELD.items() if at[name] == GPU)


def cuts(update: str = CPU) -> list[dict[str, str]]:
    """The 64 assignments with fwd-bwd on the GPU and the update on the device ``update``."""
    choice("update", update, (GPU, CPU))
    free = [name for name in HELD if name not in ("fwd-bwd", "update")]
    return [
        {"fwd-bwd": GPU, "update": update, **dict(zip(free, devices, strict=True))}
        for devices in product((GPU, CPU), repeat=len(free))
    ]


def _checked(assignment: Mapping[str, str]) -> dict[str, str]:
    """The device of every node; that of fwd-bwd is the GPU, as its work grows with the batch."""
    instance("assignment", assignment, Mapping, "one of cuts()", "dict {node: device}")
    legal = dict.fromkeys(HELD, (GPU, CPU)) | {"fwd-bwd": (GPU,)}
    return {name: choice(name, assignment.get(name), legal[name]) for name in HELD}


# ---- ZeRO-Infinity, sec. 4: bandwidth ----
def ait_optimizer(batch: float, seq_len: int) -> float:
    """FLOPs per byte of optimizer states moved, b s / 4; ZeRO-Infinity, eq. 10.

    P parameters have 16 P bytes of states, which are read and written once per step.
    """
    return batch * seq_len / 4


def bandwidth_needed(efficiency: float, ait: float, peak_flops: float) -> float:
    """Bytes/s at which `efficiency` is reached: e / (1 - e) peak / ait.

    efficiency  share of the time that is spent computing
    ait         arithmetic intensity, FLOPs per byte moved
    peak_flops  FLOP/s that one device reaches when it waits for nothing; the paper uses 70e12
    """
    if not 0 < efficiency < 1:
        why = "without overlap, every transfer costs time"
        raise illegal("efficiency", efficiency, why, "a number above 0 and below 1")
    return efficiency / (1 - efficiency) * peak_flops / ait


def efficiency(
    flops_per_step: float, bytes_per_step: float, peak_flops: float, bandwidth: float
) -> float:
    """compute / (compute + transfer): the share of time spent computing, without any overlap.

    No overlap is the paper's assumption; with ait FLOPs per byte this is its eq. 6, ait bw / (ait
    bw + peak). bytes_per_step are those that cross the link: with gradients leaving the device and
    parameters returning, 4 per parameter in 16 bits, and 8 in paralab's fp32.
    """
    compute, transfer = flops_per_step / peak_flops, bytes_per_step / bandwidth
    return compute / (compute + transfer)


def efficiency_overlapped(
    flops_per_step: float, bytes_per_step: float, peak_flops: float, bandwidth: float
) -> float:
    """compute / max(compute, transfer): the share of time spent computing, with perfect overlap.

    The paper has no such formula. The result is at most twice `efficiency`, and 1 where
    `efficiency` is 1/2 or more.
    """
    compute, transfer = flops_per_step / peak_flops, bytes_per_step / bandwidth
    return compute / max(compute, transfer)
