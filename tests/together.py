"""Cases as lines of text, and their trainings: many in one launch, in turn on the same ranks.

    case("dp=2 zero_stage=2 microbatches=3 tied=False clip_norm=0.1")

Each word sets a field of the plan, of the model or of the run. What a launch costs, a second of a
processor, is paid once per number of ranks.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import paralab as pl
from equality import TOLERANCE, assert_equal_state, references, worst
from paralab.experiment import _meta, checked
from paralab.launch import launch_program
from paralab.report import scratch
from paralab.report.report import Report

MODEL = pl.ModelSpec(layers=2, hidden=40, heads=4, seq_len=24, vocab=260)  # 3 divides no unit of it
PLAN = {"bucket_bytes": 40_000}  # so there are several buckets
RUN = {"steps": 2, "optimizer": "sgd", "lr": 0.5, "keep_state": True}
MODEL_FIELDS, PLAN_FIELDS = (
    {field.name for field in dataclasses.fields(kind)} for kind in (pl.ModelSpec, pl.Plan)
)


class Case(NamedTuple):
    """A training; its name is the line that it was made of."""

    name: str
    model: pl.ModelSpec
    plan: pl.Plan
    more: tuple[tuple[str, Any], ...]  # of the run what is not as in RUN

    @property
    def settings(self) -> dict[str, Any]:
        return RUN | dict(self.more)

    def on_one_device(self) -> Case:
        """The same micro-batches in the same order on one device; of one rank of data."""
        kept = ("microbatches", "microbatch_size", "precision", "grad_dtype")
        plan = pl.Plan(**{name: getattr(self.plan, name) for name in kept})
        return Case("on one device", self.model, plan, self.more)


def case(line: str, **objects: Any) -> Case:
    """The case of a line and of settings that are no text. A stage has a block at least."""
    fields = dict(map(_word, line.split())) | objects
    stages = fields.get("pp", 1) * fields.get("virtual_stages", 1)
    fields.setdefault("layers", max(MODEL.layers, stages))
    model = MODEL.replace(**{n: v for n, v in fields.items() if n in MODEL_FIELDS})
    plan = pl.Plan(**PLAN | {n: v for n, v in fields.items() if n in PLAN_FIELDS})
    more = tuple((n, v) for n, v in fields.items() if n not in MODEL_FIELDS | PLAN_FIELDS)
    said = [line, *(getattr(o, "__name__", f"{n}={o}") for n, o in objects.items())]
    return Case(", ".join(said), model, plan, more)


def cases(lines: str, **objects: Any) -> list[Case]:
    """One for each line that is not empty; what stands behind a # is a comment."""
    texts = (" ".join(line.partition("#")[0].split()) for line in lines.splitlines())
    return [case(text, **objects) for text in texts if text]


def _word(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    with contextlib.suppress(ValueError, SyntaxError):  # else it is a string
        return name, ast.literal_eval(value)
    return name, value


def named(some: list[Case]) -> Any:
    """A test of each, by its name."""
    import pytest  # ranks import this module

    return pytest.mark.parametrize("one", some, ids=lambda one: one.name)


# ---- reports -------------------------------------------------------------------------------------
class Together:
    """What ``train`` finds of cases, once of each. The one that is asked for brings some others
    with as many ranks: so many that no test takes long.
    """

    def __init__(self, some: Iterable[Any], train: Callable, *, most: int = 40) -> None:
        self.cases, self.train, self.most = list(dict.fromkeys(some)), train, most
        self.found: dict[Any, Any] = {}

    def __getitem__(self, case: Any) -> Any:
        if case not in self.found:
            ranks = case.plan.world_size
            new = [one for one in [case, *self.cases] if one not in self.found]
            alike = [one for one in dict.fromkeys(new) if one.plan.world_size == ranks]
            alike = alike[: self.most]
            self.found |= zip(alike, self.train(alike), strict=True)
        return self.found[case]


class Trained(Together):
    """`pl.run` of cases, in strict order mode if nothing else is said, and what the reference says
    of them. ``how``: of `reports`.
    """

    def __init__(self, some: Iterable[Case], data: Path, **how: Any) -> None:
        def train(alike: list[Case]) -> list[Report]:
            jobs = [(one.model, one.plan, one.settings) for one in alike]
            return reports(jobs, data, **how)

        super().__init__(some, train)
        self.data = data
        self.known: dict[str, dict[str, Any]] = {}

    def alone(self, case: Case) -> dict[str, Any]:
        """What the reference trains: losses, gradients, weights."""
        if self._key(case) not in self.known:
            plain = [one for one in self.cases if one.settings["optimizer"] == "sgd"]
            asked = {self._key(one): self._asked(one) for one in [*plain, case]}
            new = {key: how for key, how in asked.items() if key not in self.known}
            self.known |= zip(new, references(list(new.values())), strict=True)
        return self.known[self._key(case)]

    def _key(self, case: Case) -> str:
        return repr((self._asked(case), case.model.block))

    def _asked(self, case: Case) -> dict[str, Any]:
        plan, settings = case.plan, case.settings
        return {
            "model": case.model,
            "microbatches": plan.dp * plan.microbatches,
            "microbatch_size": plan.microbatch_size,
            "precision": plan.precision,
            "clip_norm": settings.get("clip_norm"),
            "steps": settings["steps"],
            "lr": RUN["lr"],
            "data": self.data,
        }

    def assert_equals_the_reference(self, case: Case) -> None:
        alone, report, precision = self.alone(case), self[case], case.plan.precision
        assert_equal_state(alone, report, precision=precision)
        for expected, loss in zip(alone["losses"], report.losses, strict=True):
            assert abs(loss - expected) <= TOLERANCE[precision] * abs(expected)


def assert_same_bits(expected: Any, found: Any) -> None:
    """Losses, gradients and weights of two reports."""
    for what in ("gradients", "weights"):
        gap, name = worst(getattr(expected, what), getattr(found, what))
        assert gap == 0.0, f"{what} of {name} differ by {gap}"
    assert found.losses == expected.losses


def reports(
    jobs: Sequence[tuple[pl.ModelSpec, pl.Plan, dict[str, Any]]],
    data: Path | None = None,
    *,
    strict: bool = True,
    program: Callable | None = None,
) -> list[Report]:
    """What `pl.run` returns of each (model, plan, settings); all have as many ranks. program: what
    is run on them in place of `in_turn`.
    """
    made = [checked(model, plan, **{"data": data, **settings}) for model, plan, settings in jobs]
    with contextlib.ExitStack() as stack:
        asked = []
        for (model, plan, _), settings in zip(jobs, made, strict=True):
            folder = stack.enter_context(scratch.folder(plan.tiers))
            asked.append((model, plan, {**settings, "offload_folder": folder}))
        ranks = jobs[0][1].world_size
        how = {"timeout": 60, "device": "cpu", "strict": strict}
        parts = launch_program(program or in_turn, ranks, (asked,), **how)
    return [
        Report.from_parts(list(mine), model=model, plan=plan, meta=_meta(how, mine[0]["meta"]))
        for (model, plan, _), how, mine in zip(jobs, made, zip(*parts, strict=True), strict=True)
    ]


# ---- on the ranks --------------------------------------------------------------------------------
def in_turn(context: Any, jobs: Sequence[tuple[Any, pl.Plan, dict]], around: Any = None) -> list:
    """A rank's part of each training. around(number): a context manager that each runs in."""
    return list(one_by_one(context, jobs, around))


def one_by_one(
    context: Any, jobs: Sequence[tuple[Any, pl.Plan, dict]], around: Any = None
) -> Iterator[dict[str, Any]]:
    """The same, each part as soon as it is there."""
    import torch.distributed as dist

    from paralab import transports
    from paralab.interpret.train import train

    groups = remembered(dist.new_group)
    look, transports.send_first = transports.send_first, lambda: None
    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)  # as in conftest.py: parts of reports stay to the end
    for number, (model, plan, settings) in enumerate(jobs):
        dist.new_group = groups()
        look()  # once for all groups so far: with those of many jobs there are many threads
        store = dist.PrefixStore(str(number), context.store)  # strict mode counts its calls there
        own = dataclasses.replace(context, store=store)
        with around(number) if around else contextlib.nullcontext():
            try:
                part = train(own, model, plan, **settings)
            except Exception as error:
                error.add_note(f"job {number}: {model} {plan}")
                raise
        yield part


def remembered(new_group: Any) -> Callable[[], Callable]:
    """What makes ``new_group`` for one job after the other: the first that a job asks for with
    these ranks is the first that the job before it had, and so on.
    """
    made: dict[tuple[int, ...], list[Any]] = defaultdict(list)

    def of_a_job() -> Callable[..., Any]:
        asked: Counter = Counter()

        def group(ranks: Sequence[int], **how: Any) -> Any:
            key = tuple(ranks)
            asked[key] += 1
            if len(made[key]) < asked[key]:
                made[key].append(new_group(ranks, **how))
            return made[key][asked[key] - 1]

        return group

    return of_a_job
