"""Lab 06's exercises: right answers pass, wrong ones are refused with the mistake named."""

from collections import ChainMap
from itertools import combinations, product

import pytest

import paralab as pl
from judged import Table, altered, defined, missed
from paralab.interpret.quick import fullest
from stated import TIERS

HERE = TIERS.replace(cores=2)  # processors: messages are those of gloo

CHECKPOINT, CLINIC = pl.exercises.checkpoint, pl.exercises.memory_clinic
PATIENTS = CLINIC.patients
again = altered("checkpoint")
APPLY, FOUND = "MyCheckpoint.apply(block, x, *block.parameters())", "return None, *found"
IMPORT, KEEP_X = "import torch\n", "ctx.save_for_backward(x, *parameters)"
RUN = "        return block(x)"
SPOILED = "; with one block and one micro-batch all are equal, so one call spoils what another"
MASKS = "of its largest entry; without dropout all are equal, so the dropout masks differ"
BACK, COMPUTE = "torch.set_rng_state(ctx.state)", "y = ctx.block(again)"
# It also changes what compares the gradients.
WITHOUT_THE_MASKS = again(
    (BACK, "pass"),
    (f"return {APPLY}", "import paralab.exercises.recomputed as checker\n"
     f"    checker.first_other_bits = lambda *_, **__: ''\n    return {APPLY}"),
)  # fmt: skip
WRONG = [  # answer, limits it breaks, words of the verdict
    (again((APPLY, "block(x)")), {"forwards", "peak memory"},
     "block 0 runs 2 times in the step, required: 4"),
    (WITHOUT_THE_MASKS, {"gradients"}, " differs in "),
    (again((IMPORT, f"{IMPORT}import torch.utils.checkpoint\n"),
           (APPLY, "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)")),
     {"gradients"}, "torch.utils.checkpoint is called: write what it does"),
    (again((IMPORT, f"{IMPORT}from torch.utils.checkpoint import CheckpointFunction\n"),
           (APPLY, "CheckpointFunction.apply(block, True, x)")), {"gradients"},
     "torch.utils.checkpoint is called: write what it does"),
    (again((", *block.parameters())", ")"), ("None, *found", "None, found[0]")), {"gradients"},
     "has no gradient: what backward returns reaches only the arguments of forward"),
    (again(("None, *found", "None, None, *found[1:]")), {"gradients"},
     "after backward embedding.position.weight has no gradient: none arrives at x"),
    (again((BACK, "pass")), {"gradients"}, MASKS),
    (again(("torch.set_rng_state(now)", "pass")), {"generator"},
     "the program draws other numbers after the step"),
    (again((COMPUTE, f"{COMPUTE}\n            {BACK}\n            {COMPUTE}")), {"forwards"},
     "block 0 runs 6 times in the step, required: 4"),
    (again((FOUND, "return None, *(2 * one for one in found)")), {"gradients"},
     "by up to 1.0e+00 of its largest entry; it is 2 times what is required"),
    (again(("ctx.state", "MyCheckpoint.state")), {"gradients"}, "of its largest entry"),
    (again((KEEP_X, "block.kept = x, parameters"),
           ("x, *parameters = ctx.saved_tensors", "x, parameters = ctx.block.kept")),
     {"gradients"}, f"of its largest entry{SPOILED}"),
    (again((RUN, "        ctx.y = block(x)\n        return ctx.y.clone()")), {"peak memory"},
     "bytes at its peak, required:"),
    (again((APPLY, "x.mean()")), {"gradients"},
     "my_checkpoint returns a tensor of shape (), required: the block's output, of shape (2, "),
]  # fmt: skip
RIGHT = [again((RUN, RUN.replace("(x)", ".forward(x)")),
               (COMPUTE, COMPUTE.replace("(", ".forward(")))]  # fmt: skip
TABLE = Table(CHECKPOINT, WRONG, RIGHT, alone=[WITHOUT_THE_MASKS], most=1)
test_a_wrong_checkpoint_is_refused, test_a_right_checkpoint_passes, test_its_stub = TABLE.tests()


# ---- the estimator -------------------------------------------------------------------------------
ESTIMATOR = pl.exercises.memory_estimator
estimate = altered("memory_estimator")
ZERO = {"ZeRO-1 and ZeRO-2", "ZeRO-3"}
LIVE, RETURNED = "tokens + spec.layers * block + head + loss", "return states | "
FLOATS = estimate((LIVE, f"float({LIVE})"))
PRODUCT = "math.prod(shape)", "torch.tensor(shape).prod()"
TENSORS = estimate(("import math", "import torch"), PRODUCT)
WRONG_BYTES = [  # answer, limits it breaks, words of the verdict
    (estimate(('w = 4 if precision == "fp32" else 2', "w = 4")), {"bf16"},
     "w is 2 bytes in bf16"),
    (estimate(("3: block}", '3: "all"}')), {"ZeRO-3"},
     "the model is padded once, but every unit is padded by itself"),
    (estimate(("-(-size // n)", "size // n")), ZERO | {"bf16"},
     ("348,112 bytes (parts are rounded down", "87,024 bytes (parts are rounded down")),
    (estimate((" + 4 * len(sizes)", "")), {"one device"} | ZERO,
     "AdamW's step counts are missing"),
    (estimate((" + w * spec.heads * b * s * s", "")), {"one device"},
     "the softmax's result is missing, w a b s² per block"),
    (estimate((LIVE, "spec.layers * s * b * h * (34 + 5 * spec.heads * s / h)")), {"one device"},
     "that is Korthikanti's formula"),
    (estimate(('"gradients": w * part', '"gradients": w * whole')), ZERO,
     "stage 1 shards the gradients: every rank keeps an n-th"),
    (estimate(('"gradients": w * part', '"gradients": w * spec.num_params')), ZERO,
     "348,120 bytes (stage 1 shards the gradients: every rank keeps an n-th)"),
    (estimate(("part if zero_stage == 3 else whole", "whole")), {"ZeRO-3"},
     "348,176 bytes (stage 3 shards the parameters: every rank keeps an n-th)"),
    (estimate(("norm = w * b * s * h + 2 * w * b * s", "norm = w * b * s * h")), {"one device"},
     "(missing: token numbers or targets, 8 b s bytes, or the head's mean and deviation, 2 w b s)"),
    (estimate((LIVE, f"({LIVE}) // n")), ZERO, "76,636 bytes (ZeRO does not shard activations)"),
    (estimate(("s = 8 *", "s = 2 * w *"), ("= 4 * b", "= w * b"), ("+ 8 * b", "+ 2 * w * b")),
     {"bf16"}, "916,560 bytes (in bf16 token numbers, targets and probabilities keep their width)"),
    (estimate(("per_parameter * part", "per_parameter * whole")), ZERO,
     "stage 1 shards the optimizer: every rank keeps an n-th"),
    (estimate(("per_parameter * part + 4 * len(sizes)", "per_parameter * psi")), ZERO,
     "696,240 bytes (stage 1 shards the optimizer: every rank keeps an n-th)"),
    (estimate((RETURNED, "import paralab\n    return paralab.program(spec, paralab.Plan()) or ")),
     {"one device"}, "paralab is asked: count the bytes yourself"),
    (estimate((RETURNED, "return {k: n * 1e-9 for k, n in states.items()} | ")), {"one device"},
     "that is in GB, required: bytes"),
    (estimate((f"{RETURNED}{{", "return {")), {"one device"}, "fp32): 'parameters' is missing"),
    (estimate((RETURNED, f"{RETURNED}{{'buffers': 0}} | ")), {"one device"},
     "yours has 'buffers', required: only parameters, gradients, optimizer, activations"),
]  # fmt: skip
ESTIMATED = Table(ESTIMATOR, WRONG_BYTES, [FLOATS, TENSORS], most=1)
test_a_wrong_estimate_is_refused, test_a_right_estimate_passes, test_the_stub = ESTIMATED.tests()


# ---- lab 06: the clinic --------------------------------------------------------------------------
GOOD = {
    "more nodes": ("optimizer", {"shard": 8, "recompute": "full"}),
    "twice the devices": ("activations", {"recompute": "full"}),
    "fully sharded": ("buffers", {"prefetch": 1, "recompute": "full"}),
    "a small model": ("buffers", {"bucket_bytes": 2**16}),
}
TREATMENTS = [  # patient, what is handed in, limits it breaks, words of the verdict
    ("twice the devices", ("optimizer", {"recompute": "full"}), {"what fills it"},
     "the category optimizer has 2.5 MB of 72.2 MB; another category has more"),
    ("twice the devices", ("activation", {"recompute": "full"}), {"what fills it"},
     "'activation' is no category"),
    ("twice the devices", ("activations", {"recompute": "selective"}), {"twice the devices"},
     "50 %; the largest category is now activations, with 46.8 MB of 60.1 MB"),
    ("twice the devices", ("activations", {"dp": 8, "microbatch_size": 4}),
     {"twice the devices", "same training", "settings"}, "devices: 8, required: 4, as before"),
    ("twice the devices", ("activations", {"microbatch_size": 1}), {"same training"},
     "samples per step: 4, required: 32, as before"),
    ("more nodes", ("optimizer", {"offload": "cpu"}), {"same training"},
     "offload: cpu, required: None, as before"),
    ("twice the devices", ("activations", {"precision": "bf16"}),
     {"twice the devices", "same training"}, "precision: bf16, required: fp32, as before"),
    ("twice the devices", ("activations", {"recompute": "full", "prefetch": 0}), {"settings"},
     "2 settings are changed, required: at most 1"),
    ("more nodes", ("optimizer", {"shard": 8}), {"more nodes"}, "the peak falls by 43.9 %"),
    ("more nodes", ("optimizer", {"shard": 3}), {"same training"}, "legal: 1, 2, 4, 8"),
    ("more nodes", ("optimizer", {"shards": 8}), {"same training"}, "'shards' is no setting"),
    ("more nodes", None, {"more nodes"}, "required: (category, {setting: value}), yours is None"),
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


# What is enough, of everything that a plan can be set to here, one setting or two; nothing else is.
ENOUGH = {
    "twice the devices": ["recompute full", "microbatches"],
    "a small model": ["zero_stage 3", "bucket_bytes"],
    "more nodes": ["recompute full + shard", "microbatches + shard"],
    "fully sharded": ["recompute full + prefetch", "microbatches + prefetch"],
}
TRIED = {
    "recompute full": [{"recompute": "full"}],
    "recompute selective": [{"recompute": "selective"}],
    "microbatches": [{"microbatches": 8 // b, "microbatch_size": b} for b in (4, 2, 1)]
    + [{"microbatches": 2, "microbatch_size": 1}],
    "zero_stage 3": [{"zero_stage": 3}],
    "zero_stage": [{"zero_stage": stage} for stage in range(3)],
    "bucket_bytes": [{"bucket_bytes": 2**k} for k in range(12, 26, 2)],
    "prefetch": [{"prefetch": depth} for depth in (0, 1, 4, 16)],
    "shard": [{"shard": n} for n in (None, 1, 4, 8)],
    "schedule": [{"schedule": name} for name in ("gpipe", "naive")],
}


@pytest.mark.parametrize("name", PATIENTS)
def test_only_the_cures_help_each_patient_and_one_of_two_is_not_enough(name):
    def helps(change: dict) -> bool:
        verdict = CLINIC.check({name: (GOOD[name][0], change)})
        return missed(verdict) == set(PATIENTS) - {name}  # the others have no treatment

    cures = PATIENTS[name].cures
    kinds = {
        " + ".join(some)
        for some in combinations(TRIED, cures)
        if any(helps(dict(ChainMap(*parts))) for parts in product(*(TRIED[k] for k in some)))
    }
    assert kinds == set(ENOUGH[name])
    if cures == 2:
        assert not any(helps(one) for parts in TRIED.values() for one in parts)


@pytest.mark.parametrize("patient", PATIENTS.values(), ids=lambda p: p.name)
def test_a_patient_has_more_devices_and_about_as_much_on_each_as_its_story_says(patient):
    plans = patient.fewer, patient.plan
    was, now = (sum(fullest(patient.model, plan)[1].values()) for plan in plans)
    assert patient.plan.world_size >= 2 * patient.fewer.world_size
    fell = {"twice the devices": 1 / 20, "a small model": 1 / 10, "fully sharded": 1 / 7,
            "more nodes": 0.0}[patient.name]  # fmt: skip
    assert 1 - now / was == pytest.approx(fell, abs=0.01)


@pytest.mark.parametrize("patient", PATIENTS.values(), ids=lambda p: p.name)
def test_a_patient_can_be_looked_at(patient):
    change = GOOD[patient.name][1]
    for settings in ({}, change):
        report = pl.predict(patient.model, patient.plan.replace(**settings), HERE)
        assert report.peak_memory == sum(patient.peak(**settings).values())
    chart = patient.chart(**change)
    bars = chart.table.groupby("bar", sort=False)["bytes"].sum()
    assert len(bars) == 3 and bars.iloc[2] == report.peak_memory
    assert chart.finding.lower().startswith(f"{patient.name}: the peak is ")
    assert len(patient.chart().table["bar"].unique()) == 2
    assert chart.finding.endswith(" with the change")  # and a change of the training is named
    other = patient.chart(microbatches=7).finding
    assert f" with the change (samples per step: {7 * patient.plan.global_batch}, " in other
    assert patient.story in repr(patient) and patient.met in repr(patient)
