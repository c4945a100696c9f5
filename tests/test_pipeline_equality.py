"""Every pipeline schedule gives the gradients and SGD weights of one process.

Without tied weights each parameter has one chain of additions, whatever the schedule: bit for bit
what the program of one device gives; the reference's autograd calls other kernels, which round in
another way on some processors.
A tied embedding's gradient is the sum of two chains, and data parallelism adds ranks: within the
tolerance of equality.py. All runs keep to NCCL's order (strict mode).
"""

from __future__ import annotations

import numpy as np
import pytest

import paralab as pl
from equality import assert_equal_state, reference

STEPS, LR = 2, 0.5
SGD = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "keep_state": True}
# m < p, m not divisible by p, m = 1, and the ordinary
GRID = [
    *((name, p, m, 1) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
      for p, m in ((2, 1), (3, 2), (3, 5), (4, 6))),
    *(("interleaved", p, m, v) for p, m, v in ((2, 2, 2), (2, 4, 3), (3, 6, 2), (2, 2, 1))),
]  # fmt: skip


@pytest.fixture(scope="module")
def deep() -> pl.ModelSpec:
    """Six blocks, untied; neither 4 stages nor the head's cost divide them evenly."""
    return pl.ModelSpec(layers=6, hidden=40, heads=4, seq_len=24, vocab=257, tied=False)


@pytest.fixture(scope="module")
def expected(text):
    def of(model: pl.ModelSpec, microbatches: int) -> dict:
        return reference(
            model, microbatches=microbatches, microbatch_size=2, steps=STEPS, lr=LR, data=text
        )

    return of


def assert_same_bits(expected: dict, report: pl.Report) -> None:
    for what in ("gradients", "weights"):
        state = getattr(report, what)
        assert list(state) == list(expected[what])
        for name, array in expected[what].items():
            np.testing.assert_array_equal(array, state[name], err_msg=f"{what} {name}")


@pytest.mark.parametrize("schedule, pp, m, v", GRID)
def test_untied_models_train_bitwise_as_on_one_device(run, deep, expected, schedule, pp, m, v):
    plan = pl.Plan(pp=pp, microbatches=m, virtual_stages=v, schedule=schedule)
    report, alone = run(deep, plan, **SGD), run(deep, pl.Plan(microbatches=m), **SGD)
    assert_same_bits(vars(alone), report)
    assert_equal_state(expected(deep, m), report)
    losses = expected(deep, m)["losses"]
    np.testing.assert_allclose(report.losses, losses, rtol=1e-6)


@pytest.mark.parametrize("schedule, v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2),
                                         ("zb-h1", 1), ("zb-h2", 1)])  # fmt: skip
def test_a_tied_embedding_gets_the_gradients_of_both_its_stages(run, deep, expected, schedule, v):
    tied = deep.replace(tied=True)
    plan = pl.Plan(pp=3, microbatches=6, virtual_stages=v, schedule=schedule)
    assert_equal_state(expected(tied, 6), run(tied, plan, **SGD))


@pytest.mark.parametrize("change", [{"vocab": 3000}, {"layers": 5}, {"attention": "sdpa"}])
def test_uneven_stages_train_bitwise_too(run, deep, expected, change):
    model = deep.replace(**change)
    alone = run(model, pl.Plan(microbatches=3), **SGD)
    report = run(model, pl.Plan(pp=4, microbatches=3), **SGD)
    assert_same_bits(vars(alone), report)
    assert_equal_state(expected(model, 3), report)


@pytest.mark.parametrize(
    "schedule, v, grad_sync",
    [("1f1b", 1, "naive"), ("gpipe", 1, "bucketed"), ("1f1b", 1, "overlapped"),
     ("interleaved", 2, "overlapped"), ("zb-h2", 1, "overlapped")],
)  # fmt: skip
def test_data_parallel_runs_beside_every_schedule(run, deep, expected, schedule, v, grad_sync):
    tied = deep.replace(tied=True)
    plan = pl.Plan(dp=2, pp=2, microbatches=2, virtual_stages=v, schedule=schedule,
                   grad_sync=grad_sync, bucket_bytes=60_000)  # fmt: skip
    report = run(tied, plan, **SGD)
    assert_equal_state(expected(tied, 4), report)
    losses = expected(tied, 4)["losses"]
    np.testing.assert_allclose(report.losses, losses, rtol=1e-5)


def test_dropout_drops_the_same_activations_whichever_rank_computes_them(run, deep):
    noisy = deep.replace(dropout=0.2)
    alone = run(noisy, pl.Plan(microbatches=4), **SGD)
    assert_same_bits(
        vars(alone), run(noisy, pl.Plan(pp=3, microbatches=4, schedule="zb-h1"), **SGD)
    )
    assert_equal_state(vars(alone), run(noisy, pl.Plan(pp=2, dp=2, microbatches=2), **SGD))
    calm = run(deep, pl.Plan(microbatches=4), **SGD)
    with pytest.raises(AssertionError):
        assert_equal_state(vars(alone), calm)


@pytest.mark.parametrize("tied", [True, False])
def test_clipping_uses_the_norm_of_the_whole_model_and_counts_a_tied_weight_once(run, deep, tied):
    model = deep.replace(tied=tied)
    alone = run(model, pl.Plan(microbatches=4), clip_norm=0.1, **SGD)
    for plan in (pl.Plan(pp=3, microbatches=4), pl.Plan(pp=2, dp=2, microbatches=2)):
        assert_equal_state(vars(alone), run(model, plan, clip_norm=0.1, **SGD))
    with pytest.raises(AssertionError):
        assert_equal_state(vars(alone), run(model, pl.Plan(pp=3, microbatches=4), **SGD))


def test_adamw_keeps_both_copies_of_a_tied_weight_equal(run, deep):
    tied = deep.replace(tied=True)
    alone = run(tied, pl.Plan(microbatches=4), steps=4, keep_state=True)
    split = run(tied, pl.Plan(pp=3, microbatches=4), steps=4, keep_state=True)
    for name, weight in alone.weights.items():
        np.testing.assert_allclose(weight, split.weights[name], atol=2e-5, rtol=0, err_msg=name)


def as_text(pp: int, microbatches: int) -> list[list[str]]:
    """A schedule of one's own: GPipe, with the backwards in the other order."""
    ks = range(microbatches)
    return [[*(f"{r}F{k}" for k in ks), *(f"{r}B{k}" for k in reversed(ks))] for r in range(pp)]


def mixed(pp: int, microbatches: int, virtual_stages: int) -> list[list[tuple]]:
    """Whole and split backwards side by side."""
    lists = []
    for rank in range(pp):
        row = [(s, "F", k) for s in range(rank, pp * virtual_stages, pp)
               for k in range(microbatches)]  # fmt: skip
        for s in reversed(range(rank, pp * virtual_stages, pp)):
            row += [(s, "I", k) for k in range(0, microbatches, 2)]
            row += [(s, "B", k) for k in range(1, microbatches, 2)]
            row += [(s, "W", k) for k in range(0, microbatches, 2)]
        lists.append(row)
    return lists


def test_a_schedule_of_ones_own_trains_the_same(run, deep, expected):
    plan = pl.Plan(pp=3, microbatches=4, schedule=as_text)
    report = run(deep, plan, **SGD)
    assert_equal_state(expected(deep, 4), report)
    assert plan.to_dict()["schedule"] == "own: as_text"
    plan = pl.Plan(pp=2, microbatches=4, virtual_stages=3, schedule=mixed)
    assert_equal_state(expected(deep, 4), run(deep, plan, **SGD))


def test_in_flight_micro_batches_are_p_minus_r_for_1f1b_and_m_for_gpipe(run, deep):
    for schedule, most in (("1f1b", [3, 2, 1]), ("gpipe", [5, 5, 5])):
        spans = run(deep, pl.Plan(pp=3, microbatches=5, schedule=schedule), steps=2).spans
        spans = spans[(spans["step"] == 1) & spans["kind"].isin(["forward", "backward"])]
        for rank, expected in enumerate(most):
            mine = spans[spans["rank"] == rank].sort_values("start")
            assert set(mine["stage"]) == {rank}
            change = mine["kind"].map({"forward": 1, "backward": -1})
            assert change.cumsum().max() == expected, (schedule, rank)


def test_every_message_is_one_activation_and_every_rank_sends_what_theory_says(run, deep):
    m, size = 4, 2 * 24 * 40 * 4  # bytes of b s h elements
    report = run(deep, pl.Plan(pp=2, virtual_stages=3, microbatches=m, schedule="interleaved"),
                 steps=2)  # fmt: skip
    sent = report.traffic(by=["rank", "axis", "op"]).set_index(["rank", "axis", "op"])["bytes"]
    # 6 stages: 5 boundaries, each crossed by every micro-batch in both directions
    assert sent[0, "pp", "send"] + sent[1, "pp", "send"] == 2 * 5 * m * size
    assert sent[0, "pp", "send"] == 5 * m * size  # 3 activations and 2 gradients per micro-batch


# ---- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, said",
    [
        ({"pp": 7}, r"pp=7: .*6 blocks.*; legal: up to 6"),
        ({"pp": 2, "virtual_stages": 4, "microbatches": 2, "schedule": "interleaved"},
         r"virtual_stages=4: .*6 blocks.*; legal: up to 3"),
        ({"pp": 2, "virtual_stages": 2}, r"virtual_stages=2: schedule='1f1b' has one stage"),
        ({"virtual_stages": 2, "schedule": "interleaved"}, r"virtual_stages=2: one rank"),
        ({"pp": 3, "virtual_stages": 2, "microbatches": 4, "schedule": "interleaved"},
         r"microbatches=4: .*; legal: a multiple of 3"),
        ({"pp": 2, "schedule": "own: mine"}, r"schedule='own: mine': .*only the function's name"),
        ({"pp": 2, "schedule": lambda pp, microbatches: [["0F0", "0B0"]]}, "; legal: "),
        ({"pp": 2, "schedule": lambda pp, microbatches: 3}, "; legal: "),
        ({"pp": 2, "schedule": lambda pp, microbatches: [["0F0", "0B0"], ["1B0", "1F0"]]},
         "1B0.*; legal: "),
        ({"pp": 2, "schedule": lambda pp, microbatches: [["0B0", "0F0"], ["1F0", "1B0"]]},
         "0B0.*; legal: "),
    ],
)  # fmt: skip
def test_wrong_plans_are_refused_before_a_process_starts(monkeypatch, run, deep, settings, said):
    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("paralab.ranks.watch.Run.start", started)
    with pytest.raises(ValueError, match=f"(?s){said}"):
        run(deep, pl.Plan(**settings))


def test_what_cannot_be_called_as_a_schedule_is_refused_by_the_plan():
    with pytest.raises(ValueError, match=r"schedule=.*cannot be called.*; legal: 'naive'"):
        pl.Plan(schedule=lambda pp: [])


def test_ranks_are_a_grid_of_pipelines_by_data_parallel_groups():
    plan, grid = pl.Plan(pp=3, dp=4), np.arange(12).reshape(3, 4)
    for rank in range(12):
        pp_index, dp_index, _ = plan.place(rank)
        assert grid[pp_index, dp_index] == rank
        assert plan.ranks("dp", rank) == tuple(grid[pp_index])
        assert plan.ranks("pp", rank) == tuple(grid[:, dp_index])
