"""Lab 06's memory clinic: four plans whose memory does not fall with more devices.

    patient = pl.exercises.memory_clinic.patients["twice the devices"]
    patient.chart()                      # what fills a device, with fewer devices and with more
    patient.chart(recompute="full")      # the same, and with a setting changed
    pl.exercises.memory_clinic.check(treatment)

The causes are those that people meet (facebookresearch/fairscale issue 1050 lists some): ZeRO
shards states while something else fills the device, or it shards them over fewer ranks than there
are. An answer has a treatment for each plan: the category that takes most memory, and a change of
settings. Two of the plans have two causes, and a treatment of one of them is not enough. Peaks are
predicted (interpret/memory.py), with AdamW, on the rank with the highest peak; no rank is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paralab.checks import count_of, shown
from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import plain_answers
from paralab.exercises.verdict import NOT_STARTED, Notes
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
        """What fills a device: with fewer devices, with the plan, with settings changed."""
        from paralab.view import theme
        from paralab.view.stacked_bars import bytes_bars

        def devices(plan: Plan) -> str:
            return count_of(plan.world_size, "device")

        fewer = quick.fullest(self.model, self.fewer)[1]
        bars = {devices(self.fewer): fewer, devices(self.plan): self.peak()}
        if change:
            bars[", ".join(f"{k}={v!r}" for k, v in change.items())] = self.peak(**change)
        sizes = [theme.in_bytes(sum(parts.values())) for parts in bars.values()]
        compared = " and" if sizes[0] == sizes[1] else f", {sizes[1]}"
        title = f"{self.name.capitalize()}: the peak is {sizes[0]} with {devices(self.fewer)}"
        title += f"{compared} with {devices(self.plan)}"
        title += f", {sizes[-1]} with the change" * bool(change)
        if wrong := _treated(self, change)[1]:
            title += f" ({wrong})"
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
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers")
SETTINGS = tuple(field.name for field in fields(Plan))
# What a treatment must not change: {property of the plan: its name in words}.
STAYS = {"world_size": "devices", "global_batch": "samples per step"}
STAYS |= {name: name for name in ("precision", "offload")}
FILLS, SAME, ONE = "what fills it", "same training", "settings"
REQUIRED = {
    **{patient.name: f"its peak falls by at least {patient.drop} %" for patient in PATIENTS},
    FILLS: f"the largest category at the peak: {', '.join(CATEGORIES[:-1])} or {CATEGORIES[-1]}",
    SAME: "the changed plan runs, with as many devices and samples per step, the same precision "
    "and no offload",
    ONE: "changes: at most "
    + ", ".join(f"{patient.cures} ({patient.name})" for patient in PATIENTS)
    + "; microbatches and microbatch_size together count as one",
}


@exercise(
    Takes(kind="a dict {patient: (category, {setting: value})}"),
    required=REQUIRED,
    patients=PATIENTS,
)
def memory_clinic(tries: Tries) -> None:
    for notes, answer in plain_answers(tries):
        treatments = [answer.get(patient.name) for patient in PATIENTS]
        if all(treatment == ("", {}) for treatment in treatments):
            notes.end(NOT_STARTED)
            continue
        for patient, treatment in zip(PATIENTS, treatments, strict=True):
            notes.where = patient.name
            _look(notes, patient, treatment)


def _look(notes: Notes, patient: Patient, pair: Any) -> None:
    """Judge a treatment, the pair (category, {setting: value}), by predicted peaks."""
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], Mapping)):
        said = f"required: (category, {{setting: value}}), yours is {shown(pair)}"
        notes.look(patient.name, said, "")
        return
    (category, change), parts = pair, patient.peak()
    wrong = f"{shown(category)} is no category; legal: {', '.join(CATEGORIES)}"
    if category in CATEGORIES:
        said = f"{_size(parts[category])} of {_size(sum(parts.values()))}"
        most = parts[category] == max(parts.values())
        wrong = "" if most else f"the category {category} has {said}; another category has more"
    notes.each(FILLS, wrong)
    plan, wrong = _treated(patient, change)
    notes.each(SAME, wrong)
    if plan is None:
        return
    changed = {name for name in SETTINGS if getattr(plan, name) != getattr(patient.plan, name)}
    count = len(changed - {"microbatches"})  # microbatches and microbatch_size count as one
    said = f"{count} settings are changed, required: at most {patient.cures}"
    notes.each(ONE, said if count > patient.cures else "")
    was, parts = sum(parts.values()), quick.fullest(patient.model, plan)[1]
    now, largest = sum(parts.values()), max(parts, key=lambda name: parts[name])
    fall = f"falls by {100 * (1 - now / was):.1f} %" if now < was else "does not fall"
    wrong = f"the peak {fall}, required: a fall of {patient.drop} %; "
    wrong += f"the largest category is now {largest}, with {_size(parts[largest])} of {_size(now)}"
    if now < was and plan.bucket_bytes < patient.plan.bucket_bytes:  # still not small enough
        share = min(100 * plan.bucket_bytes / (4 * patient.model.num_params), 100)
        wrong += f"; a bucket holds {share:.0f} % of all gradients"
    cured = 100 * now <= (100 - patient.drop) * was
    notes.look(patient.name, "" if cured else wrong, f"{_size(was)} before, {_size(now)} after")


def _treated(patient: Patient, change: Mapping[str, Any]) -> tuple[Plan | None, str]:
    """(the changed plan, "" or how its training differs) or (None, why it cannot train)."""

    def made() -> Plan:
        plan = patient.plan.replace(**change)
        plan.validate(patient.model)
        return plan

    if unknown := [name for name in change if name not in SETTINGS]:
        return None, f"{shown(unknown[0])} is no setting of a plan"
    plan, trouble = attempt(made)
    for field, words in STAYS.items() if plan else ():
        now, was = getattr(plan, field), getattr(patient.plan, field)
        if now != was:
            return plan, f"{words}: {now}, required: {was}, as before the change"
    return plan, trouble


def _size(count: float) -> str:
    return f"{count / 1e6:.1f} MB"
