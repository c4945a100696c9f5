"""A sentence on every gap of a comparison, in a learner's words.

Between predicted and replayed lies the error of the device model; between replayed and measured,
what the ranks share. Which of the reasons applies is read off the numbers themselves: ranks against
cores, CPU seconds against wall seconds, what lies outside every span.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paralab.report import metrics
from paralab.theory import ideal
from paralab.theory.traffic import BOOKKEEPING

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables
    from paralab.spec import Plan

NAN = float("nan")
MOVED, WAITED = "bytes moved between tiers per rank", "copies between tiers"
COMPUTED = ("forward", "backward", "weight halves", "bucket copies", "optimizer")


def notes_on(
    table: pd.DataFrame, expect: Tables, report: Tables, difference: str
) -> dict[str, str]:
    """{quantity: sentence}. ``difference`` says how the bytes differ; empty if they do not."""
    moved = _bytes_gap(expect, difference, observed="observed" in report.meta)
    notes = {"bytes sent per rank": moved} | _device_gaps(table)
    if said := notes.get("forward", "") + _sharing(expect, report, _contention(table)):
        notes["forward"] = said
    if expect.world_size > 1:
        notes["communication"] = _communication_gap(table.loc["communication"], expect)
        notes["exposed communication"] = _exposed(table, expect)
    if MOVED in table.index:
        notes[MOVED] = difference or "they agree exactly, copy by copy and rank by rank."
        notes[WAITED] = (
            "time with at least one copy in flight between device, host and files, over links as "
            f"fast as those of cluster {expect.cluster.name!r}."
        )
        if expect.world_size == 1:
            notes["exposed communication"] = "there are no other ranks: the device waits for these."
    if expect.plan.pp > 1:
        alone = ideal.ideal(report).bubble_rate  # of the schedule itself: links cost nothing
        notes["exposed communication"] = _waited(table, expect, alone)
        notes["bubble"] = _bubble_gap(table.loc["bubble"], expect, report, alone)
    notes["step time"] = _step_gap(table, expect, report)
    return notes


def _bytes_gap(expect: Tables, difference: str, *, observed: bool) -> str:
    if observed and difference:
        return f"{difference}. The program that was observed does it in another way."
    if difference:
        return f"{difference}. A run that moves other bytes than its plan says is a bug."
    if expect.world_size == 1:
        return "one rank has no other to send to."
    how = "in the sum of each rank" if observed else "call by call and rank by rank"
    return f"bytes agree exactly, {how}.{_levels(expect)}"


def _computed(table: pd.DataFrame) -> list[str]:
    return [name for name in COMPUTED if name in table.index]


def _contention(table: pd.DataFrame) -> float:
    """How many times longer the wall clock saw the ranks compute than their threads did."""
    work = table.loc[_computed(table)].sum()
    missing = math.isnan(table.loc["forward", "measured"]) or work["replayed"] <= 0
    return NAN if missing else work["measured"] / work["replayed"]


def _device_gaps(table: pd.DataFrame) -> dict[str, str]:
    """Prediction against replay, kind by kind; the reason is given once."""
    notes = {}
    reason = ": its device is three rates, and knows nothing of caches and shapes."
    for name in _computed(table):
        predicted, replayed = table.loc[name, "predicted"], table.loc[name, "replayed"]
        if not (predicted > 0 and replayed > 0):
            continue
        off = predicted / replayed - 1
        if abs(off) <= 0.05:
            notes[name] = "prediction and replay agree within 5 %."
            continue
        side = "more" if off > 0 else "less"
        notes[name] = f"theory says {_percent(off)} {side} than the threads used{reason}"
        reason = "."
    return notes


def _cores(expect: Tables, report: Tables) -> int | None:
    return report.meta.get("cores") or expect.cluster.cores


def _sharing(expect: Tables, report: Tables, contention: float) -> str:
    cores, ranks = _cores(expect, report), report.world_size
    if math.isnan(contention) or contention < 1.1:
        return ""
    if cores and ranks > cores:
        return f" The wall clock shows more because {_sharers(ranks, cores)}."
    return " The wall clock shows more because the cores had other work too."


def _sharers(ranks: int, cores: int) -> str:
    return f"{ranks} ranks share {cores} core{'s' * (cores != 1)}"


def _levels(expect: Tables) -> str:
    """How much of the traffic leaves a node, where some does and some does not."""
    calls = expect.collectives[~expect.collectives["phase"].isin(BOOKKEEPING)]
    sent = calls.groupby("level")["wire_bytes"].sum()
    if not {"intra", "inter"} <= set(sent.index) or not sent.sum():
        return ""
    away = _percent(sent["inter"] / sent.sum())
    return f" {away} of them leave a node, by a slower link: their sum says nothing about time."


def _communication_gap(row: pd.Series, expect: Tables) -> str:
    said = (
        "time with at least one collective in flight; predicted and replayed use the same links, "
        f"those of cluster {expect.cluster.name!r}."
    )
    if row["measured"] > 1.1 * row["replayed"]:
        said += (
            f" The wall clock sees {row['measured'] / row['replayed']:.1f} times as much: there a "
            "call is in flight from its launch, also while a member still computes or waits for a "
            "core."
        )
    return said


def _exposed(table: pd.DataFrame, expect: Tables) -> str:
    waited, flight = table.loc["exposed communication"], table.loc["communication"]
    if not flight["replayed"] > 0:
        return "nothing is in flight."
    hidden = _percent(max(0.0, 1 - waited["replayed"] / flight["replayed"]))
    hides = f"on devices of their own computing hides {hidden} of"
    if expect.plan.tp > 1:
        said = "a layer cannot begin before the messages of the one before it are there: "
        said += f"{hides} them."
        if not expect.plan.tp_overlap:
            said += " With tp_overlap=False nothing of tensor parallelism's is meant to hide."
        elif expect.plan.tp_mode in ("1d", "3d"):
            said += " What can hide is the sum of an input's gradient, behind the weight's."
    elif expect.plan.zero_stage:
        said = f"{hides} it{_zero_waits(expect.plan)}"
    elif expect.plan.grad_sync == "overlapped":
        said = f"{hides} it; the rest is waited for."
    else:
        form = expect.plan.grad_sync
        said = f"{form} gradient sync starts after backward, so nothing hides it: every rank waits."
    if waited["measured"] > 1.1 * waited["replayed"]:
        said += " The measured wait holds waiting for slower ranks too, not only for bytes."
    return said


def _zero_waits(plan: Plan) -> str:
    """What of ZeRO's traffic computing can hide, and what it cannot."""
    if plan.zero_stage < 3:
        return (
            ". Gradients leave while backward goes on; a bucket's new parameters are gathered "
            "after its update, and only the updates of later buckets hide that."
        )
    ahead = f"up to {plan.prefetch} unit{'s' * (plan.prefetch != 1)} ahead of their use"
    gathered = ahead if plan.prefetch else "when they are needed, so nothing hides that"
    return f". Parameters are gathered {gathered}; gradients leave while backward goes on."


def _waited(table: pd.DataFrame, expect: Tables, alone: float) -> str:
    """Of a pipeline: what standing still means there."""
    waited, flight = table.loc["exposed communication"], table.loc["communication"]
    said = "a rank of a pipeline waits for what its neighbour has not computed yet: the bubble."
    if expect.plan.dp > 1:
        what = "parameters and the sum of" if expect.plan.zero_stage else "the sum of"
        said += f" Waiting for {what} gradients is in it too."
    row = table.loc["bubble"]
    if row["replayed"] - alone > row["replayed"] / 2:
        said += " Most of it is the links' doing: each message is waited for."
    elif waited["replayed"] > flight["replayed"]:
        said += " Messages are in flight for less than that, so a faster link would not cure it."
    return said


def _bubble_gap(row: pd.Series, expect: Tables, report: Tables, alone: float) -> str:
    formula = ideal.formula(expect)
    said = f"with free links this schedule and the run's own costs leave {_share(alone)} idle"
    if not math.isnan(formula):
        said += f", with equal stages {_share(formula)} (formula)"
    beyond = row["replayed"] - alone
    links = f"the links add {_share(beyond)}" if beyond >= 0.001 else "the links add nothing"
    said += f"; in the replay {links}."
    off = row["predicted"] - row["replayed"]
    if abs(off) < 0.01:
        said += " Theory and replay agree to one hundredth of device time."
    else:
        said += f" Theory says {_share(abs(off))} {'more' if off > 0 else 'less'}."
    if not math.isnan(row["measured"]) and abs(row["measured"] - row["replayed"]) >= 0.01:
        cores = _cores(expect, report)
        why = "the wall clock also counts what the machine did besides"
        if row["measured"] < row["replayed"]:
            why = "on the wall clock messages took less than the links of the replay say"
        if cores and report.world_size > cores:
            why = f"{_sharers(report.world_size, cores)}, so the wall clock answers who got a core"
        said += f" {why[0].upper()}{why[1:]}: {_share(row['measured'])}."
    return said


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _step_gap(table: pd.DataFrame, expect: Tables, report: Tables) -> str:
    row = table.loc["step time"]
    off = row["predicted"] / row["replayed"] - 1 if row["replayed"] > 0 else NAN
    said = [f"theory is {_percent(off)} {'above' if off > 0 else 'below'} the replay."]
    if math.isnan(off):
        said = ["in the replay a step takes no time."]
    if abs(off) < 0.01:
        said = ["theory and replay agree within 1 %."]
    if not math.isnan(row["measured"]):
        said.append(_pace(row["measured"] / row["replayed"], _cores(expect, report), report))
        carried = beside(report)
        if carried > 0.02 * row["measured"]:
            what = "Copying" if len(report.copies) else "Carrying messages"
            said.append(
                f"{what} is work too: the ranks' other threads used "
                f"{carried * 1e3:.0f} ms of processor per step and rank, which devices of their "
                "own do while they compute."
            )
        outside = _outside(report)
        if outside > 0.01 * row["measured"]:
            said.append(
                f"{_percent(outside / row['measured'])} of the measured step lies outside every "
                "span: reading data, Python between spans."
            )
    return " ".join(said)


def _pace(ratio: float, cores: int | None, report: Tables) -> str:
    """Why the wall clock runs ``ratio`` times slower than the replay."""
    ranks = report.world_size
    slower = f"the wall clock runs {ratio:.1f} times slower than devices of their own would."
    if ratio < 0.9:
        return (
            f"The wall clock is {_percent(1 - ratio)} faster than the replay: messages and "
            "copies took less time than the replay's links say."
        )
    if ratio < 1.1:
        return "The wall clock runs like devices of their own would."
    if report.meta.get("device", "cpu") != "cpu":
        return f"Python launches kernels one by one: {slower}"
    if not cores or ranks <= cores:
        return f"Every rank could have a core, but they had other work too: {slower}"
    said = f"{_sharers(ranks, cores)}: {slower}"
    if ratio > 1.25 * ranks / cores:
        said += (
            f" Sharing explains {ranks / cores:g} of it; the rest is other work on the machine, "
            "and ranks that wait for one that has no core."
        )
    return said


def _outside(report: Tables) -> float:
    """Seconds of a step without any span on the compute lane: mean over ranks, median step."""
    lane = report.spans[report.spans["lane"] == "compute"]
    whole, inside = (
        (table["end"] - table["start"]).groupby(table["step"]).sum()
        for table in (report.steps, lane)
    )
    outside = whole.sub(inside, fill_value=0.0).reindex(metrics.measured_steps(report))
    return float(outside.median()) / report.world_size


def beside(report: Tables) -> float:
    """Processor seconds that a rank's other threads used: mean over ranks, median step."""
    steps = report.steps[report.steps["step"].isin(metrics.measured_steps(report))]
    used = steps.groupby("step")["beside"].mean()
    return float(used.median()) if len(used) else 0.0


def _percent(share: float) -> str:
    return f"{abs(share) * 100:.0f} %"
