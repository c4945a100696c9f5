"""Lab 06's memory clinic: four plans whose memory does not fall with more devices.

    patient = pl.exercises.memory_clinic.patients["twice the devices"]
    patient.chart()                      # what fills a device, with fewer devices and with more
    patient.chart(recompute="full")      # the same, and with a setting changed
    pl.exercises.memory_clinic.check(treatment)

An answer has a treatment for each plan: the category that takes most memory, and a change of
settings. Peaks are predicted with and without the change. Where memory has two causes, a treatment
of one of them is not enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paralab.checks import shown
from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.memory_patients import PATIENTS, Patient
from paralab.exercises.questions import plain_answers
from paralab.exercises.verdict import NOT_STARTED, Notes
from paralab.interpret import quick
from paralab.spec import Plan

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
    _look_at_peak(notes, patient, plan)


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


def _look_at_peak(notes: Notes, patient: Patient, plan: Plan) -> None:
    was, parts = sum(patient.peak().values()), quick.fullest(patient.model, plan)[1]
    now, largest = sum(parts.values()), max(parts, key=lambda name: parts[name])
    fall = f"falls by {100 * (1 - now / was):.1f} %" if now < was else "does not fall"
    wrong = f"the peak {fall}, required: a fall of {patient.drop} %; "
    wrong += f"the largest category is now {largest}, with {_size(parts[largest])} of {_size(now)}"
    if now < was and plan.bucket_bytes < patient.plan.bucket_bytes:  # still not small enough
        share = min(100 * plan.bucket_bytes / (4 * patient.model.num_params), 100)
        wrong += f"; a bucket holds {share:.0f} % of all gradients"
    cured = 100 * now <= (100 - patient.drop) * was
    notes.look(patient.name, "" if cured else wrong, f"{_size(was)} before, {_size(now)} after")


def _size(count: float) -> str:
    return f"{count / 1e6:.1f} MB"
