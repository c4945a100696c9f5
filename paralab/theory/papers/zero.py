"""ZeRO, Rajbhandari+ 2019, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054: figure 1, tables 1 and 2, volumes of sec. 7, and what the text states.

GB are 10^9 bytes. Table 1 cuts numbers of 100 and more off and rounds smaller ones
(`zero.as_printed`); table 2 multiplies its first row as printed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.spec import ModelSpec
from paralab.theory import zero

if TYPE_CHECKING:
    import pandas as pd

# Figure 1: GB per device by stage, for 7.5 B parameters, N = 64, K = 12.
FIGURE_1 = ("120", "31.4", "16.6", "1.9")

# Table 1: GB per device; N, then Pos, Pos+g, Pos+g+p for 7.5 B, 128 B and 1 T parameters.
SIZES_1 = (7.5e9, 128e9, 1e12)
TABLE_1 = {
    1: "120 120 120 2048 2048 2048 16000 16000 16000",
    4: "52.5 41.3 30 896 704 512 7000 5500 4000",
    16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
    64: "31.4 16.6 1.88 536 284 32 4187 2218 250",
    256: "30.4 15.4 0.47 518 263 8 4046 2054 62.5",
    1024: "30.1 15.1 0.12 513 257 2 4011 2013 15.6",
}

# Table 2, "max theoretical model size" in billions by stage, and what ran: baseline and Pos. By
# model-parallel degree, 64-way data parallel, 32 GB. 500, 1000 and 2000 stand for 512, 1024, 2048.
TABLE_2 = {
    1: (2, 7.6, 14.4, 128),
    2: (4, 15.2, 28.8, 256),
    4: (8, 30.4, 57.6, 500),
    8: (16, 60.8, 115.2, 1000),
    16: (32, 121.6, 230.4, 2000),
}
MEASURED_2 = {1: (1.3, 6.2), 2: (2.5, 12.5), 8: (10.0, 50.0)}  # of the other rows none are recorded

# Sec. 7: elements sent per device and step, in parameters.
VOLUMES = (2, 2, 2, 3)
V100 = 32e9  # bytes


def zero_figure1() -> pd.DataFrame:
    """Figure 1: memory per device of a model of 7.5 billion parameters on 64 devices."""
    import pandas as pd

    rows = [
        (name, float(printed), zero.bytes_per_device(7.5e9, 64, stage) / 1e9)
        for stage, (name, printed) in enumerate(zip(zero.NAMES, FIGURE_1, strict=True))
    ]
    return pd.DataFrame(rows, columns=["stage", "GB, printed", "GB, recomputed"])


def zero_table1() -> pd.DataFrame:
    """Table 1: GB per device for three models, N of 1 to 1024, and three stages.

    A trillion parameters on 1024 devices are 15.6 GB each with all states dealt out: they fit.
    """
    import pandas as pd

    rows = []
    for n, text in TABLE_1.items():
        columns = [(psi, stage) for psi in SIZES_1 for stage in (1, 2, 3)]
        for (psi, stage), printed in zip(columns, text.split(), strict=True):
            found = zero.bytes_per_device(psi, n, stage)
            rows.append((psi / 1e9, n, zero.NAMES[stage], float(printed), found / 1e9,
                         zero.as_printed(found) == printed, found <= V100))  # fmt: skip
    names = ["parameters (B)", "devices", "stage", "GB, printed", "GB, recomputed", "same digits",
             "fits 32 GB"]  # fmt: skip
    return pd.DataFrame(rows, columns=names)


def zero_table2() -> pd.DataFrame:
    """Table 2: the largest model whose states fit 32 GB, by model-parallel degree and stage."""
    import pandas as pd

    rows = []
    for mp, sizes in TABLE_2.items():
        ran = MEASURED_2.get(mp, ())
        for stage, printed in enumerate(sizes):
            found = zero.largest_model(V100, 64, stage, model_parallel=mp) / 1e9
            rows.append((mp, 64 * mp, zero.NAMES[stage], float(printed), found,
                         ran[stage] if stage < len(ran) else None))  # fmt: skip
    names = ["model-parallel", "devices", "stage", "parameters (B), printed",
             "parameters (B), recomputed", "ran (B), printed"]  # fmt: skip
    return pd.DataFrame(rows, columns=names)


def zero_volumes(devices: int = 64) -> pd.DataFrame:
    """Sec. 7: elements that a device sends per step, in Psi, and exactly, times (N-1)/N."""
    import pandas as pd

    rows = [
        (zero.NAMES[stage], printed, zero.volume(stage), zero.elements_sent(1.0, devices, stage))
        for stage, printed in enumerate(VOLUMES)
    ]
    columns = ["stage", "Psi, printed", "Psi, recomputed", f"Psi, exactly on {devices}"]
    return pd.DataFrame(rows, columns=columns)


def zero_headlines() -> pd.DataFrame:
    """What abstract and text state, with what follows: fact, printed, recomputed, unit, note.

    Of a model that ran, recomputed is the largest whose states alone fit the device.
    """
    import pandas as pd

    gpt2 = ModelSpec(layers=48, hidden=1600, heads=25, seq_len=1024, vocab=50257)
    kept = zero.activations_footnote(gpt2, 32)

    def room(devices: int, stage: int, mp: int = 1) -> float:
        return zero.largest_model(V100, devices, stage, model_parallel=mp) / 1e9

    rows = [
        ("no model parallelism, 128 devices", 13, room(128, 2), "B", "states fill 27 GB of 32"),
        ("data parallelism alone", 1.4, room(128, 0), "B", "states fill 22 GB of 32"),
        ("largest that ran, 400 devices", 170, room(25, 2, 16), "B", "mp = 16, dp = 25"),
        ("1T on 1024 devices, per device", 15.6, zero.bytes_per_device(1e12, 1024, 3) / 1e9, "GB",
         "table 1"),
        ("aggregate of 400 devices at 38 TFLOP/s", 15, 400 * 38 / 1e3, "PFLOP/s", "abstract"),
        ("fused fp32 buffer, 3 B parameters", 12, 4 * 3e9 / 1e9, "GB", "sec. 3.2"),
        ("activations, 1.5 B, s = 1024, b = 32", 60, kept / 1e9, "GB", "sec. 3.2, footnote"),
        ("the same with checkpoints", 8, kept / gpt2.layers**0.5 / 1e9, "GB",
         "sec. 3.2: about the square root"),
        ("checkpoints, 100 B, s = 1024, b = 32", 33,
         zero.checkpoint_footnote(8192, 125, 32, 1024) / 1e9, "GB",
         "sec. 6.1 has half of it: sec. 3.2 itself says about 60 GB"),
        ("the same over 16 model-parallel devices", 2,
         zero.checkpoint_footnote(8192, 125, 32, 1024) / 16 / 1e9, "GB", "sec. 6.1"),
        ("per device, 100 B", 38, None, "TFLOP/s", "measured"),
        ("over Megatron, up to", 10, None, "x", "measured"),
        ("Turing-NLG", 17, None, "B", "ran"),
        ("Turing-NLG, per device", 41.4, None, "TFLOP/s", "measured"),
        ("Megatron, 40 B across two DGX-2, per device", 5, None, "TFLOP/s", "measured"),
        *((f"figure 6, configuration {name}", size, None, "B", "ran")
          for name, size in (("C1", 40), ("C2", 60), ("C4", 140), ("C5", 150))),
        ("InfiniBand EDR, per link", 12.5, None, "GB/s", "hardware"),
        ("NVSwitch, per link", 300, None, "GB/s", "hardware"),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["fact", "printed", "recomputed", "unit", "note"])
    return table.astype({"printed": float, "recomputed": float})
