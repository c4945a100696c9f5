"""Lab 06's memory clinic: four plans whose memory does not fall with more devices.

    patient = pl.exercises.memory_clinic.patients["twice the devices"]
    patient.chart()                      # what fills a device, with fewer devices and with more
    patient.chart(recompute="full")      # and with a setting changed
    pl.exercises.memory_clinic.check(treatment)

A treatment names what fills the device and changes the plan's settings. Peaks are predicted with
and without the change; where a plan has two causes, curing one is not enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paralab.checks import shown
from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.memory_patients import PATIENTS, Patient, peak
from paralab.exercises.questions import plain
from paralab.exercises.verdict import NOT_STARTED, Notes
from paralab.spec import Plan

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers")
SETTINGS = tuple(field.name for field in fields(Plan))
STAYS = {"world_size": "devices", "global_batch": "samples per step", "precision": "precision"}
TOGETHER = {"microbatches", "microbatch_size"}  # one setting: how a device's samples are cut
FILLS, SAME, ONE = "what fills it", "same training", "settings"
ASKED = {
    **{patient.name: f"its peak falls by at least {patient.drop} %" for patient in PATIENTS},
    FILLS: f"the largest at its peak: {', '.join(CATEGORIES[:-1])} or {CATEGORIES[-1]}",
    SAME: "a plan that runs, with its devices, samples per step and precision",
    ONE: "at most "
    + ", ".join(f"{patient.cures} ({patient.name})" for patient in PATIENTS)
    + "; microbatches and microbatch_size together are one",
}


@exercise(
    Takes(kind="a dict {patient: (category, {setting: value})}"),
    lab="06",
    asked=ASKED,
    patients={patient.name: patient for patient in PATIENTS},
)
def memory_clinic(tries: Tries) -> None:
    for one in tries.all:
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
    long = f"{patient.name}: the peak {fall}, required: by {patient.drop} %; "
    long += f"of {_size(now)} {_size(parts[most])} are {most}"
    said, left = f"{_size(was)} before, {_size(now)} after", 100 - patient.drop
    notes.note(patient.name, said, 100 * now <= left * was, long)


def _size(count: float) -> str:
    return f"{count / 1e6:.1f} MB"
