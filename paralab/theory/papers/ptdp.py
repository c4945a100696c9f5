"""PTD-P, Narayanan+ 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", arXiv:2104.04473: tables 1 and 2.

Sequences have 2048 tokens, the vocabulary 51200 entries; devices are A100s of 80 GB and 312
TFLOP/s, and everything is recomputed. The paper prints neither micro-batch sizes nor chunks per
rank; they are taken from the authors' scripts (NVIDIA/Megatron-LM,
examples/academic_paper_scripts/sc21). There the schedule of the model with a trillion parameters is
not interleaved, though by the text all of table 1 is. With a pipeline the scripts sum gradients
over data-parallel ranks all at once, after the last backward (`--DDP-impl local`). Ranks waited for
tensor parallelism's messages at once: only after the paper, since 30 August 2021 (commit cf7efd4),
does Megatron-LM overlap those of backward with the weight's gradient. Messages between stages are
sent in parts (scatter/gather, sec. 4.1), which is the default of the scripts' version.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

from paralab.spec import ModelSpec, Plan
from paralab.spec.model import megatron
from paralab.theory import needs, training

TOKENS = 300e9  # that table 2 trains on


class Row(NamedTuple):
    """A row of table 1: TFLOP/s that a device reached, and billions of parameters as printed."""

    model: ModelSpec
    plan: Plan
    tflops: float
    params: float


class Days(NamedTuple):
    """A row of table 2.

    tflops  TFLOP/s that a device reached
    params  as printed: billions of parameters
    days    as printed: days to train on `TOKENS`
    """

    model: ModelSpec
    plan: Plan
    tflops: float
    params: float
    days: float


def _plan(tp: int, pp: int, devices: int, batch: int, micro: int, zero_stage: int = 0) -> Plan:
    dp, parts = devices // (tp * pp), min(tp, pp) > 1
    sizes = {"microbatches": batch // (dp * micro), "microbatch_size": micro}
    common = Plan(recompute="full", precision="fp16", tp_overlap=False, **sizes)
    return common.replace(dp=dp, tp=tp, pp=pp, zero_stage=zero_stage, partition_messages=parts)


def _row(*columns: Any) -> Row:
    params, heads, hidden, layers, *cut, tflops, micro, chunks = columns
    plan = _plan(*cut, micro)
    if plan.pp > 1:
        plan = plan.replace(grad_sync="bucketed", bucket_bytes=2**40)
    if chunks > 1:
        plan = plan.replace(virtual_stages=chunks, schedule="interleaved")
    return Row(ModelSpec(**megatron(layers, hidden, heads)), plan, tflops, params)


# The columns of the paper: billions of parameters, heads, hidden, layers, tp, pp, devices, batch,
# TFLOP/s; then micro-batch size and chunks per rank, from run_table_1.sh.
TABLE_1 = (
    _row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    _row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
    _row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
    _row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
    _row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
    _row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    _row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    _row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    _row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    _row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
)
MODELS_2 = {174.6: ModelSpec.preset("gpt3-175b"), 529.6: TABLE_1[8].model}


def _days(*columns: Any) -> Days:
    params, model_parallel, batch, devices, micro, tflops, days = columns
    tp = min(8, model_parallel)
    stage = 3 * (model_parallel == 1)
    plan = _plan(tp, model_parallel // tp, devices, batch, micro, zero_stage=stage)
    return Days(MODELS_2[params], plan, tflops, params, days)


# The columns of the paper: billions of parameters, model-parallel size, batch, devices, micro-batch
# size, TFLOP/s, days. A model-parallel size of 1 is ZeRO-3. Its batch of 2560 on 640 devices is the
# paper's, because the model did not fit on 560.
TABLE_2 = (
    _days(174.6, 1, 1536, 384, 4, 144, 90),
    _days(174.6, 1, 1536, 768, 2, 88, 74),
    _days(174.6, 1, 1536, 1536, 1, 44, 74),
    _days(529.6, 1, 2560, 640, 4, 138, 169),
    _days(529.6, 1, 2240, 1120, 2, 98, 137),
    _days(529.6, 1, 2240, 2240, 1, 48, 140),
    _days(174.6, 96, 1536, 384, 1, 153, 84),
    _days(174.6, 96, 1536, 768, 1, 149, 43),
    _days(174.6, 96, 1536, 1536, 1, 141, 23),
    _days(529.6, 280, 2240, 560, 1, 171, 156),
    _days(529.6, 280, 2240, 1120, 1, 167, 80),
    _days(529.6, 280, 2240, 2240, 1, 159, 42),
)


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

    FLOPs and seconds per step follow from eq. 3 and the printed TFLOP/s.
    """
    made = []
    for row in TABLE_1:
        plan = row.plan
        flops = needs.step_flops(row.model, plan.global_batch, recompute=plan.recompute)
        made.append(
            {
                "parameters (B), printed": row.params,
                "parameters (B), recomputed": printed_params(row.model) / 1e9,
                "tp": plan.tp,
                "pp": plan.pp,
                "dp": plan.dp,
                "devices": plan.world_size,
                "batch": plan.global_batch,
                "micro-batches": plan.microbatches,
                "chunks": plan.virtual_stages,
                "TFLOP/s per device, printed": row.tflops,
                "FLOPs per step": float(flops),
                "seconds per step": flops / (plan.world_size * row.tflops * 1e12),
            }
        )
    return pd.DataFrame(made)


def ptdp_table2() -> pd.DataFrame:
    """Table 2: days for 300 billion tokens, exact, and by the paper's eq. 4, which is too low."""
    made = []
    for row in TABLE_2:
        model, plan = row.model, row.plan
        work = {"tokens": TOKENS, "devices": plan.world_size, "flops": row.tflops * 1e12}
        made.append(
            {
                "scheme": "ZeRO-3" if plan.zero_stage else "PTD-P",
                "parameters (B), printed": row.params,
                "parameters (B), recomputed": printed_params(model) / 1e9,
                "model-parallel": plan.tp * plan.pp,
                "batch": plan.global_batch,
                "devices": plan.world_size,
                "micro-batch": plan.microbatch_size,
                "TFLOP/s per device": row.tflops,
                "days, printed": row.days,
                "days, recomputed": needs.training_days(model, **work, recompute=plan.recompute),
                "days, eq. 4": training.days_by_parameters(printed_params(model), **work),
            }
        )
    return pd.DataFrame(made)
