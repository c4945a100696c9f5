"""Lab 03: a pipeline's executor, with one stage per rank or several.

The answer runs a step of the reference GPT on real ranks, by lists of actions that it is given. On
each rank the checker first measures the bytes that one micro-batch keeps until its backward. The
list determines how many micro-batches are in flight, and so the limit of memory: in this alone
GPipe (Huang+ 2019, arXiv:1811.06965, sec. 2.3) and 1F1B (Narayanan+ 2021, arXiv:2006.09503, sec.
3.2) differ. Messages between two ranks are matched by their order. So with two ranks and several
stages on each, an executor has to know in which order its neighbour sends.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import count, zip_longest
from typing import Any

from paralab.checks import count_of
from paralab.exercises.diagnose import distinct, first_wrong_tensor
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import reference, torch, watched
from paralab.exercises.one_process import gradients_of_each
from paralab.exercises.questions import plain
from paralab.exercises.tries import Outcome
from paralab.exercises.verdict import Notes, as_many, first
from paralab.exercises.warmup import BACKWARD_FIRST, LAST_FIRST, lists_of
from paralab.model.step import Step
from paralab.spec import ModelSpec

Run = tuple[str, int, int, int]  # schedule, p, m, v
Runs = tuple[Run, ...]
# The last of them has micro-batches with two digits.
RUNS: Runs = (("gpipe", 2, 4, 1), ("1f1b", 4, 8, 1), ("1f1b", 3, 2, 1), (LAST_FIRST, 2, 11, 1))
CHUNKED: Runs = ((BACKWARD_FIRST, 2, 4, 2), ("interleaved", 3, 6, 2), (LAST_FIRST, 2, 2, 2))
MODEL = ModelSpec(layers=1, hidden=32, heads=2, seq_len=16, tied=False)  # a block per stage
SAMPLES = 2  # of a micro-batch
SHAPE = (SAMPLES, MODEL.seq_len, MODEL.hidden)
MESSAGE = 4 * SAMPLES * MODEL.seq_len * MODEL.hidden  # bytes
SUM = "it is the sum over the micro-batches, required: the mean"
LAST = "it is the last micro-batch's alone"
MARGIN = 1.1  # factor on the bytes that are measured for one micro-batch


def _name(run: Run) -> str:
    name, p, m, v = run
    return f"{name}, p={p}, m={m}" + f", v={v}" * (v > 1)


def _required(runs: Sequence[Run]) -> dict[str, str]:
    return {
        "gradients": "those of one process, mean over the micro-batches, with these lists: "
        + "; ".join(map(_name, runs)),
        "loss": "on the last rank: the mean over the micro-batches; on the others 0.0",
        "order of work": "that of the rank's list, each action once",
        "bytes per rank": "exactly 4 b s h for each activation and gradient sent to another stage",
        "in flight": "tensors of as many micro-batches as the list keeps at once, and all messages",
    }


LIMITS = tuple(_required(RUNS))


def check(runs: Sequence[Run], tries: Tries) -> None:
    for run in runs:
        for notes, outcome in tries.run(one_step, run[1], *run, where=_name(run)):
            _look(notes, outcome, run)


def one_step(
    watch: Any, answer: tuple, seed: int, name: str, p: int, m: int, v: int
) -> dict[str, Any]:
    """What every rank runs: it measures one micro-batch in each of its stages, then lets the answer
    run a step by its list.

    Returns "gradients", "loss", what is "right", a step, the gradients of each micro-batch and the
    last one's loss (on rank 0); "done" and "made", as `_write_down` has them; in bytes, the
    "weights" of the rank, the "peak" of the step beyond weights and gradients, and at most for one
    micro-batch and stage, those "kept" and those "passing".
    """
    rank, lists = watch.group.index, lists_of(name, p, m, v)
    model = MODEL.replace(layers=v * p)
    sizes = {"microbatches": m, "microbatch_size": SAMPLES, "seed": seed}
    batches = reference.batches(model, step=0, **sizes)
    with watch.unseen():  # only rank 0 computes the right step
        right = None
        if not rank:
            _, step = reference.train(model, steps=1, optimizer="sgd", **sizes)
            gpt = reference.GPT(model, seed)
            right = step, gradients_of_each(gpt, batches), gpt(*batches[-1]).item()
    stages = {s: reference.Stage(model, s, v * p, seed) for s in range(rank, v * p, p)}
    kept, passing = zip(
        *(_measured(watch, stage, batches[0]) for stage in stages.values()), strict=True
    )
    done: list[tuple[str, int]] = []
    made: dict[str, int] = {}
    if not rank:
        made |= {f"0F{k}": _checksum(tokens) for k, (tokens, _) in enumerate(batches)}
    for s, stage in stages.items():
        _write_down(stage, s, done, made)
    with watch.section() as section:
        if v > 1:
            all_lists = [list(map(str, row)) for row in lists]
            loss = answer[0](stages, all_lists, batches, SHAPE)
        else:
            own_list = [f"{action.kind}{action.microbatch}" for action in lists[rank]]
            neighbours = (rank - 1 if rank else None), (rank + 1 if rank < p - 1 else None)
            loss = answer[0](stages[rank], own_list, *neighbours, batches, SHAPE)
    named = {n: p for stage in stages.values() for n, p in stage.named_parameters()}
    weights = sum(parameter.nbytes for parameter in named.values())
    return {
        "gradients": {
            n: None if p.grad is None else watched.array(p.grad) for n, p in named.items()
        },
        "right": right,
        "loss": plain(loss.detach() if hasattr(loss, "detach") else loss),
        "done": done,
        "made": made,
        "peak": section.peak - weights,
        "weights": weights,
        "kept": max(kept),
        "passing": max(passing),
    }


def _measured(watch: Any, stage: Any, batch: tuple) -> tuple[int, int]:
    """Bytes of one micro-batch: kept until its backward, and at the peak in addition."""
    tokens, targets = batch
    with watch.section() as section:
        x = torch.zeros(SHAPE, requires_grad=True) if stage.embedding is None else tokens
        y = stage(x, targets)
        kept = section.now()
        y.backward(torch.ones_like(y))
    stage.zero_grad()
    return kept, section.peak - kept


def _write_down(stage: Any, number: int, done: list[tuple[str, int]], made: dict[str, int]) -> None:
    """Record what a stage computes, by hooks.

    done  (action, checksum of its input) of each forward and backward, in order: ("1F0", 7)
    made  {action of another stage: checksum of the message for it}; the caller adds the tokens
    """
    calls = count()

    def hook(module: Any, given: Any, y: Any) -> None:
        k, x = next(calls), given[0]

        def began(gradient: Any) -> None:
            done.append((f"{number}B{k}", _checksum(gradient)))

        def ended(gradient: Any) -> None:
            made[f"{number - 1}B{k}"] = _checksum(gradient)

        done.append((f"{number}F{k}", _checksum(x)))
        made[f"{number + 1}F{k}"] = _checksum(y)
        if y.requires_grad:
            y.register_hook(began)
        if x.requires_grad:
            x.register_hook(ended)

    stage.register_forward_hook(hook)


def _checksum(tensor: Any) -> int:
    return zlib.crc32(tensor.detach().numpy().tobytes())


def _look(notes: Notes, outcome: Outcome, run: Run) -> None:
    from paralab.theory.schedule_check import peak_live

    _, p, m, v = run
    lists, last_stage = lists_of(*run), v * p - 1
    right, each, last_loss = outcome.results[0]["right"]
    rows = []  # what is wrong on each rank with each limit, in words
    ranks = zip(range(p), outcome.results, lists, peak_live(lists), outcome.sent(), strict=True)
    for rank, result, listed, alive, sent in ranks:
        crossings = sum((s > 0) + (s < last_stage) for s in range(rank, v * p, p))
        messages = m * crossings * MESSAGE
        said = f" sends {sent:,} bytes, required: {messages:,}{as_many(sent, messages)}"
        # There is room for the micro-batches in flight, for all messages, sent and received, and
        # for the gradients of one micro-batch before they are added, as large as the weights.
        most = MARGIN * (alive * result["kept"] + result["passing"])
        most += 2 * messages + result["weights"]
        held = f" holds {result['peak']:,} bytes of activations and messages at once, required: at "
        held += f"most {int(most):,}; its list has {count_of(alive, 'micro-batch')} in "
        held += f"flight, of {result['kept']:,} bytes each"
        wrong = (
            _wrong_gradient(result["gradients"], right, each),
            _wrong_loss(result["loss"], right.loss if rank == p - 1 else 0.0, last_loss, m),
            _wrong_order([action for action, _ in result["done"]], listed),
            said if sent != messages else "",
            held if result["peak"] > most else "",
        )
        rows.append([words and f"rank {rank}{words}" for words in wrong])
    for limit, words in zip(LIMITS, zip(*rows, strict=True), strict=True):
        said = first(words)
        said += _mixed_up(outcome.results) if said and limit == "gradients" else ""
        notes.look(limit, said, "kept")


def _wrong_gradient(gradients: dict[str, Any], right: Step, each: Sequence[dict[str, Any]]) -> str:
    missing = [name for name, gradient in gradients.items() if gradient is None]
    if missing:
        return f": {missing[0]} has no gradient"
    known = {SUM: {name: len(each) * gradient for name, gradient in right.gradients.items()}}
    how = {"known": known, "terms": {f"of micro-batch {k}": one for k, one in enumerate(each)}}
    return first_wrong_tensor([gradients], right.gradients, ranks=lambda _: "", **how)


def _mixed_up(results: Sequence[dict[str, Any]]) -> str:
    """The first action that computes with the input of another action, in words, or ""."""
    made = {action: checksum for result in results for action, checksum in result["made"].items()}
    action_of = {checksum: action for action, checksum in made.items()}
    for rank, result in enumerate(results):
        for action, checksum in result["done"]:
            if checksum in action_of and checksum != made.get(action, checksum):
                return f"; rank {rank} does {action} with the input of {action_of[checksum]}"
    return ""


def _wrong_loss(loss: Any, right: float, last: float, m: int) -> str:
    if not isinstance(loss, (int, float)):
        return f" returns {loss!r}, required: {right:.5g}"
    if abs(loss - right) <= 1e-4:
        return ""
    yours, required = distinct(loss, right)
    words = f" returns {yours}, required: {required}"
    known = ((SUM, m * right), (LAST, last), (f"{LAST}, divided by m", last / m))
    near = (said for said, number in known if right and math.isclose(loss, number, rel_tol=1e-5))
    return "; ".join([words, *near])


def _wrong_order(done: Sequence[str], listed: Sequence[Any]) -> str:
    pairs = zip_longest(done, map(str, listed), fillvalue="nothing")
    for position, (mine, required) in enumerate(pairs):
        if required == "nothing":
            return f": its list ends after {position} actions, and yours goes on with {mine}"
        if mine != required:
            return f": action {position + 1} of its list is {required}, yours does {mine}"
    return ""


@exercise(
    Takes("pipeline_step(stage, actions, previous, following, batches, shape)"),
    required=_required(RUNS),
)
def pipeline_executor(tries: Tries) -> None:
    check(RUNS, tries)


@exercise(Takes("interleaved_step(stages, lists, batches, shape)"), required=_required(CHUNKED))
def interleaved_executor(tries: Tries) -> None:
    check(CHUNKED, tries)
