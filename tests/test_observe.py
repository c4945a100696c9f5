"""`pl.observe`: programs of plain PyTorch leave the report that a run leaves."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import os
import sys
import weakref

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paralab as pl
from paralab import cli
from paralab.report.facts import shared_cores
from patience import HANG_S
from processes import below_the_server, python, until
from refusals import refuses, shell_refuses
from stated import NODES
from trainings import sharded, trained


def ddp(steps, backwards, profiled=False):
    """Losses, or by torch's profiler the bytes that one more step takes at its peak."""
    from test_memory import profiled_peak

    layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    model = DistributedDataParallel(layers)
    update, x = torch.optim.AdamW(model.parameters()), torch.randn(64, 256)
    train = functools.partial(trained, model, x, update=update, backwards=backwards)
    losses = train(steps=steps)
    return profiled_peak(functools.partial(train, steps=1)) if profiled else losses


PSI = 4 * (2 * 256 * 512 + 512 + 256)


@pytest.fixture(scope="module")
def report():
    return pl.observe(ddp, 2, (5, 2), nodes=2, timeout=HANG_S)


def test_an_optimizers_step_ends_a_step_and_losses_are_what_fn_returns(report):
    assert report.clock == "measured" and report.model is None
    assert report.steps.groupby("rank")["step"].apply(list).tolist() == [list(range(5))] * 2
    assert len(report.losses) == 5 and report.losses[0] == pytest.approx(
        sum(r[0] for r in report.results) / 2
    )
    assert repr(report) == "Report(measured, ddp on 2 ranks, 10 collectives)"
    one_core = dataclasses.replace(report, meta={**report.meta, "cores": 1})
    assert "cores" in report.meta and shared_cores(one_core) == (2, 1)  # its nodes are virtual
    loss = report.summary().loc["loss, first step"]
    assert loss["unit"] == "" and "nats" not in str(report.loss_chart().layout)
    assert "per step" in report.traffic_chart().finding


def test_spans_have_their_kinds_and_micro_batches(report):
    spans = report.spans[(report.spans["rank"] == 0) & (report.spans["step"] == 3)]
    assert set(spans["kind"]) == {"compute", "forward", "backward", "wait", "optimizer", "comm"}
    for kind in ("forward", "backward"):
        assert set(spans[spans["kind"] == kind]["microbatch"]) == {0, 1}
    lane = spans[spans["lane"] == "compute"]
    assert lane["start"].tolist()[1:] == lane["end"].tolist()[:-1]  # no gap
    assert (spans[spans["kind"] == "wait"]["after"].map(len) > 0).all()


def test_collectives_have_axis_phase_and_level(report):
    rows = report.collectives[~report.collectives["phase"].isin(["setup", "control"])]
    assert set(rows["axis"]) == {"world"} and set(rows["phase"]) == {"backward"}
    assert set(rows["level"]) == {"inter"} and set(rows["op"]) == {"all_reduce"}
    assert report.traffic()["bytes"].tolist() == [2 * PSI] * 2  # 2 (n-1)/n of it, twice


def test_memory_has_categories_and_the_peak_of_torchs_profiler(report):
    assert set(report.memory["step"]) == {0, 1}  # later steps are timed without the ledger
    buckets = report.memory.query("category == 'buffers'")["bytes"]
    assert buckets.min() == PSI  # from the moment at which the reducer makes them
    held = report.peaks()["measured"]
    assert held["parameters"] == held["gradients"] == held["buffers"] == PSI
    assert held["optimizer"] == 2 * PSI + 4 * 4  # AdamW's step counts
    assert held["other"] <= 0.02 * held["total"]
    before = 4 * PSI + 4 * 4 + 64 * 256 * 4  # parameters, buckets, two moments; the input
    most = before + pl.launch(ddp, 2, (3, 2, True))[0]
    assert held["total"] == pytest.approx(most, rel=0.01)


def test_it_is_replayed_drawn_and_saved_like_a_run(report, tmp_path):
    replayed = report.replay(NODES, compute=0.0)
    halves = report.collectives.query("rank == 0 and step == 3 and phase == 'backward'")
    expected = sum(1e-3 * 2 + size / 1e8 for size in halves["wire_bytes"])
    assert replayed.step_time == pytest.approx(expected, rel=0.51)  # alpha is paid n - 1 times
    for draw in (report.timeline, report.traffic_chart, report.memory_chart, report.loss_chart):
        assert draw().data
    report.to_html(tmp_path / "seen.html")
    assert "<th>observed</th>" not in (tmp_path / "seen.html").read_text()  # of every parameter
    report.save(tmp_path / "seen.json")
    again = pl.load(tmp_path / "seen.json")
    assert str(again.explain()) == str(report.explain())


def test_explain_says_what_it_looks_like_and_that_no_sync_was_forgotten(report):
    answers = report.explain()
    assert "data parallelism" in answers["Do the bytes agree with theory?"]
    assert "4 (n−1)/n Ψ" in answers["Do the bytes agree with theory?"]
    once = "Are gradients reduced once, or for every micro-batch?"
    assert answers[once].startswith("For every one of 2 micro-batches")
    assert "no_sync" in answers[once]
    assert "rank 0 holds no sharded DTensor" in answers["Which parameters are not sharded?"]
    assert "optimizer 2.1 MB" in answers["What does the peak of memory consist of?"]
    assert "gloo does not report it" in answers["What is not known?"]


def averaged_by_hand():
    layer = type("DistributedDataParallel", (torch.nn.Linear,), {})(64, 64)  # not torch's
    for _ in range(3):
        layer(torch.randn(8, 64)).sum().backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
        pl.step()


def test_gradients_that_a_program_sums_and_applies_itself_are_data_parallelism():
    answers = pl.observe(averaged_by_hand, 2, steps="marked", timeout=HANG_S).explain()
    said = answers["Do the bytes agree with theory?"]
    assert "gradients all-reduced: 2 (n−1)/n Ψ = 16,640 B per rank" in said
    assert "reducer began to wait" not in answers["What is not known?"]


def compiles():
    """How many graphs there are after each step. A break would make two of one."""
    graphs, layer = [], torch.nn.Linear(8, 8)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    whole, counts = torch.compile(layer, backend=backend), []
    trained(whole, 8, update=optimizer, steps=4, behind=lambda: counts.append(len(graphs)))
    return counts


@pytest.mark.parametrize("memory_steps", [0, 2])
def test_what_is_not_compiled_while_bytes_are_counted_is_compiled_in_the_step_after(memory_steps):
    report = pl.observe(compiles, 1, memory_steps=memory_steps, timeout=HANG_S)
    assert report.results == [[0] * memory_steps + [1] * (4 - memory_steps)]
    said = report.explain().get("What is not known?", "")
    assert ("What a compiled program holds" in said) == (memory_steps > 0)


def test_a_report_of_the_librarys_own_says_how_many_ranks_make_a_call_and_nothing_unknown():
    """Of a pipeline, the first stage and the last add up the gradients of the tied embedding."""
    plan = pl.Plan(pp=4, microbatches=4)
    answers = pl.predict(pl.ModelSpec.preset("laptop"), plan, NODES, steps=1).explain()
    assert "pl.compare" in answers["Do the bytes agree with theory?"]
    assert "What is not known?" not in answers
    fast = pl.predict(SMALL, pl.Plan(dp=8), pl.Cluster.preset("dgx-a100"), detail="actions")
    assert fast.explain()["How much communication is hidden?"].startswith("0 % of the 0.09")
    said = answers["Which collectives does a step make, of what sizes?"]
    assert "axis pp, tied: 1 × all_reduce of 0.131 MB; each of 2 ranks sends 0.131 MB" in said


def fsdp_ahead(how):
    """Blocks of which each is gathered when it is needed, or while the one before computes."""

    class Chain(nn.Sequential):
        def forward(self, x):
            for i, block in enumerate(self):
                if how == "unshard" and i + 1 < len(self):
                    self[i + 1].unshard(async_op=True)
                x = block(x)
            return x

    model = Chain(*[nn.Sequential(nn.Linear(512, 512)) for _ in range(4)])
    sharded(model)
    if how != "unshard":
        for block, later in zip(model[:-1], model[1:], strict=True):
            block.set_modules_to_forward_prefetch([later])
        model._set_unshard_async_op(how == "async")
    trained(model, torch.randn(1024, 512), update=torch.optim.AdamW(model.parameters()))


@functools.cache
def ahead(how: str) -> pl.Report:
    return pl.observe(fsdp_ahead, 2, (how,), timeout=HANG_S)


def test_explain_does_not_judge_a_prefetch_whose_waits_it_has_not_seen():
    """FSDP2's gathers over NCCL run on streams of their own, and the device waits for these."""
    report = copy.deepcopy(ahead("blocking"))
    gathers, spans = set(report.collectives.query("op == 'all_gather'")["span"]), report.spans
    spans["after"] = [[a for a in after if a not in gathers] for after in spans["after"]]
    report.meta["device"] = "cuda:0"
    answers = report.explain()
    lines = answers["Are gathers prefetched?"].splitlines()
    assert len(lines) == 2 and all("not known" in line for line in lines)
    said = answers["What is not known?"]
    assert "that FSDP or the program waits for" in said and "gloo with tensors on a GPU" in said


@pytest.mark.parametrize(
    ("how", "forward", "backward"), [("blocking", 0, 0), ("unshard", 12, 0), ("async", 12, 12)]
)
def test_explain_says_whether_gathers_are_prefetched(how, forward, backward):
    """Of 4 blocks the first has none before it; 2 ranks, 2 steps. To ask for the next block early
    is no use where the call blocks, as it does on a CPU unless it is told not to.
    """
    spans = ahead(how).spans
    again = spans[spans["kind"].eq("wait")]  # a program may wait twice for a call
    spans = pd.concat([spans, again.assign(id=again["id"] + spans["id"].max())])
    said = dataclasses.replace(ahead(how), spans=spans).explain()["Are gathers prefetched?"]
    for phase, early in (("forward", forward), ("backward", backward)):
        [line] = [line for line in said.splitlines() if line.startswith(phase)]
        assert f"for {early} of 16 gathers, ranks computed" in line
        assert line.endswith("prefetch works" if early else "there is no prefetch")


def embedded():
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Embedding(2000, 64), nn.Linear(64, 4))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, torch.arange(8), update=optimizer, steps=2)


def test_parameters_that_fsdp_has_gathered_are_buffers_and_its_shards_of_gradients_gradients():
    """Also those that autograd does not save, as an embedding's."""
    psi = 4 * (2000 * 64 + 64 * 4 + 4)
    report = pl.observe(embedded, 2, timeout=HANG_S)
    held = report.memory[report.memory["step"] == 1]
    most = held.groupby("category")["bytes"].max()
    buffers = set(held[held["category"] == "buffers"]["bytes"])
    # The flat message, and what is copied out of it. A thread of gloo's may let the message go as
    # late as in backward, where the gradients' message and a shard of their sum are buffers.
    assert 2 * psi in buffers and max(buffers) <= 2.5 * psi
    assert most["parameters"] == psi / 2 and most["activations"] < psi / 10
    gradients = set(held[held["category"] == "gradients"]["bytes"])
    assert max(gradients) == psi and psi / 2 in gradients  # unsharded until they are reduced
    held = report.peaks()["measured"]
    assert held["other"] <= 0.02 * held["total"]


# ---- steps ------------------------------------------------------------------------------------
def two_in_turn(raises=False):
    made = [nn.Linear(4, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in made]
    for _ in range(3):
        for model, optimizer in zip(made, optimizers, strict=True):
            model(torch.ones(4)).sum().backward()
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step((lambda: 1 / 0) if raises else None)
            raises = False
        pl.step()


def two_in_turn_of_which_one_raises_first():
    two_in_turn(raises=True)


def inside_backward():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    for _ in range(3):
        model(torch.ones(4)).sum().backward()
        pl.step()


@pytest.mark.parametrize(
    "fn", [two_in_turn, two_in_turn_of_which_one_raises_first, inside_backward]
)
def test_where_steps_cannot_be_told_apart_they_are_marked_by_hand(fn):
    with pytest.raises(pl.RankError, match=r"call paralab.step\(\).* steps='marked'"):
        pl.observe(fn, 1)
    assert pl.observe(fn, 1, steps="marked").steps["step"].tolist() == [0, 1, 2]


def one_after_the_other():
    """Two optimizers; the second step has no backward, in the third the second steps alone."""
    made = [nn.Linear(64, 64, bias=False) for _ in range(2)]
    first, second = (torch.optim.AdamW(m.parameters()) for m in made)
    for step in range(5):
        if step != 1:
            nn.Sequential(*made)(torch.ones(4, 64)).sum().backward()
        if step != 2:
            first.step()
        dist.all_reduce(made[1].weight.grad)
        second.step()
    return made[0].weight.nbytes


@pytest.mark.parametrize("memory_steps", [0, 2])
def test_optimizers_that_step_one_after_the_other_step_in_one_step(memory_steps):
    report = pl.observe(one_after_the_other, 2, memory_steps=memory_steps)
    size, steps = report.results[0], list(range(5))
    assert report.steps.groupby("rank")["step"].apply(list).tolist() == [steps] * 2
    assert (report.steps["end"] > report.steps["start"]).all()
    assert report.collectives.query("rank == 0")["step"].tolist() == steps
    updates = report.spans.query("rank == 0 and kind == 'optimizer'").groupby("step").size()
    assert updates.tolist() == [2, 2, 1, 2, 2]
    assert set(report.memory["step"]) == set(range(memory_steps))
    if memory_steps:
        memory = report.memory.query(f"rank == 0 and step == {memory_steps - 1}")
        last = memory[memory["time"] == memory["time"].max()]
        assert last.query("category == 'optimizer'")["bytes"].sum() == 4 * size + 4 * 2


def loads_its_states():
    """To have states that it can load, torch.distributed.checkpoint makes the optimizer step."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for state in get_optimizer_state_dict(model, optimizer)["state"].values():
        dist.broadcast(state["exp_avg"], 0)
    return trained(model, 64, update=optimizer)


@pytest.mark.parametrize("memory_steps", [0, 1, 2])
def test_an_optimizers_step_before_the_first_forward_is_setup(memory_steps):
    report = pl.observe(loads_its_states, 2, memory_steps=memory_steps)
    assert report.steps["step"].tolist() == [0, 1, 2] * 2 and len(report.losses) == 3
    assert set(report.spans.query("kind == 'optimizer'")["step"]) == {0, 1, 2}
    assert report.collectives["phase"].tolist() == ["setup"] * 4
    assert set(report.memory["step"]) == set(range(memory_steps))
    if memory_steps:
        first = report.memory[report.memory["time"] == report.memory["time"].min()]
        assert first.query("category == 'optimizer'")["bytes"].sum() == 2 * 4 * 65 * 64 + 2 * 4


def forward_alone():
    with torch.no_grad():
        dist.all_reduce(torch.nn.Linear(300, 300)(torch.ones(300)))


@pytest.mark.parametrize("steps", ["optimizer", "marked"])
def test_what_never_steps_is_one_step(steps):
    report = pl.observe(forward_alone, 2, steps=steps)
    assert report.steps["step"].tolist() == [0, 0]
    assert set(report.collectives["phase"]) == {"data"}
    assert report.traffic()["bytes"].sum() == 2400
    assert "no step was ended" in report.explain()["What is not known?"]


def forward_after_the_last_mark():
    dist.all_reduce(torch.ones(300))
    pl.step()
    torch.nn.Linear(300, 300)(torch.ones(300))


def test_calls_before_a_forward_are_setup_also_if_its_step_is_left_out():
    report = pl.observe(forward_after_the_last_mark, 2, steps="marked")
    assert "forward" not in set(report.spans["kind"])
    assert set(report.collectives["phase"]) == {"setup"}
    assert "no step was ended" not in report.explain()["What is not known?"]


def catches(several):
    """The first of four steps raises, as one with a bad loss scale may; the program goes on."""
    made = [torch.nn.Parameter(torch.ones(4)) for _ in range(1 + several)]
    first, *others = (torch.optim.SGD([parameter], lr=0.1) for parameter in made)
    for step in range(4):
        sum(made).sum().backward()
        with contextlib.suppress(ZeroDivisionError):
            first.step(None if step else lambda: 1 / 0)
        for other in others:
            other.step()


@pytest.mark.parametrize("several", [False, True])
def test_an_optimizer_whose_step_raised_ends_later_ones(several):
    assert len(pl.observe(catches, 1, (several,)).steps) == 3 + several


def test_an_optimizer_whose_step_raised_in_a_backward_hides_no_later_part():
    """The hook of the first backward lets the error out, the second one's catches it."""

    def update(_):
        calls.append(len(calls))
        with contextlib.suppress(*[KeyError] * calls[-1]):
            optimizer.step({}.popitem if calls[-1] < 2 else None)

    weight, calls = nn.Parameter(torch.ones(4)), []
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(update)
    with pl.observe(steps="marked") as seen:
        for _ in range(4):
            with contextlib.suppress(KeyError):
                weight.sum().backward()
            pl.step()
    parts = seen.spans[seen.spans["kind"] != "compute"].groupby("step")["kind"].unique()
    assert set(map(tuple, parts)) == {("backward", "optimizer")}
    assert parts.index.tolist() == calls == list(range(4))


def one_has_no_parameters():
    """As a rank may have none of those that one of the optimizers is for."""
    return trained(nn.Linear(4, 4), 4, behind=torch.optim.SGD([{"params": []}], lr=0.1).step)


def test_an_optimizer_without_parameters_ends_no_step_of_its_own():
    report = pl.observe(one_has_no_parameters, 1)
    assert len(report.steps) == len(report.losses)


def hooked():
    """Packs per step of hooks on saved tensors that the program has put around its steps."""
    packs = [0]

    def pack(tensor):
        packs[-1] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trained(torch.nn.Linear(8, 8), 8, steps=4, behind=lambda: packs.append(0))
    return packs[:-1]


def test_hooks_of_the_program_stay_when_the_ledger_goes():
    [packs] = pl.observe(hooked, 1, memory_steps=2).results
    assert [packs] == pl.launch(hooked, 1) and len(set(packs)) == 1


def shuffles():
    """Rank 0 has unequal parts, rank 1 equal ones, of one all-to-all. Rank 1 alone has losses."""
    gives, gets = ([400, 100], [400, 100]) if dist.get_rank() == 0 else ([100, 100], [100, 100])
    parameter = torch.nn.Parameter(torch.ones(sum(gives)))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(2):
        parameter.sum().backward()
        dist.all_to_all_single(torch.empty(sum(gets)), parameter.grad, gets, gives)
        optimizer.step()
    return [1.0, 1.0] if dist.get_rank() == 1 else None


def test_an_all_to_all_of_unequal_parts_is_its_messages_and_losses_are_of_those_that_have_some():
    report = pl.observe(shuffles, 2)
    assert report.losses == [1.0, 1.0]
    assert set(report.collectives["op"]) == {"send", "recv"}
    assert set(report.collectives["payload_bytes"]) == {400}
    assert report.replay(NODES).step_time > 0
    assert "an exchange of unequal parts" in " ".join(str(report.explain()).split())


# ---- failures ---------------------------------------------------------------------------------
def fails(how):
    if how == "raises":
        torch.ones(3) @ torch.ones(4)
    elif how == "inits":
        dist.init_process_group("gloo")
    elif how == "exits":
        sys.exit(3)
    elif how == "forks" and os.fork() == 0:
        os._exit(0)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", r"RuntimeError: inconsistent(.|\n)*torch.ones\(3\) @ torch.ones\(4\)"),
        ("inits", r"the default process group exists already(.|\n)*paralab observe FILE"),
        ("exits", r"called sys.exit\(3\)"),
        ("forks", "no module or optimizer was called, and no tensor sent"),
    ],
)
def test_a_failure_is_said_and_no_process_is_left(how, said):
    with pytest.raises(pl.RankError, match=said):
        pl.observe(fails, 2, (how,), timeout=HANG_S)
    assert until(lambda: not below_the_server())


def test_settings_are_refused_before_a_process_starts():
    for settings in ({"steps": "some"}, {"memory_steps": -1}, {"ranks": 0}, {"nodes": 9}):
        refuses("legal: ", pl.observe, ddp, **settings)
    refuses("script='': an empty path.*the path of a Python file", pl.observe, "")
    with pytest.raises(TypeError, match=r"^observe\(\) got an unexpected keyword argument 'bogus'"):
        pl.observe(ddp, 2, bogus=1)
    refuses("without a function, pl.observe observes this process", pl.observe, ranks=7)
    pl.step()  # without an observation nothing happens


def in_a_rank():
    with pl.observe():
        pass


def test_one_of_several_ranks_is_not_observed_as_a_process_of_its_own():
    with pytest.raises(pl.RankError, match=r"one of 2 ranks.*legal: pl.observe\(fn, ranks=N\)"):
        pl.launch(in_a_rank, ranks=2)


# ---- in this process ----------------------------------------------------------------------------
def in_this_process():
    """Its one rank has what a process of one's own has."""
    from test_memory import profiled_peak

    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    model.buffers = model.modules = []  # no methods, as of Megatron-LM's DistributedDataParallel

    def train(optimizer, steps):
        trained(model, torch.randn(256, 512), update=optimizer, steps=steps)

    train(optimizer, 1)
    with pl.observe() as seen:
        train(optimizer, 3)
    assert seen.steps["step"].tolist() == [0, 1, 2] and len(seen.timeline().data)
    refuses("neither report is predicted", pl.compare, seen, seen.report)
    held = seen.peaks()["measured"]
    psi = sum(p.nbytes for p in model.parameters())
    assert held["parameters"] == psi and held["optimizer"] == 2 * psi + 16, held
    assert held["other"] <= 0.02 * held["total"], held

    first = seen.memory[seen.memory["time"] == seen.memory["time"].min()]
    first = first[first["category"] == "optimizer"]["bytes"].sum()
    assert first == 2 * psi + 16, first  # what there was before the block

    most = profiled_peak(functools.partial(train, optimizer, 1))
    memory = seen.memory[seen.memory["step"] == 1]
    total = memory.groupby("time")["bytes"].sum()
    mine = total.max() - 3 * psi - 16  # what there was before
    assert abs(mine / most - 1) < 0.01, (mine, most)

    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None and len(seen.steps)  # what was observed keeps no optimizer alive
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
    with contextlib.suppress(KeyError), pl.observe():
        raise KeyError("own")
    return "agreed"


def test_a_block_in_this_process_and_torchs_profiler_agrees_on_its_peak():
    assert pl.launch(in_this_process, ranks=1) == ["agreed"]


# ---- from a shell -------------------------------------------------------------------------------
SCRIPT = """
import argparse, os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("code", type=int)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(asked.steps):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    print("says")
    print("warns", file=sys.stderr)
    os.write(2, b"warns from below")
    sys.exit(asked.code)
"""
BYTES = 4 * (64 * 64 + 64)


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """SCRIPT, and what its observation said in a shell."""
    script = tmp_path_factory.mktemp("shell") / "train.py"
    script.write_text(SCRIPT)
    words = ["observe", "--ranks", "2", "--save", "seen.json", "train.py", "4", "0"]
    return script, python("-m", "paralab", *words, cwd=script.parent)


def test_a_script_is_observed_unchanged(shell, capsys):
    script, done = shell
    assert done.returncode == 0 and "data parallelism" in done.stdout, done.stderr
    report = pl.load(script.with_name("seen.json"))
    assert repr(report) == "Report(measured, train.py on 2 ranks, 4 collectives)"
    assert report.traffic()["bytes"].tolist() == [BYTES] * 2
    assert len(pl.observe(script, 1, (2, 0)).steps) == 2  # as text, as from a shell
    assert cli.main(["observe", "--ranks", "2", str(script), "2", "3"]) == 3  # as under Python
    assert "sys.exit(3)" in capsys.readouterr().err


def test_what_a_script_writes_on_standard_error_comes_out_there(shell):
    out, err = shell[1].stdout, shell[1].stderr
    for rank in range(2):
        assert f"[rank {rank}] says" in out.splitlines(), out
        assert {f"[rank {rank}] warns", f"[rank {rank}] warns from below"} <= {*err.splitlines()}
    assert "] warns" not in out and "] says" not in err


LEAVES = """
import atexit, sys, tempfile, threading, time, torch
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

log, pools = open("log", "w"), (ProcessPoolExecutor(1), ThreadPoolExecutor(1))
scratch = tempfile.TemporaryDirectory(prefix="scratch-", dir=".")

def later(name):
    time.sleep(0.3)
    open(name, "w").write("x")

def main():  # has the module's names, and the module has it: a cycle
    log.write("hello")
    torch.nn.Linear(4, 4)(torch.ones(1, 4))
    for pool in pools:  # nobody shuts it down
        pool.submit(abs, 1).result()
    pools[1].submit(later, "pool")
    threading.Thread(target=later, args=("thread",)).start()
    if sys.argv[1] == "registers":
        atexit.register(later, "atexit")
    atexit.unregister(atexit.register(open, "unregistered", "w"))

main()
"""


@pytest.mark.parametrize("how", ["registers", "does not"])
def test_a_script_ends_as_under_python(tmp_path, monkeypatch, how):
    """A launched rank lives on until all are done, and is killed then."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(LEAVES)
    pl.observe(tmp_path / "train.py", 1, (how,), timeout=HANG_S)
    (tmp_path / "train.py").unlink()
    assert not list(tmp_path.glob("scratch-*"))
    found = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    late = {"atexit": "x"} if how == "registers" else {}
    assert found == {"log": "hello", "thread": "x", "pool": "x", **late}


MODULE = """
import sys
from pathlib import Path
from . import model

assert __package__ == __spec__.name.partition(".")[0] == "own" and "__main__" == __name__
assert sys.modules["__main__"].__dict__ is globals() and sys.path[0] == str(Path.cwd())
print(sys.argv == [__file__, "--ranks", "7", "-m", "--", "--html"])
model.layer(model.ones)
"""


@pytest.mark.parametrize("name", ["own", "own.train"])
def test_a_module_is_observed_by_its_name(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (own := tmp_path / "own").mkdir()
    (own / "model.py").write_text(
        "import torch\nlayer, ones = torch.nn.Linear(4, 4), torch.ones(4)"
    )
    file = own / ("train.py" if "." in name else "__main__.py")
    file.write_text(MODULE)
    words = ["observe", "--ranks", "1", "-m", name, "--ranks", "7", "-m", "--", "--html"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "[rank 0] True" in said and f"(measured, {name} on 1 rank, 0 collectives)" in said
    why = "module='own.none': No module named own.none; legal: -m and the name"
    assert why in shell_refuses(capsys, "observe", "--ranks", "1", "-m", "own.none")
    why = "own/train.py': script is this path already"
    assert why in shell_refuses(capsys, "observe", "--save", "own/train.py", "-m", "own.train")


def torchrun(*words):
    """What it does once it has read its options, with ranks that are forked: torch is loaded."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    dist.destroy_process_group()
    meets = {"run_id": "observed", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    how = {"start_method": "fork", "max_restarts": 0}
    config = LaunchConfig(1, 1, nproc_per_node=2, **how, **meets)
    return elastic_launch(config, cli.main)(words)


@pytest.mark.parametrize("program", [("train.py",), ("-m", "train")])
def test_torchruns_ranks_write_parts_that_are_merged(tmp_path, monkeypatch, capsys, program):
    """With interpreters of their own they run in test_torchrun.py."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.py").write_text("import os\nos.chdir('elsewhere')" + SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert pl.launch(torchrun, 1, ("observe", *program, "4", "0")) == [{0: 0, 1: 0}]
    report = pl.load(tmp_path / "parts")
    assert report.traffic()["bytes"].tolist() == [BYTES] * 2 and report.world_size == 2
    assert len(report.meta["observed"]) == 2 and "data parallelism" in str(report.explain())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "as a rank of torchrun")
    (tmp_path / "occupied").write_text("a file")
    capsys.readouterr()
    for said, *words in [
        ("out='occupied': the folder cannot be created", "--out", "occupied", "train.py"),
        ("ranks='2'", "--ranks", "2", "train.py"),
        ("script='none.py': there is no such file; legal: the path of a Python file", "none.py"),
    ]:
        assert said in shell_refuses(capsys, "observe", *words)


# ---- next to a prediction -----------------------------------------------------------------------
SMALL = pl.ModelSpec(layers=2, hidden=32, heads=2, seq_len=16)


def reference_ddp(steps, twice=False):
    """DistributedDataParallel on the reference GPT."""
    model = torch.nn.parallel.DistributedDataParallel(pl.reference.GPT(SMALL))
    update, rank = torch.optim.AdamW(model.parameters()), dist.get_rank()
    for step in range(steps):
        [(tokens, targets)] = pl.reference.batches(
            SMALL, step=step, microbatches=1, microbatch_size=2, rank=rank, ranks=2, device="cpu"
        )
        update.zero_grad()
        model(tokens, targets).backward()
        for parameter in model.parameters() if twice else ():
            dist.all_reduce(parameter.grad)
        update.step()


@functools.cache
def reference(twice: bool) -> pl.Report:
    return pl.observe(reference_ddp, ranks=2, args=(4, twice))


@pytest.mark.parametrize("twice", [False, True])
def test_a_program_is_compared_with_the_prediction_of_its_plan(twice):
    expect = pl.predict(SMALL, pl.Plan(dp=2, microbatch_size=2), pl.Cluster.preset("dgx-a100"))
    compared = pl.compare(expect, reference(twice))
    row, note = compared.table.loc["bytes sent per rank"], compared.notes["bytes sent per rank"]
    assert row["predicted"] == 4 * SMALL.num_params
    assert compared.table.loc["backward", "measured"] > 0
    if twice:
        assert row["measured"] == 2 * row["predicted"] and not compared.bytes_agree
        assert "the program that was observed communicates in another way" in note.lower()
    else:
        assert row["measured"] == row["predicted"] and compared.bytes_agree
        assert note == "The bytes agree exactly, summed over the calls of each rank."
    wide = pl.predict(SMALL, pl.Plan(dp=4, microbatch_size=2), pl.Cluster.preset("dgx-a100"))
    refuses("4 was predicted, 2 was run.* for 2 ranks", pl.compare, wide, reference(twice))
