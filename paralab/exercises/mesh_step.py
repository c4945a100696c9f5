"""Lab 10: one training step on a data x pipeline mesh.

Micro-batches go through the stages of a pipeline, gradients are averaged over dp and clipped by the
norm of the whole model's gradient. The answer is compared with one process.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import pairwise
from typing import Any

from paralab.exercises.diagnose import first_wrong_tensor
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import dist, reference, torch, watched
from paralab.exercises.questions import plain, wrong_number
from paralab.exercises.tries import Outcome
from paralab.exercises.verdict import Notes
from paralab.model.step import Step
from paralab.spec import ModelSpec, Plan

STEPS, LR = 2, 0.5
NEAR = 3e-5  # relative tolerance of a norm: two known mistakes differ by 5e-5
OLD = 1e4  # of every element of .grad before the first step
CLIPS = (0.6, 100.0)  # max_norm of each step: only the first clips
MODEL = ModelSpec(layers=4, hidden=32, heads=2, seq_len=16, tied=False)
WIDER = MODEL.replace(hidden=48)  # 3 divides the sizes of all its tensors
CUTS = (
    (MODEL, Plan(dp=2, pp=2, microbatches=3, microbatch_size=2)),
    (WIDER, Plan(dp=1, pp=4, microbatches=2, microbatch_size=3)),
    (WIDER, Plan(dp=3, pp=1, microbatches=4, microbatch_size=1)),
)
SCALARS = 256  # bytes of norms and losses, tensors or pickled numbers
REQUIRED = {
    "norm": "of the whole model's gradient before clipping, on every rank",
    "weights": f"after each of {STEPS} steps of SGD, one of them clipped: those of one process",
    "order": "the first stage starts a second micro-batch before the first one has come back",
    "bytes per rank": "each activation and its gradient once; the stage's gradients once, over dp",
}
NORM, WEIGHTS, ORDER, BYTES = REQUIRED
WAIT = ", and wait for the result"
ADDED = "the norms of the stages are added, not their squares"
OLD_ONES = "old gradients were not set to zero"
ONE_PIPELINE = f"it is the norm of one pipeline's gradient: average over dp first{WAIT}"
TWICE = "gradients are averaged twice over dp, or divided by the number of all ranks"


@exercise(
    Takes("mesh_step(stage, batches, groups, optimizer, max_norm, hidden)"), required=REQUIRED
)
def mesh_step(tries: Tries) -> None:
    for model, plan in CUTS:
        settings = {"where": f"dp={plan.dp}, pp={plan.pp}", "memory": False}
        for notes, outcome in tries.run(stepped, plan.world_size, model, plan, **settings):
            _look(notes, outcome, model, plan)


@cache  # the same for every answer
def of_one_process(model: ModelSpec, plan: Plan) -> tuple[list[Step], float]:
    """(steps of one process, norm of the first gradient on the samples of one pipeline alone)"""
    how = {"optimizer": "sgd", "lr": LR, "steps": STEPS, "clip_norm": CLIPS}
    how["microbatch_size"], m = plan.microbatch_size, plan.microbatches
    steps, alone = (list(reference.train(model, microbatches=n * m, **how)) for n in (plan.dp, 1))
    return steps, sum(float((g * g).sum()) for g in alone[1].gradients.values()) ** 0.5


def stepped(watch: Any, answer: tuple, seed: int, model: ModelSpec, plan: Plan) -> dict[str, Any]:
    """What every rank runs. Returns the norms and the weights of each step, the "order" of forwards
    and backwards, "FBFB", and on rank 0 the right steps.
    """
    rank, place, groups = dist.get_rank(), plan.place(dist.get_rank()), {}
    right = None if rank else of_one_process(model, plan)
    sizes = {"microbatches": plan.microbatches, "microbatch_size": plan.microbatch_size}
    for axis in ("dp", "pp"):
        for ranks in sorted({plan.ranks(axis, other) for other in range(plan.world_size)}):
            made = dist.new_group(ranks)
            groups |= {axis: made} if rank in ranks else {}
    stage = reference.Stage(model, place.pp, plan.pp)
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, OLD)
    optimizer, norms, weights = reference.optimizer(stage.parameters(), "sgd", LR), [], []
    order: list[str] = []  # of forwards and backwards

    def forward(module: Any, given: Any, y: Any) -> None:
        order.append("F")
        if y.requires_grad:
            y.register_hook(lambda _: order.append("B"))

    stage.register_forward_hook(forward)
    for step in range(STEPS):
        batches = reference.batches(model, step=step, rank=place.dp, ranks=plan.dp, **sizes)
        watch.label = f"step {step}"
        norm = answer[0](stage, batches, groups, optimizer, CLIPS[step], model.hidden)
        norms.append(plain(norm))
        weights.append(watched.arrays(stage))
    return {"norms": norms, "weights": weights, "right": right, "order": "".join(order)}


def _look(notes: Notes, outcome: Outcome, model: ModelSpec, plan: Plan) -> None:
    where, d, m = notes.where, plan.dp, plan.microbatches
    message = 4 * plan.microbatch_size * model.seq_len * model.hidden
    steps, one_pipeline = outcome["right"][0]
    sequential = outcome["order"][0].startswith("FB")
    wrong = "rank 0 runs the backward of its first micro-batch before it starts the second one: "
    wrong += "the stages take turns"
    notes.look(ORDER, wrong * sequential * (plan.pp > 1), "the stages work at the same time")
    for step, (before, right) in enumerate(pairwise(steps)):
        squares = {name: float((g * g).sum()) for name, g in right.gradients.items()}
        norm, weights = sum(squares.values()) ** 0.5, [steps[step] for steps in outcome["weights"]]
        stages, most = [sum(squares[n] for n in names) ** 0.5 for names in weights], CLIPS[step]
        for rank, norms in enumerate(outcome["norms"]):
            own = stages[rank]
            known = [
                (f"it is the norm of this stage alone: sum the squares over pp{WAIT}", own),
                (ADDED, sum(stages[other] for other in plan.ranks("pp", rank))),
                ("squares are summed over dp, required: over pp", own * d**0.5),
                *((OLD_ONES, OLD * model.num_params**0.5 * times) for times in (1, d)),
                *((ONE_PIPELINE, one_pipeline / times) for times in (1, d)),
                ("it is the norm after clipping", min(norm, most)),
                ("every parameter is counted once for each data-parallel rank", norm * d**0.5),
                ("gradients are added over dp, not averaged", norm * d),
                ("the loss is not divided by the number of micro-batches", norm * m),
                ("the loss is divided neither by m nor by dp", norm * m * d),
                (TWICE, norm / d),
                ("the squares of the stages are averaged, not added", norm / plan.pp**0.5),
                ("it is the square of the norm", norm**2),
            ]
            wrong = wrong_number(norms[step], norm, known, "{:.6g}".format, ", the norm", NEAR)
            notes.where = f"{where}, step {step + 1}, rank {rank}"
            notes.each(NORM, wrong)
        clipped: dict[str, dict[str, Any]] = defaultdict(dict)  # {known mistake: weights}
        for own, names in zip(stages, weights, strict=True):
            for words, factor in (
                ("the gradient is not clipped before optimizer.step()", 1.0),
                ("the gradient is clipped by the norm of this stage alone", min(1.0, most / own)),
                ("the gradient is scaled to max_norm although it is shorter", most / norm),
            ):
                for name in names:
                    moved = LR * factor * right.gradients[name]
                    clipped[words][name] = before.weights[name] - moved
        wrong = first_wrong_tensor(weights, right.weights, start=before.weights, known=clipped)
        notes.where = f"{where}, step {step + 1}"
        notes.each(WEIGHTS, wrong)
        for rank, size in enumerate(outcome.sent(f"step {step}")):
            stage, psi = plan.place(rank).pp, 4 * sum(w.size for w in weights[rank].values())
            messages = m * message * ((stage > 0) + (stage < plan.pp - 1))
            required = messages + 2 * (d - 1) * psi // d
            wrong = f"rank {rank} sends {size:,} bytes, required: {required:,} and at most "
            wrong += f"{SCALARS} for norms"
            notes.each(BYTES, "" if required <= size <= required + SCALARS else wrong)
