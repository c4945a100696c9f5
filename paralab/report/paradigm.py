"""Which paradigm the calls of a group look like, with the closed form of its bytes.

Per rank and step, with n ranks in the group and Psi bytes of trained parameters, of which other
axes have taken their share:

    data parallelism        all-reduce      2 (n-1)/n Psi, for every backward that is reduced
    ZeRO-1                  broadcast         (n-1)/n Psi on average, beside the all-reduce, or an
                                              all-gather; or a reduce-scatter, and an all-gather
                                              of as many
    sharded parameters      all-gather        (n-1)/n Psi, for every forward; again for every
                                              backward if the parameters are resharded; of frozen
                                              parameters too
                            reduce-scatter    (n-1)/n Psi, for every backward that is reduced

Tensor parallelism sums activations: what a forward sums, its backward sums as much of, or several
times as much, where a layer's input has several gradients. Local SGD sums in some steps only.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

from paralab.report import about
from paralab.report.tables import Tables
from paralab.theory.traffic import SURPLUS

if TYPE_CHECKING:
    import pandas as pd

REDUCTIONS = ("all_reduce", "reduce_scatter")
LATE = ("backward", "data", "optimizer")  # of gradients: by hand, or in a closure
NEAR = 0.02  # a ratio this near to a whole number is it: FSDP pads its shards
ACTIVATIONS = (
    "sums activations in the forward and their gradients in the backward, as tensor parallelism "
    "does; its bytes follow from the batch, not from the parameters"
)


def form(report: Tables, calls: pd.DataFrame, axis: str) -> str:
    """What the collectives on an axis look like, in words. calls: those of all axes"""
    rank = int(calls["rank"][calls["axis"] == axis].min())
    calls = calls[calls["rank"] == rank]
    rows, steps = calls[calls["axis"] == axis], steps_of(report, rank)
    n, psi = len(rows["ranks"].iloc[0]), trained_bytes(report, rank, axis)
    if n == 1:
        return "a group of one rank sends nothing"
    if in_parts(report, rank):
        return "FullyShardedDataParallel shows a rank's parts of parameters, so Ψ is not known"
    if not psi:
        return "no trained parameter was seen, so there is nothing to compare with"
    if sums_activations(report, rows, axis):
        return ACTIVATIONS
    late = rows[rows["op"].isin(REDUCTIONS) & rows["phase"].isin(LATE)]
    local = 0 < late["step"].nunique() < steps and not late["phase"].eq("backward").any()
    if local:
        when = f"{late['step'].nunique()} of {steps} steps"
        rows, steps = rows[rows["step"].isin(late["step"])], late["step"].nunique()
    sent = Counter((rows.groupby(["op", "phase"])["payload_bytes"].sum() / steps).to_dict())
    frozen = trained_bytes(report, rank, axis, trained=False)
    reduced, scattered = (sum(sent[op, phase] for phase in LATE) / psi for op in REDUCTIONS)
    gathers = {phase: sent["all_gather", phase] / (psi + frozen) for phase in ("forward", *LATE)}
    sharded = "FSDPModule" in made_of(report, "modules", rank)
    if not (reduced or scattered):
        if sharded and gathers["backward"]:
            return "parts of parameters that a forward has kept, gathered again for its backward"
        return "no paradigm that is known here"
    gathered, factor, each_gather = 0.0, scattered, ()
    if reduced >= scattered:
        name, factor = "data parallelism, gradients all-reduced", 2 * reduced
        if local:
            name = f"sums outside the backward in {when}, as local SGD averages parameters; then"
        for op, does in (("broadcast", "broadcasts"), ("all_gather", "gathers")):
            if (spread := sent[op, "optimizer"] / psi) > NEAR:
                name += f", with a sharded optimizer (ZeRO-1) that {does} updated parameters"
                factor += spread
    elif before := gathers["forward"] + sharded * gathers["data"]:  # ``model.unshard()``
        name = "sharded parameters (FSDP, ZeRO-3), gathered for the forward, "
        name += _kept(report, calls, axis)
        gathered, each_gather = before + gathers["backward"], (before, gathers["backward"])
    elif gathered := gathers["data"] + gathers["optimizer"]:
        name = "a sharded optimizer (ZeRO-1): gradients reduce-scattered, updated parameters "
        name += "gathered"
    else:
        name = "sharded gradients (ZeRO-2)"
    factor, share = factor + gathered, (n - 1) / n
    said = f"{name}: {factor:.3g} (n−1)/n Ψ = {mb(factor * share * psi)} per rank "
    said += f"(n={n}, Ψ={mb(psi)})"
    m, each = backwards(report, rank, rows[rows["op"].isin(REDUCTIONS)])
    times = max(reduced, scattered)
    if not whole_number(times) or (each and not whole_number(times / each)):
        said += "; not a whole number of times Ψ"
        said += f" for each of {each:.3g} backwards" * (each > 1)
        said += ": parameters that take no part, messages in fewer bits, or shards in place of "
        said += "whole gradients send less"
    if m and any(times and not whole_number(times / m) for times in each_gather):
        said += "; what is gathered for a forward or a backward is not Ψ: it has fewer bits, or "
        said += "some parameters are kept"
    if frozen and gathered:
        said += f"; {gathered:.3g} (n−1)/n of {mb(frozen)} of frozen parameters on top"
    extra = rows["wire_bytes"][rows["phase"] == SURPLUS].sum() / steps
    if extra:
        said += f"; gloo's reduce-scatter is an all-reduce and sends {mb(extra)} more"
    beside = rows["wire_bytes"].sum() / steps - extra
    beside -= share * (factor * psi + gathered * frozen)
    if beside > NEAR * factor * share * psi:
        said += f"; beside that, {mb(beside)} of other things on this axis"
    return said


def _kept(report: Tables, calls: pd.DataFrame, axis: str) -> str:
    """What becomes of parameters that were gathered on an axis behind a forward. FSDP2 may gather
    them again within smaller groups, on an axis where nothing is reduced and nothing cut.
    """
    again = calls[calls["op"].eq("all_gather") & calls["phase"].eq("backward")]
    own = made_of(report, "parameters", int(calls["rank"].min()))
    others = {name for p in own for name in p.get("cut", ())}.union(
        calls["axis"][calls["op"].isin(REDUCTIONS)]
    )
    again = set(again["axis"]) - (others - {axis})
    if not again:
        return "kept for backward"
    return f"again{' in smaller groups' * (axis not in again)} for every backward"


def sums_activations(report: Tables, rows: pd.DataFrame, axis: str) -> bool:
    """Whether an axis is one of tensor parallelism: DTensor cuts parameters along it, and no FSDP
    does; or what its forwards reduce is no small thing beside its backwards; or these reduce
    nothing of other sizes, and not the gradients of all parameters once.
    """
    rank = int(rows["rank"].min())
    cut = any(axis in p.get("cut", ()) for p in made_of(report, "parameters", rank))
    if cut and "FSDPModule" not in made_of(report, "modules", rank):
        return True
    sums = rows[rows["op"].isin(REDUCTIONS) & (rows["rank"] == rank)]
    ahead = sums["phase"] == "forward"
    forward, behind = sums["payload_bytes"][ahead], sums["payload_bytes"][~ahead]
    if forward.sum() > behind.sum() / 2:
        return True
    if behind.empty or not behind.isin(forward).all():
        return False
    _, each = backwards(report, rank, sums)
    psi = trained_bytes(report, rank, axis) * steps_of(report, rank) * (each or 1)
    return not psi or whole_number(behind.sum() / psi) != 1


def steps_of(report: Tables, rank: int) -> int:
    """The steps that count, of a rank: ranks may have different numbers of them."""
    steps = report.steps["step"][report.steps["rank"] == rank]
    return max(1, int(steps.isin(about.measured_steps(report)).sum()))


def backwards(report: Tables, rank: int, rows: pd.DataFrame) -> tuple[float, float]:
    """A rank's backwards per step, and how many of them launch one of these calls. Ids of spans are
    in the order in which a rank wrote.
    """
    steps, spans = about.measured_steps(report), report.spans
    spans = spans[(spans["rank"] == rank) & spans["step"].isin(steps)]
    spans = spans[spans["kind"] == "backward"].sort_values("id")
    calls = rows["span"][(rows["rank"] == rank) & (rows["phase"] == "backward")]
    which = list(zip(spans["step"], spans["microbatch"], strict=True))
    before = spans["id"].searchsorted(calls, side="left") - 1
    reduced, n = {which[at] for at in before if at >= 0}, steps_of(report, rank)
    return len(set(which)) / n, len(reduced) / n


def trained_bytes(report: Tables, rank: int, axis: str, *, trained: bool = True) -> float:
    """Psi of an axis: bytes of the trained parameters that are cut along it, or of all trained ones
    if none is; without what other axes have cut away. Not ``trained``: of frozen ones. 0 where they
    are not known.
    """
    if in_parts(report, rank):
        return 0.0
    own = [p for p in made_of(report, "parameters", rank) if p["trained"] == trained]
    along = [p for p in own if axis in p.get("cut", ())]
    total = 0.0
    for p in along or own:
        elsewhere = prod(size for name, size in p.get("cut", {}).items() if name != axis)
        total += p["elements"] / elsewhere * p["bytes"] / max(p["held"], 1)
    return total


def in_parts(report: Tables, rank: int = 0) -> bool:
    """Whether the program is FSDP1's: it shows parts of parameters, of sizes that are not seen."""
    return "FullyShardedDataParallel" in made_of(report, "modules", rank)


def made_of(report: Tables, what: str, rank: int = 0) -> Any:
    """What the observation found in the rank's program: "modules", "parameters", whether an
    optimizer evaluates "closures", whether other "threads" train, whether messages leave in
    "batches", whether calls are waited for "aside", on other streams, whether it has CUDA "graphs",
    whether it "compiles".
    """
    return report.meta["observed"][rank].get(what, ()) if "observed" in report.meta else ()


def any_made_of(report: Tables, what: str) -> bool:
    """Whether the program of any rank is."""
    return any(found.get(what) for found in report.meta.get("observed", ()))


def whole_number(times: float) -> int:
    """The whole number that is near, or 0."""
    near = round(times)
    return near if near and abs(times / near - 1) <= NEAR else 0


def mb(size: float) -> str:
    return f"{size / 1e6:,.3g} MB" if size >= 1e5 else f"{size:,.0f} B"
