"""Measured seconds per iteration that others have published, to hold predictions against.

GPT models of 18.4 and 39.1 billion parameters on 256 and 512 A100s, split in many ways: the runs
that VIA-Research/vTrain was validated on (Bang+ 2024, "vTrain: A Simulation Framework for
Evaluating Cost-effective and Compute-optimal Large Language Model Training", MICRO 2024),
github.com/VIA-Research/vTrain at f8dda847. Those figures are theirs: MIT licence, copyright (c)
2024 KAIST. Permission is granted, free of charge, to use, copy, modify and distribute them,
provided that this notice stays with them; they come without warranty of any kind.

The table says degrees, batch and time, not how Megatron-LM was set up. Assumed here: 16 bits, 1F1B,
blocks recomputed in full (with less, some of these micro-batches would need several times a GPU's
memory), gradients summed after backward in one message, vocabulary 51200, nodes of eight.
"""

from __future__ import annotations

from typing import NamedTuple

from paralab.spec import ModelSpec, Plan


class Run(NamedTuple):
    """One measured run.

    seconds  per iteration
    """

    model: ModelSpec
    plan: Plan
    seconds: float


def _runs(
    layers: int,
    hidden: int,
    heads: int,
    batch: int,
    rows: tuple[tuple[int, int, int, int, float], ...],
) -> tuple[Run, ...]:
    """rows: micro-batch, tp, dp, pp, milliseconds per iteration."""
    model = ModelSpec(
        layers=layers, hidden=hidden, heads=heads, seq_len=2048, vocab=51200, attention="explicit"
    )
    return tuple(
        Run(
            model,
            Plan(
                dp=dp,
                tp=tp,
                pp=pp,
                microbatches=batch // (dp * micro),
                microbatch_size=micro,
                recompute="full",
                precision="fp16",
                grad_sync="bucketed",
                bucket_bytes=2**40,
            ),
            milliseconds / 1e3,
        )
        for micro, tp, dp, pp, milliseconds in rows
    )


def vtrain_18b() -> tuple[Run, ...]:
    """18.4 B parameters on 256 A100s, 1024 samples per iteration."""
    return _runs(40, 6144, 48, 1024, VTRAIN_18B)


def vtrain_39b() -> tuple[Run, ...]:
    """39.1 B parameters on 512 A100s, 1536 samples per iteration."""
    return _runs(48, 8192, 64, 1536, VTRAIN_39B)


VTRAIN_18B = (
    (8, 8, 32, 1, 9603.6),
    (16, 8, 32, 1, 10506.6),
    (4, 8, 32, 1, 9927.6),
    (2, 8, 32, 1, 10453.3),
    (8, 4, 32, 2, 10856.3),
    (4, 4, 32, 2, 10950.4),
    (2, 4, 32, 2, 10031.6),
    (4, 2, 32, 4, 10825.0),
    (4, 1, 32, 8, 12379.0),
    (2, 8, 16, 2, 10434.8),
    (2, 8, 8, 4, 10926.4),
    (8, 8, 4, 8, 11026.1),
    (8, 2, 16, 8, 13157.5),
    (2, 16, 16, 1, 20414.8),
    (32, 8, 4, 8, 16241.4),
)
VTRAIN_39B = (
    (2, 2, 32, 8, 21890.4),
    (2, 4, 32, 4, 13875.5),
    (2, 2, 16, 16, 23747.9),
    (3, 4, 32, 4, 16185.5),
    (4, 4, 32, 4, 15625.6),
    (2, 4, 16, 8, 16070.6),
    (3, 2, 32, 8, 19067.2),
    (3, 4, 16, 8, 17606.1),
    (2, 4, 8, 16, 14529.6),
    (3, 2, 16, 16, 26188.8),
    (4, 4, 16, 8, 17413.6),
    (6, 4, 32, 4, 18532.1),
    (6, 8, 32, 2, 14915.5),
    (8, 8, 32, 2, 15212.8),
    (4, 8, 32, 2, 14757.3),
    (12, 8, 32, 2, 17126.8),
    (3, 8, 32, 2, 14850.4),
    (3, 4, 8, 16, 15023.9),
    (2, 8, 32, 2, 14614.0),
    (4, 4, 8, 16, 15585.5),
    (2, 8, 16, 4, 14713.4),
    (6, 4, 16, 8, 16087.0),
    (3, 8, 16, 4, 14833.8),
    (4, 8, 16, 4, 14750.7),
    (6, 8, 16, 4, 15249.4),
    (2, 8, 8, 8, 15001.9),
    (8, 8, 16, 4, 15814.5),
    (3, 8, 8, 8, 15270.7),
    (4, 8, 8, 8, 14967.1),
    (6, 4, 8, 16, 20044.1),
    (6, 8, 8, 8, 15775.3),
    (12, 8, 16, 4, 17182.4),
    (3, 1, 32, 16, 19991.0),
    (2, 8, 4, 16, 15639.4),
    (6, 2, 32, 8, 23062.9),
    (3, 8, 4, 16, 16360.8),
    (8, 8, 8, 8, 16413.4),
    (4, 8, 4, 16, 15944.5),
    (6, 8, 4, 16, 16232.8),
    (6, 2, 16, 16, 27228.4),
    (12, 8, 8, 8, 17999.5),
    (12, 4, 16, 8, 20614.8),
    (8, 8, 4, 16, 16877.1),
    (12, 8, 4, 16, 18568.3),
    (12, 4, 8, 16, 27810.3),
    (24, 8, 8, 8, 23171.1),
    (24, 8, 4, 16, 24169.9),
)
