"""Labs 05 and 06: one step of ZeRO of one's own, and the clinic of plans that do not shrink."""

from __future__ import annotations

import numpy as np
import pytest

import bad_answers as bad
import bad_attacks as attacks
import paralab as pl
from judged import assert_reads_the_same_alone, defined, judged, missed
from paralab.exercises import zero

STEP, CLINIC = pl.exercises.zero_step, pl.exercises.memory_clinic
PATIENTS = CLINIC.patients


# ---- lab 05: a step of ZeRO ----------------------------------------------------------------------
ZERO = [  # answer, limits it breaks, words of the verdict
    (bad.ZeroAllReduce, {"bytes per rank"}, "N=2: rank 0 sends 300,012 bytes in a step, required: "
     "200,008, 1.5 times as many"),
    (bad.ZeroNot, {"kept between steps"}, "N=2: rank 0 keeps 200,008 bytes, an N-th is 100,004"),
    (bad.ZeroMomentumForAll, {"kept between steps"}, "rank 0 keeps 200,008 bytes"),
    (bad.ZeroKeepsItsPart, {"kept between steps"}, "rank 0 keeps 200,008 bytes"),
    (bad.ZeroNoGather, {"parameters", "bytes per rank"},
     "N=2: rank 1: step 1, part 0, element 0: "),
    (bad.ZeroNoWait, {"parameters"}, "N=2: rank 0 never waits for all_gather #1"),
    (bad.ZeroWrongPart, {"parameters"}, "N=2: rank 0: step 1, part 0, element 0: "),
    (bad.ZeroAveragesTwice, {"parameters"}, "it has changed by 0.5 times what is required"),
    (bad.ZeroOwnGradient, {"parameters", "bytes per rank"}, "required: 200,008, 0.5 times"),
    (bad.ZeroForgetsMomentum, {"parameters"}, "it has moved as in a first step, without"),
    (bad.ZeroDropsTheRest, {"parameters", "bytes per rank"},
     "N=3: rank 0: step 1, part 2, element 16,"),
    (bad.ZeroNoPadding, {"parameters"}, "N=3: "),
    (bad.ZeroGathersGradients, {"bytes per rank", "extra memory"}, "1.5 times as many"),
    (bad.ZeroManyCopies, {"extra memory"}, "copies of Ψ at once"),
    (bad.ZeroNotInPlace, {"parameters"}, "it is as it was before"),
    (bad.ZeroPlain, {"bytes per rank"}, "300,012 bytes in a step, required: 200,008"),
    (bad.ZeroRootOnly, {"parameters"}, "N=2: "),
    (bad.ZeroRaises, {"parameters"}, "N=2: rank 0 raised KeyError: 'part 7'"),
    (bad.ZeroHasNoStep, {"parameters"}, "the class has no method step"),
    (bad.zero_of_three, {"parameters"}, "yours cannot be called so: got an unexpected keyword"),
    (attacks.ZeroSleeps, {"parameters"}, "N=2: rank 0 never waits for all_gather #1"),
    (attacks.ZeroNumpyMomentum, {"kept between steps"}, "N=2: rank 0 keeps 200,"),
    (attacks.ZeroBytes, {"kept between steps"}, "N=2: rank 0 keeps 300,"),
    (attacks.ZeroDecoy, {"bytes per rank"}, "500,020 bytes in a step, required: 200,008"),
    (attacks.ZeroControl, {"bytes per rank"}, "400,016 bytes in a step, required: 200,008"),
    (attacks.ZeroConstants, {"parameters"}, "N=3: rank 0: step 1, part 0, element 0: "),
    (attacks.ZeroResizes, {"parameters"}, "the parameters have shape (10,) now"),
    ("zero", {"parameters"}, "required: a class, yours is 'zero'"),
]  # fmt: skip
RIGHT = [bad.ZeroGood, bad.ZeroByHand, bad.ZeroGlooHolds]
ZEROS = [*(row[0] for row in ZERO), *RIGHT]
ALONE = (bad.ZeroRootOnly,)


@pytest.mark.parametrize("answer, limits, words", ZERO)
def test_a_wrong_zero_step_is_refused_by_the_limits_it_breaks(answer, limits, words):
    verdict = judged(STEP, answer, ZEROS, alone=ALONE)
    assert not verdict and verdict.started and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_zero_step_passes(answer):
    verdict = judged(STEP, answer, ZEROS, alone=ALONE)
    assert verdict.passed, repr(verdict)


@pytest.mark.parametrize("answer", [bad.ZeroGood, bad.ZeroMomentumForAll])
def test_two_verdicts_on_one_answer_are_the_same(answer):
    judged(STEP, answer, ZEROS, alone=ALONE)
    assert_reads_the_same_alone(STEP, answer, ZEROS)


@pytest.mark.parametrize("n", zero.RANKS)
def test_one_process_is_sgd_with_momentum_on_the_sum_of_the_shares(n):
    """The checker's own reference against torch.optim.SGD."""
    import torch

    right, gradients = zero.of_one_process(7, n)
    parameter = torch.nn.Parameter(torch.from_numpy(zero.drawn(7)).double())
    lr, momentum = zero.SETTINGS[n]
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=momentum)
    for step in range(zero.STEPS):
        shares = [zero.drawn(7, n, rank, step) for rank in range(n)]
        np.testing.assert_array_equal(gradients[step], np.sum(shares, axis=0, dtype=np.float64))
        parameter.grad = torch.from_numpy(gradients[step])
        sgd.step()
        np.testing.assert_allclose(parameter.detach().numpy(), right[step + 1], rtol=0, atol=1e-12)


# ---- lab 06: the clinic --------------------------------------------------------------------------
GOOD = {
    "twice the devices": ("activations", {"recompute": "full"}),
    "a small model": ("buffers", {"bucket_bytes": 2**16}),
    "fully sharded": ("buffers", {"prefetch": 1}),
    "more nodes": ("optimizer", {"shard": 8}),
}
TREATMENTS = [  # patient, what is handed in, limits it breaks, words of the verdict
    ("twice the devices", ("optimizer", {"recompute": "full"}), {"what fills it"},
     "optimizer are 2.5 MB of 72.2 MB, something else is more"),
    ("twice the devices", ("activation", {"recompute": "full"}), {"what fills it"},
     "'activation' is no category"),
    ("twice the devices", ("", {"recompute": "full"}), {"what fills it"}, "no category is named"),
    ("twice the devices", ("activations", {"recompute": "selective"}), {"twice the devices"},
     "by 50 %; of 60.1 MB 46.8 MB are activations"),
    ("twice the devices", ("activations", {"microbatch_size": 1}), {"same training"},
     "samples per step: 4, and it was 32"),
    ("twice the devices", ("activations", {"precision": "bf16"}),
     {"twice the devices", "same training"}, "precision: bf16, and it was fp32"),
    ("twice the devices", ("activations", {"dp": 8, "microbatch_size": 4}),
     {"twice the devices", "same training", "settings"}, "devices: 8, and it was 4"),
    ("twice the devices", ("activations", {"recompute": "full", "prefetch": 0}), {"settings"},
     "2 settings are changed, required: one"),
    ("twice the devices", ("activations", {}), {"twice the devices", "settings"},
     "no settings are changed"),
    ("twice the devices", ("activations", {"recompute": "none"}),
     {"twice the devices", "settings"}, "the peak does not fall, required: by 50 %"),
    ("a small model", ("buffers", {"zero_stage": 0}), {"a small model"}, "does not fall"),
    ("a small model", ("buffers", {"zero_stage": 1}), {"a small model"}, "does not fall"),
    ("a small model", ("buffers", {"bucket_bytes": 2**18}), {"a small model"}, "the peak falls"),
    ("fully sharded", ("buffers", {"prefetch": 8}), {"fully sharded"}, "the peak falls by "),
    ("fully sharded", ("buffers", {"zero_stage": 2}), {"fully sharded"}, "does not fall"),
    ("more nodes", ("optimizer", {"shard": 3}), {"same training"}, "legal: 1, 2, 4, 8"),
    ("more nodes", ("optimizer", {"shards": 8}), {"same training"}, "'shards' is no setting"),
    ("more nodes", ("optimizer", {"shard": 1}), {"more nodes"}, "does not fall"),
    ("more nodes", None, {"more nodes"}, "required: (category, {setting: value}), yours is None"),
    ("more nodes", (np.array(["optimizer", "buffers"]), {"shard": 8}), {"what fills it"},
     "is no category"),
    ("more nodes", ("optimizer", "shard=8"), {"more nodes"}, "required: (category, {setting"),
]  # fmt: skip


@pytest.mark.parametrize("name, treatment, limits, words", TREATMENTS)
def test_a_treatment_that_does_not_help_or_changes_the_training_is_refused(
    name, treatment, limits, words
):
    verdict = CLINIC.check({**GOOD, name: treatment})
    assert missed(verdict) == limits, verdict.table.to_string()
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


def test_the_solution_helps_and_a_verdict_reads_the_same_twice():
    solved = defined(str(CLINIC.solution()), "treatment")
    first, second = CLINIC.check(solved), CLINIC.check(solved)
    assert first.passed and CLINIC.check(GOOD).passed, repr(first)
    assert first == second
    stub = CLINIC.check(defined(CLINIC.stub, "treatment"))
    assert not stub and not stub.started
    told = CLINIC.check(list(GOOD.items()))
    assert told.started and "required: a dict" in repr(told)


def test_one_patient_treated_leaves_open_what_is_asked_of_all():
    rows = {row.limit: row.ok for row in CLINIC.check({"more nodes": GOOD["more nodes"]}).rows}
    assert (
        rows["more nodes"] and [rows[n] for n in ("what fills it", "same training")] == [None] * 2
    )


# What alone is enough, of everything that a plan can be set to here; nothing else is.
HELPS = {
    "twice the devices": [{"recompute": "full"}, {"microbatches": 4, "microbatch_size": 2},
                          {"microbatches": 8, "microbatch_size": 1}],
    "a small model": [{"zero_stage": 3}, *({"bucket_bytes": 2**k} for k in (12, 14, 16))],
    "fully sharded": [{"prefetch": 0}, {"prefetch": 1}, {"prefetch": 2}, {"prefetch": 4}],
    "more nodes": [{"shard": None}, {"shard": 4}, {"shard": 8}],
}  # fmt: skip
TRIED = [
    *({"recompute": kind} for kind in ("selective", "full")),
    *({"microbatches": 8 // b, "microbatch_size": b} for b in (4, 2, 1)),
    *({"zero_stage": stage} for stage in range(4)),
    *({"bucket_bytes": 2**k} for k in range(12, 26, 2)),
    *({"prefetch": depth} for depth in (0, 1, 2, 4, 8, 16)),
    *({"shard": n} for n in (None, 1, 2, 4, 8)),
    *({"schedule": name} for name in ("gpipe", "naive")),
]


@pytest.mark.parametrize("name", PATIENTS)
def test_one_kind_of_setting_alone_helps_each_patient(name):
    def passes(change: dict) -> bool:
        verdict = CLINIC.check({name: (GOOD[name][0], change)})
        return missed(verdict) == set(PATIENTS) - {name}  # the others have no treatment

    assert [change for change in TRIED if passes(change)] == sorted(HELPS[name], key=TRIED.index)


@pytest.mark.parametrize("patient", PATIENTS.values(), ids=lambda p: p.name)
def test_a_patient_has_more_devices_and_about_as_much_on_each_as_its_story_says(patient):
    from paralab.exercises.memory import peak

    was, now = (sum(peak(patient.model, p).values()) for p in (patient.fewer, patient.plan))
    assert patient.plan.world_size >= 2 * patient.fewer.world_size
    fell = {"twice the devices": 1 / 20, "a small model": 1 / 10, "fully sharded": 1 / 6,
            "more nodes": 0.0}[patient.name]  # fmt: skip
    assert 1 - now / was == pytest.approx(fell, abs=0.01)


@pytest.mark.parametrize("patient", PATIENTS.values(), ids=lambda p: p.name)
def test_a_patient_can_be_looked_at(patient):
    change = GOOD[patient.name][1]
    report = patient.report(**change)
    assert report.clock == "predicted" and report.plan == patient.plan.replace(**change)
    assert report.peak_memory == sum(patient.peak(**change).values())
    assert patient.report().peak_memory == sum(patient.peak().values())
    chart = patient.chart(**change)
    bars = chart.table.groupby("bar", sort=False)["bytes"].sum()
    assert len(bars) == 3 and bars.iloc[2] == report.peak_memory
    assert (
        patient.name in chart.layout.title.text and len(patient.chart().table["bar"].unique()) == 2
    )
    assert patient.story in repr(patient) and patient.met in repr(patient)
