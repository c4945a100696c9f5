"""The mesh: every rank a cell, every node a frame, and the groups of one rank in colour.

    numpy.arange(world_size).reshape(pp, dp, tp)

A row is a pipeline rank, a block in it a data-parallel index, and the cells of a block are tensor
parallel to each other: neighbours in rank are side by side (PTD-P, Narayanan+ 2021,
arXiv:2104.04473, sec. 3.2). So the tp group of a rank is its block, its dp group the cells of the
row at the same place in each block, and its pipeline the column. Ranks fill one node after the
other: the frames show which groups stay inside a node and which have to leave it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paralab.checks import instance, whole
from paralab.spec import Cluster, Plan
from paralab.spec.cluster import check_devices
from paralab.theory.traffic import level
from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.marks.boxes import rows_axis
from paralab.view.marks.curves import curve
from paralab.view.mesh_grid import NARROWEST, ROW_GAP, Grid, Group

ROW, LEGEND_ROW, HEAD = 34, 20, 84  # pixels
TP_SENDS = {  # in every layer, by tp_mode
    "1d": "all-reduce of activations",
    "2d": "broadcast and reduce of blocks",
    "2.5d": "broadcast and reduce of blocks",
    "3d": "all-gather and reduce-scatter of blocks",
}


def groups(plan: Plan, cluster: Cluster | None = None, rank: int = 0) -> list[Group]:
    """The groups of ``rank`` with more than one member, from the innermost axis outwards."""
    inside = TP_SENDS[plan.tp_mode]
    if plan.sequence_parallel:
        inside = "all-gather and reduce-scatter of activations"
    axes, result = {"tp": f"{inside} in every layer", **_dp_sends(plan)}, []
    axes["pp"] = "activations forward, their gradients back"
    for axis, sends in axes.items():
        ranks = plan.ranks(axis, rank)
        if len(ranks) > 1:
            crosses = "" if cluster is None else level(ranks, cluster.node_of)
            result.append(Group(axis, ranks, sends, crosses))
    return result


def _dp_sends(plan: Plan) -> dict[str, str]:
    """{axis: what its group sends} of data parallelism: with HSDP and with hpZ one group more."""
    if not plan.zero_stage:
        return {"dp": f"all-reduce of gradients, {theme.text(plan.grad_sync_name)}"}
    sharded, near = "reduce-scatter of gradients, all-gather of parameters", {}
    if plan.zero_stage == 3:
        sharded += f" for every {'forward' if plan.secondary_shard else 'use'}"
    if plan.secondary_shard:
        near = {"secondary": "all-gather of parameters for every backward"}
    sharded += f" (ZeRO-{plan.zero_stage})"
    if plan.shard_degree == plan.dp:
        return near | {"dp": sharded}
    return near | {"shard": sharded, "replica": "all-reduce of the gradients' shards"}


def mesh(plan: Plan, cluster: Cluster | None = None, *, rank: int = 0) -> Chart:
    """The ranks of ``plan`` as a grid, the groups of ``rank`` in the colours of their
    axes, with what each group sends, and the nodes of ``cluster``, if it is given, as frames.

    Of more than ten pipeline ranks, or two dozen ranks in a row, the neighbours of ``rank``, the
    first and the last are drawn; the table has all. Raises ValueError if there is no such rank, or
    if the cluster has too few devices.
    """
    world = instance("plan", plan, Plan, "a pl.Plan(...)").world_size
    check_devices(cluster, world)
    rank = whole("rank", rank, at_least=0, at_most=world - 1)
    own_groups = groups(plan, cluster, rank)
    grid = Grid(plan, rank)
    sizes = f"pp={plan.pp} x dp={plan.dp} x tp={plan.tp}"
    below = sizes + ", ranks of a tp group are side by side" * (plan.tp > 1)
    names = {"rank": f"rank {rank}"} | {group.axis: group.name for group in own_groups}
    width = theme.frame().width - 3 * theme.SIDE
    names = {key: theme.broken(text, width, 12) for key, text in names.items()}
    lines = sum(1 + text.count("<br>") for text in names.values())  # of the legend
    middles, blocks = zip(*grid.blocks, strict=True)
    across = {"tickvals": middles, "ticktext": blocks, "showticklabels": plan.dp > 1}
    across |= {"side": "top", "tickangle": 0, "showgrid": False}
    fixed = {"showline": False, "fixedrange": True}
    ticks = [(y + 0.5, f"{row_name(plan, index)} ") for index, y in grid.y.items()]
    fig = figure(
        _finding(plan, cluster, rank, own_groups),
        " · ".join([below, *grid.left_out]),
        height=int(HEAD + 40 + ROW * max(3.0, grid.bottom) + LEGEND_ROW * lines),
        margin={"t": HEAD, "b": 14 + LEGEND_ROW * lines, "l": 10, "r": 16},
        legend={"orientation": "v", "yref": "container", "y": 0, "xanchor": "left"}
        | dict.fromkeys(("itemclick", "itemdoubleclick"), False),
        xaxis={**across, **fixed, "range": [-0.15, max(grid.right, NARROWEST) + 0.15]},
        yaxis=rows_axis(ticks, grid.bottom + 0.1, -ROW_GAP - 0.1) | fixed,
    )
    look = theme.look()
    colours = {"other": look.grid, "rank": look.series[3]}
    colours |= {group.axis: theme.axis_colour(group.axis) for group in own_groups}
    square = {"mode": "markers", "symbol": "square", "size": 12}
    keys = [
        curve("", [(None, None)], ink=colours[name], **square) | {"name": text}
        for name, text in names.items()
    ]
    notes, frames = grid.nodes(cluster)
    axis_of = {r: group.axis for group in reversed(own_groups) for r in group.ranks}
    axis_of[rank] = "rank"
    fig.draw([grid.cells(colours, axis_of, cluster), *keys], [*notes, *grid.dots()], frames)
    return fig.tabled(
        lambda: (
            "rank pp dp tp node group",  # node is -1 without a cluster
            [
                (r, *plan.place(r), cluster.node_of(r) if cluster else -1, axis_of.get(r, ""))
                for r in range(world)
            ],
        ),
    )


def row_name(plan: Plan, index: int) -> str:
    """ "stage 2", or "stages 2, 6" for a pipeline rank with several chunks."""
    stages = range(index, plan.stages, plan.pp)
    if len(stages) == 1:
        return f"stage {index}"
    shown = ", ".join(map(str, stages)) if len(stages) < 4 else f"{index}, {index + plan.pp}, ..."
    return f"stages {shown}"


def _finding(plan: Plan, cluster: Cluster | None, rank: int, groups: Sequence[Group]) -> str:
    """How many ranks the rank shares groups with, and which groups leave their node."""
    world, others = plan.world_size, {r for group in groups for r in group.ranks} - {rank}
    if not others:
        return "There is only one rank, so it shares a group with no other"
    text = f"Rank {rank} shares groups with {len(others):,} of the {world - 1:,} other ranks"
    if len(others) == world - 1:
        text = f"Rank {rank} shares a group with every other rank"
    between = [group.axis for group in groups if group.level == "inter"]
    if cluster is None:
        return text
    if not between:
        return f"{text}, all inside its node"
    inside = [group.axis for group in groups if group.level == "intra"]
    text += f": {' and '.join(between)} between nodes"
    return text + f", {' and '.join(inside)} inside one" * bool(inside)
