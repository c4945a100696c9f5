"""The mesh: every rank where Megatron deals it, nodes around them, and groups as they talk."""

from itertools import pairwise

import numpy as np
import pytest

import paralab as pl
import stated
from paralab.view import mesh, rank_mesh, theme
from refusals import refuses

MODEL = pl.ModelSpec(layers=4, hidden=64, heads=8, seq_len=16)
SAID = {"all-reduce": "all_reduce", "all-gather": "all_gather", "broadcast": "broadcast",
        "reduce-scatter": "reduce_scatter", "and reduce of": "reduce"}  # fmt: skip
PLANS = [
    {"dp": 4}, {"dp": 2, "zero_stage": 1}, {"dp": 4, "zero_stage": 2}, {"dp": 2, "zero_stage": 3},
    {"dp": 4, "zero_stage": 2, "shard": 2}, {"dp": 8, "zero_stage": 3, "secondary_shard": 4},
    {"tp": 4}, {"tp": 2, "sequence_parallel": True},
    {"tp": 4, "tp_mode": "2d", "microbatch_size": 4}, {"pp": 4},
    {"tp": 8, "tp_mode": "2.5d", "microbatch_size": 8},
    {"tp": 8, "tp_mode": "3d", "microbatch_size": 8}, {"dp": 2, "tp": 2, "pp": 2},
]  # fmt: skip


def cluster(nodes: int, each: int = 8) -> pl.Cluster:
    return stated.cluster(nodes=nodes, devices_per_node=each)


def cells(chart) -> dict[int, tuple[float, float, str]]:
    """{rank: middle of its cell, and its colour}"""
    (heat,) = (trace for trace in chart.data if trace.type == "heatmap")
    scale = {round(place * heat.zmax): colour for place, colour in heat.colorscale}
    x, y = ([sum(pair) / 2 for pair in pairwise(at)] for at in (heat.x, heat.y))
    return {int(text): (x[j], y[i], scale[heat.z[i][j]])
            for i, line in enumerate(heat.text) for j, text in enumerate(line) if text}  # fmt: skip


@pytest.mark.parametrize("plan", [pl.Plan(), pl.Plan(dp=2, tp=2, pp=2), pl.Plan(dp=4, tp=4, pp=4),
                                  pl.Plan(dp=3, tp=2, pp=4)], ids=str)  # fmt: skip
def test_cells_lie_as_megatron_deals_the_ranks(plan):
    where = cells(mesh(plan))
    grid = np.arange(plan.world_size).reshape(plan.pp, plan.dp, plan.tp)
    assert sorted(where) == grid.ravel().tolist()
    for line in grid.reshape(plan.pp, -1):  # a row per stage, in it all from left to right
        assert len({where[r][1] for r in line}) == 1
        assert sorted(line, key=lambda r: where[r][0]) == line.tolist()
    for column in grid.reshape(plan.pp, -1).T:  # stages one below the other
        assert len({where[r][0] for r in column}) == 1
        assert sorted(column, key=lambda r: where[r][1]) == column.tolist()


@pytest.mark.parametrize("rank", [0, 5, 63])
def test_a_ranks_groups_have_the_colours_of_their_axes(rank):
    plan = pl.Plan(dp=4, tp=4, pp=4)
    chart = mesh(plan, cluster(8), rank=rank)
    seen = {r: colour for r, (*_, colour) in cells(chart).items()}
    legend = [t.name for t in chart.data if t.type == "scatter"]
    for axis in ("tp", "dp", "pp"):
        mine = {r for r, colour in seen.items() if colour == theme.axis_colour(axis)}
        assert mine == set(plan.ranks(axis, rank)) - {rank}
        assert any(name.startswith(f"{axis}: 4 ranks ") for name in legend)
    assert len(set(seen.values())) == 5 and legend[0] == f"rank {rank}"
    table = chart.table.set_index("rank")
    assert table.loc[rank, "group"] == "rank"
    assert set(table["group"]) == {"", "rank", "tp", "dp", "pp"}
    assert table.loc[23].to_list()[:4] == [*plan.place(23), 2]
    assert "9 of the 63 other ranks: dp and pp between nodes, tp inside one" in chart.finding


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_the_words_for_a_group_name_the_calls_that_a_step_makes_in_it(settings):
    plan = pl.Plan(**settings)
    report = pl.predict(MODEL, plan, cluster(2, 4), steps=1)
    calls = report.collectives[report.collectives["rank"] == 0]
    groups = rank_mesh.groups(plan, cluster(2, 4))
    assert {g.axis.replace("shard", "dp") for g in groups} == {*calls["axis"].str.split(":").str[0]}
    assert len({theme.axis_colour(group.axis) for group in groups}) == len(groups)
    for group in groups:
        kind = {"shard": "dp"}.get(group.axis, group.axis)
        mine = calls[calls["axis"].str.split(":").str[0] == kind]
        if kind == "tp":  # norms, embedding and loss have other calls, few and small
            mine = mine[mine["phase"].isin(["linear_forward", "linear_backward"])
                        & (mine["axis"] != "tp:depth")]  # fmt: skip
        if kind == "pp":
            assert "activations forward" in group.sends and {"send", "recv"} & set(mine["op"])
            assert max(mine["ranks"].map(len)) == len(group.ranks)
            continue
        said = {op for word, op in SAID.items() if word in group.sends}
        assert said == set(mine["op"]), group
        assert set(mine["level"]) <= {"intra", group.level}, group
        assert max(mine["ranks"].map(len)) == len(group.ranks) or kind == "tp"


def test_groups_say_whether_they_leave_a_node():
    plan = pl.Plan(dp=2, tp=4, pp=2)
    for where, levels in (
        (cluster(2), ["intra", "intra", "inter"]), (cluster(4, 4), ["intra", "inter", "inter"]),
        (None, ["", "", ""]),
    ):  # fmt: skip
        found = {g.axis: g.level for g in rank_mesh.groups(plan, where)}
        assert found == dict(zip(("tp", "dp", "pp"), levels, strict=True))
    names = [group.name for group in rank_mesh.groups(plan, cluster(2))]
    assert names[0] == "tp: 4 ranks inside a node, all-reduce of activations in every layer"
    assert names[2].startswith("pp: 2 ranks between nodes, activations forward")


@pytest.mark.parametrize(("plan", "each"), [
    (pl.Plan(dp=4, tp=4, pp=4), 8), (pl.Plan(dp=3, tp=2, pp=4), 8), (pl.Plan(pp=4), 2),
    (pl.Plan(dp=512), 8), (pl.Plan(dp=6, tp=8, pp=64), 8),
], ids=str)  # fmt: skip
def test_every_cell_lies_in_the_frame_of_its_node(plan, each):
    own = cluster(-(-plan.world_size // each), each)
    chart = mesh(plan, own)
    for rank, (x, y, _) in cells(chart).items():
        (frame,) = [s for s in chart.layout.shapes if s.x0 < x < s.x1 and s.y0 < y < s.y1]
        (name,) = [n.text for n in chart.layout.annotations
                   if -1e-6 < n.x - frame.x0 < 0.021 and abs(n.y - frame.y0) < 1e-6]  # fmt: skip
        assert name.removeprefix("node ") == str(own.node_of(rank)), rank
    assert not mesh(plan).layout.shapes


def test_nodes_that_touch_share_a_line_and_do_not_overlap():
    one, other = mesh(pl.Plan(tp=4), cluster(2, 2)).layout.shapes
    assert one.x0 < one.x1 == other.x0 < other.x1


def test_of_thousands_of_ranks_the_neighbourhood_is_drawn_and_said():
    plan = pl.Plan(dp=6, tp=8, pp=64)
    rank = plan.world_size // 2
    chart = mesh(plan, cluster(384), rank=rank)
    seen = set(cells(chart))
    assert len(seen) == 240 and len(chart.table) == 3072
    assert {*plan.ranks("tp", rank), 0, plan.world_size - 1, rank - 48, rank + 48} <= seen
    assert "10 of 64 stages drawn · 3 of 6 dp indices drawn" in chart.below
    assert sum(note.text in "⋮⋯" for note in chart.layout.annotations) == 3


def test_one_rank_is_a_mesh_too_and_wrong_ones_are_refused():
    chart = mesh(pl.Plan())
    assert list(cells(chart)) == [0]
    assert chart.finding == "There is only one rank, so it shares a group with no other"
    refuses("rank=4: out of range; legal: a whole number from 0 to 3", mesh, pl.Plan(dp=4), rank=4)
    refuses(r"it has 8 devices, and 16 ranks.*more nodes", mesh, pl.Plan(dp=16), cluster(1))
    refuses("it has 1 device, and 2 ranks need one each", mesh, pl.Plan(dp=2), cluster(1, 1))
    refuses("plan=4: not a plan; legal: a pl.Plan", mesh, 4)
    refuses("cluster='dgx-a100': not a cluster", mesh, pl.Plan(dp=2), "dgx-a100")


def test_a_row_names_the_stages_of_its_rank():
    plan = pl.Plan(pp=2, virtual_stages=3, schedule="interleaved", microbatches=4)
    assert list(mesh(plan).layout.yaxis.ticktext) == ["stages 0, 2, 4 ", "stages 1, 3, 5 "]
