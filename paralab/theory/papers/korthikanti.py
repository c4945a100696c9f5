"""Korthikanti+ 2022, "Reducing Activation Recomputation in Large Transformer Models",
arXiv:2205.05198: the formulas of table 2, figures 1 and 7, and what table 5 says of utilisation.

All on A100s of 312 TFLOP/s, 16-bit activations, dropout masks of a byte, no data parallelism. GiB
is 2^30 bytes. The values behind figures 1 and 7 are those recorded in calculon-ai/calculon,
validation/seqsel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.spec import ModelSpec
from paralab.theory import needs, training
from paralab.theory.activation_costs import first_stage_bytes, layer_bytes
from paralab.theory.offload_costs import model_state_bytes

if TYPE_CHECKING:
    import pandas as pd

PEAK, GIB = 312e12, 2**30


class Setting(NamedTuple):
    """A row of table 3; ``chunks`` per rank are in the text of sec. 6."""

    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    devices: int
    batch: int
    micro: int
    chunks: int

    @property
    def model(self) -> ModelSpec:
        return ModelSpec(layers=self.layers, hidden=self.hidden, heads=self.heads, seq_len=2048,
                         vocab=51200, dropout=0.1)  # fmt: skip

    def first_stage(self, **how: Any) -> float:
        """GiB of activations on the first stage's ranks."""
        return float(first_stage_bytes(
            self.model, self.micro, tp=self.tp, pp=self.pp, virtual_stages=self.chunks, **how
        ) / GIB)  # fmt: skip


TABLE_3 = {
    "22B": Setting(64, 6144, 48, 8, 1, 8, 4, 4, 1),
    "175B": Setting(96, 12288, 96, 8, 8, 64, 64, 1, 3),
    "530B": Setting(128, 20480, 105, 8, 35, 280, 280, 1, 3),
    "1T": Setting(160, 25600, 128, 8, 64, 512, 512, 1, 1),
}

# Table 2's rows: name, formula as printed, and what it is in `layer_bytes`.
TABLE_2 = (
    ("no parallelism", "s b h (34 + 5 a s/h)", {"tp": 1}),
    ("tensor parallel", "s b h (10 + 24/t + 5 a s/(h t))", {}),
    ("tensor and sequence parallel", "s b h (34/t + 5 a s/(h t))", {"sequence_parallel": True}),
    ("tensor parallel, selective", "s b h (10 + 24/t)", {"recompute": "selective"}),
    ("tensor and sequence parallel, selective", "s b h (34/t)",
     {"sequence_parallel": True, "recompute": "selective"}),
    ("full recomputation", "s b h (2)", {"recompute": "full"}),
)  # fmt: skip

# Figure 1, GiB per device: parameters and optimizer, activations at the tensor-parallel baseline,
# with sequence parallelism and selective recomputation.
FIGURE_1 = {
    "22B": (45.5625, 59.25, 9.5625),
    "175B": (45.5625, 66.84375, 12.3515625),
    "530B": (31.640625, 114.0234375, 23.076171875),
    "1T": (32.958984375, 131.25, 26.5625),
}

# Figure 7, activations in % of the tensor-parallel baseline: sequence parallel, selective, both,
# full recomputation. The other two models' bars are not recorded.
FIGURE_7 = {"22B": (66.84, 49.42, 16.18, 7.64), "175B": (62.04, 56.53, 18.49, 8.71)}

# Table 4, one block of the 22B model: milliseconds forward, backward, both; % over the baseline.
TABLE_4 = (
    ("no recomputation", "none", 7.7, 11.9, 19.6, None),
    ("sequence parallel", "none", 7.2, 11.8, 19.0, -3),
    ("full recomputation", "full", 7.7, 19.5, 27.2, 39),
    ("selective", "selective", 7.7, 13.2, 20.9, 7),
    ("selective, sequence parallel", "selective", 7.2, 13.1, 20.3, 4),
)

# Table 5: seconds per iteration with full recomputation, and with sequence parallelism and
# selective recomputation; the rise in throughput, MFU and HFU of the latter in %.
TABLE_5 = {
    "22B": (1.42, 1.10, 29.0, 41.5, 43.7),
    "175B": (18.13, 13.75, 31.8, 51.4, 52.8),
    "530B": (49.05, 37.83, 29.7, 56.0, 57.0),
    "1T": (94.42, 71.49, 32.1, 56.3, 57.0),
}
# Sec. 6.3: the 530B model with 8-way data parallelism, on 8 times the devices and batch.
DP_8 = (8, None, 39.15, None, 54.2, None)


def korthikanti_table2(model: str = "175B", batch: int = 1) -> pd.DataFrame:
    """Table 2 with numbers put in: bytes that one block of a model of table 3 keeps per rank.

    "recomputed" is `activation_costs.layer_bytes`; its tests hold it to the formula as printed.
    """
    import pandas as pd

    setting = TABLE_3[model]
    rows = [
        (name, printed, float(layer_bytes(setting.model, batch, **{"tp": setting.tp, **how})) / GIB)
        for name, printed, how in TABLE_2
    ]
    return pd.DataFrame(rows, columns=["configuration", "bytes, printed", "GiB, recomputed"])


def korthikanti_figure1() -> pd.DataFrame:
    """Figure 1: why no model of table 3 fits 80 GiB without recomputation, and all do with it.

    Parameters and optimizer are 18 bytes for each of 12 l h^2 parameters, over t p devices;
    activations those of the pipeline's first stage.
    """
    import pandas as pd

    rows = []
    for name, (states, baseline, present) in FIGURE_1.items():
        at = TABLE_3[name]
        whole = model_state_bytes(at.layers, at.hidden, "megatron-bf16")
        rows.append({
            "model": name, "states (GiB), printed": states,
            "states (GiB), recomputed": whole / (at.tp * at.pp) / GIB,
            "baseline (GiB), printed": baseline, "baseline (GiB), recomputed": at.first_stage(),
            "both (GiB), printed": present,
            "both (GiB), recomputed": at.first_stage(sequence_parallel=True, recompute="selective"),
        })  # fmt: skip
    return pd.DataFrame(rows)


def korthikanti_figure7() -> pd.DataFrame:
    """Figure 7: activations in per cent of those of tensor parallelism alone."""
    import pandas as pd

    ways = {
        "sequence parallel": {"sequence_parallel": True},
        "selective": {"recompute": "selective"},
        "both": {"sequence_parallel": True, "recompute": "selective"},
        "full": {"recompute": "full"},
    }
    rows = []
    for name, printed in FIGURE_7.items():
        at, row = TABLE_3[name], {"model": name}
        for (way, how), value in zip(ways.items(), printed, strict=True):
            row[f"{way} (%), printed"] = value
            row[f"{way} (%), recomputed"] = 100 * at.first_stage(**how) / at.first_stage()
        rows.append(row)
    return pd.DataFrame(rows)


def korthikanti_table4() -> pd.DataFrame:
    """Table 4, measured milliseconds of one block, beside what counting FLOPs would expect.

    FLOPs say 33 % for full recomputation and 1.8 % for selective. The paper measured 39 % (its
    backward hides an all-reduce that there is nothing to hide behind in a recomputation) and 7 %:
    what lies between two small products is a matter of memory bandwidth, not of FLOPs.
    """
    import pandas as pd

    block = TABLE_3["22B"].model
    plain = needs.step_flops(block, 1) - _head(block)
    base = TABLE_4[0][4]
    rows = [{
        "experiment": name, "forward (ms), printed": forward, "backward (ms), printed": backward,
        "both (ms), printed": both, "both (ms), recomputed": forward + backward,
        "overhead (%), printed": overhead, "overhead (%), recomputed": 100 * (both / base - 1),
        "FLOPs over none (%)": 100 * (needs.step_flops(block, 1, recompute=how) - _head(block))
                               / plain - 100,
    } for name, how, forward, backward, both, overhead in TABLE_4]  # fmt: skip
    return pd.DataFrame(rows).astype({"overhead (%), printed": float})


def _head(model: ModelSpec) -> int:
    """FLOPs per sample outside of the blocks."""
    return 6 * model.seq_len * model.hidden * model.vocab


def korthikanti_table5() -> pd.DataFrame:
    """Table 5: iteration times, throughput, and the two utilisations that follow from them; last,
    the 530B model on 2240 devices (sec. 6.3).

    "HFU (%), recomputed" is by the paper's eq. 8, which counts the attention core three times over
    (`training.printed_selective_flops`); "HFU (%), counted once" is what its text describes.
    """
    import pandas as pd

    printed = [(name, 1, *row) for name, row in TABLE_5.items()] + [("530B", *DP_8)]
    rows = []
    for name, dp, full, present, gain, mfu, hfu in printed:
        at, devices, batch = TABLE_3[name], dp * TABLE_3[name].devices, dp * TABLE_3[name].batch
        used = {"seconds": present, "devices": devices, "peak": PEAK}
        once = training.utilisation(at.model, batch, recompute="selective", **used)
        eq8 = training.printed_selective_flops(at.model, batch)
        rows.append({
            "model": name, "devices": devices, "batch": batch,
            "full (s), printed": full, "present (s), printed": present,
            "throughput (%), printed": gain,
            "throughput (%), recomputed": full and 100 * (full / present - 1),
            "MFU (%), printed": mfu, "MFU (%), recomputed": 100 * once.model,
            "HFU (%), printed": hfu,
            "HFU (%), recomputed": 100 * eq8 / (present * devices * PEAK),
            "HFU (%), counted once": 100 * once.hardware,
        })  # fmt: skip
    return pd.DataFrame(rows)
