"""Forms: the user's own code in a plan or a model, a schedule, a pass or a block.

A form is checked as far as possible before a process starts, and without torch; only the parameters
of a block are known by making its module, which needs torch.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from paralab.checks import choice, count_of, illegal, instance, shown
from paralab.parallel import schedules
from paralab.parallel.schedules import RELAY, Action

GRAD_SYNC_FORMS = ("naive", "bucketed", "overlapped")
SCHEDULE_NAMES = (*schedules.SCHEDULES, RELAY)
OWN_FORM = "own: "  # a saved plan has this and the name of a form, not its code
BLOCK_FORM = (
    "None for the standard block, or a class or function that makes an nn.Module from a ModelSpec"
)


def name_of(function: Any) -> str:
    """The name of a user's function, also in a `functools.partial`; of another object its class."""
    while isinstance(function, partial) and not hasattr(function, "__name__"):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def form_name(form: Any) -> str:
    """A form as text: a built-in form's name, or "own: " and the name of the user's function."""
    return OWN_FORM + name_of(form) if callable(form) else form


def saved(form: Any) -> bool:
    """Whether ``form`` is the text that a saved plan has in place of the user's code."""
    return isinstance(form, str) and form.startswith(OWN_FORM)


def check_passes(name: str, forms: Any) -> tuple[Any, ...]:
    """The user's passes as a tuple. Raises if one of them cannot be called."""
    legal = "functions f(program) -> program, see paralab.programs.own"
    instance(name, forms, (tuple, list), f"a tuple of {legal}", "sequence")
    for form in forms:
        if not callable(form) and not saved(form):
            raise illegal(name, forms, f"{shown(form)} cannot be called", legal)
    return tuple(forms)


def check_schedule(name: str, form: Any) -> Any:
    """Raise if ``form`` cannot be a schedule, as far as can be known before it is called."""
    if callable(form):
        schedules.takes_three(form)
    elif not saved(form):
        choice(name, form, SCHEDULE_NAMES, *schedules.OWN_SCHEDULES)
    return form


def make_schedule(form: Any, pp: int, microbatches: int, virtual_stages: int) -> list[list[Action]]:
    """One list of actions per pipeline rank; raises ``ValueError`` if these make no schedule."""
    make = _build if callable(form) else _build_once  # a user's function may return another list
    return make(form, pp, microbatches, virtual_stages)


def _build(form: Any, pp: int, microbatches: int, virtual_stages: int) -> list[list[Action]]:
    from paralab.theory.schedule_check import validate

    if form == RELAY:  # callers see the relay's rank as one stage
        form = "gpipe"
    lists = schedules.build(form, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages)
    if len(lists) != pp:
        why = f"it returned {count_of(len(lists), 'list')}"
        raise illegal("schedule", form_name(form), why, f"{pp}, one per pipeline rank")
    validate(lists, microbatches=microbatches, stages=pp * virtual_stages)
    return lists


_build_once = lru_cache(maxsize=64)(_build)


def check_block(name: str, form: Any) -> Any:
    """Raise if ``form`` cannot make blocks, as far as can be known before it is called."""
    if not callable(form) and not saved(form):
        raise illegal(name, form, "neither a class nor a function", BLOCK_FORM)
    return form


def block_shapes(form: Any, model: Any) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the parameters of ``form(model)``, the user's own block, which is made on
    torch's "meta" device, without memory and random numbers.

    Every rank makes its own blocks, so each call has to make the same module. In a notebook the
    variables that ``form`` reads may change; therefore each call makes the block again and compares
    it with the first one, to which all cached figures belong.
    """
    if isinstance(form, str):
        why = "a saved model keeps only the name of its block"
        raise illegal("block", form, why, "model.replace(block=the class or function itself)")
    first_module, shapes = _block_once(form, model)
    module = _on_meta(form, model)
    current = {local: tuple(parameter.shape) for local, parameter in module.named_parameters()}
    if (repr(module), current) != (repr(first_module), shapes):
        was, differs = (first_module, module) if current == shapes else (shapes, current)
        why = f"block(model) made {shown(was)} the first time, and now makes {shown(differs)}"
        legal = "a block whose sizes depend on its model alone; if a variable that it reads has "
        raise illegal("block", form_name(form), why, legal + "changed, define the block again")
    return shapes


def _on_meta(form: Any, model: Any) -> Any:
    """The module ``form(model)``; raises ``ValueError`` if it is none or cannot be made."""
    import torch

    name = form_name(form)
    try:
        with torch.device("meta"):
            module = form(model)
    except Exception as error:
        why = f"block(model) raised {type(error).__name__}: {error}"
        raise illegal("block", name, why, BLOCK_FORM) from error
    if not isinstance(module, torch.nn.Module):
        raise illegal("block", name, f"block(model) returned {shown(module)}", BLOCK_FORM)
    return module


@lru_cache(maxsize=1024)  # keeps a block at least as long as other caches keep its model
def _block_once(form: Any, model: Any) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """A block and the shapes of its parameters, checked to be trainable under a plan."""
    import torch

    name, module, second = form_name(form), _on_meta(form, model), _on_meta(form, model)
    if repr(module) != repr(second):
        why = f"block(model) made {shown(module)} the first time, and {shown(second)} the second"
        raise illegal("block", name, why, "one that makes the same module at every call")
    shapes = {}
    for local, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            why = f"its parameter {local!r} has no shape until it is called"
            raise illegal("block", name, why, "layers with given sizes, not lazy ones")
        if not parameter.requires_grad:
            why = f"its parameter {local!r} requires no gradient, and every parameter of a model "
            legal = "a buffer: module.register_buffer(...)"
            raise illegal("block", name, why + "is trained", legal)
        if not parameter.is_floating_point():
            why = f"its parameter {local!r} is {parameter.dtype}, not real floating point"
            raise illegal("block", name, why, "two real parameters in place of a complex one")
        shapes[local] = tuple(parameter.shape)
    return module, shapes
