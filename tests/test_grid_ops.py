"""2D, 2.5D and 3D as ops: one process's gradients, and the messages and bytes that an op lists."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import oracles
import paralab as pl
from equality import assert_equal_state, reference, worst
from paralab.interpret import memory
from paralab.interpret.traffic import rows
from paralab.model import grid_ops
from paralab.model.build import build
from paralab.programs.compile import compiled
from paralab.programs.instructions import COMPUTE
from witness_memory import witness

STEPS, LR = 2, 0.5
MODEL = pl.ModelSpec(layers=2, hidden=32, heads=4, seq_len=12, vocab=260)
GRIDS: dict[str, dict[str, Any]] = {
    "2d": {"tp": 4, "tp_mode": "2d"},
    "2.5d": {"tp": 8, "tp_mode": "2.5d"},
    "2.5d flat": {"tp": 4, "tp_mode": "2.5d", "tp_depth": 1},
    "2.5d deep": {"tp": 2, "tp_mode": "2.5d", "tp_depth": 2},
    "3d": {"tp": 8, "tp_mode": "3d"},
}
ZB = {"pp": 2, "schedule": "zb-h1"}
GRID_OPS = (grid_ops.Linear2D, grid_ops.Linear3D, grid_ops.SplitNorm, grid_ops.Scatter)
every_grid = pytest.mark.parametrize("grid", GRIDS)


def grid_plan(grid: str, **more: Any) -> pl.Plan:
    return pl.Plan(**{"microbatch_size": 4, "bucket_bytes": 20_000, **GRIDS[grid], **more})


@pytest.fixture
def sgd(run):
    def train(plan: pl.Plan, model: pl.ModelSpec = MODEL, **more: Any) -> pl.Report:
        settings = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "keep_state": True, **more}
        return run(model, plan, **settings)

    return train


# ---- one process's gradients ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("grid", "plan", "change"),
    [
        *((grid, {"microbatches": 2}, {}) for grid in GRIDS),
        ("2d", {}, {"tied": False, "attention": "sdpa"}),
        ("3d", {}, {"tied": False, "attention": "sdpa"}),
        ("2d", {"dp": 2, "zero_stage": 2, "microbatches": 2}, {}),
        ("2.5d deep", {"dp": 2, "zero_stage": 3}, {"tied": False}),
        ("2d", {"pp": 2, "microbatches": 3}, {}),
        ("3d", {"recompute": "full", "microbatches": 2}, {}),
        ("2d", {**ZB, "microbatches": 4}, {}),
        ("2.5d deep", {**ZB, "microbatches": 3, "dp": 2, "zero_stage": 1}, {"tied": False}),
        ("3d", {**ZB, "microbatches": 2}, {}),
    ],
    ids=str,
)
def test_gradients_and_sgd_weights_equal_one_process(sgd, text, grid, plan, change):
    plan, model = grid_plan(grid, **plan), MODEL.replace(**change)
    alone = reference(
        model,
        microbatches=plan.dp * plan.microbatches,
        microbatch_size=4,
        steps=STEPS,
        lr=LR,
        data=text,
    )
    assert_equal_state(alone, sgd(plan, model))


@pytest.fixture(scope="module")
def alone(run):
    """What the same ops make of it on one device, computed once."""
    known: dict[str, pl.Report] = {}

    def of(model: pl.ModelSpec, **more: Any) -> pl.Report:
        key = f"{model} {more}"
        if key not in known:
            plan = pl.Plan(microbatch_size=4, precision=more.pop("precision", "fp32"))
            settings = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "keep_state": True, **more}
            known[key] = run(model, plan, **settings)
        return known[key]

    return of


@pytest.mark.parametrize("grid", ["2d", "2.5d", "3d"])
def test_dropout_drops_what_one_device_drops(sgd, alone, grid):
    model = MODEL.replace(layers=1, dropout=0.2)
    assert worst(alone(model).gradients, sgd(grid_plan(grid), model).gradients)[0] < 1e-5


@pytest.mark.parametrize("grid", ["2d", "2.5d", "3d"])
def test_the_norm_that_clips_counts_what_is_held_twice_once(sgd, alone, grid):
    report = sgd(grid_plan(grid), clip_norm=0.01)
    assert worst(alone(MODEL, clip_norm=0.01).weights, report.weights)[0] < 1e-5
    assert worst(alone(MODEL).weights, report.weights)[0] > 1e-3  # it did clip


@pytest.mark.parametrize("grid", ["2d", "3d"])
def test_16_bits_stay_near(sgd, alone, grid):
    model = MODEL.replace(layers=1)
    report = sgd(grid_plan(grid, precision="bf16"), model, lr=0.05)
    assert worst(alone(model, precision="bf16", lr=0.05).weights, report.weights)[0] < 0.05


# ---- messages ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("grid", "plan"),
    [
        ("2d", {"microbatches": 2, "recompute": "full"}),
        ("2.5d", {}),
        ("3d", {"microbatches": 2}),
        ("2d", {**ZB, "microbatches": 3}),
    ],
    ids=str,
)
def test_a_run_makes_the_messages_that_its_ops_list_and_no_others(run, grid, plan):
    plan = grid_plan(grid, **plan)
    program, table = compiled(MODEL, plan), run(MODEL, plan, steps=2).collectives
    table = table[(table["step"] == 1) & (table["phase"] != "control")]
    columns = ["op", "axis", "peer", "phase", "payload_bytes", "wire_bytes"]
    for rank in range(plan.world_size):
        made = table[table["rank"] == rank][columns].itertuples(index=False)
        listed = [(r.op, r.axis, r.peer, r.phase, r.payload, r.wire) for r in rows(program, rank)]
        on_grid = [row for row in listed if row[1].startswith("tp")]
        assert [tuple(row) for row in made if row.axis.startswith("tp")] == on_grid
        assert {row[3] for row in on_grid} > {"linear_forward", "linear_backward"}


def test_messages_and_bytes_are_those_of_the_core_before():
    """Of every plan with a grid among the oracles, row by row on each axis of the tensor group."""
    seen = Counter()
    for one in oracles.load():
        if one.plan.tp == 1 or one.plan.tp_mode == "1d":
            continue
        seen[one.plan.tp_mode] += 1
        program = compiled(one.model, one.plan, optimizer=one.optimizer)
        node_of = lambda rank: rank // oracles.MACHINE.devices_per_node  # noqa: E731
        for rank, calls in enumerate(one.calls):
            made = Counter(
                (r.op, r.axis, r.phase, r.payload, r.wire, r.level, r.peer, r.ranks)
                for r in rows(program, rank, node_of)
                if r.axis.startswith("tp") and r.phase != "control"
            )
            assert made == Counter(row for row in calls if row[1].startswith("tp")), one.name
    assert min(seen[mode] for mode in ("2d", "2.5d", "3d")) > 0, seen


def test_summa_sends_what_the_paper_says_and_who_sends_depends_on_the_root():
    """Forward: (q-1) (MK + KN) elements by all ranks of a grid of q x q."""
    plan = pl.Plan(tp=9, tp_mode="2d", microbatch_size=3)
    model = MODEL.replace(hidden=36, heads=3, vocab=258, layers=1)
    program, q = compiled(model, plan), 3
    made = [[r for r in rows(program, rank) if r.phase == "linear_forward"] for rank in range(9)]
    h, m = model.hidden, 3 * model.seq_len
    sizes = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
    elements = (q - 1) * sum(m * k + k * n for k, n in sizes)
    assert sum(row.wire for rank in made for row in rank) == 4 * elements
    for call in zip(*made, strict=True):
        assert len({(row.op, row.axis, row.payload) for row in call}) == 1
        assert len({row.wire for row in call}) > 1


# ---- what an op says of itself -------------------------------------------------------------------
class Alone:
    """What ops ask a rank for, on one process: a message changes nothing, and is written down."""

    def __init__(self, plan: pl.Plan, index: int) -> None:
        import torch

        from paralab.parallel.layouts import groups, mode_of

        self.groups = {}
        for axis in mode_of(plan).axes:
            ranks = next(found for found in groups(plan, axis) if index in found)
            self.groups[axis] = SimpleNamespace(index=ranks.index(index), size=len(ranks))
        self.made: list = []
        self.keeping, self.dtype, self.share = True, torch.float32, 1.0
        self.first_token = self.first_logit = 0
        self.regathered = None

    def call(self, op, method, number, *tensors):
        self.made.append((method, number))
        call = op.calls[method][number]
        whole = max(tensors, key=lambda t: t.numel())
        assert whole.numel() * whole.element_size() == call.payload, (op, method, number)
        n = self.groups[call.axis].size
        small = {"all_gather": n, "reduce_scatter": n}.get(call.op, 1)
        assert min(t.numel() for t in tensors) * small == whole.numel()
        assert all(t.is_contiguous() for t in tensors)

    beside = call

    def roots(self, op, method, number):
        call = op.calls[method][number]
        return self.groups[call.axis].index == call.root

    def buffers(self, *tensors):
        pass


class Sink:
    """Where gradients go: their shapes are looked at."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.left = dict(shapes)

    def add(self, name, grad):
        assert tuple(grad.shape) == self.left.pop(name), name


def storages(*found: Any) -> dict[int, int]:
    import torch

    sizes: dict[int, int] = {}
    for one in found:
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, (tuple, list)):
            sizes |= storages(*one)
    return sizes


@every_grid
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_op_makes_its_messages_in_order_and_keeps_the_bytes_that_it_says(grid, precision, tied):
    import torch

    plan, model = grid_plan(grid, precision=precision), MODEL.replace(layers=1, tied=tied)
    dtype, made = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision], build(model, plan)
    table = made.shapes["embedding.token.weight"]
    for index in {0, 1, plan.tp - 1}:
        env = Alone(plan, index)
        for before, op in itertools.pairwise(made.ops):
            if not isinstance(op, GRID_OPS):
                continue
            env.made = []
            tokens = made.tokens * (op.parts if isinstance(op, grid_ops.Scatter) else 1)
            x = torch.randn(tokens, before.out // tokens).to(dtype)
            shapes = op.params or dict.fromkeys(op.borrows, table)
            weights = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
            state, kept = op.forward(weights, (x,), env)
            given, held = storages(x), storages(kept)
            assert state[-1].numel() == op.out and state[-1].dtype == dtype
            assert (given.keys() <= held.keys()) == op.keeps_input, op
            assert sum(held[where] for where in held.keys() - given.keys()) == op.keeps, op
            grads = (torch.randn(x.shape).to(dtype),) * op.forks + (torch.randn_like(state[-1]),)
            given_grads = storages(grads[-1])
            grads, deferred = op.input_grad(weights, kept, grads, env)
            assert grads[-1].shape == x.shape and grads[-1].dtype == dtype
            if deferred is not None:
                waits, shared = storages(deferred), storages(x) | given_grads
                assert (given.keys() <= waits.keys()) == op.defers_input, op
                assert (given_grads.keys() <= waits.keys()) == op.defers_grad, op
                assert sum(waits[at] for at in waits.keys() - shared.keys()) == op.deferred, op
                sink = Sink(shapes)
                op.weight_grad(deferred, sink, env)
                assert not sink.left
            methods = ((how, len(op.calls.get(how, ()))) for how in ("forward", "input", "weight"))
            assert env.made == [(how, number) for how, many in methods for number in range(many)]


@every_grid
def test_the_ranks_share_the_products_of_one_device(grid):
    """Work of every kind of product, forward, of inputs and of weights, adds up to one device's."""
    plan = grid_plan(grid)
    whole = build(MODEL, pl.Plan(microbatch_size=4))
    part = build(MODEL, plan)
    for half in range(3):
        of_one, of_part = (
            [sum(op.work[half].products[kind] for op in model.ops) for kind in range(3)]
            for model in (whole, part)
        )
        assert of_part == pytest.approx([flops / plan.tp for flops in of_one])


@pytest.mark.parametrize(
    ("grid", "plan"),
    [
        ("2d", {}),
        ("2.5d", {"precision": "bf16"}),
        ("3d", {"precision": "bf16"}),
        ("3d", {"recompute": "full"}),
        ("2d", {**ZB, "microbatches": 2}),
        ("3d", {**ZB, "microbatches": 2}),
    ],
    ids=str,
)
def test_memory_inside_every_op_is_what_the_ledger_counts(monkeypatch, grid, plan):
    """Each op is an instruction here. On the first rank; others, whose turn in SUMMA is another,
    may stay below it.
    """
    tops, look = {}, memory._Rank.look

    def looked(self, position: int, *inside: Any) -> None:
        more = sum(found.activations + found.workspace for found in inside)
        tops[position] = max(tops.get(position, 0), self.total + more)
        look(self, position, *inside)

    monkeypatch.setattr(memory._Rank, "look", looked)
    monkeypatch.setattr(
        "paralab.programs.compile.message_cuts", lambda model: set(range(len(model.ops)))
    )
    plan, model = grid_plan(grid, **plan), MODEL.replace(hidden=64)
    program = compiled(model, plan)
    for rank in {0, 1, plan.world_size - 1}:
        tops.clear()
        found = memory.memory(program, plan.place(rank).pp)
        seen = witness(model, plan, rank)
        between = [{kind: n for (_, kind), n in then.items() if n} for then in found.between]
        assert between == [{kind: n for kind, n in then.items() if n} for then in seen.between]
        checked = 0
        for position, ins in enumerate(program.codes[plan.place(rank).pp]):
            if ins.op in COMPUTE and isinstance(program.model.ops[ins.at[0]], GRID_OPS):
                said, was = tops[position], seen.tops[position][0]
                assert was <= said if rank else was == said, (rank, ins)
                checked += 1
        assert checked > 20
