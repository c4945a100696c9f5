"""Data parallelism: every rank holds the whole model and trains on its own share of the batch.

The loss is divided by the samples of the *global* batch, so the gradient of the whole batch is the
sum of the gradients that the N ranks have after backward. (PyTorch's DDP divides by N instead, for
a loss that is the mean over a rank's own samples.) For Psi parameters the all-reduces make every
rank send 2 (N-1)/N Psi elements, whichever of the three forms runs:

    "naive"       one all-reduce per parameter once backward is over, one after the other: hundreds
                  of small messages, each paying the latency alpha
    "bucketed"    the same bytes in a few flat buffers
    "overlapped"  each buffer is sent as soon as its last gradient is computed, while backward
                  computes the others

Memory: 4 Psi bytes of fp32 gradients. Time: alpha * calls + bytes / bandwidth, of which
"overlapped" hides as much as fits behind the rest of backward. One all-reduce sums one *unit*: a
bucket of parallel/buckets.py, or with "naive" a single parameter. A form takes a rank's list of
instructions (programs/instructions.py) and returns it with all-reduces; where no WAIT is written,
programs/derive.py puts it in front of the first use. Li+ 2020, "PyTorch Distributed",
arXiv:2006.15704, sec. 3.2 has the same ladder. Lab 02 shows it.
"""

from __future__ import annotations

from paralab.programs.instructions import Code, all_reduce, completed, gradients, insert, wait


def overlapped(code: Code) -> Code:
    """A unit's gradient is summed over the ranks as soon as it is complete."""
    # completed: {position of an instruction: units whose gradient is complete behind it}
    return insert(
        code, {position: map(all_reduce, units) for position, units in completed(code).items()}
    )


def bucketed(code: Code) -> Code:
    """The same sums, all of them started when backward is over."""
    return code + [all_reduce(u) for u in gradients(code)]


def naive(code: Code) -> Code:
    """The same, but each sum is waited for before the next one begins."""
    calls = [all_reduce(u) for u in sorted(gradients(code))]
    return code + [ins for call in calls for ins in (call, wait(call))]


FORMS = {"overlapped": overlapped, "bucketed": bucketed, "naive": naive}
