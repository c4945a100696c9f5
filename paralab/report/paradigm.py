"""Which paradigm an observed program's collectives look like, and the closed form of its bytes.

Bytes that a rank sends per step, with n ranks in the group and Psi bytes of trained parameters (of
a parameter that is sharded along other axes too, only the rank's shard on these counts):

    data parallelism        all-reduce      2 (n-1)/n Psi, for every backward that is reduced
    ZeRO-1, one of          all-reduce      2 (n-1)/n Psi, and a broadcast or an all-gather of the
                                              updated parameters, (n-1)/n Psi on average
                            reduce-scatter    (n-1)/n Psi, and an all-gather of as many bytes
    sharded parameters      all-gather        (n-1)/n Psi, for every forward; again for every
                                              backward if the parameters are resharded; of frozen
                                              parameters too
                            reduce-scatter    (n-1)/n Psi, for every backward that is reduced

Tensor parallelism sums activations in the forward. Its backward sums as many bytes, or several
times as many where the input of a layer has several gradients. Local SGD sums in some steps only.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

from paralab.checks import mb
from paralab.report import facts
from paralab.report.tables import Tables
from paralab.theory.traffic import SURPLUS

if TYPE_CHECKING:
    import pandas as pd

REDUCTIONS = ("all_reduce", "reduce_scatter")
# The phases in which gradients are reduced: "data" by the program's own calls, "optimizer" in a
# closure that the optimizer evaluates.
REDUCING = ("backward", "data", "optimizer")
FSDP = {"FSDPModule", "FullyShardedDataParallel"}
NEAR = 0.02  # tolerance for a ratio to be a whole number: FSDP pads its shards
ACTIVATIONS = (
    "sums activations in the forward and their gradients in the backward, as tensor parallelism "
    "does; its bytes follow from the batch, not from the parameters"
)


def describe_axis(report: Tables, calls: pd.DataFrame, axis: str) -> str:
    """Name the paradigm that the collectives on an axis look like, and compare their bytes with its
    closed form. calls: the collectives on all axes
    """
    rank = int(calls["rank"][calls["axis"] == axis].min())
    calls = calls[calls["rank"] == rank]
    rows, steps = calls[calls["axis"] == axis], steps_of(report, rank)
    sizes = rows[rows["op"].isin(REDUCTIONS)].groupby("op")["payload_bytes"].sum()
    most = "" if sizes.empty else sizes.idxmax()
    n, psi = len(rows["ranks"].iloc[0]), trained_bytes(report, rank, axis, op=most)
    if n == 1:
        return "a group of one rank sends nothing"
    if not psi:
        return "no trained parameter was seen, so there is nothing to compare with"
    if sums_activations(report, rows, axis):
        return ACTIVATIONS
    sums = rows[rows["op"].isin(REDUCTIONS) & rows["phase"].isin(REDUCING)]
    summed, name = sums["step"].nunique(), "data parallelism, gradients all-reduced"
    seldom = ""
    if 0 < summed < steps:
        seldom = f"; in the {summed} of {steps} steps that reduce gradients"
        if not sums["phase"].eq("backward").any():
            name = f"sums outside the backward in {summed} of {steps} steps, as local SGD averages "
            name, seldom = name + "parameters", "; in such a step"
        rows, steps = rows[rows["step"].isin(sums["step"])], summed
    # Payload bytes per step; the ratios below are multiples of Ψ.
    payload = Counter((rows.groupby(["op", "phase"])["payload_bytes"].sum() / steps).to_dict())
    frozen = trained_bytes(report, rank, axis, trained=False)
    all_reduced, scattered = (
        sum(payload[op, phase] for phase in REDUCING) / psi for op in REDUCTIONS
    )
    gathers = {
        phase: payload["all_gather", phase] / (psi + frozen) for phase in ("forward", *REDUCING)
    }
    sharded = fully_sharded(report, rank)
    outside = rows[rows["op"].eq("all_gather") & rows["phase"].eq("data")]
    unsharded = sharded and outside["step"].nunique() == steps  # ``model.unshard()``, no checkpoint
    own = made_of(report, "parameters", rank)
    # A forward then gathers what has been updated.
    whole = own and not gathers["backward"] and all(p["held"] == p["elements"] for p in own)
    if not (all_reduced or scattered):
        if sharded and gathers["backward"]:
            return "shards of parameters that the forward has kept, gathered again for the backward"
        return "it looks like none of the known paradigms"
    roots = rows["peer"][rows["op"].eq("broadcast") & rows["phase"].isin(REDUCING)].unique()
    one_root = len(roots) == 1
    gathered, factor, pass_gathers, updates = 0.0, scattered, (), ("broadcast",)
    to_root = average = False
    if all_reduced >= scattered:
        factor, updates = 2 * all_reduced, ("broadcast", "all_gather")
    elif (for_forward := gathers["forward"] + unsharded * gathers["data"]) and not whole:
        name = "sharded parameters (FSDP, ZeRO-3), gathered for the forward, "
        name += _kept(report, calls, axis)
        pass_gathers = for_forward, gathers["backward"]
        gathered = sum(pass_gathers)
    elif gathered := gathers["forward"] + gathers["data"] + gathers["optimizer"]:
        name = "a sharded optimizer (ZeRO-1): gradients reduce-scattered, updated parameters "
        name += "gathered"
    else:
        name, to_root = "sharded gradients (ZeRO-2)", one_root
    for op in updates:
        copies = op == "broadcast" and one_root and not to_root  # every rank updates all
        behind = payload[op, "data"] / psi  # between the optimizer's step and the next forward
        behind *= whole_number(behind) == 1 and not copies
        redistributed = payload[op, "optimizer"] / psi + behind
        if redistributed <= NEAR:
            continue
        factor += redistributed
        average |= op == "broadcast"
        if to_root:
            name = f"gradients reduced to rank {roots[0]}, which broadcasts their sum or the "
            name += "updated parameters"
        else:
            verb = op.removeprefix("all_") + "s"
            name += f", with a sharded optimizer (ZeRO-1) that {verb} updated parameters"
    factor, share = factor + gathered, (n - 1) / n
    text = f"{name}{seldom}: {factor:.3g} (n−1)/n Ψ = {mb(factor * share * psi)} per rank "
    text += "on average " * average + f"(n={n}, Ψ={mb(psi)})"
    m, reducing = backwards(report, rank, rows[rows["op"].isin(REDUCTIONS)])
    reducing *= steps_of(report, rank) / steps
    times = max(all_reduced, scattered)
    if 2 * times < reducing * (1 - NEAR):  # less than messages in half the bits
        part = f"{mb(times / reducing * psi)} of {mb(psi)}, unless gradients are compressed or"
        text += f"; only a part of the parameters is reduced over this axis, {part} sharded; the "
        text += "others are local (experts, say), reduced over another axis, unused, or forgotten"
    elif not whole_number(times) or (reducing and not whole_number(times / reducing)):
        text += "; this is not a whole multiple of Ψ"
        text += f" for each of {reducing:.3g} backward passes" * (reducing > 1)
        text += ": unused or local parameters (experts, say), messages in fewer bits, or shards in "
        text += "place of whole gradients send less"
    m = backwards(report, rank, rows[rows["op"].eq("all_gather")])[1] or reducing or m
    if m and any(times and times / m < 1 - NEAR for times in pass_gathers):
        text += "; the parameters that are gathered for a forward or a backward are not Ψ bytes: "
        text += "they have fewer bits, or some of them are kept"
    if frozen and gathered:
        text += f"; in addition, {gathered:.3g} (n−1)/n times {mb(frozen)} of frozen parameters"
        text += ", if these are gathered as often"
    surplus = rows["wire_bytes"][rows["phase"] == SURPLUS].sum() / steps
    if surplus:
        text += f"; gloo's reduce-scatter is an all-reduce and sends {mb(surplus)} more"
    rest = rows["wire_bytes"].sum() / steps - surplus
    if average:  # owners of more parameters send more
        sent = rows[rows["op"].eq("broadcast") & ~rows["phase"].isin(("forward", "backward"))]
        rest += (share * sent["payload_bytes"].sum() - sent["wire_bytes"].sum()) / steps
    rest -= share * (factor * psi + gathered * frozen)
    if rest > NEAR * factor * share * psi:
        text += f"; in addition, {mb(rest)} of other traffic on this axis"
    return text


def _kept(report: Tables, calls: pd.DataFrame, axis: str) -> str:
    """Whether the parameters that a forward gathered on an axis are kept for its backward or
    gathered again. FSDP2 may gather them again within smaller groups, on an axis along which no
    gradient is reduced and no parameter sharded.
    """
    gathers = calls[calls["op"].eq("all_gather") & calls["phase"].eq("backward")]
    parameters = made_of(report, "parameters", int(calls["rank"].min()))
    sharding = {name for p in parameters for name in p.get("cut", ())}.union(
        calls["axis"][calls["op"].isin(REDUCTIONS)]
    )
    again = set(gathers["axis"]) - (sharding - {axis})
    if not again:
        return "kept for backward"
    return f"again{' in smaller groups' * (axis not in again)} for every backward"


def sums_activations(report: Tables, rows: pd.DataFrame, axis: str) -> bool:
    """Whether the reductions on an axis look like those of tensor parallelism. They do if one of
    three conditions holds: parameters are sharded along the axis as DTensors, and not by FSDP; the
    forwards reduce more than half as many bytes as the later phases; or every later reduction has
    the size of one in a forward, and their sum is not to the byte that of all gradients once.
    """
    rank = int(rows["rank"].min())
    cut = any(axis in p.get("cut", ()) for p in made_of(report, "parameters", rank))
    if cut and not fully_sharded(report, rank):
        return True
    sums = rows[rows["op"].isin(REDUCTIONS) & (rows["rank"] == rank)]
    in_forward = sums["phase"] == "forward"
    forward, later = sums["payload_bytes"][in_forward], sums["payload_bytes"][~in_forward]
    if forward.sum() > later.sum() / 2:
        return True
    if later.empty or not later.isin(forward).all():
        return False
    _, reducing = backwards(report, rank, sums)
    psi = trained_bytes(report, rank, axis) * steps_of(report, rank) * (reducing or 1)
    return later.sum() != round(psi)


def steps_of(report: Tables, rank: int) -> int:
    """How many measured steps a rank has: the ranks of an observed program may differ in this."""
    steps = report.steps["step"][report.steps["rank"] == rank]
    return max(1, int(steps.isin(facts.measured_steps(report)).sum()))


def backwards(report: Tables, rank: int, rows: pd.DataFrame) -> tuple[float, float]:
    """(a rank's backwards per step, how many of them launch the calls in ``rows``). Those that
    launch calls of unequal bytes count as one: they are of parts of a model or a loss.

    A rank's span ids rise with time, so a call belongs to the backward with the largest id below.
    """
    steps, spans = facts.measured_steps(report), report.spans
    spans = spans[(spans["rank"] == rank) & spans["step"].isin(steps)]
    spans = spans[spans["kind"] == "backward"].sort_values("id")
    calls = rows[(rows["rank"] == rank) & (rows["phase"] == "backward")]
    passes = list(zip(spans["step"], spans["microbatch"], strict=True))
    before = spans["id"].searchsorted(calls["span"], side="left") - 1
    launched: dict[Any, Counter[Any]] = {step: Counter() for step in steps}
    for at, size in zip(before, calls["payload_bytes"], strict=True):
        if at >= 0:
            launched[passes[at][0]][passes[at]] += size
    alike = (sizes.total() / max(sizes.values()) for sizes in launched.values() if +sizes)
    n = steps_of(report, rank)
    return len(set(passes)) / n, sum(whole_number(number) or 1 for number in alike) / n


def trained_bytes(
    report: Tables, rank: int, axis: str, *, op: str = "", trained: bool = True
) -> float:
    """Psi of an axis: bytes of the trained parameters that are sharded along it, or of all trained
    ones if none is; next to FSDP's, those of an all-reduce are the others. Of a parameter sharded
    along other axes too, only the rank's shard on those counts. ``trained=False``: the same of
    frozen parameters. 0 where they are not known. op: the reduction
    """
    own = [p for p in made_of(report, "parameters", rank) if p["trained"] == trained]
    sharded = [p for p in own if axis in p.get("cut", ())]
    others = [p for p in own if p not in sharded] * (op == "all_reduce")
    total = 0.0
    for p in others or sharded or own:
        other_shards = prod(size for name, size in p.get("cut", {}).items() if name != axis)
        total += p["elements"] / max(other_shards, 1) * p["bytes"] / max(p["held"], 1)
    return total


def fully_sharded(report: Tables, rank: int = 0) -> bool:
    """Whether the rank's program has modules of FSDP2, or of FSDP1."""
    return not FSDP.isdisjoint(made_of(report, "modules", rank))


def made_of(report: Tables, what: str, rank: int = 0) -> Any:
    """What the observation found in the rank's program, an entry of `Program.about`. Empty if there
    is none, or if the report is not an observation's.
    """
    return report.meta["observed"][rank].get(what, ()) if "observed" in report.meta else ()


def whole_number(times: float) -> int:
    """The whole number within 2 % of ``times``, or 0 if there is none."""
    near = round(times)
    return near if near and abs(times / near - 1) <= NEAR else 0
