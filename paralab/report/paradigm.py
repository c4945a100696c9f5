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

Tensor parallelism sums activations in the forward, and in the backward as many bytes, or several
times as many where the input of a layer has several gradients.
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
# The phases in which gradients are reduced: "data" by the program's own calls, "optimizer" in an
# optimizer's step.
REDUCING = ("backward", "data", "optimizer")
PASSES = ("forward", "backward")
FSDP = {"FSDPModule", "FullyShardedDataParallel"}
NEAR = 0.02  # tolerance for a ratio to be a whole number: FSDP pads its shards
ACTIVATIONS = (
    "sums activations in the forward and their gradients in the backward, as tensor parallelism "
    "does; its bytes follow from the batch, not from the parameters"
)


def describe_axis(report: Tables, calls: pd.DataFrame, axis: str) -> str:
    """Name the paradigm that the collectives on an axis look like, and compare their bytes with its
    closed form.
    """
    rank = int(calls["rank"].min())
    rows = calls[calls["rank"] == rank]
    n, psi = len(rows["ranks"].iloc[0]), trained_bytes(report, rank, axis)
    if n == 1:
        return "a group of one rank sends nothing"
    if not psi:
        return "no trained parameter was seen, so there is nothing to compare with"
    if sums_activations(report, rows, axis):
        return ACTIVATIONS
    # Bytes per step; ratios below are multiples of Ψ.
    sums = rows.groupby(["op", "phase"])[["payload_bytes", "wire_bytes"]].sum()
    payload, wire = (Counter((sums[name] / steps_of(report, rank)).to_dict()) for name in sums)
    reduced = {op: sum(payload[op, phase] for phase in REDUCING) / psi for op in REDUCTIONS}
    op = max(REDUCTIONS, key=reduced.__getitem__)
    again = payload["all_gather", "backward"]
    if not reduced[op]:
        if again and fully_sharded(report, rank):
            return "shards of parameters that the forward has kept, gathered again for the backward"
        return "it looks like none of the known paradigms"
    own, frozen = made_of(report, "parameters", rank), 0.0
    sharded = again or any(p["held"] < p["elements"] for p in own)
    name, phases = "data parallelism, gradients all-reduced", ()
    # In every step, before the forward: FSDP2's ``unshard()``, not the saving of a checkpoint.
    ahead = rows["step"][rows["op"].eq("all_gather") & rows["phase"].eq("data")].nunique()
    unshards = fully_sharded(report, rank) and ahead == steps_of(report, rank)
    if op == "reduce_scatter" and (payload["all_gather", "forward"] or unshards) and sharded:
        name, phases = "sharded parameters (FSDP, ZeRO-3), gathered for the forward, ", PASSES
        phases += ("data",) * unshards
        name += "again for every backward" if again else "and not on this axis for the backward"
        frozen = trained_bytes(report, rank, axis, trained=False)
    elif op == "reduce_scatter":
        name, phases = "gradients reduced to owners (ZeRO-2)", ("forward", "data", "optimizer")
        if any(payload["all_gather", phase] for phase in phases):
            name = "a sharded optimizer (ZeRO-1): gradients reduce-scattered, updated parameters "
            name += "gathered"
    gathers = {("all_gather", phase): payload["all_gather", phase] for phase in phases}
    gathers = {call: size / (psi + frozen) for call, size in gathers.items() if size}
    gathered = sum(gathers.values())
    factor = reduced[op] * (1 + (op == "all_reduce")) + gathered
    counted = {(op, phase) for phase in REDUCING}.union(gathers)  # the calls of the closed form
    owners = rows["peer"][rows["op"] == "broadcast"].nunique()  # one: of buffers, or a first copy
    for update in ["broadcast"] * (owners > 1) + ["all_gather"] * (op == "all_reduce"):
        calls_of_update = {(update, "optimizer")}
        if whole_number(payload[update, "data"] / psi) == 1:  # before the next forward
            calls_of_update.add((update, "data"))
        if (times := sum(payload[call] for call in calls_of_update) / psi) > NEAR:
            verb = update.removeprefix("all_") + "s"
            name += f", with a sharded optimizer (ZeRO-1) that {verb} updated parameters"
            factor, counted = factor + times, counted | calls_of_update
    form = factor * (n - 1) / n * psi
    average = "on average " * ("broadcast" in dict(counted))  # owners of more parameters send more
    text = f"{name}: {factor:.3g} (n−1)/n Ψ = {mb(form)} per rank {average}(n={n}, Ψ={mb(psi)})"
    if not all(map(whole_number, (reduced[op], *gathers.values()))):
        text += "; these are not whole multiples of Ψ: unused or local parameters (experts, say), "
        text += "messages in fewer bits, steps that reduce nothing, and parameters that are kept "
        text += "for the backward send less, and padded shards more"
    if frozen:
        text += f"; in addition, {gathered:.3g} (n−1)/n times {mb(frozen)} of frozen parameters"
        text += ", if these are gathered as often"
    if surplus := sum(size for (_, phase), size in wire.items() if phase == SURPLUS):
        text += f"; gloo's reduce-scatter is an all-reduce and sends {mb(surplus)} more"
    rest = sum(size for call, size in wire.items() if call not in counted) - surplus
    if rest > NEAR * form:
        text += f"; in addition, {mb(rest)} of other traffic on this axis"
    return text


def sums_activations(report: Tables, rows: pd.DataFrame, axis: str) -> bool:
    """Whether the reductions on an axis look like those of tensor parallelism: parameters are
    sharded along it as DTensors, and not by FSDP; or the forwards reduce more than a quarter of
    the bytes that the later phases do, as the input of a layer may have several gradients.
    """
    rank = int(rows["rank"].min())
    cut = any(axis in p["cut"] for p in made_of(report, "parameters", rank))
    if cut and not fully_sharded(report, rank):
        return True
    sums = rows[rows["op"].isin(REDUCTIONS) & (rows["rank"] == rank)]
    in_forward, sizes = sums["phase"] == "forward", sums["payload_bytes"]
    return bool(sizes[in_forward].sum() > sizes[~in_forward].sum() / 4)


def steps_of(report: Tables, rank: int) -> int:
    """How many measured steps a rank has: the ranks of an observed program may differ in this."""
    steps = report.steps["step"][report.steps["rank"] == rank]
    return max(1, int(steps.isin(facts.measured_steps(report)).sum()))


def backwards(report: Tables, rank: int, rows: pd.DataFrame) -> tuple[float, float]:
    """(a rank's backwards per step, how many of them launch the calls in ``rows``).

    A rank's span ids rise with time, so a call belongs to the backward with the largest id below.
    """
    spans = report.spans[report.spans["rank"].eq(rank) & report.spans["kind"].eq("backward")]
    spans = spans[spans["step"].isin(facts.measured_steps(report))].sort_values("id")
    passes = list(zip(spans["step"], spans["microbatch"], strict=True))
    calls = rows["span"][(rows["rank"] == rank) & (rows["phase"] == "backward")]
    launched = {passes[at] for at in spans["id"].searchsorted(calls) - 1 if at >= 0}
    return len(set(passes)) / (n := steps_of(report, rank)), len(launched) / n


def trained_bytes(report: Tables, rank: int, axis: str, *, trained: bool = True) -> float:
    """Psi of an axis: bytes of the trained parameters that are sharded along it, or of all trained
    ones if none is. Of a parameter sharded along other axes too, only the rank's shard on those
    counts. ``trained=False``: the same of frozen parameters. 0 where they are not known.
    """
    own = [p for p in made_of(report, "parameters", rank) if p["trained"] == trained]
    total = 0.0
    for p in [p for p in own if axis in p["cut"]] or own:
        other_shards = prod(size for name, size in p["cut"].items() if name != axis)
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
