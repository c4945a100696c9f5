"""Lab 12's exercise: what a rank sends, by axis, against the compiled program."""

import contextlib
import sys
import threading

import paralab as pl
from judged import Table, altered

SENDS = pl.exercises.rank_sends


def counted(model, plan, rank):
    return dict(pl.dry_run(model, plan, rank=rank).traffic(by="axis").to_numpy())


def counted_without_a_profile(*asked):
    sys.setprofile(None)
    return counted(*asked)


def counted_in_a_thread(*asked):
    found = {}
    thread = threading.Thread(target=lambda: found.update(counted(*asked)))
    thread.start()
    thread.join()
    return found


def counted_at_the_second_try(model, plan, rank):
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            return counted(model, plan, rank)


def counted_behind_a_loop(model, plan, rank):
    with contextlib.suppress(RuntimeError):
        while True:
            pass
    return counted(model, plan, rank)


def loops_behind_a_refusal(model, plan, rank):
    with contextlib.suppress(RuntimeError):
        counted(model, plan, rank)
    while True:
        pass


WRONG = [  # changes of the answer, limits it breaks, words of the verdict
    ([("6 if", "4 if")], {"tp"}, "forward runs twice, and so do its two all-reduces"),
    ([("plan.microbatch_size * s", "s")], {"tp", "pp"},
     "(yours counts one sample per micro-batch)"),
    ([("plan.microbatch_size * s", "plan.global_batch / m * s")], {"tp", "pp"},
     "(yours counts the samples of all data-parallel ranks)"),
    ([("2 * (d - 1) * width", "2 * (d - 1) * 4")], {"dp"}, "GB (in bf16 a number has 2 bytes)"),
    ([('"fp32" else 2', '"fp32" else 4')], {"tp", "pp", "dp"}, "in bf16 a number has 2 bytes"),
    ([("rank // (d * t)", "rank // t % p")], {"tp", "pp", "dp"}, "dp=8, pp=3, tp=4, m=6, rank 48"),
    ([("        reduces += 1 ", "        reduces += 0 ")], {"tp"},
     "the embedding's all-reduce is missing, or the rank is on another stage: tp is innermost"),
    ([("tp = m * ", "tp = ")], {"tp"}, "yours counts one micro-batch"),
    ([("reduces * 2 * (t - 1)", "reduces * (t - 1)")], {"tp"}, "that is half of an all-reduce"),
    ([("activation // t", "activation")], {"tp"},
     "(each of the 2 (t-1) steps of a ring sends a t-th of the tensor)"),
    ([("1 if stage == 0 else 2", "1")], {"pp"}, "a stage in the middle also sends gradients back"),
    ([("2 * (d - 1) * width", "m * 2 * (d - 1) * width")], {"dp"}, "summed once per step"),
    ([("    if stage == 0:\n        parameters", "    if False:\n        parameters")], {"dp"},
     "dp=8, pp=3, tp=4, m=6, rank 0: "),
    ([("replicated = 2 * h + 4 * h", "replicated = 6 * h // t")], {"dp"},
     "(norms and the biases of row-parallel layers are replicated)"),
    ([("return {\"tp\": tp, ", "return {")], {"tp"}, "the dict has no entry 'tp'"),
    ([("return {\"tp\": tp, \"pp\": pp, \"dp\": dp}", "return tp + pp + dp")], {"tp", "pp", "dp"},
     "required: a dict, {axis: bytes}, yours is an int"),
    ([("width = 4 if", "width = model.width if")], {"tp", "pp", "dp"}, "raised AttributeError"),
]  # fmt: skip
LOOKS = counted, counted_at_the_second_try, counted_without_a_profile, counted_in_a_thread
LIBRARY = "so this function of it may not be called"
BAD = [
    *((altered("rank_sends")(*pairs), *row) for pairs, *row in WRONG),
    *((one, set(SENDS.required), LIBRARY) for one in LOOKS),
    (loops_behind_a_refusal, set(SENDS.required), LIBRARY),
    (counted_behind_a_loop, set(SENDS.required), "2,000,000 lines of the answer were run"),
]
TABLE = Table(SENDS, BAD, exact=True)
test_wrong_bytes_are_refused, test_right_bytes_pass, test_its_stub = TABLE.tests()
