"""The algorithm of every collective of a report on its cluster, with the seconds that decided it.

No run records whether a collective was a ring or a tree: NCCL chooses by itself, and a prediction
takes the faster one by alpha and bandwidth (spec/links.py).
"""

from __future__ import annotations

from collections import Counter

import pandas as pd

from paralab.checks import illegal
from paralab.report.facts import in_outline, own_calls, reach
from paralab.report.tables import Tables
from paralab.theory.traffic import most_sent

COLUMNS = ["op", "axis", "members", "nodes", "near", "payload_bytes", "calls", "algorithm"]
COLUMNS += ["latency_s", "moving_s", "otherwise_s"]


def algorithms(report: Tables) -> pd.DataFrame:
    """One row per kind of call: its operation, axis, group, payload, algorithm and seconds.

    members          ranks of the group
    nodes, near      nodes that the group spans, and members on the node with fewest of them
    calls            number of such calls by all ranks in all steps
    algorithm        "ring", "tree", "pairwise" or "direct"
    latency_s, moving_s   seconds per call: alpha, once for each message that has to come after
                     another one; and bytes over bandwidth
    otherwise_s      seconds by the other algorithm, where there is a choice

    Raises ValueError for a report in outline, which has only sums of calls, or without a cluster.
    """
    if report.cluster is None:
        legal = "a prediction, or a replay: report.replay(cluster)"
        raise illegal("cluster", None, "the report has no cluster", legal)
    if in_outline(report):
        why = "in an outline, calls are summed up"
        raise illegal("detail", "actions", why, "pl.predict(..., detail='calls')")
    cluster, calls = report.cluster, own_calls(report)
    count = Counter()
    for row in calls[calls["op"] != "recv"].itertuples(index=False):
        group = reach(report, row.op, row.rank, row.peer, row.ranks)
        if group.members > 1:
            count[row.op, row.axis, group, row.payload_bytes] += 1
    rows = []
    for (op, axis, group, payload), number in count.items():
        sent, ways = most_sent(op, payload, group.members), cluster.ways(op, group)
        seconds = {name: way.seconds(sent) for name, way in ways.items()}
        name = min(seconds, key=seconds.__getitem__)
        took, latency = seconds.pop(name), ways[name].latency
        times = latency, took - latency, min(seconds.values(), default=None)
        kind = op, axis, group.members, group.nodes, group.near
        rows.append((*kind, payload, number, name, *times))
    return pd.DataFrame(rows, columns=COLUMNS)
