"""Lab 06's memory clinic: four plans whose memory does not fall with more devices.

    patient = pl.exercises.memory_clinic.patients["twice the devices"]
    patient.chart()                      # what fills a device, with fewer devices and with more
    patient.chart(recompute="full")      # and with a setting changed
    pl.exercises.memory_clinic.check(treatment)

The causes are those that people meet (facebookresearch/fairscale issue 1050 lists some): ZeRO
shards states, and something else fills the device, or fewer ranks shard them than there are. Two of
the plans have two causes, and curing one is not enough. Peaks are predicted ones
(interpret/memory.py), with AdamW, on the rank with the highest peak. No rank is started, and
nothing here needs more than a laptop to be run for real.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paralab.checks import shown
from paralab.exercises.exercise import Exercise
from paralab.exercises.questions import plain
from paralab.exercises.tries import Takes, Try, attempt
from paralab.exercises.verdict import NOT_STARTED, Notes
from paralab.interpret import quick
from paralab.spec import Cluster, Link, ModelSpec, Plan

if TYPE_CHECKING:
    from paralab.report.report import Report
    from paralab.view.chart import Chart

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers")
CLUSTER = Cluster(  # of a laptop's size; processors, so messages are gloo's and have its buffers
    name="laptop",
    devices_per_node=8,
    flops=1e11,
    memory_bandwidth=2e10,
    op_overhead=1e-5,
    intra=Link(alpha=2e-4, bandwidth=1e9),
    cores=4,
)
SETTINGS = tuple(field.name for field in fields(Plan))
STAYS = {"world_size": "devices", "global_batch": "samples per step", "precision": "precision"}
TOGETHER = {"microbatches", "microbatch_size"}  # one setting: how a device's samples are cut


@dataclass(frozen=True, kw_only=True, repr=False)
class Patient:
    """A plan that needs about as much memory per device as one on fewer devices.

    story   what was expected, and what was seen
    met     where people met it
    fewer   the plan that it is compared with
    drop    per cent by which the peak has to fall
    cures   how many settings may be changed for that
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
        return peak(self.model, self.plan.replace(**change))

    def report(self, **change: Any) -> Report:
        """The predicted report of the plan, with settings changed or not."""
        from paralab.interpret.predict import predict

        return predict(self.model, self.plan.replace(**change), CLUSTER)

    def chart(self, **change: Any) -> Chart:
        """What fills a device: with fewer devices, as it is, and with settings changed."""
        from paralab.view import theme
        from paralab.view.memory import bytes_bars

        def devices(plan: Plan) -> str:
            return f"{plan.world_size} device{'s' * (plan.world_size > 1)}"

        bars = {devices(self.fewer): peak(self.model, self.fewer), devices(self.plan): self.peak()}
        if change:
            bars[", ".join(f"{k}={v!r}" for k, v in change.items())] = self.peak(**change)
        said = [theme.scaled(sum(parts.values()), "B") for parts in bars.values()]
        title = f"{self.name}: of {devices(self.fewer)} each needs {said[0]} at its peak, of "
        title += f"{devices(self.plan)} {said[1]}" + f", once changed {said[-1]}" * bool(change)
        return bytes_bars(bars, title=title)

    def __repr__(self) -> str:
        lines = f"{self.name}: {self.story}", self._set(self.model), self._set(self.plan)
        return "\n  ".join((*lines, f"met in {self.met}"))

    def _set(self, of: ModelSpec | Plan) -> str:
        """What is set in a description: the fields that differ from their default."""
        pairs = [(one.name, getattr(of, one.name), one.default) for one in fields(of)]
        found = ", ".join(f"{name}={now!r}" for name, now, default in pairs if now != default)
        return f"{type(of).__name__}({found})"


PATIENTS = (
    Patient(
        name="more nodes",
        drop=50,
        cures=2,
        story="Eight devices instead of four, nodes of two. No device needs a byte less",
        met="DeepSpeed 237",
        model=ModelSpec(layers=12, hidden=128, heads=4, seq_len=32),
        fewer=Plan(dp=4, zero_stage=3, shard=2, microbatch_size=2),
        plan=Plan(dp=8, zero_stage=3, shard=2, microbatch_size=2),
    ),
    Patient(
        name="twice the devices",
        drop=50,
        story="On four devices instead of two the memory was to be halved, and falls by a "
        "twentieth",
        met="fairscale 1050, DeepSpeed 2302",
        model=ModelSpec(layers=6, hidden=128, heads=4, seq_len=128),
        fewer=Plan(dp=2, zero_stage=3, microbatch_size=8),
        plan=Plan(dp=4, zero_stage=3, microbatch_size=8),
    ),
    Patient(
        name="fully sharded",
        drop=45,
        cures=2,
        story="Every state is sharded by twice as many devices, and a device needs only a seventh "
        "less",
        met="fairscale 1050",
        model=ModelSpec(layers=16, hidden=64, heads=4, seq_len=16),
        fewer=Plan(dp=4, zero_stage=3, prefetch=32, microbatch_size=2),
        plan=Plan(dp=8, zero_stage=3, prefetch=32, microbatch_size=2),
    ),
    Patient(
        name="a small model",
        drop=30,
        story="273 thousand parameters. Each of four devices needs nearly as much as one alone",
        met="pytorch-lightning 6047, pytorch 108976, DeepSpeed 1302",
        model=ModelSpec(layers=4, hidden=72, heads=4, seq_len=32),
        fewer=Plan(microbatch_size=1),
        plan=Plan(dp=4, zero_stage=2, microbatch_size=1),
    ),
)
FILLS, SAME, ONE = "what fills it", "same training", "settings"
ASKED = {
    **{patient.name: f"its peak falls by at least {patient.drop} %" for patient in PATIENTS},
    FILLS: f"the largest at its peak: {', '.join(CATEGORIES[:-1])} or {CATEGORIES[-1]}",
    SAME: "a plan that runs, with its devices, samples per step and precision",
    ONE: "at most "
    + ", ".join(f"{patient.cures} ({patient.name})" for patient in PATIENTS)
    + "; microbatches and microbatch_size together are one",
}


def peak(model: ModelSpec, plan: Plan) -> dict[str, int]:
    """{category: bytes} at the peak of the rank with the highest one. Raises ValueError
    as `predict` does.
    """
    return quick.fullest(model, plan)[1]


def check(tries: Sequence[Try], timeout: float) -> None:
    for one in tries:
        _look(one.notes, plain(one.answer[0]))


def _look(notes: Notes, treatment: Mapping[str, Any]) -> None:
    """Predict every patient with and without the change, {patient: (category, {setting: value})}.
    No rank is started.
    """
    pairs = {patient.name: _as_pair(treatment.get(patient.name)) for patient in PATIENTS}
    if all(pair == ("", {}) for pair in pairs.values()):
        notes.end(NOT_STARTED)
        return
    kept: dict[str, list[str]] = {FILLS: [], SAME: [], ONE: []}
    for patient in PATIENTS:
        pair, name = pairs[patient.name], patient.name
        if pair is None:
            yours = shown(treatment.get(name))
            said = f"{name}: required: (category, {{setting: value}}), yours is {yours}"
            notes.note(name, "nothing to try", False, said)
            continue
        found = {FILLS: _misnamed(patient, pair[0])}
        plan, found[SAME] = _changed(patient, pair[1])
        if plan is not None:
            found[ONE] = _too_many(patient, plan)
            _hold_against_drop(notes, patient, plan)
        for limit, wrong in found.items():
            kept[limit] += [] if wrong else [name]
            if wrong:
                notes.note(limit, f"{name}: {wrong}", False, f"{name}: {wrong}")
    for limit, said in ((FILLS, "all four named"), (SAME, "all four"), (ONE, "no more than that")):
        if len(kept[limit]) == len(PATIENTS):
            notes.note(limit, said, True)


def _as_pair(found: Any) -> tuple[Any, Mapping[str, Any]] | None:
    is_pair = isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[1], Mapping)
    return tuple(found) if is_pair else None


def _misnamed(patient: Patient, category: Any) -> str:
    """Why this is not the category that fills most; "" if it is."""
    parts = patient.peak()
    if category not in CATEGORIES:
        return f"{shown(category)} is no category" if category else "no category is named"
    if category == max(parts, key=lambda name: parts[name]):
        return ""
    held, total = _size(parts[category]), _size(sum(parts.values()))
    return f"{category} are {held} of {total}, something else is more"


def _changed(patient: Patient, change: Mapping[str, Any]) -> tuple[Plan | None, str]:
    """(the changed plan, how it trains another thing), or (None, why it cannot train)."""

    for name in change:
        if name not in SETTINGS:
            return None, f"{shown(name)} is no setting of a plan"

    def made() -> Plan:
        plan = patient.plan.replace(**change)
        plan.validate(patient.model)
        return plan

    plan, trouble = attempt(made)
    if trouble:
        return None, trouble
    for field, words in STAYS.items():
        now, was = getattr(plan, field), getattr(patient.plan, field)
        if now != was:
            return plan, f"{words}: {now}, and it was {was}"
    return plan, ""


def _too_many(patient: Patient, after: Plan) -> str:
    """How many settings differ, in words; "" if at least one does and no more than may."""
    before = patient.plan
    changed = {name for name in SETTINGS if getattr(after, name) != getattr(before, name)}
    count = len(changed - TOGETHER) + bool(changed & TOGETHER)
    said = f"{count or 'no'} settings are changed, required: "
    if 1 <= count <= patient.cures:
        return ""
    return said + ("one" if patient.cures == 1 else f"1 or {patient.cures}")


def _hold_against_drop(notes: Notes, patient: Patient, plan: Plan) -> None:
    was, parts = sum(patient.peak().values()), peak(patient.model, plan)
    now, most = sum(parts.values()), max(parts, key=lambda name: parts[name])
    fall = f"falls by {100 * (1 - now / was):.1f} %" if now < was else "does not fall"
    notes.note(
        patient.name,
        f"{_size(was)} before, {_size(now)} after",
        100 * now <= (100 - patient.drop) * was,
        f"{patient.name}: the peak {fall}, required: by {patient.drop} %; of {_size(now)} "
        f"{_size(parts[most])} are {most}",
    )


def _size(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


memory_clinic = Exercise(
    name="memory_clinic",
    lab="06",
    asked=ASKED,
    takes=(Takes("a dict {patient: (category, {setting: value})}"),),
    checker=check,
    patients={patient.name: patient for patient in PATIENTS},
)
