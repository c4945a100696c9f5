"""What a plan takes beside a name: a form of one's own, as far as it can be judged before a run.

Gradient synchronisation may be a class of the user's, a pipeline's schedule a function. What such a
form must be able to do is checked here, without torch and before a process starts.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal
from paralab.parallel.schedules import RELAY, SCHEDULES, takes_three

if TYPE_CHECKING:
    from paralab.parallel.schedules import Action

GRAD_SYNC_FORMS = ("naive", "bucketed", "overlapped")
GRAD_SYNC_MOMENTS = ("grad_ready", "finish", "reset")  # what an own form is asked for
SCHEDULE_NAMES = (*SCHEDULES, RELAY)
OWN_FORM = "own: "  # a saved plan keeps this and the name of an own form, not its code


def form_name(form: Any) -> str:
    """A form as text: its name, or "own: " and that of a class or function of the user's."""
    if callable(form):
        return OWN_FORM + getattr(form, "__name__", type(form).__name__)
    return form


def check_grad_sync(form: Any) -> None:
    """Refuse what could not synchronise gradients, as far as can be known before it is called."""
    if isinstance(form, str) and form.startswith(OWN_FORM):
        return
    if not callable(form):
        choice("grad_sync", form, GRAD_SYNC_FORMS)
        return
    legal = " | ".join(map(repr, GRAD_SYNC_FORMS)) + " | a class with grad_ready, finish, reset"
    missing = [m for m in GRAD_SYNC_MOMENTS if not callable(getattr(form, m, None))]
    if isinstance(form, type) and missing:
        raise illegal("grad_sync", form, f"the class has no method {' and no '.join(missing)}",
                      legal)  # fmt: skip
    try:
        signature = inspect.signature(form)
    except (TypeError, ValueError):  # built in: what it takes shows when it is called
        return
    try:
        signature.bind([], group=None, bucket_bytes=1)
    except TypeError as error:
        raise illegal("grad_sync", form, f"cannot be called ({error})",
                      "one called as form(parameters, group=group, bucket_bytes=bytes)"
                      ) from None  # fmt: skip


def check_schedule(form: Any) -> None:
    """Refuse what could not be a schedule, as far as can be known before it is called."""
    if isinstance(form, str) and form.startswith(OWN_FORM):
        return
    if not callable(form):
        choice("schedule", form, SCHEDULE_NAMES)
        return
    takes_three(form)


def make_schedule(form: Any, pp: int, microbatches: int, virtual_stages: int) -> list[list[Action]]:
    """One list of actions per pipeline rank, proved to be a schedule, or ``ValueError``."""
    make = _build if callable(form) else _build_once  # an own function may change its mind
    return make(form, pp, microbatches, virtual_stages)


def _build(form: Any, pp: int, microbatches: int, virtual_stages: int) -> list[list[Action]]:
    from paralab.parallel.schedules import build
    from paralab.theory.schedule_check import validate

    if form == RELAY:  # to whoever looks at a rank as one stage
        form = "gpipe"
    lists = build(form, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages)
    if len(lists) != pp:
        raise illegal("schedule", form_name(form), f"made {len(lists)} lists",
                      f"{pp}, one per pipeline rank")  # fmt: skip
    validate(lists, microbatches=microbatches, stages=pp * virtual_stages)
    return lists


_build_once = lru_cache(maxsize=64)(_build)
