"""Lab 09's exercises: right answers pass, wrong ones are refused with the mistake named."""

import functools
import importlib
import os
import random
from pathlib import Path

import pytest
import torch

import paralab as pl
from judged import Table, altered
from paralab import view
from refusals import refuses
from written import MyStreamedAdamW

BANDWIDTH, STREAMED = pl.exercises.bandwidth, pl.exercises.streamed_optimizer


# ---- warm-up: the bandwidth ----------------------------------------------------------------------
FIRST, OTHERS, PAPER = BANDWIDTH.required
ALL, SHARE = {FIRST, OTHERS, PAPER}, "efficiency / (1 - efficiency)"
needed = altered("bandwidth")
WRONG_BANDWIDTH = [  # answer, limits it breaks, words of the verdict
    (needed(("8 * tokens", "6 * tokens")), ALL, "8 FLOPs per parameter and token, not 6"),
    (needed(("8 * tokens", "4 * tokens")), ALL,
     "not 4, or yours doubles the bytes: moved has those of both directions"),
    (needed((SHARE, "efficiency")), ALL, "that is e X / I: copies have 1 - e of the step's time"),
    (needed((SHARE, "(1 - efficiency) / efficiency")), {OTHERS, PAPER},
     "e and 1 - e are exchanged"),
    (needed(("peak / intensity", "peak / intensity / 1e9")), ALL, "yours is in GB/s"),
    (needed((f"{SHARE} * peak / intensity", "'9 GB/s'")), ALL,
     "required: a number of bytes per second"),
]  # fmt: skip
BANDWIDTHS = Table(BANDWIDTH, WRONG_BANDWIDTH, exact=True, most=1)
test_a_wrong_bandwidth_is_refused, test_a_right_bandwidth_passes, test_its_stub = BANDWIDTHS.tests()


# ---- implement: the streamed optimizer -----------------------------------------------------------
class InMemory(MyStreamedAdamW):
    """The states are where torch has them."""

    def __init__(self, parameters, folder, *, lr, betas, eps, weight_decay, unit):
        same = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, folder, unit=unit, **same)
        self.adam = torch.optim.AdamW(self.parameters, foreach=False, **same)

    def step(self):
        self.adam.step()


class Misspelt(torch.optim.Optimizer):
    """Its step is torch's, which is a bare ``raise NotImplementedError``."""

    def __init__(self, parameters, folder, *, lr, betas, eps, weight_decay, unit):
        super().__init__(parameters, {"lr": lr})

    def stpe(self):
        pass


adam = altered("streamed_optimizer")
MAPPED, FLUSH = 'np.memmap(self.path, dtype=np.float32, mode="r+")', "moments.flush()"
READ, WRITE = "np.fromfile(self.path, np.float32)", "moments.tofile(self.path)"
COUNT, NEXT = "self.steps += 1", "                at += 2 * size\n"
OTHERS_PLACE = (
    "; the moments that were read are not zero, as they are before the first step: each unit needs "
)
MOVES = "p.addcdiv_(m, denominator, value=-self.lr / (1 - b1**self.steps))"
EACH_MAPPED = (  # each unit is mapped by itself
    ("m = torch.from_numpy(moments[at : at + size])",
     'both = np.memmap(self.path, np.float32, "r+", 4 * at, (2 * size,))'),
    ("v = torch.from_numpy(moments[at + size : at + 2 * size])",
     "m, v = torch.from_numpy(both).split(size)"),
)  # fmt: skip
EVERYTHING = adam((MAPPED, READ), (FLUSH, WRITE))
WEIGHTS, FILES, PEAK, KEPT = STREAMED.required
READ_ONLY = adam(('mode="r+"', 'mode="r"'))
WRONG = [
    (READ_ONLY, {WEIGHTS}, 'a change in place of a np.memmap of mode "r" ends so: required: "r+"'),
    (adam((COUNT, "pass")), {WEIGHTS}, "; self.steps is 0: step has to add 1"),
    (InMemory, {WEIGHTS, KEPT}, "so the states are not in them alone"),
    (EVERYTHING, {PEAK}, "bytes at once, required: at most 101,912"),
    (adam(("= lr, betas, eps, weight_decay", "= 0.01, (0.8, 0.95), 1e-6, 0.05")), {WEIGHTS},
     "after step 1 embedding.token"),
    (adam((MAPPED, f"self.kept = self.kept if self.steps > 1 else {READ}"), (FLUSH, WRITE)),
     {WEIGHTS}, "so the states are not in them alone"),
    (adam((MAPPED, MAPPED.replace("r+", "c"))), {WEIGHTS},
     ("after step 2 ", "; the states of step 1 were not written to the files, or erased since")),
    (adam((FLUSH, f"{FLUSH}\n        for p in self.parameters:\n            p.grad.zero_()")),
     {WEIGHTS}, "it changes embedding.token.weight.grad, which its caller still needs: work on"),
    (adam((FLUSH, f"{FLUSH}\n        for p in self.parameters:\n            p.grad = None")),
     {WEIGHTS}, "embedding.token.weight.grad is another one: leave it"),
    (adam(("range(0, p.numel()", "range(0, p.numel() - 1")), {WEIGHTS},
     "after step 1 embedding.token.weight differs in 1 "),
    (adam(("range(0, p.numel(), self.unit)", "[0]")), {WEIGHTS},
     ("after step 1 embedding.token.weight differs in 6,827 ",
      "; there it is as it was before the step")),
    (adam(("8 * count", "16 * count")), {FILES}, "required: 403,200"),
    (adam(("8 * count", "4 * count")), {WEIGHTS},
     "; where a file ends, a slice is shorter than asked for: 8 bytes per parameter are required"),
    (adam(("parameter.grad.view(-1)", "parameter.grad")), {WEIGHTS},
     ("at non-singleton dimension 1, line ", "m.lerp_(g, 1 - b1)  ")),  # no word of a file's end
    (adam((MOVES, f"{MOVES}\n        m.copy_(m.bfloat16())")), {WEIGHTS}, "after step 2 "),
    (adam((NEXT, "")), {WEIGHTS},
     ("after step 1 embedding.token.weight differs in 6,827 ", OTHERS_PLACE)),
    (adam(*EACH_MAPPED, ('"r+", 4 * at', '"r+", at')), {WEIGHTS},  # NaN and infinite numbers
     "; the root of a negative number is NaN, as when v is read from another number's place"),
    (adam(("v.sqrt()", "m.sqrt()")), {WEIGHTS}, "; the root of a negative number is NaN, as "),
    (Misspelt, {WEIGHTS}, "raised NotImplementedError"),
]  # fmt: skip
RIGHT = [
    adam(*EACH_MAPPED),
    adam((MOVES, f"{MOVES}\n\n\nMyStreamedAdamW.kind = MyStreamedAdamW")),
]  # fmt: skip
TABLE = Table(STREAMED, WRONG, RIGHT, alone=[READ_ONLY], most=1)
test_a_wrong_optimizer_is_refused, test_a_right_optimizer_passes, test_the_stub = TABLE.tests()


class EndsItsProcess(MyStreamedAdamW):
    def __init__(self, parameters, folder, **settings):
        told, self.folder = settings.pop("told"), folder
        Path(told).write_text(folder)

    def step(self):
        os._exit(1)


def test_the_folder_goes_with_the_check_where_the_answer_s_process_was_stopped(tmp_path):
    told = tmp_path / "folder"
    verdict = STREAMED.check(functools.partial(EndsItsProcess, told=str(told)))
    assert not verdict.passed and told.exists()
    assert not Path(told.read_text()).exists()


# ---- go further: the order of a streamed update --------------------------------------------------
def good(units, window):
    jobs, ahead = [], window - 1
    for unit in range(units + ahead):
        if unit < units:
            jobs += [("read", unit, unit % window), ("update", unit, unit % window)]
        if unit >= ahead:
            jobs.append(("write", unit - ahead, (unit - ahead) % window))
    return jobs


def one_after_the_other(units, window):
    return [(kind, u, u % window) for u in range(units) for kind in ("read", "update", "write")]


def in_batches(units, window):
    """Fills the window, updates all of it, writes all of it."""
    jobs = []
    for first in range(0, units, window):
        group = range(first, min(first + window, units))
        jobs += [(kind, u, u - first) for kind in ("read", "update", "write") for u in group]
    return jobs


STREAM = pl.exercises.stream
offload = importlib.import_module("paralab.exercises.offload")
FAST_S, SLOW_S = offload.UPDATE_S.values()
JOBS, WINDOW, SIMULATED = STREAM.required
KINDS = ("read", "update", "write")


def changed(rule):
    """The right jobs, changed by a rule for (jobs, units, window)."""
    return lambda units, window: rule(good(units, window), units, window)


WRONG_ORDERS = [  # answer, limits it breaks, words of the verdict
    (one_after_the_other, {SIMULATED},
     "units=6, window=2: with the fast host it takes 198 ms, required: at most 150 ms; the "
     "lane disk is idle from 10 ms to 18 ms, before write 0"),
    (in_batches, {SIMULATED},
     "units=6, window=2: with the slow host it takes 255 ms, required: at most 205 ms; the lane "
     "host is idle from 70 ms to 95 ms, before update 2"),
    (lambda n, w: [(kind, u, u % w) for kind in KINDS for u in range(n)], {JOBS},
     "jobs[2]=('read', 2, 0): it overwrites unit 0, which is in that buffer and has not been"),
    (changed(lambda jobs, n, w: [(k, u, (b + (k == "write")) % w) for k, u, b in jobs]), {JOBS},
     "unit 0 is not in buffer 1 by then"),
    (changed(lambda jobs, n, w: [(k, u, (b + (k == "update")) % w) for k, u, b in jobs]), {JOBS},
     "jobs[1]=('update', 0, 1): unit 0 is not in buffer 1 by then"),
    (changed(lambda jobs, n, w: [job for job in jobs if job[:2] != ("update", n - 1)]), {JOBS},
     "unit 5 has not been updated by then"),
    (changed(lambda jobs, *_: jobs[:-1]), {JOBS}, "units=6, window=2: there is no write of unit 5"),
    (changed(lambda jobs, *_: [jobs[0], *jobs]), {JOBS},
     "jobs[1]=('read', 0, 0): the read of unit 0 is there twice"),
    (lambda n, w: good(n, w + 1), {WINDOW},
     "jobs[4]=('read', 2, 2): the buffers are 0 to 1"),
    (lambda n, w: good(n, 2), {WINDOW},
     "units=5, window=1: jobs[2]=('read', 1, 1): the only buffer is 0"),
    (lambda n, w: None, {JOBS}, "jobs=None: not a list"),
    (changed(lambda jobs, *_: [" ".join(map(str, job)) for job in jobs]), {JOBS},
     "jobs[0]='read 0 0': not a job"),
    (lambda n, w: good(5 if n == 4 else n, w), {JOBS},
     "units=4, window=2: jobs[11][1]=4: out of range"),
]  # fmt: skip
ORDERS = [
    good, lambda n, w: iter(good(n, w)), changed(lambda jobs, *_: list(map(list, jobs))),
    changed(lambda jobs, n, w: [(k, n - 1 - u, w - 1 - b) for k, u, b in jobs]),
]  # fmt: skip
STREAMS = Table(STREAM, WRONG_ORDERS, ORDERS, exact=True, most=1)
test_a_wrong_stream_is_refused, test_a_right_stream_passes, test_a_stub = STREAMS.tests()


@pytest.mark.parametrize("answer", ORDERS)
def test_what_is_right_is_said_of_the_task_s_size(answer):
    verdict = STREAMS[answer]
    assert {row.yours.split(": ")[0] for row in verdict.rows} == {"units=6, window=2"}


# ---- simulated time ------------------------------------------------------------------------------
def took(jobs, update_s):
    return max(end for _, end in offload.simulate(jobs, update_s))


def test_a_job_starts_when_its_lane_and_its_buffer_are_free():
    jobs = good(3, 2)
    times = dict(zip([job[:2] for job in jobs], offload.simulate(jobs, 30e-3), strict=True))
    assert {job: round(1e3 * start) for job, (start, _) in times.items()} == {
        ("read", 0): 0, ("update", 0): 10, ("read", 1): 10, ("update", 1): 40, ("write", 0): 40,
        ("read", 2): 55, ("update", 2): 70, ("write", 1): 70, ("write", 2): 100,
    }  # fmt: skip


@pytest.mark.parametrize("update_s", [1e-3, FAST_S, 10e-3, 25e-3, SLOW_S, 0.1])
def test_reading_ahead_reaches_the_limit_at_every_size(update_s):
    for units in range(1, 13):
        for window in range(1, 16):
            jobs = good(units, window)
            assert not offload.first_misplaced(jobs, units)
            limit = offload.limit_s(units, window, update_s)
            assert took(jobs, update_s) == pytest.approx(limit, rel=1e-9), (units, window)


def test_no_order_that_is_right_is_faster_than_the_limit():
    draw = random.Random(0)
    for _ in range(500):
        units, window = draw.randint(1, 6), draw.randint(1, 4)
        jobs = at_random(draw, units, window)
        assert not offload.first_misplaced(jobs, units)
        for update_s in (1e-3, FAST_S, 12e-3, SLOW_S):
            assert took(jobs, update_s) >= offload.limit_s(units, window, update_s) * (1 - 1e-9)


def at_random(draw: random.Random, units: int, window: int) -> list:
    """Some order that is right."""
    jobs, inside, left = [], {}, draw.sample(range(units), units)
    while left or inside:
        free = [buffer for buffer in range(window) if buffer not in inside]
        if left and free and (not inside or draw.random() < 0.5):
            inside[buffer := draw.choice(free)] = ["read", "update", "write"], left.pop()
        else:
            buffer = draw.choice(list(inside))
        kinds, unit = inside[buffer]
        jobs.append((kinds.pop(0), unit, buffer))
        if not kinds:
            del inside[buffer]
    return jobs


def test_a_wrong_timeout_is_refused():
    with pytest.raises(ValueError, match=r"timeout=0.*; legal: "):
        STREAM.check(good, timeout=0)


def test_the_picture_of_an_order_has_its_jobs_and_says_how_far_it_is_from_the_limit():
    chart, slow = view.jobs(iter(good(6, 2)), host="fast"), view.jobs(one_after_the_other(6, 2))
    assert chart.finding == "6 units take 150 ms; no order takes less than 150 ms"
    assert slow.finding == "6 units take 330 ms; no order takes less than 205 ms"
    assert len(chart.table) == 18 and chart.table["end"].max() == pytest.approx(0.150)
    assert set(chart.table.query("what == 'update'")["lane"]) == {"host"}
    first = view.jobs(good(1, 1)[:1])
    assert first.finding == "These jobs take 10 ms; all jobs take at least 55 ms"
    early = good(6, 2)
    early[4:6] = early[5], early[4]  # as fast as any order, and unit 0 is never written
    said = "These jobs are no update of 6 units: jobs[4]=('read', 2, 0): it overwrites unit 0, "
    assert view.jobs(early, host="fast").finding.startswith(said)
    refuses(r"jobs=.*; legal: a list \[\(\"read\", 0, 0\), \.\.\.\]", view.jobs, [])
    refuses("legal: fast, slow|'fast'", view.jobs, good(6, 2), host="other")
