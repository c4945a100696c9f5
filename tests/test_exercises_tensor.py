"""Lab 07: an MLP of one's own on several ranks."""

from __future__ import annotations

import numpy as np
import pytest

import bad_answers as bad
import paralab as pl
from paralab.exercises import tensor

MLP = pl.exercises.tensor_mlp
ALL = {"result", "gradients", "bytes, forward", "bytes, backward", "weights per rank"}


def missed(verdict) -> set[str]:
    return {row.limit for row in verdict.rows if row.ok is False}


WRONG = [  # answer, limits it breaks, words of the verdict
    (bad.MLPAddsNothing, {"result", "bytes, forward"},
     "the rank's own term of the sum, which nobody has added up"),
    (bad.MLPAddsNothingBack, {"gradients", "bytes, backward"},
     "the rank's own term of the sum, which nobody has added up"),
    (bad.MLPBiasEverywhere, {"result"}, "t=2, rank 0: z at [0, 0] is "),
    (bad.MLPBiasEverywhere, {"result"}, "; c is in it 2 times"),
    (bad.MLPSumsBiasGradient, {"gradients", "bytes, backward"}, "; it is 2 times what is asked"),
    (bad.MLPSumsBiasGradient, {"gradients", "bytes, backward"}, "t=2, rank 0: the gradient of c"),
    (bad.MLPAverages, {"gradients"}, "the gradient of x at [0, 0] is "),
    (bad.MLPAverages, {"gradients"}, "; it is 0.5 times what is asked"),
    (bad.MLPSumsIncoming, {"gradients"}, "t=2, rank 0: the gradient of x at "),
    (bad.MLPKeepsAll, {"weights per rank"}, "t=2: rank 0 holds 186,"),
    (bad.MLPKeepsViews, {"weights per rank"},
     "t=2: rank 0 holds 124,096 bytes, a t-th and c are 62,176"),
    (bad.MLPGathersWeights, {"bytes, forward"},
     "t=2: rank 0 sends 61,920 bytes in forward, asked are 12,288, 5.04 times as many"),
    (bad.MLPGathersInside, {"bytes, forward"}, "asked are 12,288, 2.88 times as many"),
    (bad.MLPRowsFirst, {"result", "gradients", "bytes, forward", "bytes, backward"},
     "t=2, rank 0: the gradient of B has shape (240, 32), asked (120, 64)"),
    (bad.MLPOthersPart, {"gradients"}, "the gradient of B at [0, 0] is "),
    (bad.MLPOthersPart, {"gradients"}, "; that is rank 1's part"),
    (bad.MLPNoSlope, {"gradients"}, "t=2, rank 0: the gradient of x at [0, 0] is "),
    (bad.MLPNoWait, {"result"}, "t=2, rank 0: nobody waits for all_reduce #0"),
    (bad.MLPBehindTheBack, {"bytes, forward", "bytes, backward"},
     "t=2: rank 0 sends nothing through the group in forward"),
    (bad.MLPRootOnly, {"result"}, "t=2: "),
    (bad.MLPRaises, {"result"}, "t=2: rank 0 raised KeyError: 'A'"),
    (bad.MLPNoGradients, {"result"}, "t=2: rank 0 raised KeyError: 'B'"),
    (bad.MLPReturnsNothing, {"result"}, "a tensor is asked, this is a NoneType"),
    (bad.MLPHasNoBackward, {"result"}, "no attribute 'backward'"),
    (bad.mlp_of_three, {"result"}, "mlp_of_three() got an unexpected keyword argument"),
    ("mlp", {"result"}, "asked is a class, yours is 'mlp'"),
]  # fmt: skip


@pytest.mark.parametrize("answer, limits, words", WRONG)
def test_a_wrong_mlp_is_refused_by_the_limits_it_breaks(answer, limits, words):
    verdict = MLP.check(answer, timeout=3)
    assert not verdict and verdict.started and limits == missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", [bad.MLPGood, bad.MLPInTwo])
def test_a_right_mlp_passes_and_says_the_same_twice(answer):
    first, second = MLP.check(answer), MLP.check(answer)
    assert first.passed and {row.limit for row in first.rows} == ALL, repr(first)
    assert first == second and first._repr_html_() == second._repr_html_()


def test_a_refusal_reads_the_same_twice():
    first, second = (MLP.check(bad.MLPKeepsViews) for _ in range(2))
    assert first == second and not first


def test_an_mlp_that_is_not_written_is_not_started():
    names: dict = {"__name__": "__main__"}
    exec(MLP.stub, names)
    stub = MLP.check(names["MyMLP"])
    assert not stub and not stub.started


def test_the_whole_mlp_is_what_autograd_makes_of_it():
    """The checker's own reference against torch."""
    import torch

    given = {n: torch.from_numpy(v).double() for n, v in tensor._given().items()}
    A, b, B, c, x = (given[name].requires_grad_() for name in ("A", "b", "B", "c", "x"))
    z = (x @ A + b).relu() @ B + c
    z.backward(given["grad"])
    found = {"z": z.detach(), "x": x.grad, "A": A.grad, "b": b.grad, "B": B.grad, "c": c.grad}
    for name, value in found.items():
        np.testing.assert_allclose(tensor._of_one_device()[name], value.numpy(), atol=1e-10)


def test_a_wrong_timeout_is_refused():
    with pytest.raises(ValueError, match="timeout=0.*legal"):
        MLP.check(bad.MLPGood, timeout=0)
