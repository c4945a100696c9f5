"""Heterogeneous training as printed: ZeRO-Offload (Ren+ 2021, arXiv:2101.06840) and ZeRO-Infinity
(Rajbhandari+ 2021, arXiv:2104.07857).

ZeRO-Offload counts 16 bytes per parameter, ZeRO-Infinity 20 (theory/needs.py). Where the second
prints TB and GB it means TiB and GiB. Both measure on DGX-2s: 16 V100s of 32 GB, 1.5 TB of host
memory, 28 TB of NVMe disks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.theory import offload_costs as costs
from paralab.theory import zero
from paralab.theory.offload_costs import CPU, GPU, UPDATE_SUPER

if TYPE_CHECKING:
    import pandas as pd

GIB, TIB = 2**30, 2**40
V100, DGX2_GPUS, DGX2_HOST, DGX2_DISK = 32e9, 16, 1.5e12, 28e12

# ZeRO-Offload, table 1: where parameters, gradients and the update are; bytes per parameter on the
# GPU, and the reduction.
OFFLOAD_TABLE_1 = (
    (GPU, GPU, GPU, 16, 1),
    (GPU, CPU, GPU, 14, 1.14),
    (GPU, GPU, CPU, 4, 4),
    (GPU, CPU, CPU, 4, 8),
)

# ZeRO-Offload, figure 7: billions that fit 1, 4 and 16 V100s of one DGX-2.
OFFLOAD_FIGURE_7 = {
    "PyTorch": (1.4, 1.4, 1.4),
    "Megatron": (1.4, 4.5, 15),
    "ZeRO-2": (1.4, 3.9, 8),
    "SwapAdvisor": (8, 8, 8),
    "L2L": (17, 17, 17),
    "ZeRO-Offload": (13, 30, 70),
}

# ZeRO-Infinity, figure 2a: layers, hidden, heads; trillions; states, activations and checkpoints
# per node in TiB; working memory of states (MSWM) and of activations (AWM) in GiB. s = 1024, 32
# samples per node, 2 per GPU for the AWM.
INFINITY_FIGURE_2A = (
    (80, 10240, 128, 0.1, 1.83, 2.03, 0.05, 1.95, 1.63),
    (100, 20480, 160, 0.5, 9.16, 3.91, 0.12, 6.25, 2.5),
    (315, 163840, 1024, 101.47, 1845.7, 88.59, 3.08, 400.0, 18.0),
)

# ZeRO-Infinity, figure 6a: billions that fit one DGX-2.
INFINITY_FIGURE_6A = {
    "Data parallel": 1.4,
    "ZeRO-2": 10,
    "ZeRO-Offload": 13,
    "ZeRO-3": 20,
    "3D": 20,
    "ZeRO-Inf-CPU": 70,
    "ZeRO-Inf-NVMe": 1000,
}

# ZeRO-Infinity, table 1: nodes, billions, hidden in thousands of 1024, layers, batch per GPU,
# model-parallel degree, where 16-bit parameters and optimizer states lie.
INFINITY_TABLE_1 = (
    (1, 10, 4, 50, 8, 1, "GPU", "GPU"),
    (1, 50, 8, 62, 26, 1, "CPU", "NVMe"),
    (1, 100, 8, 125, 24, 1, "CPU", "NVMe"),
    (1, 500, 18, 124, 8, 1, "NVMe", "NVMe"),
    (1, 1000, 25, 128, 7, 1, "NVMe", "NVMe"),
    (32, 500, 18, 124, 7, 4, "GPU", "GPU"),
    (32, 1000, 25, 128, 5, 4, "GPU", "GPU"),
    (32, 5000, 48, 174, 3, 4, "NVMe", "NVMe"),
    (32, 10_000, 64, 200, 2, 4, "NVMe", "NVMe"),
    (32, 20_000, 88, 205, 1.25, 8, "NVMe", "NVMe"),
)

# ZeRO-Infinity, table 2: optimizer states and gradients, then parameters: which devices, and
# whether they are partitioned; the `Plan` that says the same (3D is cut by tp and pp instead).
INFINITY_TABLE_2 = (
    ("Data parallel", "GPU", False, "GPU", False, {"zero_stage": 0}),
    ("ZeRO-2", "GPU", True, "GPU", False, {"zero_stage": 2}),
    ("ZeRO-Offload", "CPU, GPU", True, "GPU", False, {"zero_stage": 2, "offload": "cpu"}),
    ("3D parallelism", "GPU", True, "GPU", True, None),
    ("ZeRO-3", "GPU", True, "GPU", True, {"zero_stage": 3}),
    ("ZeRO-Inf-CPU", "CPU, GPU", True, "CPU, GPU", True, {"zero_stage": 3, "offload": "cpu"}),
    ("ZeRO-Inf-NVMe", "NVMe, CPU, GPU", True, "NVMe, CPU, GPU", True,
     {"zero_stage": 3, "offload": "nvme"}),
)  # fmt: skip


def zero_offload_table1() -> pd.DataFrame:
    """ZeRO-Offload, table 1: bytes per parameter on the GPU, and what crosses per step.

    The last row is printed as 4M with a reduction of 8: it is 2M.
    """
    import pandas as pd

    rows = []
    for p16, g16, update, printed, reduction in OFFLOAD_TABLE_1:
        where = {"p16": p16, "g16": g16, **dict.fromkeys(UPDATE_SUPER, update)}
        at = costs.placed(*(name for name, device in where.items() if device == CPU))
        held = costs.gpu_memory(at)
        rows.append((p16, g16, update, printed, held, reduction, 16 / held, costs.cut_volume(at)))
    names = ["parameters", "gradients", "update", "M bytes, printed", "M bytes, recomputed",
             "reduction, printed", "reduction, recomputed", "M bytes that cross"]  # fmt: skip
    return pd.DataFrame(rows, columns=names)


def _bound(system: str, devices: int) -> float | None:
    """Billions whose states alone fill the memory that ``system`` may use, at 16 bytes each."""
    stage = {"PyTorch": 0, "Data parallel": 0, "ZeRO-2": 2, "ZeRO-3": 3, "3D": 3, "Megatron": 3}
    if system in stage:  # Megatron and 3D cut all states, as stage 3 does
        return zero.largest_model(V100, devices, stage[system]) / 1e9
    offloaded = costs.gpu_memory(costs.placed("g16", *UPDATE_SUPER))
    if system == "ZeRO-Offload":  # 16-bit parameters on every GPU, the rest on the host
        return min(V100 / offloaded, DGX2_HOST / (16 - offloaded)) / 1e9
    return {"ZeRO-Inf-CPU": DGX2_HOST / 16e9, "ZeRO-Inf-NVMe": DGX2_DISK / 16e9}.get(system)


def zero_offload_figure7() -> pd.DataFrame:
    """ZeRO-Offload, figure 7: the largest model on 1, 4 and 16 GPUs, and what states allow.

    ZeRO-Offload goes beyond one GPU's 13 billion with model parallelism beside it, so its limit is
    that of one copy cut over all GPUs; L2L and SwapAdvisor have no formula here.
    """
    import pandas as pd

    rows = []
    for system, sizes in OFFLOAD_FIGURE_7.items():
        for devices, printed in zip((1, 4, 16), sizes, strict=True):
            limit = _bound(system, devices)
            if system == "ZeRO-Offload":
                limit = min(devices * V100 / 2, DGX2_HOST / 14) / 1e9
            rows.append((system, devices, float(printed), limit))
    names = ["system", "devices", "parameters (B), printed", "limit of states (B), recomputed"]
    return pd.DataFrame(rows, columns=names).astype({names[-1]: float})


def zero_infinity_figure2a() -> pd.DataFrame:
    """ZeRO-Infinity, figure 2a: what large models need, by equations 1 to 5.

    Printed in TB and GB, meant in TiB and GiB. The first row's MSWM, 1.95, is 20 h^2 bytes where
    eq. 4 makes it 16.
    """
    import pandas as pd

    rows = []
    for layers, hidden, heads, size, states, kept, saved, mswm, awm in INFINITY_FIGURE_2A:
        # all kept: as if there was one checkpoint at the start
        everything = costs.awm_bytes(hidden, heads, 32, 1024, interval=layers)
        rows.append({
            "layers": layers, "hidden": hidden, "heads": heads,
            "parameters (T), printed": size,
            "parameters (T), recomputed": costs.transformer_parameters(layers, hidden) / 1e12,
            "states (TiB), printed": states,
            "states (TiB), recomputed": costs.model_state_bytes(layers, hidden) / TIB,
            "activations (TiB), printed": kept, "activations (TiB), recomputed": everything / TIB,
            "checkpoints (TiB), printed": saved,
            "checkpoints (TiB), recomputed": costs.checkpoint_bytes(layers, hidden, 32, 1024) / TIB,
            "MSWM (GiB), printed": mswm, "MSWM (GiB), recomputed": costs.mswm_bytes(hidden) / GIB,
            "AWM (GiB), printed": awm,
            "AWM (GiB), recomputed": costs.awm_bytes(hidden, heads, 2, 1024) / GIB,
        })  # fmt: skip
    return pd.DataFrame(rows)


def zero_infinity_table1() -> pd.DataFrame:
    """ZeRO-Infinity, table 1: the models it ran; sizes by eq. 1, 12 l h^2, within 3.5 %."""
    import pandas as pd

    names = ["nodes", "parameters (B), printed", "parameters (B), recomputed", "hidden", "layers",
             "batch per GPU", "model-parallel", "parameters on", "optimizer on"]  # fmt: skip
    rows = [
        (nodes, size, costs.transformer_parameters(layers, 1024 * kib) / 1e9, 1024 * kib, layers,
         batch, mp, p16, states)
        for nodes, size, kib, layers, batch, mp, p16, states in INFINITY_TABLE_1
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=names)


def zero_infinity_figure6a() -> pd.DataFrame:
    """ZeRO-Infinity, figure 6a: the largest model on one DGX-2, beside what states alone allow."""
    import pandas as pd

    rows = [(system, float(printed), _bound(system, DGX2_GPUS))
            for system, printed in INFINITY_FIGURE_6A.items()]  # fmt: skip
    names = ["system", "parameters (B), printed", "limit of states (B), recomputed"]
    return pd.DataFrame(rows, columns=names)


def zero_infinity_table2() -> pd.DataFrame:
    """ZeRO-Infinity, table 2: what a system places where, and the fields of `Plan` that do so."""
    import pandas as pd

    rows = [
        (name, states, shared, parameters, whole,
         "tp, pp" if plan is None else ", ".join(f"{k}={v!r}" for k, v in plan.items()))
        for name, states, shared, parameters, whole, plan in INFINITY_TABLE_2
    ]  # fmt: skip
    names = ["system", "optimizer and gradients", "partitioned", "parameters",
             "parameters partitioned", "plan"]  # fmt: skip
    return pd.DataFrame(rows, columns=names)
