"""Lab 03: counts of warm-ups and executors that are wrong, wasteful or not started are told so."""

from __future__ import annotations

import torch
import torch.distributed as dist

import paralab as pl
from judged import Table, altered
from paralab.parallel.schedules import one_f_one_b

WARMUP, STEP, CHUNKS = (
    getattr(pl.exercises, name)
    for name in ("warmup", "pipeline_executor", "interleaved_executor")
)  # fmt: skip


def changed(name: str, *changes: str):
    return altered(name)(*zip(changes[::2], changes[1::2], strict=True))


# ---- the warm-up ---------------------------------------------------------------------------------
def interleaved(r, p, m, v):
    return 2 * (p - r - 1) + (v - 1) * p + 1


def seen(r, p, m, v):
    """An unusual right answer: a simulation of who needs what, for 1F1B."""
    if v > 1:
        return min(m * v, interleaved(r, p, m, v))
    return "".join(action.kind for action in one_f_one_b(p, m)[r]).index("B")


def one_b(r, p, m, v):
    return min(m, p - r)


COUNTS = [  # answer, words of the verdict
    (lambda r, p, m, v: min(m, p - r - 1) if v == 1 else min(v * m, interleaved(r, p, m, v)),
     "rank 0, p=4, m=8, v=1: required: 4, yours 3 (the first forward of"),
    (lambda r, p, m, v: p - r if v == 1 else min(v * m, interleaved(r, p, m, v)),
     "rank 0, p=3, m=1, v=1: required: 1, yours 3 (there is only 1 forward to run)"),
    (lambda r, p, m, v: min(m, r + 1), "yours 1 (that is the count of rank 3)"),
    (lambda r, p, m, v: min(v * m, interleaved(r, p, m, v)),
     "required: 4, yours 7 (that is the interleaved warm-up, and this is 1F1B)"),
    (lambda r, p, m, v: min(m, p - r),
     "rank 0, p=4, m=8, v=3: required: 15, yours 4 (that is the count of 1F1B"),
    (lambda r, p, m, v: interleaved(r, p, m, v) - (p - r - 1) if v > 1 else one_b(r, p, m, v),
     "required: 15, yours 12 (each rank after this one adds two"),
    (lambda r, p, m, v: 2 * (p - r - 1) + 1 if v > 1 else one_b(r, p, m, v),
     "required: 15, yours 7 ("),
    (lambda r, p, m, v: min(m, interleaved(r, p, m, v)) if v > 1 else one_b(r, p, m, v),
     "required: 15, yours 8 (m is not the most that there can be: a rank has v m = 24 forwards)"),
    (lambda r, p, m, v: min(v * m, v * (p - r - 1) + 1) if v > 2 else seen(r, p, m, v),
     "v=3: required: 15, yours 10 (the distance to the last rank is not multiplied by v)"),
    (lambda r, p, m, v: interleaved(r, p, m, v) if v > 1 else min(m, p - r),
     "p=2, m=2, v=3: required: 6, yours 7 (there are only 6 forwards to run)"),
    (lambda r, p, m, v: m,
     "rank 0, p=4, m=8, v=1: required: 4, yours 8 (that is GPipe: all forwards"),
    (lambda r, p, m, v: str(p - r), "required: a number of forwards, yours is '4'"),
    (changed("warmup", "p - rank)", "p // rank)"), "raised ZeroDivisionError"),
]  # fmt: skip
LIMIT = set(WARMUP.required)
COUNTED = Table(WARMUP, [(count, LIMIT, words) for count, words in COUNTS], [seen])
test_a_wrong_count_is_refused, test_a_right_count_passes, test_the_stub = COUNTED.tests()


# ---- one stage per rank --------------------------------------------------------------------------
def step(*changes: str):
    return changed("pipeline_executor", *changes)


def functional(stage, actions, previous, following, batches, shape):
    """An unusual right answer: torch.autograd.grad, few open sends, batched calls."""
    weights, kept, open_, total = list(stage.parameters()), {}, [], 0.0
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

    def send(tensor, to):
        while len(open_) > 2:
            open_.pop(0).wait()
        open_.extend(dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor.contiguous(), to)]))

    for action in actions:
        k = int(action[1:])
        if action[0] == "F":
            x = batches[k][0]
            if previous is not None:
                x = torch.empty(shape)
                dist.irecv(x, previous).wait()
                x = x.requires_grad_()
            y = stage(x, batches[k][1]) if following is None else stage(x)
            if following is None:
                total += y.item() / len(batches)
            else:
                send(y.detach().clone(), following)
            kept[k] = x, y
            continue
        x, y = kept.pop(k)
        g = torch.tensor(1 / len(batches))
        if following is not None:
            g = torch.empty(shape)
            dist.irecv(g, following).wait()
        inputs = weights if previous is None else [*weights, x]
        found = torch.autograd.grad(y, inputs, g)
        del x, y
        for weight, gradient in zip(weights, found, strict=False):
            weight.grad += gradient
        if previous is not None:
            send(found[-1], previous)
        del found
    for work in open_:
        work.wait()
    return total


SUMMED = "it is the sum over the micro-batches, required: the mean"
# It fails on some ranks only: the others would wait for them in a launch that answers share.
NO_LEAF = step("x.requires_grad_()", "pass")
KEEPS_GRADIENTS = step("sent.append(dist.isend(x.grad, previous))", "pass")
STEPS = [  # answer, limits it breaks, words of the verdict
    (step(" / len(batches)", ""), {"gradients", "loss"}, "gpipe, p=2, m=4: rank 0: embedding"),
    (NO_LEAF, {"gradients"},
     (": tensor=None: it cannot be sent or filled; legal: a tensor; .grad is None unless the "
      "tensor required a gradient before its forward")),
    (KEEPS_GRADIENTS, {"gradients"},
     ("no rank makes progress any more: rank 0 is in recv #4 from rank 1 (also in flight: send #0 "
      "to rank 1, ", "; rank 1 has returned its result")),
    (step("in_flight.pop(k)", "in_flight[k]", "backward(gradient)",
          "backward(gradient, retain_graph=True)"), {"in flight"},
     "has 4 micro-batches in flight, of"),
    (step("in_flight.pop(k)", "in_flight.popitem()[1]"), {"order of work"},
     "rank 0: action 5 of its list is 0B0, yours does 0B3"),
    (step("in_flight.pop(k)", "in_flight.pop(next(iter(in_flight)))"), {"order of work"},
     "backward first, p=2, m=3: rank 0: action 4 of its list is 0B2, yours does 0B0"),
    (step("y.backward(gradient)", "stage.zero_grad(); y.backward(gradient)"), {"gradients"},
     "; it is the one term of micro-batch 3, to which no other was added"),
    (step("work.wait()", "pass"), {"gradients"}, "rank 0 never waits for send"),
    (step("y.backward(gradient)", "y.backward(torch.ones_like(y))"), {"gradients"}, "gpipe, p=2"),
    (step("in actions:", "in sorted(actions, key=lambda a: a[0] == 'B'):"),
     {"order of work", "in flight"}, "1f1b, p=4, m=8: rank 0: action 5 of its list is 0B0, yours"),
    (step("float(total)", "float(total) * len(batches)"), {"loss"}, SUMMED),
    (step("total = total + y.detach()", "total = y.item()"), {"loss"},
     "; it is the last micro-batch's alone, divided by m"),
    (step("total = total + y.detach()", "total = y.item() * len(batches)"), {"loss"},
     "; it is the last micro-batch's alone"),
    (step("return float(total)", "return None"), {"loss"},
     "gpipe, p=2, m=4: rank 0 returns None, required: 0"),
    (step("batches[k]", "batches[0]"), {"gradients", "loss"},
     ("rank 0: embedding", "; rank 0 does 0F1 with the input of 0F0")),
    (step("total = total + y.detach()", "total = total + stage(x, targets)"),
     {"order of work"}, SUMMED),
    (lambda stage, actions, previous, following, batches, shape: 0.0,
     {"gradients", "order of work", "bytes per rank"}, "rank 0: embedding.token.weight has no"),
    (step("dist.isend(y.", "dist.isend(torch.ones(3), following), dist.isend(y.",
          "sent.append(dist.isend(torch", "sent.extend((dist.isend(torch", "detach(), following))",
          "detach(), following)))", "dist.recv(x, previous)",
          "dist.recv(torch.empty(3), previous); dist.recv(x, previous)"), {"bytes per rank"},
     "rank 0 sends 16,432 bytes, required: 16,384 "),
    (lambda stage, actions: 0.0, {"gradients"}, "required: pipeline_step(stage, actions, previous"),
]  # fmt: skip


ALL_STEPS = Table(STEP, STEPS, [functional], alone=[NO_LEAF, KEEPS_GRADIENTS])
test_a_wrong_executor_is_refused, test_a_right_executor_passes, test_its_stub = ALL_STEPS.tests()


# ---- several stages per rank ---------------------------------------------------------------------


def chunks(*changes: str):
    return changed("interleaved_executor", *changes)


# It fails on some ranks only, too.
NO_RING = chunks("(stage + 1) % p))\n", "rank + 1))\n")
CHUNKED = [  # answer, limits it breaks, words of the verdict
    (chunks("inbox[queue[sender].popleft()] = message", "inbox[action] = message"), {"gradients"},
     "; rank 0 does 0B0 with the input of 2F2"),
    (chunks(" / len(batches)", ""), {"gradients", "loss"}, SUMMED),
    (chunks("in_flight.pop((stage, k))", "in_flight[stage, k]", "if stage < last else None)",
            "if stage < last else None, retain_graph=True)"), {"in flight"}, "in flight, of"),
    (chunks("in_flight.pop((stage, k))",
            "in_flight.pop(next(one for one in in_flight if one[0] == stage))"),
     {"order of work"}, "backward first, p=2, m=2, v=2: rank 0: action 5 of its list is 2B1"),
    (NO_RING, {"gradients"}, "rank=2: no member of"),
    (chunks("total += y.item()", "pass"),
     {"loss"}, "rank 1 returns 0, required: "),
    (chunks("batches[k]", "batches[k % 2]"), {"gradients", "loss"}, "p=2, m=4, v=2: rank"),
]  # fmt: skip


def by_inspection(stages, lists, batches, shape):
    """An unusual right answer: one loop over all ranks' lists says what comes when."""
    rank, p = dist.get_rank(), dist.get_world_size()
    last, inbox, order, kept, works, total = p * len(stages) - 1, {}, {}, {}, [], 0.0
    for sender in {(rank - 1) % p, (rank + 1) % p}:
        order[sender] = []
        for action in lists[sender]:
            kind = action.strip("0123456789")
            stage, k = map(int, action.split(kind))
            to = stage + (1 if kind == "F" else -1)
            if 0 <= to <= last and to % p == rank:
                order[sender].append((to, kind, k))

    def message(*need):
        source = (need[0] - (1 if need[1] == "F" else -1)) % p
        while need not in inbox:
            now = inbox[order[source].pop(0)] = torch.empty(shape)
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, now, source)])[0].wait()
        return inbox.pop(need)

    for action in lists[rank]:
        kind = action.strip("0123456789")
        stage, k = map(int, action.split(kind))
        if kind == "F":
            x = message(stage, "F", k).requires_grad_() if stage else batches[k][0]
            y = stages[stage](x, batches[k][1])
            total += y.item() / len(batches) if stage == last else 0.0
            if stage < last:
                works.append(dist.isend(y.detach(), (rank + 1) % p))
            kept[stage, k] = x, y
        else:
            x, y = kept.pop((stage, k))
            y.backward(torch.tensor(1 / len(batches)) if stage == last else message(stage, "B", k))
            if stage:
                works.append(dist.isend(x.grad, (rank - 1) % p))
            del x, y
    [work.wait() for work in works]
    return total


ALL_CHUNKS = Table(CHUNKS, CHUNKED, [by_inspection], alone=[NO_RING])
test_wrong_chunks_are_refused, test_right_chunks_pass, test_the_stub_of_chunks = ALL_CHUNKS.tests()
