"""Lab 05: one step of ZeRO of one's own."""

from __future__ import annotations

import numpy as np
import pytest

import bad_answers as bad
import bad_attacks as attacks
import paralab as pl
from judged import Table
from paralab.exercises import zero

STEP = pl.exercises.zero_step


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
    (bad.ZeroRootOnly, {"parameters"}, "N=2: "),
    (bad.ZeroRaises, {"parameters"}, "N=2: rank 0 raised KeyError: 'part 7'"),
    (bad.ZeroHasNoStep, {"parameters"}, "the class has no method step"),
    (bad.zero_of_three, {"parameters"}, "yours cannot be called so: got an unexpected keyword"),
    (attacks.ZeroSleeps, {"parameters"}, "N=2: rank 0 never waits for all_gather #1"),
    (attacks.ZeroNumpyMomentum, {"kept between steps"}, "N=2: rank 0 keeps 200,"),
    (attacks.ZeroBytes, {"kept between steps"}, "N=2: rank 0 keeps 300,"),
    (attacks.ZeroConstants, {"parameters"}, "N=3: rank 0: step 1, part 0, element 0: "),
    (attacks.ZeroResizes, {"parameters"}, "the parameters have shape (10,) now"),
    ("zero", {"parameters"}, "required: a class, yours is 'zero'"),
]  # fmt: skip
RIGHT = [bad.ZeroGood, bad.ZeroByHand, bad.ZeroGlooHolds]
ZEROS = Table(STEP, ZERO, RIGHT, alone=[bad.ZeroRootOnly])
test_a_wrong_step_is_refused, test_a_right_step_passes, test_its_stub = ZEROS.tests()


@pytest.mark.parametrize("answer", [bad.ZeroGood, bad.ZeroMomentumForAll])
def test_two_verdicts_on_one_answer_are_the_same(answer):
    ZEROS.assert_reads_the_same_alone(answer)


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
