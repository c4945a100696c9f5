"""Lab 07: an MLP of one's own on several ranks."""

from __future__ import annotations

import numpy as np
import pytest

import bad_answers as bad
import bad_attacks as attacks
import paralab as pl
from judged import assert_reads_the_same_alone, judged, missed
from paralab.exercises import tensor

MLP = pl.exercises.tensor_mlp
ALL = {"result", "gradients", "bytes, forward", "bytes, backward", "weights per rank"}


WRONG = [  # answer, limits it breaks, words of the verdict
    (bad.MLPAddsNothing, {"result", "bytes, forward"},
     "the rank's own term of the sum, to which no other was added"),
    (bad.MLPAddsNothingBack, {"gradients", "bytes, backward"},
     "the rank's own term of the sum, to which no other was added"),
    (bad.MLPBiasEverywhere, {"result"}, "t=2: rank 0: z, element (0, 0): "),
    (bad.MLPBiasEverywhere, {"result"}, "; c is in it 2 times"),
    (bad.MLPSumsBiasGradient, {"gradients", "bytes, backward"}, "; it is 2 times what is required"),
    (bad.MLPSumsBiasGradient, {"gradients", "bytes, backward"}, "t=2: rank 0: the gradient of c"),
    (bad.MLPAverages, {"gradients"}, "the gradient of x, element (0, 0): "),
    (bad.MLPAverages, {"gradients"}, "; it is 0.5 times what is required"),
    (bad.MLPSumsIncoming, {"gradients"}, "t=2: rank 0: the gradient of x, element "),
    (bad.MLPKeepsAll, {"weights per rank"}, "t=2: rank 0 holds 186,"),
    (bad.MLPKeepsViews, {"weights per rank"},
     "t=2: rank 0 holds 124,096 bytes, a t-th and c are 62,176"),
    (bad.MLPGathersWeights, {"bytes, forward"},
     "t=2: rank 0 sends 61,920 bytes in forward, required: 12,288, 5.04 times as many"),
    (bad.MLPOthersPart, {"gradients"}, "the gradient of B, element (0, 0): "),
    (bad.MLPOthersPart, {"gradients"}, "; it is rank 1's part"),
    (bad.MLPNoWait, {"result"}, "t=2: rank 0 never waits for all_reduce #0"),
    (bad.MLPRootOnly, {"result"}, "t=2: "),
    (bad.MLPRaises, {"result"}, "t=2: rank 0 raised KeyError: 'A'"),
    (bad.MLPNoGradients, {"result"}, "t=2: rank 0 raised KeyError: 'B'"),
    (bad.MLPReturnsNothing, {"result"}, "required: a tensor, this is a NoneType"),
    (bad.MLPHasNoBackward, {"result"}, "the class has no method backward"),
    (bad.mlp_of_three, {"result"}, "yours cannot be called so: "),
    (attacks.MLPWaitsLate, {"result"}, "the rank's own term of the sum, to which no other was"),
    (attacks.MLPNumpyWeights, {"weights per rank"}, "t=2: rank 0 holds 185,"),
    (attacks.MLPDecoy, {"bytes, forward", "bytes, backward"}, "t=2: rank 0 sends 24,576 bytes"),
    ("mlp", {"result"}, "required: a class, yours is 'mlp'"),
]  # fmt: skip
RIGHT = [bad.MLPGood, bad.MLPInTwo, bad.MLPPlain]
MLPS = [*{id(row[0]): row[0] for row in WRONG}.values(), *RIGHT]
ALONE = (bad.MLPRootOnly,)


@pytest.mark.parametrize("answer, limits, words", WRONG)
def test_a_wrong_mlp_is_refused_by_the_limits_it_breaks(answer, limits, words):
    verdict = judged(MLP, answer, MLPS, alone=ALONE)
    assert not verdict and verdict.started and limits == missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_mlp_passes(answer):
    verdict = judged(MLP, answer, MLPS, alone=ALONE)
    assert verdict.passed and {row.limit for row in verdict.rows} == ALL, repr(verdict)


def test_two_verdicts_on_one_answer_are_the_same():
    judged(MLP, bad.MLPKeepsViews, MLPS, alone=ALONE)
    assert_reads_the_same_alone(MLP, bad.MLPKeepsViews, MLPS)


def test_the_whole_mlp_is_what_autograd_makes_of_it():
    """The checker's own reference against torch."""
    import torch

    given = {n: torch.from_numpy(v).double() for n, v in tensor.given(7).items()}
    A, b, B, c, x = (given[name].requires_grad_() for name in ("A", "b", "B", "c", "x"))
    z = (x @ A + b).relu() @ B + c
    z.backward(given["grad"])
    found = {"z": z.detach(), "x": x.grad, "A": A.grad, "b": b.grad, "B": B.grad, "c": c.grad}
    for name, value in found.items():
        np.testing.assert_allclose(tensor.of_one_device(7)[name], value.numpy(), atol=1e-10)


@pytest.mark.parametrize("t", tensor.RANKS)
def test_the_terms_of_all_ranks_are_the_sum(t):
    terms, whole = tensor.terms(7, t), tensor.of_one_device(7)
    np.testing.assert_allclose(sum(terms["z"]) + tensor.given(7)["c"], whole["z"], atol=1e-5)
    np.testing.assert_allclose(sum(terms["x"]), whole["x"], atol=1e-5)


def test_a_wrong_timeout_is_refused():
    with pytest.raises(ValueError, match="timeout=0.*legal"):
        MLP.check(bad.MLPGood, timeout=0)
