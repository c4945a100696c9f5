"""Lab 10: a planner on a budget. Where does every degree of parallelism go, with thirty questions?

PTD-P (Narayanan+ 2021, arXiv:2104.04473, sec. 5.4) ends in advice: model parallelism just as large
as memory asks for, tensor parallelism inside a node and the pipeline across, the rest of the
devices data-parallel, and a micro-batch that is neither too small for the device nor too large for
the bubble. The answer is a function that knows such rules and may ask for the simulated step
(interpret/outline.py) and the peak memory of thirty plans. It is held against the best plan that
`pl.plan_search` finds among all of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paralab.checks import illegal
from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import exercise
from paralab.exercises.questions import ends, untraced
from paralab.exercises.tries import Takes, Try, on_ranks
from paralab.exercises.verdict import NOT_STARTED, Notes
from paralab.spec import Cluster, ModelSpec, Plan

QUESTIONS, SLACK = 30, 1.10
PRECISION = "bf16"
PTDP = {"schedule": "1f1b", "zero_stage": [0, 1], "offload": None}  # what the paper composes


class Case(NamedTuple):
    """What is to be placed: a model of the literature, nodes of eight devices, samples per step."""

    model: str
    nodes: int
    batch: int

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.preset(self.model)

    @property
    def cluster(self) -> Cluster:
        return Cluster.preset("dgx-a100", nodes=self.nodes)

    def __str__(self) -> str:
        return f"{self.model} on {8 * self.nodes} devices, batch {self.batch}"


CASES = (Case("ptdp-7.5b", 2, 64), Case("ptdp-39b", 8, 128), Case("gpt3-175b", 16, 128))


class Answer(NamedTuple):
    """What there is to know of a plan: seconds per step, simulated, and bytes on the device with
    the highest peak memory.
    """

    seconds: float
    bytes: int


PLAN, FITS, NODE, TIME, ASKED_OFTEN = (
    "plan",
    "memory",
    "tensor parallelism",
    "simulated step",
    "questions",
)
ASKED = {
    PLAN: f"three models, 16 to 128 devices: legal, all devices, the whole batch, {PRECISION}",
    FITS: "the device with the highest peak memory within its 80 GB",
    NODE: "sends nothing between nodes",
    TIME: f"at most {SLACK:g} times the best there is with 1F1B and zero_stage of 0 or 1",
    ASKED_OFTEN: f"at most {QUESTIONS} for each model",
}


@exercise(Takes("a function", "f(model, cluster, batch, ask)"), lab="10", asked=ASKED)
def place(tries: Sequence[Try], timeout: float) -> None:
    for notes, found in on_ranks(tries, plans, 1, timeout=10 * timeout):
        for case, (plan, trouble, questions) in zip(CASES, found.results[0], strict=True):
            if trouble == NOT_STARTED:
                notes.end(NOT_STARTED)
                break
            if questions > QUESTIONS:
                said = f"more than {QUESTIONS}"
                notes.look(ASKED_OFTEN, f"{case}", f"{said} questions", "")
            elif trouble:
                notes.note(PLAN, f"{case.model}: failed", False, f"{case}: {trouble}")
            else:
                _look(notes, case, plan, questions)


class TooMany(Exception):
    """The questions are used up."""


def plans(watch: Any, answer: tuple, seed: int) -> list[tuple[Plan | None, str, int]]:
    """What one rank runs: (the plan, or why there is none, the number of questions), by case."""
    from paralab.programs import search

    for module in (sys.modules["paralab"], search):  # `pl`, too
        module.plan_search = _refused  # only on this rank, which ends with the check
    found = []
    for case in CASES:
        ask, count = _counted(case)
        with ends():
            plan, trouble = attempt(lambda c=case, a=ask: _planned(answer[0], c, a))
        if trouble.startswith("raised NotImplementedError"):
            trouble = NOT_STARTED
        found.append((plan, trouble, count()))
    return found


def _refused(*_: Any, **__: Any) -> None:
    raise RuntimeError("the search is the answer: here it cannot be asked")


def _counted(case: Case) -> tuple[Callable[[Plan], Answer], Callable[[], int]]:
    """(what answers questions about plans, how many there were)."""
    asked = 0

    def ask(plan: Plan) -> Answer:
        nonlocal asked
        if asked >= QUESTIONS:
            asked += 1
            raise TooMany(f"more than {QUESTIONS} questions")
        with untraced():
            suits(plan, case)
            asked += 1
            return known(plan, case)

    return ask, lambda: asked


def _planned(answer: Callable[..., Any], case: Case, ask: Callable[[Plan], Answer]) -> Plan:
    plan = answer(case.spec, case.cluster, case.batch, ask)
    suits(plan, case)
    return plan


def suits(plan: Any, case: Case) -> None:
    """Raise ValueError unless ``plan`` is one for this case."""
    if type(plan) is not Plan:  # a class of one's own could say anything of itself
        raise illegal("plan", plan, "not a plan", "a pl.Plan(...)")
    plan.validate(case.spec)
    devices, batch = case.cluster.num_devices, case.batch
    if plan.world_size != devices:
        raise illegal(
            "dp",
            plan.dp,
            f"dp*tp*pp is {plan.world_size}, there are {devices} devices",
            f"dp={max(1, devices // (plan.tp * plan.pp))} with tp={plan.tp}, pp={plan.pp}",
        )
    if plan.global_batch != batch:
        raise illegal(
            "microbatches",
            plan.microbatches,
            f"dp*microbatches*microbatch_size is {plan.global_batch}, a step has {batch} samples",
            "what makes the product right",
        )
    if plan.precision != PRECISION:
        raise illegal("precision", plan.precision, "not what is required", repr(PRECISION))
    if plan.offload is not None:
        raise illegal("offload", plan.offload, "these machines have no other memory", "None")


@functools.lru_cache(maxsize=1024)
def known(plan: Plan, case: Case) -> Answer:
    """What `ask` says."""
    from paralab.interpret.outline import step_of, totals

    return Answer(*totals(step_of(case.spec, plan, case.cluster, "adamw")))


@functools.cache
def best(case: Case) -> float:
    """Seconds per step of the fastest plan that fits."""
    from paralab.programs.search import plan_search

    found = plan_search(
        case.spec, case.cluster, global_batch=case.batch, precision=PRECISION, top=5, **PTDP
    )
    return known(found.best, case).seconds


def _look(notes: Notes, case: Case, plan: Plan, questions: int) -> None:
    memory_gb, room_gb = known(plan, case).bytes / 1e9, case.cluster.memory / 1e9
    notes.note(PLAN, "three legal plans", True)
    long = f"{case}: {memory_gb:.0f} GB on the device with the highest peak memory, which has "
    long += f"{room_gb:.0f}"
    notes.note(FITS, f"{case.model}: {memory_gb:.0f} GB", memory_gb <= room_gb, long)
    nodes = {case.cluster.node_of(rank) for rank in plan.ranks("tp", 0)}
    long = f"{case}: the {plan.tp} ranks of a tensor-parallel group are on {len(nodes)} nodes, "
    long += "and all that they share goes over the slow links between them"
    notes.note(NODE, f"{case.model}: tp={plan.tp}", len(nodes) == 1, long)
    seconds, least = known(plan, case).seconds, best(case)
    said = f"{case.model}: {seconds / least:.2f} times"
    long = f"{case}: a step takes {seconds:.2f} s, the best plan {least:.2f} s"
    notes.note(TIME, said, seconds <= SLACK * least, long)
    notes.note(ASKED_OFTEN, f"{case.model}: {questions}", True)
