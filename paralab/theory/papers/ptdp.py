"""PTD-P, Narayanan+ 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", arXiv:2104.04473: tables 1 and 2.

Sequences of 2048 tokens, 51200 entries, A100s of 80 GB and 312 TFLOP/s, everything recomputed.
Micro-batch sizes and chunks per rank are not printed; they are those of the authors' scripts
(NVIDIA/Megatron-LM, examples/academic_paper_scripts/sc21). There the model of a trillion parameters
is not interleaved, though the text says that table 1 is.

An accuracy means little next to table 1: saying 146 TFLOP/s for every row is 6.1 % off on
average (`NULL_MODEL`).
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from paralab.spec import ModelSpec, Plan
from paralab.theory import needs, training

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
        return ModelSpec(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            seq_len=SEQ_LEN,
            vocab=VOCAB,
            attention="explicit",
        )

    @property
    def plan(self) -> Plan:
        dp = self.devices // (self.tp * self.pp)
        return Plan(
            dp=dp,
            tp=self.tp,
            pp=self.pp,
            microbatches=self.batch // (dp * self.micro),
            microbatch_size=self.micro,
            virtual_stages=self.chunks,
            recompute="full",
            schedule="interleaved" if self.chunks > 1 else "1f1b",
            precision="fp16",
        )


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
    rows = []
    for row in TABLE_1:
        model, plan = row.model, row.plan
        flops = needs.step_flops(model, row.batch, recompute="full")
        total = row.devices * row.tflops * 1e12
        rows.append(
            {
                "parameters (B), printed": row.params,
                "parameters (B), recomputed": printed_params(model) / 1e9,
                "tp": row.tp,
                "pp": row.pp,
                "dp": plan.dp,
                "devices": row.devices,
                "batch": row.batch,
                "micro-batches": plan.microbatches,
                "chunks": row.chunks,
                "TFLOP/s per device, printed": row.tflops,
                "TFLOP/s per device, recomputed": 1e3 * row.pflops / row.devices,
                "PFLOP/s, printed": row.pflops,
                "PFLOP/s, recomputed": total / 1e15,
                "peak (%), printed": row.percent,
                "peak (%), recomputed": 1e14 * row.tflops / PEAK,
                "FLOPs per step": float(flops),
                "seconds per step": flops / total,
                "bubble over ideal": (row.pp - 1) / (row.chunks * plan.microbatches),
                "146 TFLOP/s is off by (%)": 100 * (NULL_MODEL / (row.tflops * 1e12) - 1),
            }
        )
    return pd.DataFrame(rows)


def ptdp_table2() -> pd.DataFrame:
    """Table 2: days for 300 billion tokens, exact, and by the paper's own eq. 4, which is low."""
    rows = []
    for scheme, billions, mp, batch, devices, micro, tflops, days in TABLE_2:
        model = MODELS_2[billions]
        work = {"tokens": 300e9, "devices": devices, "flops": tflops * 1e12}
        rows.append(
            {
                "scheme": scheme,
                "parameters (B), printed": billions,
                "parameters (B), recomputed": printed_params(model) / 1e9,
                "model-parallel": mp,
                "batch": batch,
                "devices": devices,
                "micro-batch": micro,
                "TFLOP/s per device": tflops,
                "days, printed": days,
                "days, recomputed": needs.training_days(model, **work),
                "days, eq. 4": training.days_by_parameters(printed_params(model), **work),
            }
        )
    return pd.DataFrame(rows)
