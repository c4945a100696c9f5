"""Lab 00: a step over micro-batches, and the peak of a step by formulas."""

import paralab as pl
from judged import Table, altered

STEP, PEAK = pl.exercises.accumulate, pl.exercises.peak_estimate
step = altered("accumulate")
SHARE, HANDED_IN = "(len(tokens) / samples)", "return float(mean), norm"
LOOP = "    for tokens, targets in microbatches:\n"
ADDED, FINDS = "mean = mean + loss.detach()", "loss.backward()"
ALONE = "the gradients of the micro-batches are not added up: only the last one's share is left"
WRONG = [  # answer, limits it breaks, words of the verdict
    (step((SHARE, "1.0")), {"loss", "gradient norm", "weights"},
     ("step 1: after the step: embedding.token.weight", "the sum over the micro-batches")),
    (step((SHARE, "(1 / len(microbatches))")), {"loss", "gradient norm", "weights"},
     ("samples 4 + 4 + 1, step 1: ", "the mean of the micro-batches' means, but they differ in")),
    (step(("if norm > clip_norm", "if False")), {"weights"}, "the gradient is not clipped"),
    (step(("if norm > clip_norm", "if True")), {"weights"},
     "; the gradient is scaled to clip_norm, although its norm is smaller"),
    (step((HANDED_IN, "return mean, min(norm, clip_norm)")), {"gradient norm"},
     "that is the norm after clipping"),
    *((step((LOOP, LOOP.replace("batches", f"batches{rest}"))),
       {"loss", "gradient norm", "weights", "forward passes"},
       (f"(micro-batch {k} is missing, counted from 0)", f"; micro-batch {k} is missing, counted"))
      for rest, k in (("[1:]", 0), ("[:-1]", 2))),
    (step((LOOP, f"{LOOP}        optimizer.zero_grad()\n")), {"gradient norm", "weights"},
     (f"({ALONE})", f"; {ALONE}")),
    (step(("    optimizer.zero_grad()\n", ""),
          ("optimizer.step()", "optimizer.step()\n    optimizer.zero_grad()")),
     {"gradient norm", "weights"},
     "samples 4 + 4 + 4, step 1: after the step: embedding.token.weight, element (0, 0): "),
    (step(("optimizer.step()", "torch.optim.SGD(model.parameters(), lr=0.1).step()")), {"weights"},
     ": weights (samples 4 + 4 + 4, step 1): optimizer.step() is called 0 times, required: once"),
    (step(("]).norm().item()", "]).square().sum().item()")), {"gradient norm", "weights"},
     "(that is its square, the root is missing)"),
    (step(("    optimizer.step()\n", "    raise NotImplementedError('your turn')\n")), {"loss"},
     """raise NotImplementedError("your turn") is reached: delete it, and write what is missing"""),
    (step((FINDS, "whole = loss + (whole if mean else 0)"),
          ("    gradients =", "    whole.backward()\n    gradients =")), {"peak memory"},
     "one micro-batch with all gradients"),
    (step((LOOP, LOOP.replace("microbatches", "[map(torch.cat, zip(*microbatches))]"))),
     {"forward passes", "peak memory"},
     "the forward passes have [12] samples, required: [4, 4, 4]"),
    (step((ADDED, f"{ADDED}\n        optimizer.step()"), ("if norm > clip", "if norm == clip")),
     {"weights", "loss"}, ": weights (samples 4 + 4 + 4, step 1): optimizer.step() is called 4 "),
    (step((HANDED_IN, "return norm, float(mean)")), {"loss"},
     "(that is the norm; required: the pair (loss, norm))"),
    (step((ADDED, "mean = mean + loss"), ("float(mean)", "mean")), {"loss"},
     ("required: a number, detached or by .item(), yours is 'tensor(", "grad_fn=")),
]  # fmt: skip
LAST_FIRST = step((LOOP, LOOP.replace("microbatches", "reversed(microbatches)")))
TENSORS = step((HANDED_IN, "return mean, torch.tensor(norm)"))
STEPS = Table(STEP, WRONG, [TENSORS, LAST_FIRST])
test_a_wrong_step_is_refused, test_a_right_step_passes, test_the_stub_of_a_step = STEPS.tests()


# ---- the peak ------------------------------------------------------------------------------------
estimate = altered("peak_estimate")
MOST = "max(at_output, at_mlp, at_scores, at_lookup)"


def by_asking(model, batch, microbatches):
    spec = pl.ModelSpec(**vars(model), attention="explicit")
    plan = pl.Plan(microbatch_size=batch, microbatches=microbatches)
    return sum(pl.program(spec, plan).peak().values())


def handed_in(text):
    return estimate((MOST, text))


LAB, LOGITS = "the lab's model", "large vocabularies"
ESTIMATES = [
    (handed_in("16 * psi"), {LAB, LOGITS}, "the model states alone"),
    (handed_in("16 * psi + L * (34 * sbh + 5 * scores)"), {LAB},
     "34 and 5 are of 16-bit activations"),
    (handed_in("max(at_mlp, at_scores, at_lookup)"), {LOGITS},
     "b=4, m=1: required: 8.159 GB, yours 6.785 GB (without the logits and their gradient)"),
    (handed_in("max(at_output, at_mlp, at_scores)"), {LOGITS, "wide models, few tokens"},
     ("layers=32", "yours 1.777 GB (that is at the backward of the output matrix; a later",
      "yours 81.390 GB (that is at the backward of the last block; a later moment has more)")),
    (estimate(("microbatches > 1", "False")), {"several micro-batches"},
     "m=4: required: 132.957 MB, yours 123.256 MB (from the second micro-batch on all gradients"),
    (estimate(("microbatches > 1", "True")), {LAB}, "m=1"),
    *((estimate(("+ 4 * logits  # grad", f"+ {size} * logits  # grad")), {LOGITS},
       ("layers=1, hidden=128", " times as much; required at the peak: parameters "))
      for size in (3, 5)),
    (handed_in(f"{MOST} / 1e9"), {LAB}, "that is in GB, required: bytes"),
    (by_asking, {LAB},
     ("asks paralab; required: formulas of your own, line ", " of test_exercises_00.py in by_")),
    (handed_in("16 * model.num_params"), {LAB}, "no attribute 'num_params'"),
    (handed_in("0.0, 0.0"), {LAB}, "a number of bytes, yours is (0.0, 0.0)"),
]  # fmt: skip
RIGHT_ESTIMATES = [handed_in(f"round(1.02 * {MOST})")]  # within 5 %
TABLE = Table(PEAK, ESTIMATES, RIGHT_ESTIMATES)
test_a_wrong_estimate_is_refused, test_a_right_estimate_passes, test_the_stub = TABLE.tests()
