"""The memory clinic's patients: four plans whose memory does not fall with more devices.

The causes are those that people meet (facebookresearch/fairscale issue 1050 lists some): ZeRO
shards states while something else fills the device, or it shards them over fewer ranks than there
are. Two of the plans have two causes. Peaks are predicted (interpret/memory.py), with AdamW, on the
rank with the highest peak. No rank is started; a laptop could run all of these plans.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paralab.checks import count_of
from paralab.interpret import quick
from paralab.spec import ModelSpec, Plan

if TYPE_CHECKING:
    from paralab.view.chart import Chart


@dataclass(frozen=True, kw_only=True, repr=False)
class Patient:
    """A plan that needs about as much memory per device as one on fewer devices.

    story   what was expected, and what was seen
    met     public issues in which people report it
    fewer   the plan on fewer devices with which it is compared
    drop    per cent by which a treatment has to lower the peak
    cures   the most settings that a treatment may change
    """

    name: str
    story: str
    met: str
    model: ModelSpec
    fewer: Plan
    plan: Plan
    drop: int
    cures: int = 1

    def peak(self, **change: Any) -> dict[str, int]:
        """{category: bytes} at the peak of the rank with the highest one, as predicted.

        change  settings of the plan to be changed first: ``recompute="full"``
        """
        return quick.fullest(self.model, self.plan.replace(**change))[1]

    def chart(self, **change: Any) -> Chart:
        """What fills a device: with fewer devices, with the plan, and with settings changed."""
        from paralab.view import theme
        from paralab.view.memory import bytes_bars

        def devices(plan: Plan) -> str:
            return count_of(plan.world_size, "device")

        fewer = quick.fullest(self.model, self.fewer)[1]
        bars = {devices(self.fewer): fewer, devices(self.plan): self.peak()}
        if change:
            bars[", ".join(f"{k}={v!r}" for k, v in change.items())] = self.peak(**change)
        sizes = [theme.scaled(sum(parts.values()), "B") for parts in bars.values()]
        compared = " and" if sizes[0] == sizes[1] else f", {sizes[1]}"
        title = f"{self.name.capitalize()}: the peak is {sizes[0]} with {devices(self.fewer)}"
        title += f"{compared} with {devices(self.plan)}"
        title += f", {sizes[-1]} with the change" * bool(change)
        return bytes_bars(bars, title=title)

    def __repr__(self) -> str:
        lines = f"{self.name}: {self.story}", self._set(self.model), self._set(self.plan)
        return "\n  ".join((*lines, f"public issues: {self.met}"))

    def _set(self, spec: ModelSpec | Plan) -> str:
        """A model or a plan as text, with the fields that differ from their defaults."""
        pairs = [(f.name, getattr(spec, f.name), f.default) for f in fields(spec)]
        changed = ", ".join(f"{name}={now!r}" for name, now, default in pairs if now != default)
        return f"{type(spec).__name__}({changed})"


PATIENTS = (
    Patient(
        name="more nodes",
        drop=50,
        cures=2,
        story="Eight devices instead of four, in nodes of two, and no device needs a byte less",
        met="DeepSpeed 237",
        model=ModelSpec(layers=12, hidden=128, heads=4, seq_len=32),
        fewer=Plan(dp=4, zero_stage=3, shard=2, microbatch_size=2),
        plan=Plan(dp=8, zero_stage=3, shard=2, microbatch_size=2),
    ),
    Patient(
        name="twice the devices",
        drop=50,
        story="On four devices instead of two the memory should halve, but it falls by a twentieth",
        met="fairscale 1050, DeepSpeed 2302",
        model=ModelSpec(layers=6, hidden=128, heads=4, seq_len=128),
        fewer=Plan(dp=2, zero_stage=3, microbatch_size=8),
        plan=Plan(dp=4, zero_stage=3, microbatch_size=8),
    ),
    Patient(
        name="fully sharded",
        drop=45,
        cures=2,
        story="Every state is sharded by twice as many devices, but a device needs only a seventh "
        "less",
        met="fairscale 1050",
        model=ModelSpec(layers=16, hidden=64, heads=4, seq_len=16),
        fewer=Plan(dp=4, zero_stage=3, prefetch=32, microbatch_size=2),
        plan=Plan(dp=8, zero_stage=3, prefetch=32, microbatch_size=2),
    ),
    Patient(
        name="a small model",
        drop=25,
        story="273 thousand parameters on four devices, and each needs nearly as much as one alone",
        met="pytorch-lightning 6047, pytorch 108976, DeepSpeed 1302",
        model=ModelSpec(layers=4, hidden=72, heads=4, seq_len=32),
        fewer=Plan(microbatch_size=1),
        plan=Plan(dp=4, zero_stage=2, microbatch_size=1),
    ),
)
