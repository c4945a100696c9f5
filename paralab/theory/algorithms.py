"""Which algorithm every call of a report takes on its cluster, and what that costs.

Ring or tree is not recorded: over NCCL the library chooses, and a prediction takes what is quicker
by alpha and bandwidth (spec/links.py). This is that choice, row by row, with what it was made by.
"""

from __future__ import annotations

from collections import Counter

import pandas as pd

from paralab.checks import illegal
from paralab.report.about import in_outline, own_calls, reach
from paralab.report.tables import Tables
from paralab.spec.links import Reach
from paralab.theory.traffic import most_sent

COLUMNS = ["op", "axis", "members", "nodes", "near", "payload_bytes", "calls", "algorithm"]
COLUMNS += ["latency_s", "moving_s", "otherwise_s"]


def algorithms(report: Tables) -> pd.DataFrame:
    """One row per kind of call: op, axis, where its group is, payload, and how it is done.

    members          ranks of the group
    nodes, near      nodes that the group is on, and members on one of them
    calls            of all ranks and steps
    algorithm        "ring", "tree", "pairwise" or "direct"
    latency_s, moving_s   seconds per call: alpha, once per message that comes after another; and
                     bytes over bandwidth
    otherwise_s      seconds by the other algorithm, where there is a choice

    Raises ValueError for a report in outline, whose calls are summed up, or without a cluster.
    """
    if report.cluster is None:
        raise illegal("cluster", None, "the report has none", "a prediction, or report.replay()")
    if in_outline(report):
        why = "an outline has its calls summed up"
        raise illegal("detail", "actions", why, "pl.predict(..., detail='calls')")
    cluster, calls = report.cluster, own_calls(report)
    count: Counter[tuple[str, str, Reach, int]] = Counter()
    for row in calls[calls["op"] != "recv"].itertuples(index=False):
        where = reach(report, row.op, row.rank, row.peer, row.ranks)
        if where.members > 1:
            count[row.op, row.axis, where, row.payload_bytes] += 1
    rows = []
    for (op, axis, where, payload), number in count.items():
        sent, ways = most_sent(op, payload, where.members), cluster.ways(op, where)
        name, seconds = cluster.call(op, sent, where)
        others = [way.seconds(sent) for other, way in ways.items() if other != name]
        latency = ways[name].latency
        group = op, axis, where.members, where.nodes, where.near
        times = latency, seconds - latency, min(others, default=None)
        rows.append((*group, payload, number, name, *times))
    return pd.DataFrame(rows, columns=COLUMNS)
