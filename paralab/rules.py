"""What goes together: the rules behind `Plan.validate`, and which parameters may be frozen.

Each raises ``ValueError`` naming the field, the value and what would be legal, before any process
starts. Torch-free.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal
from paralab.forms import OWN_FORM

if TYPE_CHECKING:
    from paralab.spec import ModelSpec, Plan

MAX_RANKS = 65536  # beyond any published run; mostly catches a slipped digit

# What each setting that this version cannot run yet is limited to. An entry leaves this table in
# the same change that makes `run` and `predict` understand it.
_NOT_YET: dict[str, tuple[Any, str]] = {
    "tp": (1, "tensor parallelism"),
    "sequence_parallel": (False, "sequence parallelism"),
    "offload": (None, "offload"),
    "tp_mode": ("1d", "tensor parallelism in 2D, 2.5D and 3D"),
}


def begins(name: str, prefix: str) -> bool:
    """Whether ``prefix`` is ``name`` or whole words of it: "blocks.1" begins no "blocks.10"."""
    return name == prefix or name.startswith(f"{prefix}.")


def check_frozen(model: ModelSpec) -> tuple[str, ...]:
    """``model.frozen`` as a tuple of prefixes that name parameters and leave some to train."""
    frozen, names = model.frozen, tuple(model.parameter_shapes())
    if not isinstance(frozen, (tuple, list)):
        raise illegal("frozen", frozen, "not a list of names",
                      'a list such as ["embedding", "blocks.0"]')  # fmt: skip
    for prefix in frozen:
        if not isinstance(prefix, str) or not any(begins(name, prefix) for name in names):
            raise illegal("frozen", frozen, f"{prefix!r} begins no parameter's name",
                          f"embedding, blocks.0 to blocks.{model.layers - 1}, head, or a name "
                          "inside one")  # fmt: skip
    if not any(map(model.trainable, names)):
        raise illegal("frozen", frozen, "leaves nothing to train", "fewer names")
    return tuple(frozen)


def check_plan(plan: Plan, model: ModelSpec) -> None:
    """Raise ``ValueError`` if ``plan`` cannot train ``model`` in this version."""
    for name, kind in (("grad_sync", "class"), ("schedule", "function")):
        value = getattr(plan, name)
        if isinstance(value, str) and value.startswith(OWN_FORM):
            raise illegal(name, value, f"a saved plan keeps only the {kind}'s name",
                          f"plan.replace({name}=the {kind} itself)")  # fmt: skip
    for name, (only, what) in _NOT_YET.items():
        if getattr(plan, name) != only:
            raise illegal(name, getattr(plan, name), f"{what} is not in this version", repr(only))
    if plan.world_size > MAX_RANKS:
        raise illegal("dp", plan.dp, f"dp*tp*pp is {plan.world_size} ranks", f"up to {MAX_RANKS}")
    _check_pipeline(plan, model)
    _check_zero(plan)
    _check_split_backward(plan)
    if plan.precision != "fp32" and plan.pp > 1:
        raise illegal("precision", plan.precision, "messages between pipeline stages are fp32 in "
                      "this version", "'fp32', or pp=1")  # fmt: skip
    if model.frozen and plan.pp > 1:
        raise illegal("frozen", model.frozen, "every stage sends the gradient of its input back, "
                      "and one that trains nothing would have none to compute",
                      "(), or pp=1")  # fmt: skip
    if plan.zero_stage == 3 and plan.pp > 1:
        warnings.warn(
            f"zero_stage=3 with pp={plan.pp}: a stage's parameters are gathered again for every "
            f"action, 2*{plan.microbatches} times a step; zero_stage=1 moves them once",
            stacklevel=3,
        )


def _check_pipeline(plan: Plan, model: ModelSpec) -> None:
    """Every stage has a block, and the schedule is one."""
    pp, v = plan.pp, plan.virtual_stages
    if v > 1 and pp == 1:
        raise illegal("virtual_stages", v, "one rank has nobody to take turns with: all the "
                      "chunks would be its own", "1, or pp of at least 2")  # fmt: skip
    if v > 1 and isinstance(plan.schedule, str) and plan.schedule != "interleaved":
        raise illegal("virtual_stages", v, f"schedule={plan.schedule!r} has one stage per rank",
                      'schedule="interleaved" or a function of your own, or '
                      "virtual_stages=1")  # fmt: skip
    if plan.stages > model.layers:
        name, most = ("pp", model.layers) if v == 1 else ("virtual_stages", model.layers // pp)
        legal = f"up to {most}" if most else f"pp of at most {model.layers} first"
        raise illegal(name, getattr(plan, name), f"pp*virtual_stages is {plan.stages} stages, "
                      f"the model has {model.layers} blocks, and every stage needs one",
                      f"{legal}, or a model of at least {plan.stages} layers")  # fmt: skip
    plan.actions()


def _check_zero(plan: Plan) -> None:
    """What data-parallel ranks may keep only a share of."""
    if plan.shard is not None and plan.zero_stage == 0:
        raise illegal("shard", plan.shard, "zero_stage=0 keeps everything on every rank, so there "
                      "is nothing to share", "None, or zero_stage of 1 to 3")  # fmt: skip
    if plan.dp % plan.shard_degree:
        divisors = ", ".join(str(n) for n in range(1, plan.dp + 1) if plan.dp % n == 0)
        raise illegal("shard", plan.shard, f"dp={plan.dp} ranks cannot be dealt into groups of it",
                      divisors)  # fmt: skip
    if plan.zero_stage and plan.grad_sync != "overlapped":
        raise illegal("grad_sync", plan.grad_sync_name, f"zero_stage={plan.zero_stage} brings its "
                      "own way of adding gradients up, a reduce-scatter to whoever keeps the sum",
                      "'overlapped', or zero_stage=0")  # fmt: skip


def _check_split_backward(plan: Plan) -> None:
    """What a schedule that puts weight halves of backward aside does not go with."""
    if not (plan.zero_stage == 3 or plan.recompute != "none"):
        return
    if not any(action.kind == "W" for actions in plan.actions() for action in actions):
        return
    legal = "'naive' | 'gpipe' | '1f1b' | 'interleaved'"
    if plan.zero_stage == 3:
        raise illegal("zero_stage", 3, f"schedule={plan.schedule_name!r} puts weight halves of "
                      "backward aside, and every stage's parameters would have to stay gathered "
                      "until they ran", f"0, 1 or 2, or schedule={legal}")  # fmt: skip
    raise illegal("recompute", plan.recompute, f"schedule={plan.schedule_name!r} puts weight "
                  "halves of backward aside, and these need the recomputed activations after the "
                  "block has given them back", f"'none', or schedule={legal}")  # fmt: skip
