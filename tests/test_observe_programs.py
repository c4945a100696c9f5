"""`pl.observe` sees programs of many kinds as they are, and `explain` says what they do."""

import contextlib
import functools
import itertools
import os
import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call, grad
from torch.nn.parallel import DistributedDataParallel as ddp
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import paralab as pl
from paralab import observing
from paralab.checks import mb
from paralab.launch import launch_program
from patience import HANG_S
from trainings import layers, sharded, trained

FORM = "Do the bytes agree with theory?"
TIMES = "Are gradients reduced once, or for every micro-batch?"
CALLS = "Which collectives does a step make, of what sizes?"
UNKNOWN = "What is not known?"


def seen(fn, ranks=2, args=(), *, memory_steps=0, **more):
    return pl.observe(fn, ranks, args, memory_steps=memory_steps, timeout=HANG_S, **more)


def in_turn(context, jobs):
    """In a rank: what `pl.observe` without a ledger does there, for one program after the other."""
    settings = {"marked": False, "memory_steps": 0}
    return [observing._on_rank(fn, context.nodes, settings, context, *args) for fn, *args in jobs]


@functools.cache
def reports(ranks):
    """{(program, *its arguments): report} of all in SAID: a launch each would cost a minute."""
    jobs = [job for job, (needed, _) in SAID.items() if needed == ranks]
    parts = launch_program(in_turn, ranks, (jobs,), any_tensor=True, timeout=HANG_S)
    found = zip(jobs, zip(*parts, strict=True), strict=True)
    return {job: observing._report(job[0].__name__, [*of]) for job, of in found}


# ---- what a program does is not touched --------------------------------------------------------
def profiles_itself():
    with profile(activities=[ProfilerActivity.CPU], with_stack=True):
        return trained(layers(1, 8), 8)


def compiled_around_ddp():
    return trained(torch.compile(ddp(layers(3, 512)), backend="eager"), 512)


def compiled_update():
    model = layers(1)
    update = torch.optim.SGD(model.parameters(), 0.1)
    traced = torch.compiler.disable(update.step)  # or else it takes seconds to compile
    update.step = torch.compile(lambda: traced(), backend="eager")
    return trained(model, 256, update=update)


def sparse_sums():
    return trained(ddp(nn.EmbeddingBag(1000, 32, sparse=True)), torch.arange(40).view(8, 5))


@pytest.mark.parametrize(
    ("fn", "memory_steps"),
    [(profiles_itself, 0), (compiled_around_ddp, 0), (compiled_around_ddp, 2)],
)
def test_programs_that_look_closely_at_torch_run_as_without(fn, memory_steps, capfd):
    assert seen(fn, memory_steps=memory_steps).results == pl.launch(fn, 2)
    assert "recompile_limit" not in "".join(capfd.readouterr())


def test_bytes_are_counted_until_a_compiled_update_has_ended():
    """The counting cannot end within it; it did, and torch asked to report a bug to PyTorch."""
    report = seen(compiled_update, 1, memory_steps=1)
    assert set(report.memory["step"]) == {0} and len(report.losses) == 3


def test_sparse_gradients_are_gathered_as_without():
    report = seen(sparse_sums, memory_steps=2)
    assert len(set(map(tuple, report.results))) == 1
    sums = report.collectives.query("op == 'all_gather' and phase == 'backward'")
    each = 40 * (8 + 4 * 32)  # indices and values of one rank
    assert set(sums["payload_bytes"]) == {2 * each} and set(sums["wire_bytes"]) == {each}


def with_torch_func():
    layer = torch.nn.Linear(8, 8)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.ones(4, 8)
    grad(lambda w: functional_call(layer, w, (x,)).square().mean())(weights)
    pl.step()
    return 1


def asks_the_environment():
    """As accelerate, Lightning and transformers do, to know that their ranks run already."""
    dist.all_reduce(torch.ones(4))
    own = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    return [*own, os.environ.get("LOCAL_WORLD_SIZE")]


def test_a_function_finds_its_rank_in_the_environment_as_under_torchrun():
    assert seen(asks_the_environment).results == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]


def compiled_as_one_graph():
    torch.compile(nn.Linear(8, 8), backend="eager", fullgraph=True)(torch.ones(4, 8))
    return 1


@pytest.mark.parametrize("fn", [with_torch_func, compiled_as_one_graph])
def test_what_cannot_be_counted_is_observed_without_the_ledger_and_with_it_that_is_said(fn):
    assert seen(fn, 1, steps="marked").results == [1]
    why = r"memory_steps=1: .* (torch.func|fullgraph=True) .*; legal: 0"
    with pytest.raises(pl.RankError, match=why):
        seen(fn, 1, memory_steps=1, steps="marked")


def test_a_script_that_starts_processes_itself_runs_and_is_told_why_nothing_was_seen(tmp_path):
    script = tmp_path / "starts.py"
    script.write_text("""
from multiprocessing import get_context

def work():
    open(__file__ + ".done", "w").close()

if __name__ == "__main__":
    started = get_context("spawn").Process(target=work)
    started.start()
    started.join()
""")
    with pytest.raises(pl.RankError, match="Processes that a program starts itself"):
        seen(script, 1)
    assert (tmp_path / "starts.py.done").exists()


def as_many_ranks_as_torch_pretends():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    dist.all_reduce(torch.ones(4))


# ---- threads -----------------------------------------------------------------------------------
def by_groups_of_its_own(stated, members=((0, 1),)):
    """Sums over groups that torch does not register, as torchft makes them, of one name all."""
    rank, sums = dist.get_rank(), []
    members = (*members, (rank,)) if stated else members
    for ranks in members:
        store = dist.PrefixStore(str(ranks), dist.distributed_c10d._get_default_store())
        place = ranks.index(rank), len(ranks)
        gloo, group = dist.ProcessGroupGloo(store, *place), dist.ProcessGroup(store, *place)
        if stated:
            gloo.options.global_ranks_in_group = list(ranks)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group.allreduce([total := torch.ones(8)]).wait()
        sums.append(total[0].item())
    return sums


@pytest.mark.parametrize("stated", [True, False])
def test_calls_of_a_group_that_torch_has_not_registered_are_seen(stated):
    report = seen(by_groups_of_its_own, 2, (stated,))
    assert report.results == [[2.0, 1.0][: 1 + stated]] * 2
    sent = report.collectives.groupby(["axis", "wire_bytes"]).size().to_dict()
    alone = {("ranks 0", 0): 1, ("ranks 1", 0): 1}
    assert sent == {("world", 32): 2} | (alone if stated else {})


def steps_in_backward():
    model = layers(1)
    update = torch.optim.SGD(model.parameters(), 0.1)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: update.step())
    model(torch.ones(8, 256)).sum().backward()


REFUSED = {
    (as_many_ranks_as_torch_pretends,): (1, r"ranks=4: the group has the ranks \(0, 1, 2, 3\)"),
    (by_groups_of_its_own, False, ((1, 0),)): (
        2, r"ranks=\(0, 1\): the observed rank (0 is the group's rank 1|1 is the group's rank 0);"),
    (steps_in_backward,): (1, "optimizer='SGD': it steps inside a backward"),
}  # fmt: skip


def goes_on_after(then, program, *args):
    """As a program that takes what is raised for the failure of a peer, and skips the update."""
    with contextlib.suppress(Exception) if then else contextlib.nullcontext():
        program(*args)
    if then == "trains":
        with pytest.raises(ValueError, match="legal: "):
            trained(layers(1), 256)
    elif then:
        raise ConnectionError("connection closed by peer")


@pytest.mark.parametrize("then", ["", "ends", "trains"])
@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program[0].__name__)
def test_a_refusal_that_a_program_catches_ends_its_next_step_or_its_observation(program, then):
    ranks, said = REFUSED[program]
    with pytest.raises(pl.RankError, match=f"raised ValueError: {said}"):
        seen(goes_on_after, ranks, (then, *program))


def sums_on_a_thread():
    """A thread sums what a frozen module makes while the first one trains alone."""
    model = nn.PReLU().requires_grad_(False)
    group = dist.new_group(group_desc="metrics")

    def sums():
        for _ in range(150):
            dist.all_reduce(model(torch.ones(20_000)), group=group)

    thread = threading.Thread(target=sums)
    x = torch.randn(256, 512)
    trained(layers(6, 512), x, steps=7, behind=lambda: thread.ident or thread.start())
    thread.join()


def test_what_other_threads_send_is_none_of_a_backwards():
    report = seen(sums_on_a_thread)
    assert set(report.collectives.query("axis == 'metrics'")["phase"]) == {"control"}
    spans = report.spans[(report.spans["rank"] == 0) & (report.spans["lane"] == "compute")]
    assert "wait" not in set(spans["kind"])
    backwards = spans[spans["kind"] == "backward"]
    assert backwards["step"].tolist() == list(range(7))  # no call cuts one in two
    assert report.replay(pl.Cluster.preset("dgx-a100")).step_time > 0  # in which they take no time


# ---- what a paradigm is called, and what is counted --------------------------------------------
def in_16_bits(how):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if how == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        return trained(sharded(layers(3), mp_policy=policy), 256, backwards=3)
    model = ddp(layers(1))
    model.register_comm_hook(None, fp16_compress_hook)
    return trained(model, 256, backwards=3)


def two_levels(backwards, each):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, turns = sharded(layers(3), mesh=mesh), itertools.count(1)

    def forward(x):
        model.set_requires_gradient_sync(each or next(turns) % backwards == 0)
        return model(x)

    update = torch.optim.SGD(model.parameters(), 0.1)
    trained(forward, 256, update=update, steps=2, backwards=backwards)


def evaluates_closures():
    """Of two micro-batches the last, as Lightning's Trainer does."""
    model, x = ddp(layers(1, 64)), torch.randn(32, 64)
    update = torch.optim.SGD(model.parameters(), 0.1)

    def closure():
        (loss := model(x).square().mean()).backward()
        return loss

    for _ in range(3):
        with model.no_sync():
            closure()
        update.step(closure)


def unequal_steps(first=3):
    model = ddp(layers(1))
    with Join([model]):
        trained(model, 256, steps=6 if dist.get_rank() else first)
    return [2.0] * 6 if dist.get_rank() else [1.0] * first


def plays_in_turn():
    """A generator and its critic: each has a backward and an update in every step."""
    players = ddp(layers(1)), ddp(layers(1))
    for _ in range(3):
        for player in players:
            trained(player, 256, steps=1)
        pl.step()


def beside_ddp(what):
    from torch.distributed import _functional_collectives as functional

    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if what == "a statistic":
                dist.all_reduce(y.detach().mean(0)[:8].contiguous())
            if what == "features":  # as of a contrastive loss
                y = functional.all_gather_tensor_autograd(y, 0, dist.group.WORLD)
            return y

    def copied():
        for parameter in model.parameters() if what == "copies" else ():
            dist.broadcast(parameter.data, 0)
        if what == "metrics":
            dist.all_gather(list(torch.empty(2, 40_000)), torch.ones(40_000))

    model = ddp(Net(512, 512))
    trained(model, 512, backwards=2, behind=copied)


def measures_beside_ddp():
    """A metric is gathered behind the backward, and a norm in the optimizer's step."""

    def gather(count):
        own = torch.ones(count)
        dist.all_gather([torch.empty(count) for _ in range(dist.get_world_size())], own)

    model = ddp(nn.Linear(512, 512))
    update = torch.optim.SGD(model.parameters(), 0.1)
    update.register_step_pre_hook(lambda *_: gather(1))
    trained(model, 512, update=update, behind=lambda: gather(2**14))


def first_stage_by_hand(scatters, ahead=False):
    """ahead: updated parameters are gathered in the next forward, as Megatron-LM overlaps them."""
    model, n = layers(1, 512), dist.get_world_size()
    own = list(model.parameters())
    mine = parameters_to_vector(own).detach().chunk(n)[dist.get_rank()].clone()
    mine = torch.nn.Parameter(mine)
    update = torch.optim.AdamW([mine])

    def gather(*_):
        flat = torch.empty(n * len(mine))
        dist.all_gather(list(flat.chunk(n)), mine.detach())
        vector_to_parameters(flat, own)

    if ahead:
        model.register_forward_pre_hook(gather)
    for _ in range(3):
        model(torch.ones(8, 512)).square().mean().backward()
        flat = torch.cat([p.grad.flatten() for p in own])
        if scatters:
            dist.reduce_scatter(torch.empty_like(mine), list(flat.chunk(n)))
        else:
            dist.all_reduce(flat)
        mine.grad = flat.chunk(n)[dist.get_rank()]
        update.step()
        model.zero_grad()
        ahead or gather()


def third_stage_by_hand():
    """Its parameters keep their bytes, into which they are gathered."""
    model, n = nn.Linear(512, 512, bias=False), dist.get_world_size()

    def gather(*_):
        parts = [*model.weight.data.chunk(n)]
        dist.all_gather(parts, parts[dist.get_rank()].clone())

    def scatter():
        parts = [*model.weight.grad.chunk(n)]
        dist.reduce_scatter(parts[0].clone(), parts)

    model.register_forward_pre_hook(gather)
    model.register_full_backward_pre_hook(gather)
    trained(model, 512, behind=scatter)


def owners_update():
    """Every owner has layers: their gradients are reduced there, and it broadcasts what it updates,
    as OSS of fairscale does."""

    class Update(torch.optim.SGD):
        def step(self):
            super().step()
            for at, parameter in enumerate(model.parameters()):
                dist.broadcast(parameter.data, at % 2)

    def reduced():
        for at, parameter in enumerate(model.parameters()):
            dist.reduce(parameter.grad, at % 2)

    model = layers(3, bias=False)
    trained(model, 256, update=Update(model.parameters(), 0.1), behind=reduced)


def updates_in_parts():
    """One optimizer steps for one parameter after the other, as in ZeRO-3 of DeepSpeed."""

    class Parts:
        def step(self):
            for parameter in own:
                update.param_groups[0]["params"] = [parameter]
                update.step()

        def zero_grad(self):
            model.zero_grad()

    model = layers(2, bias=False)
    own = list(model.parameters())
    update = torch.optim.SGD(own, 0.1)
    sums_gradients(model, 256, update=Parts())


def empties_its_parameters():
    """A rank's parameters have no elements unless they are gathered: ZeRO-3 as DeepSpeed has it."""

    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(256, 256, bias=False)
            self.weight.ds_numel = self.weight.numel()
            self.weight.ds_tensor = self.weight.data.chunk(2)[dist.get_rank()].clone()
            self.weight.register_post_accumulate_grad_hook(self.scatter)
            self.weight.data = torch.empty(0)

        def forward(self, x):
            self.weight.data = torch.empty(256, 256)
            dist.all_gather_into_tensor(self.weight.data, self.weight.ds_tensor)
            return super().forward(x)

        def scatter(self, weight):
            weight.ds_tensor.grad = torch.empty_like(weight.ds_tensor)
            dist.reduce_scatter_tensor(weight.ds_tensor.grad, weight.grad)
            weight.grad, weight.data = None, torch.empty(0)

    model = nn.Sequential(Layer(), Layer())
    shards = [layer.weight.ds_tensor for layer in model]
    trained(model, 256, update=torch.optim.SGD(shards, 0.1))
    return sum(shard.nbytes for shard in shards)


def one_column_parallel_layer():
    from torch.distributed.tensor import Replicate, parallel

    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 1024))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    how = {"1": parallel.ColwiseParallel(output_layouts=Replicate())}
    trained(parallel.parallelize_module(model, mesh, how), 128)


def gathered_again_in_pairs():
    trained(sharded(layers(3), reshard_after_forward=2), 256)


def unshards_ahead():
    """As torch's example of FSDP2 does, in every step before the forward."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(layers(3, bias=False))
    update = torch.optim.SGD(model.parameters(), 0.1)
    trained(lambda x: (model.unshard(), model(x))[1], 256, update=update)


def sums_beside_fsdp():
    """The last layer, with a quarter of the parameters, is summed by hand."""
    model = nn.Sequential(sharded(layers(3, bias=False)), layers(1, bias=False))
    trained(model, 256, behind=lambda: dist.all_reduce(model[1][0].weight.grad))


def saves_the_whole_model():
    """After the second of three measured steps, with the tensors gathered."""
    model, turns = sharded(layers(3, bias=False)), iter(range(4))

    def behind():
        if next(turns) == 2:
            [weight.full_tensor() for weight in model.parameters()]

    trained(model, 256, steps=4, behind=behind)


def fsdp(reshard):
    model = nn.Sequential(*layers(3, 512), nn.Linear(512, 3))
    sharded(model[:3], reshard_after_forward=reshard)
    trained(model, 512)


def on_two_axes(column, row):
    """Two layers, tensor parallel with these layouts, and the mesh."""
    from torch.distributed.tensor import parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    how = {"0": parallel.ColwiseParallel(**column), "1": parallel.RowwiseParallel(**row)}
    return parallel.parallelize_module(layers(2, bias=False), mesh["tp"], how), mesh


def on_a_mesh_of_two_axes():
    model, mesh = on_two_axes({}, {})
    trained(sharded(model, mesh=mesh["dp"]), 256)


def counts_on(device):
    """The FLOPs of a step are counted first, on a copy of the model without bytes."""
    copy, empty = layers(2, bias=False).to("meta"), torch.ones(8, 256, device="meta")
    if device == "fake":
        with FakeTensorMode():
            copy, empty = layers(2, bias=False), torch.ones(8, 256)
    copy(empty).sum().backward()
    trained(ddp(layers(2, bias=False)), 256)


def sums_alone():
    alone, _ = dist.new_subgroups(1)
    model = layers(1, bias=False)
    trained(model, 256, behind=lambda: dist.all_reduce(model[0].weight.grad, group=alone))


def two_layers_frozen():
    model = layers(3)
    for parameter in model[:2].parameters():
        parameter.requires_grad_(False)
    trained(sharded(model), 256)


def sharded_beside_sums():
    """The root alone is sharded; tensor parallelism gathers in the forward and in the backward."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    model, mesh = on_two_axes({"input_layouts": Shard(0)}, {"output_layouts": Shard(0)})
    trained(fully_shard(model, mesh=mesh["dp"]), 256)


def several_gradients_of_one_input():
    """Queries, keys and values are cut by hand, and each sums its gradient of the input."""

    def summed(gradient):
        dist.all_reduce(gradient := gradient.contiguous())
        return gradient

    def copy(x):
        y = x.view_as(x)
        if y.requires_grad:
            y.register_hook(summed)
        return y

    class Attention(nn.ModuleList):
        def forward(self, x):
            *parts, out = self
            q, k, v = (part(copy(x)) for part in parts)
            dist.all_reduce((y := out(q * k + v)).data)
            return x + y

    sizes = [(128, 64)] * 3 + [(64, 128)]
    made = [Attention(nn.Linear(*size, bias=False) for size in sizes) for _ in range(4)]
    trained(nn.Sequential(*made), torch.ones(64, 128), backwards=2)


def sums_gradients(model, x, **how):
    """One by one, when they are complete."""
    trained(model, x, behind=lambda: [dist.all_reduce(p.grad) for p in model.parameters()], **how)


def gathers_what_it_updates():
    """The optimizer sums gradients, and each rank updates its share, as Muon of modded-nanogpt."""

    class Update(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            own, mine = self.param_groups[0]["params"], dist.get_rank()
            for parameter in own:
                dist.all_reduce(parameter.grad)
            own[mine].sub_(own[mine].grad)
            dist.all_gather(list(own), own[mine])

    model = layers(2, bias=False)
    trained(model, 256, update=Update(model.parameters(), {}), backwards=2)


def the_first_fsdp(views, levels=1):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    unit = {"device_id": torch.device("cpu"), "use_orig_params": views}
    if levels == 2:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        unit |= {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    trained(FullyShardedDataParallel(layers(1), **unit), 256)


def sums_a_statistic():
    model = layers(1)
    trained(model, 256, behind=lambda: dist.all_reduce(model[0].bias.grad.clone()))


def exchanges():
    """Equal parts, whose sizes torch's function states."""
    x = torch.ones(256, requires_grad=True)
    trained(
        lambda y: all_to_all_single_autograd(x * y, None, None, dist.group.WORLD),
        256,
        update=torch.optim.SGD([x], 0.1),
    )


def scatters_and_sends():
    """No model: what comes before the first message is no setup."""
    numbers = torch.empty(1000)
    dist.reduce_scatter(numbers, [torch.ones(1000)] * 2)
    (dist.recv if dist.get_rank() else dist.send)(numbers, 1 - dist.get_rank())


ONCE = "Ψ is reduced per step, which has 1 backward pass."
TWO = "Ψ is reduced per step, which has 2 backward passes."
EVERY = "For every one of 2 micro-batches: "
SUMMED = "data parallelism, gradients all-reduced: "
AROUND = ", with an optimizer's step between or around them."
OTHER = "65,536 B of other traffic"

# {(program, *its arguments): (ranks, {question: parts of its answer})}: None where there is none.
SAID = {
    **dict.fromkeys([(in_16_bits, "fsdp"), (in_16_bits, "ddp")], (2, {
        TIMES: (EVERY.replace("2", "3") + "1.5 times Ψ",), FORM: ("messages in fewer bits",)})),
    (two_levels, 2, False): (4, {TIMES: (TWO,), FORM: ("axis replicate: " + SUMMED + "2 (n",)}),
    (two_levels, 2, True): (
        4, {TIMES: (EVERY + "2 times Ψ",), FORM: ("axis replicate: " + SUMMED + "4 (n",)}),
    (evaluates_closures,): (2, {TIMES: (TWO[:-1] + AROUND,)}),
    (unequal_steps,): (2, {
        CALLS: ("1 × all_reduce of 0.263 MB",), FORM: (": 2 (n−1)/n Ψ = 0.263 MB per rank",),
        TIMES: (ONCE,), UNKNOWN: ("from 2 to 5 steps that count",)}),
    (unequal_steps, 1): (2, {UNKNOWN: ("from 0 to 5 steps that count",)}),
    (beside_ddp, "a statistic"): (
        2, {FORM: (SUMMED + "4 (n−1)/n Ψ = 2.1 MB",), TIMES: (EVERY,)}),
    (beside_ddp, "features"): (
        2, {FORM: (SUMMED + "4 (n−1)/n Ψ = 2.1 MB", OTHER), TIMES: (EVERY,)}),
    (beside_ddp, "metrics"): (
        2, {FORM: (SUMMED + "4 (n−1)/n Ψ = 2.1 MB", "0.16 MB of other"), TIMES: (EVERY,)}),
    (beside_ddp, "copies"): (
        2, {FORM: (SUMMED + "4 (n−1)/n Ψ = 2.1 MB", "1.05 MB of other"), TIMES: (EVERY,)}),
    (measures_beside_ddp,): (2, {FORM: (SUMMED + "2 (n−1)/n Ψ = 1.05 MB", "65,540 B of other")}),
    **dict.fromkeys([(first_stage_by_hand, True), (first_stage_by_hand, True, True)], (2, {FORM: (
        "a sharded optimizer (ZeRO-1): gradients reduce-scattered, updated parameters gathered: "
        "2 (n−1)/n Ψ = 1.05 MB",)})),
    (first_stage_by_hand, False): (2, {FORM: (
        "gradients all-reduced, with a sharded optimizer (ZeRO-1) that gathers updated "
        "parameters: 3 (n−1)/n Ψ = 1.58 MB",)}),
    (third_stage_by_hand,): (2, {
        TIMES: (ONCE,), FORM: ("FSDP, ZeRO-3", "again for every backward: 3 (n−1)/n Ψ = 1.57 MB")}),
    (owners_update,): (2, {TIMES: (ONCE,), FORM: (
        "axis world: gradients reduced to owners (ZeRO-2), with a sharded optimizer (ZeRO-1) that "
        "broadcasts updated parameters: 2 (n−1)/n Ψ = 0.786 MB per rank on average (n=2, Ψ=0.786 "
        "MB)\n",)}),
    (updates_in_parts,): (2, {TIMES: (ONCE,), CALLS: ("data: 2 × all_reduce",)}),
    (empties_its_parameters,): (2, {
        TIMES: (ONCE,), FORM: ("not on this axis for the backward: 2 (n−1)/n Ψ = 0.524 MB",),
        "Which parameters are not sharded?": ("None: all parameters are sharded.",)}),
    (one_column_parallel_layer,): (
        2, {FORM: ("axis tp: sums activations in the forward",), TIMES: None}),
    (on_a_mesh_of_two_axes,): (4, {FORM: (
        "axis dp: sharded parameters (FSDP, ZeRO-3), gathered for the forward, again for every "
        "backward: 3 (n−1)/n Ψ = 0.393 MB per rank (n=2, Ψ=0.262 MB)",)}),
    (sharded_beside_sums,): (4, {  # the other axis gathers in the backward, too
        FORM: ("gathered for the forward, and not on this axis for the backward: 2 (n−1)/n Ψ",),
        "Are gathers prefetched?": ("forward: for ", "of 8 gathers")}),
    (several_gradients_of_one_input,): (
        2, {FORM: ("axis world: sums activations in the forward",), TIMES: None}),
    (gathers_what_it_updates,): (2, {TIMES: (TWO,), FORM: (
        "gradients all-reduced, with a sharded optimizer (ZeRO-1) that gathers updated "
        "parameters: 3 (n−1)/n Ψ = 0.786 MB",)}),
    (fsdp, True): (2, {
        FORM: ("FSDP, ZeRO-3", "again for every backward", ": 3 (n−1)/n Ψ"),
        "Which parameters are not sharded?": ("3.weight",)}),
    (fsdp, False): (2, {
        FORM: ("FSDP, ZeRO-3", "not on this axis for the backward", ": 2 (n−1)/n Ψ"),
        "Which parameters are not sharded?": ("3.weight",)}),
    (gathered_again_in_pairs,): (4, {FORM: (
        "axis dim_1: shards of parameters that the forward has kept, gathered again for the backw",
        "axis world: sharded parameters (FSDP, ZeRO-3), gathered for the forward, and not on this "
        "axis for the backward: 2 (n−1)/n Ψ",)}),
    (unshards_ahead,): (2, {TIMES: (ONCE,), FORM: (
        "sharded parameters (FSDP, ZeRO-3), gathered for the forward, and not on this axis for "
        "the backward: 2 (n−1)/n Ψ = 0.786 MB per rank (n=2, Ψ=0.786 MB); gloo's",)}),
    (sums_beside_fsdp,): (2, {TIMES: (ONCE,), FORM: ("again for every backward: 3 (n−1)/n Ψ",)}),
    (saves_the_whole_model,): (2, {FORM: (
        "again for every backward: 3 (n−1)/n Ψ = 1.18 MB per rank (n=2, Ψ=0.786 MB); gloo",
        "0.131 MB of other traffic")}),
    **dict.fromkeys([(counts_on, "meta"), (counts_on, "fake")], (2, {
        TIMES: (ONCE,), FORM: (SUMMED + "2 (n−1)/n Ψ = 0.524 MB per rank (n=2, Ψ=0.524 MB)",)})),
    (sums_alone,): (2, {TIMES: None, FORM: ("a group of one rank sends nothing",)}),
    (two_layers_frozen,): (2, {FORM: (
        "(n−1)/n times 0.526 MB of frozen parameters, if these are gathered as often",)}),
    **dict.fromkeys([(the_first_fsdp, True), (the_first_fsdp, False)], (2, {
        FORM: ("for the backward: 2 (n−1)/n Ψ = 0.263 MB per rank (n=2, Ψ=0.263 MB)",),
        TIMES: (ONCE,), "Which parameters are not sharded?": ("None: all",)})),
    (the_first_fsdp, True, 2): (4, {TIMES: (ONCE,), FORM: (
        "axis replicate: " + SUMMED + "2 (n−1)/n Ψ = 0.132 MB",
        "axis shard: sharded parameters (FSDP, ZeRO-3), gathered for the forward, and not")}),
    (sums_a_statistic,): (2, {TIMES: None, FORM: (
        "unused or local parameters (experts, say)", "send less, and padded shards more")}),
    (exchanges,): (2, {TIMES: None, FORM: ("0→1 (2), 1→0 (2); it may be", "parts")}),
    (scatters_and_sends,): (2, {TIMES: None, CALLS: (
        "axis world, data: 1 × reduce_scatter of 8,000 B", "data: 1 × send of 4,000 B",
        "axis world, gloo surplus: 1 × all_gather of 8,000 B")}),
}  # fmt: skip


@pytest.mark.parametrize("job", SAID, ids=lambda job: f"{job[0].__name__} {job[1:]}")
def test_a_paradigm_is_known_by_its_calls(job):
    ranks, said = SAID[job]
    answers = reports(ranks)[job].explain()
    for asked, parts in {TIMES: (), **said}.items():
        assert (asked in answers) == (parts is not None), asked
        assert all(part in answers[asked] for part in parts or ()), answers[asked]
    assert answers.get(TIMES, "").startswith(said.get(TIMES) or "")  # not "2 times Ψ"
    assert "recv" not in answers[CALLS]  # a message counts once, at its sender
    form = answers[FORM]
    partly = in_16_bits, sums_a_statistic, two_layers_frozen
    assert ("whole multiple" in form) == (job[0] in partly)
    assert job != (beside_ddp, "a statistic") or "of other traffic" not in form


def test_a_size_is_written_with_three_digits_in_its_unit():
    sizes = {99_999: "99,999 B", 1e5: "0.1 MB", 999.4e6: "999 MB", 999.6e6: "1 GB", 135e9: "135 GB"}
    assert {size: mb(size) for size in sizes} == sizes
    assert mb(2.49e15) == "2,490,000 GB"


def test_losses_of_a_step_are_averaged_over_the_ranks_that_have_it():
    assert reports(2)[unequal_steps,].losses == [1.5] * 3 + [2.0] * 3


def test_backwards_with_updates_between_them_are_no_micro_batches():
    said = seen(plays_in_turn, steps="marked").explain()[TIMES]
    assert said == TWO[:-1] + AROUND


def masters():
    model = layers(4).to(torch.bfloat16)
    own = [p.detach().float().requires_grad_() for p in model.parameters()]
    update, x = torch.optim.AdamW(own), torch.ones(16, 256, dtype=torch.bfloat16)
    for _ in range(3):
        model(x).float().square().mean().backward()
        for master, parameter in zip(own, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        update.step()
        update.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(own, model.parameters(), strict=True):
                parameter.copy_(master)
    return sum(master.nbytes for master in own)


def test_what_an_optimizer_updates_is_found_where_no_module_shows_it():
    report = seen(masters, 1, memory_steps=2)
    held, size = report.peaks(0)["measured"], report.results[0]
    assert held["other"] == 0 and held["optimizer"] >= 3 * size


def receives(microbatches):
    """Of a pipeline: a stage's inputs are leaves that require a gradient. Bytes of one."""
    model = layers(1, bias=False)
    update = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        received = [torch.ones(1024, 256, requires_grad=True) for _ in range(microbatches)]
        for y in [model(x) for x in received]:
            y.backward(torch.ones_like(y))
        del y  # its graph has its input
        update.step()
        update.zero_grad()
    return received[0].nbytes, model[0].weight.nbytes


def plain_weights():
    made = [torch.randn(256, 256, requires_grad=True) for _ in range(3)]
    one, two, three = made
    trained(lambda x: x @ one @ two @ three, 256, update=torch.optim.SGD(made, 0.1), steps=2)
    return sum(weight.nbytes for weight in made)


def beside_a_module():
    """Parameters that no module has: one whose rows are looked up, and one that is multiplied."""
    table, weight, head = *(nn.Parameter(torch.randn(256, 256)) for _ in range(2)), layers(1)
    own = [table, weight, *head.parameters()]

    def loss(x):
        return head(x @ weight + table[torch.arange(8)])

    trained(loss, 256, update=torch.optim.Adagrad(own), steps=2)
    return sum(parameter.nbytes for parameter in own)


def infers(lazily):
    model = nn.LazyLinear(256) if lazily else layers(1)
    with torch.no_grad():
        for _ in range(1 + lazily):
            model(torch.ones(1, 256))


@pytest.mark.parametrize("lazily", [False, True])
def test_the_parameters_are_known_when_the_first_forward_that_finds_them_begins(lazily):
    held = seen(infers, 1, (lazily,), memory_steps=1).memory
    known = held["time"][held["category"] == "parameters"].min()
    assert (known == held["time"].min()) is not lazily
    begin = held[held["time"] == known].set_index("category")["bytes"]
    assert begin["parameters"] == 4 * (256 * 256 + 256) and begin["other"] == 4 * 256


def most_of(report, step):
    held = report.memory[(report.memory["step"] == step) & (report.memory["tier"] == "device")]
    return Counter(held.groupby("category")["bytes"].max().to_dict())


def test_what_a_stage_has_received_is_an_activation_and_its_gradient_none_of_a_parameter():
    report = seen(receives, 1, (4,), memory_steps=2)
    [(each, weight)], most = report.results, most_of(report, 1)
    assert most["activations"] == 4 * each and most["buffers"] == 0
    assert most["gradients"] == most["parameters"] == weight


def test_plain_tensors_that_an_optimizer_updates_are_parameters_though_autograd_saves_them():
    report = seen(plain_weights, 1, memory_steps=2)
    [size], most = report.results, most_of(report, 1)
    assert most["gradients"] == most["parameters"] == size and most["activations"] < size / 10


def test_parameters_of_no_module_are_no_copies_of_weights_and_count_from_their_first_backward():
    report = seen(beside_a_module, 1, memory_steps=2)
    [size], at_peak = report.results, report.peaks(0)["measured"]
    assert most_of(report, 1)["parameters"] == size
    assert most_of(report, 1)["optimizer"] < 1.01 * size and at_peak["other"] < size / 100


def goes_on():
    """AdamW, whose peak is the same in every step: while it updates."""
    model = layers(4, bias=False)
    update = torch.optim.AdamW(model.parameters(), foreach=False)
    trained(model, 256, update=update, steps=2)
    return sum(p.nbytes for p in model.parameters())


def test_states_of_an_optimizer_are_known_once_it_has_made_them():
    report = seen(goes_on, 1, memory_steps=2)
    states = 2 * report.results[0] + 4 * 4
    assert report.peaks(0)["measured"]["optimizer"] == states
    assert "in step 1" in report.explain()["What does the peak of memory consist of?"]
    first = report.memory.query("step == 0 and category == 'optimizer'")["bytes"]
    assert first.max() == states


def unsharded_first(unshards):
    model = sharded(nn.Sequential(nn.Linear(128, 128), nn.Sequential(nn.Linear(128, 512))))
    for part in (model[0], model[1], model):
        part.set_reshard_after_forward(True)
    before = model[0].unshard if unshards else bool
    update = torch.optim.SGD(model.parameters(), 0.1)
    trained(lambda x: (before(), model(x))[1], 128, update=update, steps=2)
    return sum(p.to_local().nbytes for p in model.parameters())


@pytest.mark.parametrize("unshards", [False, True])
def test_shards_are_the_parameters_also_where_a_program_gathers_before_its_first_forward(unshards):
    report = seen(unsharded_first, 2, (unshards,), memory_steps=2)
    most = most_of(report, 1)
    assert most["parameters"] == report.results[0] and most["optimizer"] == 0


# ---- what is kept for the backward by hooks of the program, and what no tensor shows -------------
WIDE, ROWS, DEPTH = 1024, 256, 4


def recomputes(reentrant):
    blocks = [
        nn.Sequential(nn.Linear(64, WIDE), nn.GELU(), nn.Linear(WIDE, 64)) for _ in range(DEPTH)
    ]
    x = torch.ones(ROWS, 64, requires_grad=True)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    x.square().mean().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_for_the_backward_are_activations(reentrant):
    memory = seen(recomputes, 1, (reentrant,), memory_steps=2).memory
    between, hidden = (DEPTH + 1) * ROWS * 64 * 4, 2 * ROWS * WIDE * 4  # blocks; in one block
    assert memory.query("category == 'activations'")["bytes"].max() == between + hidden


class OnRecomputation(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def accumulates(recomputes):
    """Without recomputation autograd saves neither biases nor the first weight, as the input needs
    no gradient."""
    model = layers(3, bias=not recomputes)
    model = sharded(OnRecomputation(*model) if recomputes else model)
    model.set_requires_gradient_sync(False)
    model(torch.ones(8, 256, requires_grad=recomputes)).square().mean().backward()
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("recomputes", [True, False])
def test_unsharded_gradients_are_gradients_whether_or_not_their_parameters_are_saved(recomputes):
    report = seen(accumulates, args=(recomputes,), memory_steps=1)
    held = report.memory.query("rank == 0 and category == 'gradients'")["bytes"]
    assert held.max() == report.results[0]
