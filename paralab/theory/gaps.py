"""Notes on a comparison: sentences for a learner on the gap in each row.

The note of a row says what its quantity means and how far its three columns are apart. The reasons
for gaps are the same for all rows of time, so only the note of the step time gives them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paralab.checks import count_of
from paralab.report import facts, metrics
from paralab.report.tables import Tables
from paralab.spec import Plan
from paralab.theory import ideal
from paralab.view.theme import in_seconds, listed, percent

if TYPE_CHECKING:
    import pandas as pd

MOVED, WAITED = "bytes moved between tiers per rank", "copies between tiers"
EXPOSED_COPIES = "exposed copies"
COMPUTED = ("forward", "backward", "weight halves", "bucket copies", "optimizer")
LATE = {"naive": "nothing hides it", "bucketed": "only updates of earlier buckets hide any of it"}
NEAR = 0.05  # relative gaps below this get no explanation


def notes_on(
    table: pd.DataFrame, expect: Tables, replayed: Tables, report: Tables, difference: str
) -> dict[str, str]:
    """{quantity: sentences} for the rows of ``table``, the comparison.

    expect, replayed, report  the predicted, replayed and measured report
    difference                how the bytes differ, as text; "" if they do not
    """
    means = {
        "bytes sent per rank": _bytes(expect, difference, observed="observed" in report.meta),
        MOVED: difference or "The bytes agree exactly, copy by copy and rank by rank.",
        WAITED: "This is the time with at least one copy in flight between device, host and files.",
        "communication": (
            "This is the time with at least one collective in flight. The wall clock counts a call "
            "from its launch, even while a rank of its group still computes or waits for a core."
        )
        * (expect.world_size > 1),
        "exposed communication": _exposed(expect, replayed),
        EXPOSED_COPIES: (
            "The device waits for copies between tiers, and for the host's work on what is copied."
        ),
        "bubble": _bubble(table, expect, report) if "bubble" in table.index else "",
        "step time": " ".join(_reasons(table, expect, report)),
    }
    notes = {}
    for name, row in table.iterrows():
        sentences = [_distances(row)] * (row["unit"] == "s") + [means.get(name, "")]
        if any(sentences):
            notes[name] = " ".join(filter(None, sentences))
    notes.setdefault("step time", "The columns agree.")
    return notes


def _distances(row: pd.Series) -> str:
    """How far theory and the wall clock are from the replay; "" if they are close to it."""
    predicted, replayed, measured = row["predicted"], row["replayed"], row["measured"]
    if not replayed > 0:
        return "In the replay this takes no time." * (predicted > 0 or measured > 0)
    sentences, off, times = [], predicted / replayed - 1, measured / replayed
    if abs(off) > NEAR:
        sentences = [f"Theory is {percent(abs(off))} {'above' if off > 0 else 'below'} the replay."]
    if times > 1.1:
        sentences.append(f"The wall clock shows {times:.1f} times as much as the replay.")
    elif times < 0.9:
        sentences.append(f"The wall clock shows {percent(1 - times)} less than the replay.")
    return " ".join(sentences)


def _reasons(table: pd.DataFrame, expect: Tables, report: Tables) -> Iterator[str]:
    """The causes of the gaps of the whole table, each if the table's numbers show it."""
    work = table.loc[[name for name in COMPUTED if name in table.index]].sum()
    if warm_up := facts.measured_steps(report) == [0]:
        yield (
            "The run has no step but its warm-up, in which ranks also allocate and sample memory; "
            "with steps=2 or more it is left out."
        )
    elif abs(work["predicted"] - work["replayed"]) > NEAR * work["replayed"]:
        yield "The prediction describes a device by a few rates, and does not model caches."
    step = table.loc["step time"]
    ranks, cores = facts.shared_cores(report, expect.cluster.cores)
    theirs, modelled = (facts.machines(each) for each in (report, expect))
    if len(theirs) > len(modelled):
        shape = f"nodes={len(theirs)}, devices_per_node={max(theirs.values())}"
        calibrate = ", as torchrun … -m paralab doctor --calibrate measures it"
        yield (
            f"The run was on {len(theirs)} nodes, prediction and replay are on {len(modelled)}: "
            f"predict for cluster.replace({shape}), whose inter is the link between the nodes"
            f"{calibrate * (facts.device_of(report) == 'cpu')}."
        )
    if step["measured"] < 0.9 * step["replayed"]:
        yield "Messages and copies took less time than the links of the replay would need."
    elif step["measured"] > 1.1 * step["replayed"] and not warm_up:
        if facts.device_of(report) == "cuda":
            yield "Python launches kernels one by one, and the device is idle in between."
        elif cores:
            yield (
                f"{ranks} ranks share {count_of(cores, 'core')}, which explains a factor of "
                f"{ranks / cores:g}; any more comes from other work on the machine, and from ranks "
                "that wait for a rank without a core."
            )
        elif len(theirs) <= len(modelled):
            yield "There is a core for every rank, but the cores had other work too."
        if 1 < len(theirs) <= len(modelled):
            yield "Links between nodes that are slower than stated have the same effect."
    carries = len(report.copies) or expect.world_size > 1
    if carries and (by_threads := other_threads(report)) > 0.02 * step["measured"]:
        yield (
            f"{'Copying' if len(report.copies) else 'Carrying messages'} is work too: the other "
            f"threads of a rank used {in_seconds(by_threads)} of CPU time per step. Ranks with "
            "devices of their own would compute meanwhile."
        )
    if (outside := _outside(report)) > 0.01 * step["measured"]:
        yield (
            f"{percent(outside / step['measured'])} of the measured step lies outside every span: "
            "it goes into reading data, and into Python between spans."
        )


def _bytes(expect: Tables, difference: str, *, observed: bool) -> str:
    if difference:
        other = "The program that was observed communicates in another way."
        bug = "A run that moves other bytes than its plan says is a bug."
        return f"{difference}. {other if observed else bug}"
    if expect.world_size == 1:
        return "A single rank has no other rank to send to."
    how = "summed over the calls of each rank" if observed else "call by call and rank by rank"
    return f"The bytes agree exactly, {how}."


def _exposed(expect: Tables, replayed: Tables) -> str:
    """What a device waits for, and how much of the communication is hidden."""
    plan, shares = expect.plan, metrics.typical_shares(replayed)
    if plan.pp > 1:
        others = ["messages of tensor parallelism"] * (plan.tp > 1)
        others += ["gathered parameters"] * (plan.zero_stage > 0 and plan.dp > 1)
        whose = "the" if plan.dp > 1 else "a tied embedding's"
        others += [f"the sum of {whose} gradients"] * (plan.dp > 1 or expect.model.tied)
        note = "A rank of a pipeline waits for its neighbour to compute: this is the bubble."
        return f"{note} It waits for {listed(others)} too." if others else note
    if expect.world_size == 1:
        return ""
    if not shares["communication"] > 0:
        return "No communication is in flight."
    hidden = percent(shares["hidden"] / shares["communication"])
    return f"With a device per rank, computation hides {hidden} of the communication{_hides(plan)}"


def _hides(plan: Plan) -> str:
    """The end of the sentence on hidden communication: what the plan overlaps it with."""
    if plan.tp > 1:
        return ". A layer cannot begin before the messages of the previous layer have arrived."
    if plan.zero_stage == 3:
        ahead = f"up to {count_of(plan.prefetch, 'unit')} ahead of their use"
        gathered = ahead if plan.prefetch else "when they are needed, so nothing hides that"
        return f". Parameters are gathered {gathered}; gradients are reduced during the backward."
    if plan.zero_stage:
        return (
            ". Gradients are reduced during the backward; a bucket's new parameters are gathered "
            "after its update, and only the updates of later buckets hide that."
        )
    if plan.grad_sync not in LATE:  # "overlapped", or a pass of the user's, which may overlap
        return "; ranks wait for the rest."
    late = f"{plan.grad_sync} gradient sync starts after the backward"
    return f": {late}, so {LATE[plan.grad_sync]}."


def _bubble(table: pd.DataFrame, expect: Tables, report: Tables) -> str:
    """The share of the bubble that the schedule causes, and the share that links cause."""
    alone, formula = ideal.ideal(report).bubble_rate, ideal.formula(expect)
    note = f"If links took no time, this schedule would leave {percent(alone, 1)} idle "
    note += "at the costs of the run"
    if not math.isnan(formula):
        note += f", and {percent(formula, 1)} if all stages cost the same (formula)"
    links = table.loc["bubble", "replayed"] - alone
    more = percent(links, 1) if links >= 1e-3 else "nothing"
    return f"{note}; in the replay the links add {more}."


def _outside(report: Tables) -> float:
    """Seconds of a step without any span on the compute lane: mean over ranks, median step."""
    lane = report.spans[report.spans["lane"] == "compute"]
    of_steps, of_spans = (
        (table["end"] - table["start"]).groupby(table["step"]).sum()
        for table in (report.steps, lane)
    )
    ranks = report.steps.groupby("step")["rank"].nunique()
    outside = (of_steps.sub(of_spans, fill_value=0.0) / ranks).reindex(facts.measured_steps(report))
    return float(outside.median())


def other_threads(report: Tables) -> float:
    """CPU seconds of a rank's threads other than its own: mean over ranks, median step."""
    steps = report.steps[report.steps["step"].isin(facts.measured_steps(report))]
    used = steps.groupby("step")["beside"].mean()
    return float(used.median()) if len(used) else 0.0
