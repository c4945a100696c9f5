"""Lab 03: counts of warm-ups and executors that are wrong, wasteful or not started are told so."""

import paralab as pl
from judged import Table, altered

WARMUP, STEP, CHUNKS = (
    getattr(pl.exercises, name)
    for name in ("warmup", "pipeline_executor", "interleaved_executor")
)  # fmt: skip


def changed(name: str, *changes: str):
    return altered(name)(*zip(changes[::2], changes[1::2], strict=True))


# ---- the warm-up ---------------------------------------------------------------------------------
def interleaved(r, p, m, v):
    return 2 * (p - r - 1) + (v - 1) * p + 1


COUNTS = [  # answer, words of the verdict
    (lambda r, p, m, v: p - r if v == 1 else min(v * m, interleaved(r, p, m, v)),
     "rank 0, p=3, m=1, v=1: required: 1, yours 3 (there is only 1 forward to run)"),
    (lambda r, p, m, v: min(v * m, interleaved(r, p, m, v)),
     "required: 4, yours 7 (that is the interleaved warm-up, and this is 1F1B)"),
    (lambda r, p, m, v: min(m, p - r),
     "rank 0, p=4, m=8, v=3: required: 15, yours 4 (that is the count of 1F1B"),
    (lambda r, p, m, v: interleaved(r, p, m, v) if v > 1 else min(m, p - r),
     "p=2, m=2, v=3: required: 6, yours 7 (there are only 6 forwards to run)"),
    (lambda r, p, m, v: min(m, p) if v == 1 else min(v * m, interleaved(r, p, m, v)),
     "rank 1, p=4, m=8, v=1: required: 3, yours 4 (that is the count of rank 0)"),
    (lambda r, p, m, v: m,
     "rank 0, p=4, m=8, v=1: required: 4, yours 8 (that is GPipe: all forwards"),
    (lambda r, p, m, v: str(p - r), "required: a number of forwards, yours is '4'"),
]  # fmt: skip
LIMIT = set(WARMUP.required)
COUNTED = Table(WARMUP, [(count, LIMIT, words) for count, words in COUNTS])
test_a_wrong_count_is_refused, test_a_right_count_passes, test_the_stub = COUNTED.tests()


# ---- one stage per rank --------------------------------------------------------------------------
def step(*changes: str):
    return changed("pipeline_executor", *changes)


SUMMED = "it is the sum over the micro-batches, required: the mean"
# They fail on some ranks: the others would wait for them in a launch that answers share.
NO_LEAF = step("x.requires_grad_()", "pass")
ONE_DIGIT = step("int(action[1:])", "int(action[1])")
STEPS = [  # answer, limits it breaks, words of the verdict
    (step(" / len(batches)", ""), {"gradients", "loss"}, "gpipe, p=2, m=4: rank 0: embedding"),
    (NO_LEAF, {"gradients"},
     (": tensor=None: it cannot be sent or filled; legal: a tensor; .grad is None unless the "
      "tensor required a gradient before its forward")),
    (step("in_flight.pop(k)", "in_flight[k]", "backward(gradient)",
          "backward(gradient, retain_graph=True)"), {"in flight"},
     "has 4 micro-batches in flight, of"),
    (step("in_flight.pop(k)", "in_flight.pop(next(iter(in_flight)))"), {"order of work"},
     "backward first, p=2, m=11: rank 0: action 12 of its list is 0B10, yours does 0B0"),
    (ONE_DIGIT, {"gradients"}, ("p=2, m=11: rank ", " raised KeyError: 1, line ")),  # on either
    (step("in actions:", "in sorted(actions, key=lambda a: a[0] == 'B'):"),
     {"order of work", "in flight"}, "1f1b, p=4, m=8: rank 0: action 5 of its list is 0B0, yours"),
    (step("batches[k]", "batches[0]"), {"gradients", "loss"},
     ("rank 0: embedding", "; rank 0 does 0F1 with the input of 0F0")),
    (step("total = total + y.detach()", "total = total + stage(x, targets)"),
     {"order of work"}, SUMMED),
    (step("dist.isend(y.", "dist.isend(torch.ones(3), following), dist.isend(y.",
          "sent.append(dist.isend(torch", "sent.extend((dist.isend(torch", "detach(), following))",
          "detach(), following)))", "dist.recv(x, previous)",
          "dist.recv(torch.empty(3), previous); dist.recv(x, previous)"), {"bytes per rank"},
     "rank 0 sends 16,432 bytes, required: 16,384 "),
]  # fmt: skip

ALL_STEPS = Table(STEP, STEPS, alone=[NO_LEAF, ONE_DIGIT])
test_a_wrong_executor_is_refused, test_a_right_executor_passes, test_its_stub = ALL_STEPS.tests()


# ---- several stages per rank ---------------------------------------------------------------------


def chunks(*changes: str):
    return changed("interleaved_executor", *changes)


CHUNKED = [  # answer, limits it breaks, words of the verdict
    (chunks("inbox[queue[sender].popleft()] = message", "inbox[action] = message"), {"gradients"},
     "; rank 0 does 0B0 with the input of 2F2"),
    (chunks(" / len(batches)", ""), {"gradients", "loss"}, SUMMED),
    (chunks("in_flight.pop((stage, k))", "in_flight[stage, k]", "if stage < last else None)",
            "if stage < last else None, retain_graph=True)"), {"in flight"}, "in flight, of"),
    (chunks("in_flight.pop((stage, k))",
            "in_flight.pop(next(one for one in in_flight if one[0] == stage))"),
     {"order of work"}, "backward first, p=2, m=2, v=2: rank 0: action 5 of its list is 2B1"),
    (chunks("total += y.item()", "pass"),
     {"loss"}, "rank 1 returns 0, required: "),
    (chunks("batches[k]", "batches[k % 2]"), {"gradients", "loss"}, "p=2, m=4, v=2: rank"),
]  # fmt: skip

ALL_CHUNKS = Table(CHUNKS, CHUNKED)
test_wrong_chunks_are_refused, test_right_chunks_pass, test_the_stub_of_chunks = ALL_CHUNKS.tests()
