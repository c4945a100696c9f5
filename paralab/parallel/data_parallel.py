"""Data parallelism: every rank holds the whole model and trains on its own share of the batch.

The loss is divided by the samples of the *global* batch, so the gradient of the whole batch is the
sum of what the N ranks have after backward. One all-reduce of the Psi gradients makes every rank
send 2 (N-1)/N Psi elements, whichever of the three forms runs:

    "naive"       one all-reduce per parameter once backward is over, one after the other: hundreds
                  of small messages, each paying alpha
    "bucketed"    the same bytes in a few flat buffers
    "overlapped"  each buffer leaves as soon as its last gradient is there, while backward computes
                  the rest

Memory: 4 Psi bytes of fp32 gradients. Time: alpha * calls + bytes / bandwidth, of which
"overlapped" hides what fits behind the backward that is left. The units that are summed are the
buckets of parallel/buckets.py. Li+ 2020, "PyTorch Distributed", arXiv:2006.15704, sec. 3.2 has the
same ladder. Lab 02 shows it.
"""

from __future__ import annotations

from paralab.programs.instructions import Code, all_reduce, completed, gradients, insert, wait


def overlapped(code: Code) -> Code:
    """A unit's gradient is summed over the ranks as soon as nothing more is added to it."""
    # completed: {position of an instruction: units whose gradient is complete behind it}
    return insert(
        code, {position: map(all_reduce, units) for position, units in completed(code).items()}
    )


def bucketed(code: Code) -> Code:
    """The same sums, when backward is over."""
    return code + [all_reduce(u) for u in gradients(code)]


def naive(code: Code) -> Code:
    """One sum after the other."""
    calls = [all_reduce(u) for u in sorted(gradients(code))]
    return code + [ins for call in calls for ins in (call, wait(call))]


FORMS = {"overlapped": overlapped, "bucketed": bucketed, "naive": naive}
