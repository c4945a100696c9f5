"""Lab 10: a planner that chooses every degree of parallelism, and may try twelve plans.

PTD-P (Narayanan+ 2021, arXiv:2104.04473, sec. 3) has advice: model parallelism just as large as
memory requires, tensor parallelism inside a node and the pipeline across nodes, the rest of the
devices data-parallel, and a micro-batch that is neither too small for the device nor too large for
the bubble. The answer is a function that applies such rules, and may ask for the simulated step
(interpret/totals.py) and the peak memory of twelve plans. It is compared with the best plan of all,
found by `pl.plan_search`, whose seconds are written down here, because a search takes long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from paralab.checks import illegal
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.unaided import UNAIDED, bounded, untraced
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory.uncollected import uncollected

QUESTIONS, SLACK = 12, 1.10
PRECISION = "bf16"


class Case(NamedTuple):
    """A model from the literature, a number of nodes with eight devices, samples per step, and the
    simulated seconds of the fastest plan that fits.
    """

    model: str
    nodes: int
    batch: int
    best: float

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.preset(self.model)

    @property
    def cluster(self) -> Cluster:
        return Cluster.preset("dgx-a100", nodes=self.nodes)

    def __str__(self) -> str:
        return f"{self.model} on {8 * self.nodes} devices, batch {self.batch}"


CASES = (
    Case("ptdp-7.5b", 2, 64, 2.195913),
    Case("ptdp-39b", 8, 128, 5.550357),
    Case("gpt3-175b", 16, 128, 13.607276),
)


class Answer(NamedTuple):
    """The reply to a question: a plan's simulated seconds per step, and the bytes on the device
    with the highest peak memory.
    """

    seconds: float
    bytes: int


REQUIRED = {
    "plan": "for each of three models, on 16 to 128 devices: legal, with all devices and the whole "
    f"batch, in {PRECISION}; at most {QUESTIONS} questions",
    "memory": "at most 80 GB on the device with the highest peak memory",
    "tensor parallelism": "sends nothing between nodes",
    "simulated step": f"at most {SLACK:g} times the best of all plans with 1F1B and zero_stage "
    "0 or 1",
}
PLAN, FITS, NODE, TIME = REQUIRED


@exercise(Takes("f(model, cluster, batch, ask)"), required=REQUIRED)
def place(tries: Tries) -> None:
    for notes, outcome in tries.run(plans, 1, patience=3):
        for case, (plan, trouble) in zip(CASES, outcome.results[0], strict=True):
            notes.where = f"{case}"
            if trouble:
                notes.end(trouble)
                break
            notes.each(PLAN, "", "three legal plans")
            answer, most = known(plan, case), case.cluster.memory
            notes.at_most(FITS, answer.bytes / 1e9, most / 1e9, "{:.1f} GB".format)
            nodes = {case.cluster.node_of(rank) for rank in plan.ranks("tp", 0)}
            wrong = f"the {plan.tp} ranks of a tensor-parallel group are on {len(nodes)} nodes, "
            wrong += "and their all-reduces cross the slow links between the nodes"
            notes.look(NODE, wrong if len(nodes) > 1 else "", f"tp={plan.tp}")
            notes.at_most(TIME, answer.seconds, SLACK * case.best, "{:.2f} s".format)


def plans(watch: Any, answer: tuple, seed: int) -> list[tuple[Plan | None, str]]:
    """What one rank runs: (the answer's plan, "") or (None, why there is none) of each case."""
    note, (why, legal) = watch.group.context.note, UNAIDED
    how = why, (*legal, "theory/", "exercises/place.py", "exercises/unaided.py")
    return [bounded(lambda case=case: _planned(answer[0], case, note), *how) for case in CASES]


def _planned(
    answer: Callable[..., Any], case: Case, note: Callable[[str], None], questions: int = QUESTIONS
) -> Plan:
    left = iter(range(questions))  # an answer may assign QUESTIONS without effect

    def ask(plan: Plan) -> Answer:
        with untraced():
            suits(plan, case)
            if (number := next(left, None)) is None:
                raise RuntimeError(f"more than {questions} questions: every legal call counts")
            note(f"question {number}")  # a sign of life, for the timeout
            reply = known(plan, case)
            note("")
            return reply

    plan = answer(case.spec, case.cluster, case.batch, ask)
    suits(plan, case)
    return plan


def suits(plan: Any, case: Case) -> None:
    """Raise ValueError unless ``plan`` is a legal plan for this case."""
    if type(plan) is not Plan:  # a subclass could lie about its fields
        raise illegal("plan", plan, "not a plan", "a pl.Plan(...)")
    plan.validate(case.spec)
    devices, size, step = case.cluster.num_devices, plan.world_size, plan.global_batch
    dp = f"dp={max(1, devices // (plan.tp * plan.pp))} with tp={plan.tp}, pp={plan.pp}"
    d, m, b = plan.dp, plan.microbatches, plan.microbatch_size
    said = f"dp*microbatches*microbatch_size is {d}*{m}*{b} = {step}, "
    said += f"and a step has {case.batch} samples"
    count = "no number" if case.batch % (d * b) else case.batch // (d * b)
    count = f"{count} with dp={d}, microbatch_size={b}"
    for field, holds, why, legal in (
        ("dp", size == devices, f"dp*tp*pp is {size}, and there are {devices} devices", dp),
        ("microbatches", step == case.batch, said, count),
        ("precision", plan.precision == PRECISION, "not the required precision", repr(PRECISION)),
        ("offload", plan.offload is None, "not allowed in this exercise", "None"),
    ):
        if not holds:
            raise illegal(field, getattr(plan, field), why, legal)


@functools.lru_cache(maxsize=1024)
@uncollected()
def known(plan: Plan, case: Case) -> Answer:
    """Simulate a plan."""
    from paralab.interpret.totals import Totals

    totals = Totals(case.spec, plan, case.cluster, "adamw")
    return Answer(totals.seconds(), totals.peak)
