"""`pl.fit_cluster`: from a log of measured iterations to a cluster that predicts others."""

from functools import cache
from unittest import mock

import pytest

import paralab as pl
from paralab.theory import fit_cluster
from paralab.theory.fit_cluster import FACTORS, ClusterFit
from refusals import refuses

TRUE = pl.Cluster.preset("dgx-a100", nodes=4)
WRONG = TRUE.replace(
    flops=0.8 * TRUE.flops,
    products={name: [0.8 * rate for rate in some] for name, some in TRUE.products.items()},
    intra=pl.Link(alpha=TRUE.intra.alpha, bandwidth=1.5 * TRUE.intra.bandwidth),
)
SMALL = pl.ModelSpec(layers=4, hidden=2048, heads=16, seq_len=1024, vocab=51200)
LARGE = SMALL.replace(hidden=4096, heads=32)
PLANS = [
    pl.Plan(dp=32, microbatch_size=4, precision="bf16"),
    pl.Plan(dp=4, tp=8, microbatch_size=8, precision="bf16"),
    pl.Plan(dp=2, tp=16, microbatch_size=8, precision="bf16"),
    pl.Plan(dp=8, tp=2, pp=2, microbatches=4, microbatch_size=2, precision="bf16"),
]


def predicted(model: pl.ModelSpec, plan: pl.Plan, cluster: pl.Cluster) -> float:
    return pl.predict(model, plan, cluster, steps=1, detail="actions").step_time


@cache
def log(*models: pl.ModelSpec) -> list:
    return [(model, plan, predicted(model, plan, TRUE)) for model in models for plan in PLANS]


@cache
def corrected() -> ClusterFit:
    return pl.fit_cluster(log(SMALL, LARGE), WRONG)


def test_a_cluster_that_was_stated_wrong_is_corrected_by_what_was_measured():
    fit = corrected()
    before = [predicted(*run[:2], WRONG) / run.seconds - 1 for run in fit.runs]
    assert max(map(abs, fit.errors)) < 0.35 * max(map(abs, before))
    assert max(map(abs, fit.inside)) < 0.3 * max(map(abs, before))
    assert fit.cluster.flops == pytest.approx(TRUE.flops, rel=0.1)
    _, stated, fitted = fit.constants["products"]  # in what was trained in
    assert (stated, fitted) == (WRONG.rate("bf16"), fit.cluster.rate("bf16"))
    assert TRUE.intra.bandwidth < fit.cluster.intra.bandwidth < 0.95 * WRONG.intra.bandwidth
    assert max(map(abs, fit.null)) > 5 * max(map(abs, fit.errors))
    assert set(fit.constants) == set(FACTORS) and len(FACTORS) <= 6
    assert len(fit.errors) == len(fit.runs) and "out of sample" in repr(fit)


def test_a_run_that_is_far_off_does_not_pull_the_others_with_it():
    clean = corrected()
    slow = [(run.model, run.plan, run.seconds * (3 if i == 1 else 1))
            for i, run in enumerate(clean.runs)]  # fmt: skip
    spoiled = pl.fit_cluster(slow, WRONG)
    assert spoiled.cluster.flops == pytest.approx(clean.cluster.flops, rel=0.05)


def test_the_errors_of_a_model_are_of_a_fit_to_the_other_runs_alone():
    rows = [(model, plan, seconds * (1.3 if model == LARGE else 1))
            for model, plan, seconds in log(SMALL, LARGE)]  # fmt: skip
    fit, unseen = pl.fit_cluster(rows, WRONG), range(len(PLANS), len(rows))
    alone = pl.fit_cluster(rows[: len(PLANS)], WRONG).cluster
    for at in unseen:
        model, plan, seconds = rows[at]
        assert predicted(model, plan, alone) / seconds - 1 == pytest.approx(fit.errors[at])
    assert max(map(abs, fit.inside)) < max(abs(fit.errors[at]) for at in unseen)


def test_more_than_ten_runs_of_a_model_are_left_out_in_ten_parts():
    tiny = SMALL.replace(layers=1)
    plans = [pl.Plan(microbatch_size=b, precision="bf16") for b in range(1, 13)]
    rows = [(tiny, plan, predicted(tiny, plan, TRUE)) for plan in plans]
    with mock.patch.object(fit_cluster, "_fitted", side_effect=fit_cluster._fitted) as fits:
        errors = pl.fit_cluster(rows, WRONG).errors
    assert [len(call.args[1]) for call in fits.mock_calls] == [12, 10, 10, *[11] * 8]
    assert len(errors) == 12 and max(map(abs, errors)) < 0.1


def test_products_are_never_said_to_be_faster_than_the_data_sheet():
    rows = [(model, plan, seconds / 1.6) for model, plan, seconds in log(SMALL, LARGE)[::2]]
    fit = pl.fit_cluster(rows, TRUE)
    assert fit.cluster.rate("bf16") == pytest.approx(TRUE.peak_flops)
    assert fit.cluster.memory_bandwidth > 1.3 * TRUE.memory_bandwidth  # what is left is elsewhere
    free = pl.fit_cluster(rows, TRUE.replace(peak_flops=None))
    assert free.cluster.rate("bf16") > 1.1 * TRUE.peak_flops


def test_what_the_runs_say_nothing_about_stays_as_stated():
    alone = [(SMALL, pl.Plan(microbatch_size=b, precision="bf16")) for b in (2, 4, 8)]
    rows = [(*run, 1.2 * pl.predict(*run, TRUE, steps=1).step_time) for run in alone]
    fit = pl.fit_cluster(rows, TRUE)
    assert fit.cluster.inter == TRUE.inter and fit.cluster.intra == TRUE.intra
    assert fit.cluster.flops < TRUE.flops and len(fit.errors) == 3


def test_a_run_of_sgd_is_fitted_as_one():
    sgd = [pl.predict(model, plan, TRUE, steps=1, optimizer="sgd", detail="actions")
           for model, plan, _ in log(SMALL)]  # fmt: skip
    fit = pl.fit_cluster(sgd, TRUE)
    assert max(map(abs, fit.inside)) < 1e-6
    assert pl.fit_cluster(fit.runs, TRUE).inside == fit.inside  # what was fitted is a log too


def test_reports_are_runs_too():
    rows = log(SMALL)[:2]
    reports = [pl.predict(*row[:2], TRUE, steps=1, detail="actions") for row in rows]
    first, other = (pl.fit_cluster(runs, WRONG).cluster for runs in (rows, reports))
    assert other == first


def test_a_single_run_is_fitted_on_as_many_nodes_as_it_had():
    one = pl.fit_cluster(log(SMALL)[:1], WRONG.replace(nodes=1))
    assert one.errors == () and "out of sample" not in repr(one)
    model, plan, seconds, _ = one.runs[0]
    assert predicted(model, plan, one.cluster) / seconds - 1 == pytest.approx(one.inside[0])


TINY = pl.ModelSpec(layers=2, hidden=32, heads=4, seq_len=8, vocab=260)
ONE = (TINY, pl.Plan(), 0.1)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no run"),
        ([(SMALL, PLANS[0])], "run 0 is refused: it is not a row of three"),
        ((SMALL, PLANS[0], 1.0), "run 0 is refused: it is not a row of three"),
        ([(PLANS[0], SMALL, 1.0)], "run 0 is refused: model=.*: not a model description; legal"),
        ([(SMALL, SMALL, 1.0)], "run 0 is refused: plan=.*: not a plan; legal: a pl.Plan"),
        ([(SMALL, PLANS[0], -1.0)], "seconds"),
        ([(SMALL, PLANS[0], 1.0, "adam")], "run 0 is refused: optimizer='adam': unknown choice"),
        ([ONE, (TINY, pl.Plan(zero_stage=1, offload="nvme"), 0.1)], "run 1 is refused: "),
        ([ONE, pl.dry_run(TINY, pl.Plan())], "run 1 is refused: clock='dry run': "),
    ],
)
def test_what_is_no_log_is_refused_by_its_row(rows, words):
    with pytest.raises(ValueError, match=words) as caught:
        pl.fit_cluster(rows, WRONG.replace(disk=None))
    assert str(caught.value).count("; legal: ") == 1  # a refusal that it quotes has one already


def test_a_cluster_and_a_function_that_groups_runs_are_asked_for():
    refuses("cluster", pl.fit_cluster, [ONE], None)
    refuses("by='model': not a function", pl.fit_cluster, [ONE], WRONG, by="model")
