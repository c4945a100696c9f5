"""What goes together: the rules behind `Plan.validate`, and which parameters may be frozen.

Each raises ``ValueError`` naming the field, the value and what would be legal, before any process
starts. Torch-free.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal
from paralab.forms import OWN_FORM

if TYPE_CHECKING:
    from paralab.spec import ModelSpec, Plan

# Beyond any published run; they mostly catch a slipped digit, which would be worked on for hours.
MAX_RANKS = 65536
MAX_ACTIONS = 2**18  # micro-batches times stages


def begins(name: str, prefix: str) -> bool:
    """Whether ``prefix`` is ``name`` or whole words of it: "blocks.1" begins no "blocks.10"."""
    return name == prefix or name.startswith(f"{prefix}.")


def check_frozen(model: ModelSpec) -> tuple[str, ...]:
    """``model.frozen`` as a tuple of prefixes that name parameters and leave some to train."""
    frozen = model.frozen
    if not isinstance(frozen, (tuple, list)):
        raise illegal("frozen", frozen, "not a list of names",
                      'a list such as ["embedding", "blocks.0"]')  # fmt: skip
    if not frozen:
        return ()
    names = tuple(model.parameter_shapes())
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
    if plan.world_size > MAX_RANKS:
        name = max(("dp", "tp", "pp"), key=lambda name: getattr(plan, name))
        raise illegal(name, getattr(plan, name), f"dp*tp*pp is {plan.world_size} ranks",
                      f"up to {MAX_RANKS}")  # fmt: skip
    _check_tensor(plan, model)
    _check_relay(plan)
    _check_pipeline(plan, model)
    _check_zero(plan)
    _check_split_backward(plan, model)
    _check_offload(plan)
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


def tensor_grid(tp: int, mode: str, depth: int | None) -> tuple[int, int]:
    """(q, depth) of the grid of ``tp`` ranks in a tp_mode; see `Plan.tp_grid`."""
    if depth is not None and mode != "2.5d":
        raise illegal("tp_depth", depth, f"tp_mode={mode!r} has no depth to choose",
                      "None, or tp_mode='2.5d'")  # fmt: skip
    if mode == "1d":
        return tp, 1
    power = 3 if mode == "3d" else 2
    if mode == "2.5d":
        depths = [depth] if depth else [d for d in range(1, tp + 1) if tp % d == 0]
        for d in reversed(depths):
            q = math.isqrt(tp // d)
            if d * q * q == tp and (depth or d <= q):
                return q, d
        legal = sorted(
            {d * q * q for q in range(1, 9) for d in ([depth] if depth else range(1, q + 1))}
        )
        raise illegal("tp", tp, "tp_mode='2.5d' needs d grids of q x q ranks, "
                      + (f"d={depth}" if depth else "d up to q"), _some(legal))  # fmt: skip
    q = round(tp ** (1 / power))
    if q**power != tp:
        shape = " x ".join("q" * power)
        raise illegal("tp", tp, f"tp_mode={mode!r} needs a grid of {shape} ranks",
                      _some([n**power for n in range(1, 9)]))  # fmt: skip
    return q, q if power == 3 else 1


def _some(values: list[int]) -> str:
    return ", ".join(map(str, values[:12])) + ", ..."


def _check_tensor(plan: Plan, model: ModelSpec) -> None:
    """What a tp group's grid must divide, and what else does not go with it."""
    q, depth = plan.tp_grid
    one = plan.tp_mode == "1d"
    if plan.sequence_parallel and (plan.tp == 1 or not one):
        why = (
            "one rank has the whole sequence"
            if plan.tp == 1
            else (f"tp_mode={plan.tp_mode!r} has the residual stream in parts already")
        )
        raise illegal(
            "sequence_parallel", True, why, "False, or tp_mode='1d' with tp of at least 2"
        )
    if plan.partition_activations:
        if plan.recompute != "full":
            raise illegal("partition_activations", True, "it cuts what recomputation keeps of a "
                          f"block, and recompute is {plan.recompute!r}",
                          "False, or recompute='full'")  # fmt: skip
        if plan.tp == 1 or not one or plan.sequence_parallel:
            raise illegal("partition_activations", True, "every tp rank has its own part of a "
                          "block's input already", "False, or tp_mode='1d' with tp of at least 2 "
                          "and sequence_parallel=False")  # fmt: skip
    if plan.tp == 1:
        return
    samples = {"1d": 1, "2d": q, "2.5d": q * depth, "3d": q * q}[plan.tp_mode]
    wide = q * q if plan.tp_mode == "3d" else q
    said = f"tp={plan.tp}" if one else f"tp_mode={plan.tp_mode!r} with q={q}"
    needs: list[tuple[str, Any, int]] = [
        ("heads", model, q), ("hidden", model, 1 if one else wide), ("vocab", model, wide),
        ("microbatch_size", plan, samples),
        ("seq_len", model, q if plan.sequence_parallel else 1),
    ]  # fmt: skip
    if plan.partition_activations:
        needs.append(("seq_len", model, q))
    for name, where, parts in needs:
        value = getattr(where, name)
        if value % parts:
            nearest = sorted({max(parts, value // parts * parts), (value // parts + 1) * parts})
            legal = f"a multiple of {parts}, such as {' or '.join(map(str, nearest))}"
            if name == "vocab":
                legal += " (the entries beyond the text's are never looked up)"
            raise illegal(name, value, f"{said} deals it out in {parts} equal parts", legal)
    if model.dropout and model.attention == "sdpa":
        raise illegal("attention", "sdpa", "its fused kernel draws its dropout mask itself, and "
                      "the heads of one rank would not get the mask they have on one device",
                      "'explicit', or dropout=0")  # fmt: skip


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
    if plan.microbatches * plan.stages > MAX_ACTIONS:
        raise illegal("microbatches", plan.microbatches, f"in {plan.stages} stages make a schedule "
                      "that takes minutes to write down",
                      f"up to {max(1, MAX_ACTIONS // plan.stages)}")  # fmt: skip
    plan.actions()


def _check_relay(plan: Plan) -> None:
    """What one part of the model at a time asks for."""
    if not plan.relays:
        return
    if plan.pp > 1 or plan.virtual_stages > 1:
        name = "pp" if plan.pp > 1 else "virtual_stages"
        raise illegal(name, getattr(plan, name), "schedule='l2l' is one rank's relay: all parts "
                      "of the model take turns there", "1, or a pipeline's schedule")  # fmt: skip
    away = plan.tiers is not None and plan.tiers.parameters != "device"
    if plan.zero_stage < 3 or not away:
        name = "zero_stage" if plan.zero_stage < 3 else "offload"
        raise illegal(name, getattr(plan, name), "there is nothing to relay: schedule='l2l' brings "
                      "parameters up part by part, and these are on the device", "zero_stage=3 "
                      "with parameters on 'cpu' or 'nvme', or a pipeline's schedule")  # fmt: skip
    if plan.recompute != "full":
        raise illegal("recompute", plan.recompute, "schedule='l2l' comes back to a block after all "
                      "others: of every micro-batch its input alone can wait that long",
                      "'full', or a pipeline's schedule")  # fmt: skip


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


def _check_offload(plan: Plan) -> None:
    """What may leave the device, and what it needs for that."""
    tiers, stage = plan.tiers, plan.zero_stage
    if tiers is None:
        return
    if stage == 0 and isinstance(plan.offload, str):
        raise illegal("zero_stage", stage, f"offload={plan.offload!r} moves what ZeRO deals out, "
                      "and stage 0 deals out nothing", "1 (optimizer), 2 (gradients too), 3 "
                      "(parameters too); dp=1 is enough")  # fmt: skip
    if not tiers.states and tiers.activations == "device":
        raise illegal("offload", plan.offload, "nothing in it leaves the device",
                      "None, or a state on 'cpu' or 'nvme'")  # fmt: skip
    for name, least in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
        place = getattr(tiers, name)
        if place == "device":
            continue
        if stage < least:
            raise illegal(f"offload[{name!r}]", place, f"zero_stage={stage} does not deal {name} "
                          f"out", f"'device', or zero_stage of at least {least}")  # fmt: skip
        if tiers.optimizer == "device":
            raise illegal(f"offload[{name!r}]", place, "the update runs where the optimizer's "
                          "states are, and on the device it would have to fetch them back",
                          "'device', or the optimizer on 'cpu' or 'nvme' too")  # fmt: skip
    if tiers.activations != "device" and (plan.recompute != "full" or plan.partition_activations):
        raise illegal("offload['activations']", tiers.activations, "what moves is each block's "
                      "input, which alone is kept when blocks are recomputed",
                      "'device', or recompute='full' without partition_activations")  # fmt: skip
    ours = (tiers.parameters, tiers.gradients, tiers.optimizer)
    if tiers.delayed and ours != ("device", "cpu", "cpu"):
        raise illegal("offload['delayed']", True, "the host updates its own copy of the parameters "
                      "while the device computes with the one before",
                      "False, or parameters on 'device', gradients and optimizer on "
                      "'cpu'")  # fmt: skip


def _check_split_backward(plan: Plan, model: ModelSpec) -> None:
    """What a schedule that puts weight halves of backward aside does not go with."""
    grid = plan.tp > 1 and plan.tp_mode != "1d"
    if not (plan.zero_stage == 3 or plan.recompute != "none" or grid or model.frozen):
        return
    if not any(action.kind == "W" for actions in plan.actions() for action in actions):
        return
    legal = "'naive' | 'gpipe' | '1f1b' | 'interleaved'"
    if plan.zero_stage == 3:
        raise illegal("zero_stage", 3, f"schedule={plan.schedule_name!r} puts weight halves of "
                      "backward aside, and every stage's parameters would have to stay gathered "
                      "until they ran", f"0, 1 or 2, or schedule={legal}")  # fmt: skip
    if grid:
        raise illegal("tp_mode", plan.tp_mode, f"schedule={plan.schedule_name!r} puts weight "
                      "halves of backward aside, and on a grid these have messages of their own",
                      f"'1d', or schedule={legal}")  # fmt: skip
    if model.frozen:
        raise illegal("frozen", model.frozen, f"schedule={plan.schedule_name!r} puts weight halves "
                      "of backward aside, and what is frozen has none",
                      f"(), or schedule={legal}")  # fmt: skip
    raise illegal("recompute", plan.recompute, f"schedule={plan.schedule_name!r} puts weight "
                  "halves of backward aside, and these need the recomputed activations after the "
                  "block has given them back", f"'none', or schedule={legal}")  # fmt: skip
