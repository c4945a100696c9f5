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
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from paralab.checks import illegal
from paralab.exercises.exercise import Exercise
from paralab.exercises.verdict import NOT_STARTED, Notes, Verdict, attempt
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
    """What there is to know of a plan: seconds per step, simulated, and bytes on its fullest
    device.
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

TASK = f"""
**Your turn.** Write `my_planner(model, cluster, batch, ask)`. It returns the `pl.Plan` in which
`cluster.num_devices` devices train `model` on `batch` samples per step, in `{PRECISION}`.
`ask(plan)` tells the simulated `seconds` of a step and the `bytes` on the fullest device, which has
`cluster.memory`. There are tens of thousands of plans, and {QUESTIONS} questions: which ones are
worth asking about? Only plans without `offload`; asked about one that is not legal, or leaves
devices or samples over, `ask` raises ValueError and counts no question.

`pl.exercises.place.check(my_planner)`
"""

ASKED = (
    (PLAN, f"three models, 16 to 128 devices: legal, all devices, the whole batch, {PRECISION}"),
    (FITS, "the fullest device within its 80 GB"),
    (NODE, "sends nothing between nodes"),
    (TIME, f"at most {SLACK:g} times the best there is with 1F1B and zero_stage of 0 or 1"),
    (ASKED_OFTEN, f"at most {QUESTIONS} for each model"),
)

HINTS = (
    "tensor parallelism sends activations in every layer, forward and backward; a pipeline only "
    "where two stages meet; data parallelism gradients, once a step. Which of them belongs on the "
    "fast links inside a node?",
    "go through the sizes of model parallelism (tp*pp) from small to large: tp first, up to "
    "cluster.devices_per_node, then pp. The first sizes at which something fits are the ones "
    "to ask about. All that is left is dp = num_devices // (tp*pp), with zero_stage=1 almost for "
    "nothing.",
    "for every such (tp, pp): micro-batches of 1, 2, 4 samples, with batch // (dp*b) of them, "
    "sequence_parallel where tp > 1, and recompute 'none' before 'selective' before 'full'. Stop "
    "at the first recompute that fits; keep the fastest plan that fits; count your questions.",
)


def check(answer: Callable[..., Any]) -> Verdict:
    """Let ``answer(model, cluster, batch, ask)`` plan three models; some seconds, no ranks.

    An answer that is wrong or fails is a Verdict.
    """
    notes = Notes("place", ASKED)
    if not callable(answer):
        notes.note(PLAN, "nothing to call", False, f"asked is a function, yours is {answer!r}")
        return notes.verdict()
    try:
        inspect.signature(answer).bind(None, None, None, None)
    except (TypeError, ValueError) as error:
        notes.note(
            PLAN,
            "cannot be called",
            False,
            f"asked is f(model, cluster, batch, ask), yours cannot be called so: {error}",
        )
        return notes.verdict()
    for case in CASES:
        asked: list[Plan] = []

        def ask(plan: Plan, case: Case = case, asked: list[Plan] = asked) -> Answer:
            if len(asked) == QUESTIONS:
                raise TooMany(f"more than {QUESTIONS} questions")
            suits(plan, case)
            asked.append(plan)
            return known(plan, case)

        plan, trouble = attempt(lambda case=case, ask=ask: _planned(answer, case, ask))
        if trouble == NOT_STARTED:
            return notes.verdict()
        if trouble:
            limit = ASKED_OFTEN if trouble.startswith("raised TooMany") else PLAN
            said = f"more than {QUESTIONS}" if limit == ASKED_OFTEN else "failed"
            notes.note(limit, f"{case.model}: {said}", False, f"{case}: {trouble}")
            continue
        _look(notes, case, plan, len(asked))
    return notes.verdict()


class TooMany(Exception):
    """The questions are used up."""


def _planned(answer: Callable[..., Any], case: Case, ask: Callable[[Plan], Answer]) -> Plan:
    plan = answer(case.spec, case.cluster, case.batch, ask)
    suits(plan, case)
    return plan


def suits(plan: Any, case: Case) -> None:
    """Raise ValueError unless ``plan`` is one for this case."""
    if not isinstance(plan, Plan):
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
        raise illegal("precision", plan.precision, "not what is asked", repr(PRECISION))
    if plan.offload is not None:
        raise illegal("offload", plan.offload, "these machines have no room beside", "None")


@functools.lru_cache(maxsize=1024)
def known(plan: Plan, case: Case) -> Answer:
    """What `ask` says."""
    from paralab.interpret.outline import totals

    return Answer(*totals(case.spec, plan, case.cluster, optimizer="adamw"))


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
    notes.note(
        FITS,
        f"{case.model}: {memory_gb:.0f} GB",
        memory_gb <= room_gb,
        f"{case}: {memory_gb:.0f} GB on the fullest device, which has {room_gb:.0f}",
    )
    nodes = {case.cluster.node_of(rank) for rank in plan.ranks("tp", 0)}
    notes.note(
        NODE,
        f"{case.model}: tp={plan.tp}",
        len(nodes) == 1,
        f"{case}: the {plan.tp} ranks of a tensor-parallel group lie on {len(nodes)} nodes, "
        f"and all they share goes over the slow links between them",
    )
    seconds, least = known(plan, case).seconds, best(case)
    times = seconds / least
    notes.note(
        TIME,
        f"{case.model}: {times:.2f} times",
        times <= SLACK,
        f"{case}: a step takes {seconds:.2f} s, the best plan {least:.2f} s",
    )
    notes.note(ASKED_OFTEN, f"{case.model}: {questions}", questions <= QUESTIONS)


place = Exercise(name="place", lab="10", task=TASK, asked=ASKED, hints=HINTS, checker=check)
