"""Lab 06's exercises: right answers pass, wrong ones are refused with the mistake named."""

from __future__ import annotations

from collections import ChainMap
from itertools import combinations, product

import numpy as np
import pytest

import bad_answers_06 as bad
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
KEEP, RUN = "ctx.block = block", "        return block(x)"
AUTOGRAD = "found = torch.autograd.grad(y, (again, *parameters), gradient)"
SPOILED = "; with one block and one micro-batch all are equal, so one call spoils what another"
MASKS = "of its largest entry; without dropout all are equal, so the dropout masks differ"
BACK, COMPUTE = "torch.set_rng_state(ctx.state)", "y = ctx.block(again)"
WRONG = [  # answer, limits it breaks, words of the verdict
    (again((APPLY, "block(x)")), {"forwards", "peak memory"},
     "block 0 runs 2 times in the step, required: 4"),
    (bad.without_the_masks, {"gradients"}, " differs in "),
    (bad.torchs_own, {"gradients"}, "torch.utils.checkpoint is called: write what it does"),
    (again((IMPORT, f"{IMPORT}from torch.utils.checkpoint import CheckpointFunction\n"),
           (APPLY, "CheckpointFunction.apply(block, True, x)")), {"gradients"},
     "torch.utils.checkpoint is called: write what it does"),
    (again((BACK, "pass")), {"gradients"}, MASKS),
    (again((COMPUTE, f"{COMPUTE}\n            {COMPUTE}")), {"gradients", "forwards"}, MASKS),
    (again(("torch.set_rng_state(now)", "pass")), {"generator"},
     "the program draws other numbers after the step"),
    (again((COMPUTE, f"{COMPUTE}\n            {BACK}\n            {COMPUTE}")), {"forwards"},
     "block 0 runs 6 times in the step, required: 4"),
    (again((FOUND, "return None, *(2 * one for one in found)")), {"gradients"},
     "by up to 1.0e+00 of its largest entry; it is 2 times what is required"),
    (again((FOUND, "return None, found[0], *(0 * one for one in found[1:])")), {"gradients"},
     "by up to 1.0e+00 of its largest entry; it is zero"),
    (again((FOUND, "return None, found[0], *(None for _ in parameters)")), {"gradients"},
     "has no gradient"),
    (again(("enable_grad", "no_grad")), {"gradients"},
     "raised RuntimeError: element 0 of tensors does not"),
    (again((KEEP, f"torch.manual_seed(1)\n        {KEEP}")), {"gradients", "generator"},
     "of its largest entry"),
    (again(("ctx.state", "MyCheckpoint.state")), {"gradients"}, "of its largest entry"),
    (again((KEEP, f"MyCheckpoint.stack = getattr(MyCheckpoint, 'stack', [])\n        {KEEP}"),
           (KEEP_X, "MyCheckpoint.stack.append((x, parameters, ctx.state))"),
           ("x, *parameters = ctx.saved_tensors",
            "x, parameters, ctx.state = MyCheckpoint.stack.pop()")),
     {"gradients"}, f"largest entry{SPOILED}"),
    (again((KEEP_X, "block.kept = x, parameters"),
           ("x, *parameters = ctx.saved_tensors", "x, parameters = ctx.block.kept")),
     {"gradients"}, f"of its largest entry{SPOILED}"),
    (again((AUTOGRAD, "y.backward(gradient)\n"
            "        found = [p.grad for p in (again, *parameters)]")), {"gradients"},
     ("; with one block and one micro-batch blocks.0.block.0.mlp.down.bias differs in 32 of 32 ",
     "; it is 2 times what is required, as if y.backward() added to p.grad and that were ret")),
    (again((RUN, "        ctx.y = block(x)\n        return ctx.y.clone()")), {"peak memory"},
     "bytes at its peak, required:"),
    (again((RUN, "        ctx.leaf = x.detach().requires_grad_()\n"
            "        with torch.enable_grad():\n            ctx.y = block(ctx.leaf)\n"
            "        return ctx.y.detach()"),
           ("again = x.detach().requires_grad_()", "again = ctx.leaf"), (COMPUTE, "y = ctx.y")),
     {"forwards", "peak memory"}, "bytes at its peak, required:"),
    (again((APPLY, "x.mean()")), {"gradients"},
     "my_checkpoint returns a tensor of shape (), required: the block's output, of shape (2, "),
    (again(("def backward(", "def backwards(")), {"gradients"},
     "raised NotImplementedError: You must implement either the backward or vjp method"),
]  # fmt: skip
RIGHT = [bad.through_hooks, again((RUN, RUN.replace("(x)", ".forward(x)")),
                                  (COMPUTE, COMPUTE.replace("(", ".forward(")))]  # fmt: skip
TABLE = Table(CHECKPOINT, WRONG, RIGHT, alone=[bad.without_the_masks], most=1)
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
    (estimate(("-(-size // n)", "size / n")), ZERO | {"bf16"}, "that is not padded"),
    (estimate(("-(-size // n)", "size // n")), ZERO | {"bf16"},
     ("348,112 bytes (parts are rounded down", "87,024 bytes (parts are rounded down")),
    (estimate(('8 if precision == "fp32" else 12', "8")), {"bf16"},
     "the master weights belong to the optimizer, 4 Ψ more"),
    (estimate((" + 4 * len(sizes)", "")), {"one device"} | ZERO,
     "AdamW's step counts are missing"),
    (estimate(("len(sizes)", "len(spec.parameter_shapes())")), ZERO,
     "with ZeRO there is one per unit"),
    (estimate((" + w * spec.heads * b * s * s", "")), {"one device"},
     "the softmax's result is missing, w a b s² per block"),
    (estimate((" + 4 * w * b * s", "")), {"one device"},
     "mean and deviation of the two norms are missing"),
    (estimate(("loss = 4 * b", "loss = w * b")), {"bf16"},
     "the probabilities of the loss have 4 bytes in bf16 too"),
    (estimate((LIVE, "spec.layers * block")), {"one device"},
     "the embedding and the head are missing"),
    (estimate((LIVE, "spec.layers * s * b * h * (34 + 5 * spec.heads * s / h)")), {"one device"},
     "that is Korthikanti's formula"),
    (estimate(("(part if zero_stage == 3 else whole)", "part")), {"ZeRO-1 and ZeRO-2"},
     "stage 1 does not shard the parameters: every rank keeps all n parts"),
    (estimate(('"gradients": w * part', '"gradients": w * whole')), ZERO,
     "stage 1 shards the gradients: every rank keeps an n-th"),
    (estimate((LIVE, f"({LIVE}) / b")), {"one device"}, "that is for one sample, not for b"),
    (bad.asks_the_program, {"one device"}, "paralab is asked: count the bytes yourself"),
    (estimate((RETURNED, f'del states["optimizer"]\n    {RETURNED}')), {"one device"},
     "the state 'optimizer' is missing"),
    (estimate((RETURNED, f"{RETURNED}{{'buffers': 0}} | ")), {"one device"},
     "yours has 'buffers', required: only parameters, gradients, optimizer, activations"),
    (lambda *asked: sum(FLOATS(*asked).values()), {"one device"},
     "required: a dict, {state: bytes}, yours is a float"),
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
    ("twice the devices", ("activations", {"microbatch_size": 1}), {"same training"},
     "samples per step: 4, required: 32, as before"),
    ("twice the devices", ("activations", {"precision": "bf16"}),
     {"twice the devices", "same training"}, "precision: bf16, required: fp32, as before"),
    ("twice the devices", ("activations", {"dp": 8, "microbatch_size": 4}),
     {"twice the devices", "same training", "settings"}, "devices: 8, required: 4, as before"),
    ("twice the devices", ("activations", {"recompute": "full", "prefetch": 0}), {"settings"},
     "2 settings are changed, required: at most 1"),
    ("twice the devices", ("activations", {}), {"twice the devices"}, "does not fall"),
    ("twice the devices", ("activations", {"recompute": "none"}), {"twice the devices"},
     "the peak does not fall, required: a fall of 50 %"),
    ("a small model", ("buffers", {"bucket_bytes": 2**18}), {"a small model"},
     "by 16.6 %, required: a fall of 25 %; the largest category is now parameters, with 1.1 MB of "
     "3.4 MB; a bucket holds 24 % of all gradients"),
    ("fully sharded", ("buffers", {"prefetch": 1, "recompute": "full", "microbatches": 2,
     "microbatch_size": 1}), {"settings"}, "3 settings are changed, required: at most 2"),
    ("more nodes", ("optimizer", {"shard": 8}), {"more nodes"}, "the peak falls by 43.9 %"),
    ("more nodes", ("optimizer", {"offload": "cpu"}), {"same training"},
     "offload: cpu, required: None, as before"),
    ("more nodes", ("activations", {"shard": 8, "recompute": "full"}), {"what fills it"},
     "the category activations has 6.1 MB of 25.5 MB; another category has more"),
    ("more nodes", ("optimizer", {"shard": 3}), {"same training"}, "legal: 1, 2, 4, 8"),
    ("more nodes", ("optimizer", {"shards": 8}), {"same training"}, "'shards' is no setting"),
    ("more nodes", None, {"more nodes"}, "required: (category, {setting: value}), yours is None"),
    ("more nodes", (np.array(["optimizer", "buffers"]), GOOD["more nodes"][1]), {"what fills it"},
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
    single = {"microbatches": 2, "microbatch_size": 1}
    other = {
        "more nodes": {"shard": 8, **single},
        "twice the devices": {"microbatches": 8, "microbatch_size": 1},
        "fully sharded": {"prefetch": 1, **single},
        "a small model": {"zero_stage": 3},
    }
    verdict = CLINIC.check({name: (GOOD[name][0], change) for name, change in other.items()})
    assert verdict.passed, verdict.table.to_string()
    stub = CLINIC.check(defined(CLINIC.stub, "treatment"))
    assert not stub and not stub.started
    told = CLINIC.check(list(GOOD.items()))
    assert told.started and "required: a dict" in repr(told)


def test_one_patient_treated_leaves_the_others_to_treat():
    rows = {row.limit: row.ok for row in CLINIC.check({"more nodes": GOOD["more nodes"]}).rows}
    assert {name for name, ok in rows.items() if not ok} == set(PATIENTS) - {"more nodes"}


# What is enough, of everything that a plan can be set to here, one setting or two; nothing else is.
ENOUGH = {
    "twice the devices": {"recompute full", "microbatches"},
    "a small model": {"zero_stage 3", "bucket_bytes"},
    "more nodes": {"shard & recompute full", "microbatches & shard"},
    "fully sharded": {"prefetch & recompute full", "microbatches & prefetch"},
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
        " & ".join(sorted(some, key=str.lower))
        for some in combinations(TRIED, cures)
        if any(helps(dict(ChainMap(*parts))) for parts in product(*(TRIED[k] for k in some)))
    }
    if cures == 2:
        assert not any(helps(one) for parts in TRIED.values() for one in parts)
    wanted = {" & ".join(sorted(one.split(" & "), key=str.lower)) for one in ENOUGH[name]}
    assert kinds == wanted


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
    assert patient.story in repr(patient) and patient.met in repr(patient)
