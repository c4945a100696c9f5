"""Recorded bytes of programs that know nothing of paralab are those of the closed forms."""

import functools

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import foreign_programs
import paralab as pl
from foreign_programs import PROGRAMS, theory
from patience import HANG_S
from stated import NODES

cloudpickle.register_pickle_by_value(foreign_programs)
BOOKKEEPING = ("control", "setup")
STEPS = 2


def every(names):
    """Each program's training steps, one program after the other."""
    for name in names:
        step = PROGRAMS[name](dist.get_world_size())
        for _ in range(STEPS):
            step()
            pl.step()


@functools.cache
def of_all(ranks):
    return pl.observe(every, ranks, (list(PROGRAMS),), steps="marked", timeout=HANG_S)


@pytest.fixture(scope="module")
def report():
    return of_all(2)


@pytest.mark.parametrize("ranks", [2, 4])  # of three the kernel is asked, in test_traffic.py
@pytest.mark.parametrize("name", PROGRAMS)
def test_recorded_bytes_are_the_closed_form(ranks, name):
    report = of_all(ranks)
    n, step = report.world_size, STEPS * list(PROGRAMS).index(name) + STEPS - 1
    rows = report.collectives[report.collectives["step"] == step]
    rows = rows[~rows["phase"].isin(BOOKKEEPING) & (rows["wire_bytes"] > 0)]
    assert rows.groupby(["op", "phase"])["wire_bytes"].sum().to_dict() == theory(name, n)
    assert (report.traffic("op", bookkeeping=True)["bytes"] > 0).all()  # rows obey the formulas


def test_an_axis_has_the_name_of_its_mesh_dimension(report):
    rows = report.collectives
    tensor = STEPS * list(PROGRAMS).index("tensor") + 1
    assert set(rows[rows["step"] == tensor]["axis"]) == {"tp"}
    assert set(rows["axis"]) == {"tp", "world"}


def two_names():
    world = init_device_mesh("cpu", (2,), mesh_dim_names=("world",))
    dist.all_reduce(torch.ones(300), group=world.get_group())
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    dist.all_reduce(torch.ones(300), group=mesh.get_group("tp"))


def test_of_two_mesh_dimensions_with_one_group_the_later_names_the_axis():
    report = pl.observe(two_names, 2)
    assert report.collectives.query("rank == 0")["axis"].tolist() == ["world", "tp"]


def test_what_ranks_do_not_send_in_a_step_is_no_part_of_it(report):
    phases = report.collectives["phase"]
    assert {*phases} == {*BOOKKEEPING, "forward", "backward", "optimizer", "data", "gloo surplus"}
    assert (report.collectives[phases == "setup"]["step"] == 0).all()


def test_a_pipeline_is_replayed_though_its_later_stages_begin_with_a_message():
    report = pl.observe(every, 2, (["pipeline"],), steps="marked", memory_steps=0)
    messages = foreign_programs.MICROBATCHES * (1e-5 + foreign_programs.MESSAGE / 1e9)
    assert report.replay(NODES, compute=0.0).step_time >= messages * (1 - 1e-9)
    shares = report.bubbles()  # of an observed program no schedule is known
    assert shares[["formula", "simulated"]].isna().all(axis=None)
    assert shares.loc["bubble", ["replayed", "measured"]].notna().all()
