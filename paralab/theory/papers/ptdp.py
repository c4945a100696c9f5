"""PTD-P, Narayanan+ 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", arXiv:2104.04473: tables 1 and 2, what the text states, and the figures' settings.

Sequences of 2048 tokens, 51200 entries, A100s of 80 GB and 312 TFLOP/s, everything recomputed.
Micro-batch sizes and chunks per rank are not printed; they are those of the authors' scripts
(NVIDIA/Megatron-LM, examples/academic_paper_scripts/sc21). There the model of a trillion parameters
is not interleaved, though the text says that table 1 is.

An accuracy means little beside table 1: whoever says 146 TFLOP/s for every row is 6.1 % off on
average (`NULL_MODEL`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paralab.spec import ModelSpec, Plan
from paralab.theory import needs, training

if TYPE_CHECKING:
    import pandas as pd

PEAK = 312e12  # FLOP/s, 16-bit, of an A100
SEQ_LEN, VOCAB = 2048, 51200
NULL_MODEL = 146e12  # FLOP/s per device for any model: what a prediction has to beat


class Row(NamedTuple):
    """Of table 1; ``micro`` and ``chunks`` from the script run_table_1.sh."""

    params: float  # billions
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    devices: int
    batch: int
    tflops: float  # per device
    percent: float  # of peak
    pflops: float  # of all devices
    micro: int
    chunks: int

    @property
    def model(self) -> ModelSpec:
        return ModelSpec(layers=self.layers, hidden=self.hidden, heads=self.heads,
                         seq_len=SEQ_LEN, vocab=VOCAB)  # fmt: skip

    @property
    def plan(self) -> Plan:
        dp = self.devices // (self.tp * self.pp)
        return Plan(
            dp=dp, tp=self.tp, pp=self.pp, microbatches=self.batch // (dp * self.micro),
            microbatch_size=self.micro, virtual_stages=self.chunks, recompute="full",
            schedule="interleaved" if self.chunks > 1 else "1f1b", precision="fp16",
        )  # fmt: skip


TABLE_1 = (
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 44, 4.4, 16, 1),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 44, 8.8, 16, 1),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 46, 18.2, 16, 1),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 43, 34.6, 8, 1),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 44, 70.8, 4, 1),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 45, 143.8, 2, 3),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 47, 227.1, 2, 2),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 50, 297.4, 1, 2),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 52, 410.2, 1, 3),
    Row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 52, 502.0, 1, 1),
)

# Table 2: scheme, billions, model-parallel size, batch, devices, micro-batch, TFLOP/s per device,
# days for 300 B tokens. ZeRO-3 at 640 devices has batch 2560 because 560 did not hold it.
TABLE_2 = (
    ("ZeRO-3", 174.6, 1, 1536, 384, 4, 144, 90),
    ("ZeRO-3", 174.6, 1, 1536, 768, 2, 88, 74),
    ("ZeRO-3", 174.6, 1, 1536, 1536, 1, 44, 74),
    ("ZeRO-3", 529.6, 1, 2560, 640, 4, 138, 169),
    ("ZeRO-3", 529.6, 1, 2240, 1120, 2, 98, 137),
    ("ZeRO-3", 529.6, 1, 2240, 2240, 1, 48, 140),
    ("PTD-P", 174.6, 96, 1536, 384, 1, 153, 84),
    ("PTD-P", 174.6, 96, 1536, 768, 1, 149, 43),
    ("PTD-P", 174.6, 96, 1536, 1536, 1, 141, 23),
    ("PTD-P", 529.6, 280, 2240, 560, 1, 171, 156),
    ("PTD-P", 529.6, 280, 2240, 1120, 1, 167, 80),
    ("PTD-P", 529.6, 280, 2240, 2240, 1, 159, 42),
)
MODELS_2 = {174.6: ModelSpec.preset("gpt3-175b"), 529.6: TABLE_1[8].model}

# Settings of the figures: figure, billions as the paper or the script says, layers, hidden, heads,
# (tp, pp) of every point, devices, batches, micro-batch sizes, chunks per rank.
_PAIRS = ((1, 64), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2))
_DEGREES = (2, 4, 8, 16, 32)
CONFIGS = (
    *((11, billions, 3 * p, 20480, 128, ((8, p),), 8 * p, (8, 128), (1,), (1,))
      for p, billions in ((1, 15), (2, None), (4, None), (8, 121))),
    (12, 175, 96, 12288, 96, ((8, 12),), 96, (12, 24, 36, 48, 60), (1,), (1, 4)),
    (13, 162.2, 32, 20480, 128, tuple((t, p) for p, t in _PAIRS if p > 1), 64, (32, 128), (1,),
     (1,)),
    (14, 5.9, 32, 3840, 32, tuple((1, p) for p in _DEGREES), 64, (32, 128, 512), (1,), (1,)),
    (15, 5.9, 32, 3840, 32, tuple((t, 1) for t in _DEGREES), 64, (32, 128, 512), (1,), (1,)),
    (16, 91, 32, 15360, 128, ((8, 8),), 64, (128, 512), (1, 2, 4, 8), (1,)),
    (17, 145, 80, 12288, 96, ((8, 16),), 128, tuple(2**k for k in range(9)), (1,), (1,)),
    (18, 175, 96, 12288, 96, ((8, 12),), 96, (12, 24, 36, 48, 60), (1,), (4,)),
)  # fmt: skip


def printed_params(model: ModelSpec) -> int:
    """Parameters by eq. 2, 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)): without the last norm's 2 h
    that `ModelSpec.num_params` counts.
    """
    return model.num_params - 2 * model.hidden


def ptdp_models() -> list[tuple[ModelSpec, Plan]]:
    """The ten models of table 1, and the plan each was trained with."""
    return [(row.model, row.plan) for row in TABLE_1]


def ptdp_table1() -> pd.DataFrame:
    """Table 1: ten models from 1.7 billion to a trillion parameters, on 32 to 3072 devices.

    "PFLOP/s, recomputed" is what a device reached times devices; seconds per step and FLOPs follow
    from eq. 3; bubble is (p-1)/(v m), over the ideal time.
    """
    import pandas as pd

    rows = []
    for row in TABLE_1:
        model, plan = row.model, row.plan
        flops = needs.step_flops(model, row.batch, recompute="full")
        total = row.devices * row.tflops * 1e12
        rows.append({
            "parameters (B), printed": row.params,
            "parameters (B), recomputed": printed_params(model) / 1e9,
            "tp": row.tp, "pp": row.pp, "dp": plan.dp, "devices": row.devices, "batch": row.batch,
            "micro-batches": plan.microbatches, "chunks": row.chunks,
            "TFLOP/s per device, printed": row.tflops,
            "TFLOP/s per device, recomputed": 1e3 * row.pflops / row.devices,
            "PFLOP/s, printed": row.pflops, "PFLOP/s, recomputed": total / 1e15,
            "peak (%), printed": row.percent, "peak (%), recomputed": 1e14 * row.tflops / PEAK,
            "FLOPs per step": float(flops), "seconds per step": flops / total,
            "bubble over ideal": (row.pp - 1) / (row.chunks * plan.microbatches),
            "146 TFLOP/s is off by (%)": 100 * (NULL_MODEL / (row.tflops * 1e12) - 1),
        })  # fmt: skip
    return pd.DataFrame(rows)


def ptdp_table2() -> pd.DataFrame:
    """Table 2: days for 300 billion tokens, exact, and by the paper's own eq. 4, which is low."""
    import pandas as pd

    rows = []
    for scheme, billions, mp, batch, devices, micro, tflops, days in TABLE_2:
        model = MODELS_2[billions]
        work = {"tokens": 300e9, "devices": devices, "flops": tflops * 1e12}
        rows.append({
            "scheme": scheme,
            "parameters (B), printed": billions,
            "parameters (B), recomputed": printed_params(model) / 1e9,
            "model-parallel": mp, "batch": batch, "devices": devices, "micro-batch": micro,
            "TFLOP/s per device": tflops, "days, printed": days,
            "days, recomputed": needs.training_days(model, **work),
            "days, eq. 4": training.days_by_parameters(printed_params(model), **work),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _tflops(*wanted: object) -> float:
    """Of scheme, billions and devices in table 2."""
    return next(row[6] for row in TABLE_2 if (row[0], row[1], row[4]) == wanted)


def ptdp_facts() -> pd.DataFrame:
    """What the text states, with what follows from its tables and formulas: fact, printed,
    recomputed, unit, note. A recomputed value is missing where nothing in the paper leads to it.
    """
    import pandas as pd

    trillion, last = TABLE_1[-1].model, TABLE_1[-1]
    per_device = 1e15 * last.pflops / last.devices
    selene = {"tokens": 450e9, "devices": 3072, "flops": 163e12}
    gpt3 = {"tokens": 300e9, "devices": 1024, "flops": 140e12}
    eq4 = training.days_by_parameters
    ratio = {(b, n): 100 * (_tflops("PTD-P", b, n[0]) / _tflops("ZeRO-3", b, n[1]) - 1)
             for b, n in ((174.6, (384, 384)), (529.6, (560, 640)),
                          (174.6, (768, 768)), (529.6, (1120, 1120)))}  # fmt: skip
    model = ModelSpec.preset("ptdp-145b")
    recomputing = needs.step_flops(model, 1, recompute=True) / needs.step_flops(model, 1) - 1
    rows = [
        ("aggregate, 1T", 502, last.devices * last.tflops / 1e3, "PFLOP/s", "table 1"),
        ("share of peak, 1T", 52, 100 * per_device / PEAK, "%", "table 1"),
        ("175B, 300 B tokens, 1024 devices at 140 TFLOP/s", 34, eq4(175e9, **gpt3), "days",
         "eq. 4; exactly 34.7"),
        ("1T, 450 B tokens, 3072 devices at 163 TFLOP/s", 84,
         eq4(printed_params(trillion), **selene), "days", "eq. 4; exactly 85.0"),
        ("1T at 37.6 PFLOP/s in all", 40, 3 * 502 / 37.6, "months",
         "sec. 6; three months times 502/37.6, where 84 days make 37"),
        ("PTD-P over ZeRO-3, 175B, fewest devices", 6, ratio[174.6, (384, 384)], "%", "table 2"),
        ("PTD-P over ZeRO-3, 530B, fewest devices", 24, ratio[529.6, (560, 640)], "%", "table 2"),
        ("PTD-P over ZeRO-3, 175B, twice as many", 70, ratio[174.6, (768, 768)], "%", "table 2"),
        ("PTD-P over ZeRO-3, 530B, twice as many", 70, ratio[529.6, (1120, 1120)], "%", "table 2"),
        ("operator fusion, 175B: 113 to 135 TFLOP/s", 19, 100 * (135 / 113 - 1), "%", "sec. 5.8"),
        ("operator fusion, 530B: 133 to 148 TFLOP/s", 11, 100 * (148 / 133 - 1), "%", "sec. 5.8"),
        ("recomputation, small batches, 145B", 33, 100 * recomputing, "%",
         "sec. 5.6 calls it lower throughput; a third more FLOPs is a quarter less of that"),
        ("checkpoint, 1T", 13.8, training.SAVED_BYTES * trillion.num_params / 1e12, "TB",
         "sec. 5.10; at 2 + 4 + 8 bytes per parameter"),
        ("recomputation, large batches, at most", 2, None, "x", "sec. 5.6, measured"),
        ("scatter/gather, at most", 11, None, "%", "sec. 5.7, measured"),
        ("interleaving, at most", 10, None, "%", "sec. 1, measured"),
        ("share of peak, DeepSpeed, 1T", 36, None, "%", "sec. 6, measured"),
        ("effective bisection bandwidth, pipeline, 1T", 892, None, "GB/s", "sec. 5.9, measured"),
        ("effective bisection bandwidth, data parallel, 1T", 12.9, None, "TB/s",
         "sec. 5.9, measured"),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["fact", "printed", "recomputed", "unit", "note"])
    return table.astype({"printed": float, "recomputed": float})


def ptdp_configs() -> pd.DataFrame:
    """Every setting of figures 11 to 18: one row per (tp, pp), batch, micro-batch size and chunks.

    bubble is (p-1)/(v m) over the ideal time, the reason why the curves rise with the batch. A
    model is printed with the size that paper or script gives it, in billions; figure 11's 15 and
    121 are 12 l h^2, without embeddings (as is the 161 that sec. 5.4.1 has for figure 13's 162.2).
    """
    import pandas as pd

    rows = []
    for figure, billions, layers, hidden, heads, grids, devices, batches, micros, chunks in CONFIGS:
        model = ModelSpec(layers=layers, hidden=hidden, heads=heads, seq_len=SEQ_LEN, vocab=VOCAB)
        for (tp, pp), batch, micro, v in (
            (grid, batch, micro, v)
            for grid in grids for batch in batches for micro in micros for v in chunks
        ):  # fmt: skip
            dp = devices // (tp * pp)
            m = batch // (dp * micro)
            if m == 0:  # a batch that does not reach all ranks
                continue
            rows.append({
                "figure": figure, "parameters (B), printed": billions,
                "parameters (B), recomputed": printed_params(model) / 1e9,
                "layers": layers, "hidden": hidden, "heads": heads, "tp": tp, "pp": pp, "dp": dp,
                "devices": devices, "batch": batch, "micro-batch": micro, "micro-batches": m,
                "chunks": v, "bubble over ideal": (pp - 1) / (v * m),
            })  # fmt: skip
    return pd.DataFrame(rows).astype({"parameters (B), printed": float})
