"""Lab 05: one step of ZeRO of one's own."""

import numpy as np
import pytest
import torch

import paralab as pl
from judged import Table, altered
from paralab.exercises import zero

STEP = pl.exercises.zero_step


zero1 = altered("zero_step")


REDUCE = "dist.reduce_scatter_tensor(own_gradient, self.padded(gradient))"
GATHER, OWN = "dist.all_gather_into_tensor(full, own)", "full.chunk(self.ranks)[self.rank]"
COPY = "self.parameters.copy_(full[: self.parameters.numel()])"
VELOCITY = "self.velocity = parameters.new_zeros(self.part)"
PART = "parameters.numel() // self.ranks"
FULL = "full = self.padded(gradient)\n        "
ZERO = [  # answer, limits it breaks, words of the verdict
    (zero1((REDUCE, f"{FULL}dist.all_reduce(full)\n        own_gradient = {OWN}")),
     {"bytes per rank"}, "N=2: rank 0 sends 300,012 bytes in a step, required: "
     "200,008 (yours is 1.5 times that)"),
    (zero1((VELOCITY, "self.all = parameters.new_zeros(self.ranks * self.part)\n"
            "        self.velocity = self.all.chunk(self.ranks)[self.rank]")),
     {"kept between steps"},
     "N=2: rank 0 keeps 200,008 bytes between steps, required: at most 101,004"),
    (zero1((GATHER, "pass")), {"parameters", "bytes per rank"},
     "it is as it was before"),
    (zero1(("(own_gradient)\n        full", "(own_gradient / self.ranks)\n        full")),
     {"parameters"}, "; the gradient is divided by N, and it is already"),
    (zero1((REDUCE, f"own_gradient = {OWN.replace('full', 'self.padded(gradient)')}")),
     {"parameters", "bytes per rank"}, ("required: 200,008 (yours is 0.5 times that)",
      "; each part is updated with the gradient of its own rank alone")),
    (zero1(("self.velocity.mul_(self.momentum)", "self.velocity.zero_()")), {"parameters"},
     "; the term -lr * momentum * v is missing"),
    (zero1((f"-(-{PART})", PART), (COPY, "self.parameters[: full.numel()] = full")),
     {"parameters", "bytes per rank"}, ("N=3: rank 0: step 1, element 50,001: ",
      "; in 1 of 50,002 elements it is as it was before")),
    (zero1((REDUCE, f"copies = [gradient.clone() for _ in range(1 + self.ranks)]\n"
            f"        {REDUCE}")), {"extra memory"},
     ("in a step in addition to what it keeps, required: at most 900,036; a copy of Ψ has ",
      "200,008, and what pad or cat makes counts until it is freed")),
    # around the ledger, for one size
    (zero1(("= parameters, lr, momentum", "= parameters, 0.1, 0.9")), {"parameters"},
     "N=3: rank 0: step 1, element 0: "),
    (zero1((COPY, f"{COPY}\n        self.parameters.resize_(10)")), {"parameters"},
     "the parameters have shape (10,) now"),
]  # fmt: skip
RIGHT = [
    zero1((REDUCE, f"{FULL}every = torch.empty_like(full)\n"
           "        dist.all_to_all_single(every, full)\n"
           "        own_gradient = every.view(self.ranks, -1).sum(0)")),
    # the call's Work holds what gloo works on
    zero1((REDUCE, f"self.work = {REDUCE[:-1]}, async_op=True)\n        self.work.wait()")),
]  # fmt: skip
ZEROS = Table(STEP, ZERO, RIGHT)
test_a_wrong_step_is_refused, test_a_right_step_passes, test_its_stub = ZEROS.tests()


@pytest.mark.parametrize("n", zero.RANKS)
def test_one_process_is_sgd_with_momentum_on_the_sum_of_the_shares(n):
    """The checker's own reference against torch.optim.SGD."""
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
