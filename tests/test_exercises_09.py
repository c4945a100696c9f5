"""Lab 09's exercises: right answers pass, wrong ones are refused with the mistake named."""

import functools
import os
from pathlib import Path

import pytest
import torch

import paralab as pl
from bad_answers import good, one_after_the_other
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
    (adam(("range(0, p.numel()", "range(0, p.numel() - 1")), {WEIGHTS},
     "after step 1 embedding.token.weight differs in 1 "),
    (adam(("range(0, p.numel(), self.unit)", "[0]")), {WEIGHTS},
     ("after step 1 embedding.token.weight differs in 6,827 ",
      "; there it is as it was before the step")),
    (adam(("8 * count", "16 * count")), {FILES}, "required: 403,200"),
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


# ---- go further: the order of a streamed update, drawn -------------------------------------------
def test_the_picture_of_an_order_has_its_jobs_and_says_how_far_it_is_from_the_limit():
    chart, slow = view.jobs(iter(good(6, 2)), host="fast"), view.jobs(one_after_the_other(6, 2))
    assert chart.finding == "6 units take 150 ms; no order takes less than 150 ms"
    assert slow.finding == "6 units take 330 ms; no order takes less than 205 ms"
    assert len(chart.table) == 18 and chart.table["end"].max() == pytest.approx(0.150)
    assert set(chart.table.query("what == 'update'")["lane"]) == {"host"}
    first = view.jobs(good(1, 1)[:1])
    assert first.finding == "These jobs take 10 ms; all jobs take at least 55 ms"
    refuses(r"jobs=.*; legal: a list \[\(\"read\", 0, 0\), \.\.\.\]", view.jobs, [])
    refuses("legal: fast, slow|'fast'", view.jobs, good(6, 2), host="other")
