"""Lab 12: what a rank of a large plan holds and sends, and a better plan for the same model.

The right values come from compiled programs (`pl.dry_run`), from the schedule's lists and, for
days, from `pl.predict`, not from a second formula. 1F1B keeps at most p - r micro-batches on stage
r (Narayanan+ 2021, PTD-P, arXiv:2104.04473, sec. 2.2). What a rank sends (sec. 3) is asked of plans
with 96 to 384 ranks, not on the last stage, whose head sends more.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from paralab.checks import count_of, illegal
from paralab.dry_run import dry_run
from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import Mistakes, ask, kind_of, size_text, unlike, wrong_number
from paralab.exercises.unaided import UNAIDED
from paralab.interpret.predict import predict
from paralab.spec import Cluster, ModelSpec, Plan

# Degrees and sizes all differ, so that each known mistake gives a number of its own.
MODEL = ModelSpec(layers=12, hidden=96, heads=6, seq_len=40, vocab=528, tied=False)
PLANS = (
    Plan(tp=6, pp=4, dp=3, microbatches=6, microbatch_size=5, precision="bf16"),
    Plan(tp=3, pp=2, dp=4, microbatches=5, recompute="full", precision="bf16"),
    Plan(tp=2, pp=3, dp=5, microbatches=2, microbatch_size=3, precision="bf16"),
    Plan(tp=2, pp=1, dp=5, microbatches=3, precision="bf16"),  # the first stage is the last one
)
PARAMETERS, FLIGHT = "parameters of a rank", "micro-batches in flight"


@exercise(
    Takes("stage_parameters(model, plan, stage)"),
    Takes("in_flight(model, plan, stage)"),
    required={
        PARAMETERS: "exact for every stage of four plans",
        FLIGHT: "exact for every stage of four plans under 1F1B",
    },
)
def stage_memory(tries: Tries) -> None:
    limits = (
        (PARAMETERS, _parameters, "parameter", " of parameters"),
        (FLIGHT, _in_flight, "micro-batch", " of micro-batches"),
    )
    cases = [(part, plan, stage) for part in (0, 1) for plan in PLANS for stage in range(plan.pp)]
    questions = [(part, (MODEL, plan, stage)) for part, plan, stage in cases]
    for notes, (part, plan, stage), reply in ask(tries, cases, questions, *UNAIDED):
        notes.where = f"tp={plan.tp}, pp={plan.pp}, dp={plan.dp}, stage {stage}"
        limit, right, noun, what = limits[part]
        number, known = right(plan, stage)
        show = functools.partial(count_of, noun=noun, spec=",.10g")
        known = unlike(pair for pair in known if pair[1] != number)
        notes.look(limit, reply.number(number, known, show, what), show(number))


# ---- what a stage holds --------------------------------------------------------------------------
@functools.cache
def _count(plan: Plan, stage: int) -> int:
    return dry_run(MODEL, plan, rank=stage * plan.dp * plan.tp).meta["num_params"]


def _parameters(plan: Plan, stage: int) -> tuple[float, Mistakes]:
    right, whole, h = _count(plan, stage), _count(plan.replace(tp=1), stage), MODEL.hidden
    blocks, table = MODEL.layers // plan.pp, MODEL.vocab * h
    first, last, equal = stage == 0, stage == plan.pp - 1, MODEL.num_params / plan.pp / plan.tp
    ends = first + last
    both = "with one stage, the first is also the last: it has the embedding and the head"
    untied = "with tied=False the first stage has no head, and the last one no embedding"
    everywhere = right + (stage > 0) * (table / plan.tp + MODEL.seq_len * h)
    return right, (
        ("yours counts those of all tensor-parallel ranks together", whole),
        ("yours is an equal part of the whole model, but stages differ", equal),
        ("the embedding or the head is missing", right - ends * table / plan.tp),
        ("yours shards neither embedding nor head", right + ends * table * (1 - 1 / plan.tp)),
        (untied, right + (ends == 1) * table / plan.tp),
        ("yours has an embedding on every stage", everywhere),
        ("the positions' embedding is missing", right - first * MODEL.seq_len * h),
        *((both, right - table / plan.tp - n) for n in (2 * h, MODEL.seq_len * h) if ends == 2),
        ("the last LayerNorm is missing", right - last * 2 * h),
        ("yours counts weights, without biases and norms", right - blocks * h * (7 / plan.tp + 6)),
        *((said, right - n * (1 - 1 / plan.tp)) for said, n in _replicated(MODEL, blocks, first)),
    )


def _replicated(model: ModelSpec, blocks: int, first: bool) -> Mistakes:
    """(words, elements) that tp replicates and an answer may shard; below zero: the other way."""
    yield "the biases of column-parallel layers are sharded", -7 * blocks * model.hidden
    norms, positions = blocks * 6 * model.hidden, model.seq_len * model.hidden
    yield "norms and the biases of row-parallel layers are replicated", norms
    if first:
        yield "the positions' embedding is replicated", positions
        yield "norms, biases of row-parallel layers and positions are replicated", norms + positions


def _in_flight(plan: Plan, stage: int) -> tuple[float, Mistakes]:
    from paralab.theory.schedule_check import peak_live

    right, p, m = peak_live(plan.actions())[stage], plan.pp, plan.microbatches
    return right, (
        ("that is GPipe, which holds all micro-batches", m),
        ("there are no more than m micro-batches", p - stage),
        ("one is missing: that of the forward right before the first backward", p - stage - 1),
        ("yours counts stages from the other end", stage + 1),
        ("that is what the first stage holds; a later one holds fewer", min(p, m)),
    )


# ---- what a rank sends ---------------------------------------------------------------------------
EXACT = 1e-9  # relative, for rounding
SENT = {
    "tp": "bytes of all-reduces in forward, backward and recomputation: to nine digits",
    "pp": "bytes of activations and their gradients: to nine digits",
    "dp": "bytes of the gradients' all-reduce: to nine digits",
}


def _case(name: str, rank: int, **settings: Any) -> tuple[ModelSpec, Plan, int]:
    model = ModelSpec.preset(name).replace(tied=False)
    return model, Plan(**{"precision": "bf16", "microbatch_size": 3, **settings}), rank


# Rank 48 is on stage 1, and rank 192 on stage 6; an order of the axes with pp not outermost puts
# them on stage 0. No degree is 2, and no two of a plan are equal: several mistakes would give the
# same bytes.
SENT_CASES = (
    _case("ptdp-7.5b", 0, tp=4, pp=3, dp=8, microbatches=6, recompute="full"),
    _case("ptdp-7.5b", 48, tp=4, pp=3, dp=8, microbatches=6),
    _case("ptdp-39b", 12, tp=8, pp=6, dp=4, microbatches=7, precision="fp32"),
    _case("gpt3-175b", 192, tp=8, pp=12, dp=4, microbatches=16, recompute="full"),
)


@exercise(Takes("rank_sends(model, plan, rank)"), required=SENT)
def rank_sends(tries: Tries) -> None:
    for notes, case, reply in ask(tries, SENT_CASES, (), *UNAIDED):
        model, plan, rank = case
        notes.where = f"L={model.layers}, dp={plan.dp}, pp={plan.pp}, tp={plan.tp}, "
        notes.where += f"m={plan.microbatches}, rank {rank}"
        sent, trouble = reply.value, reply.trouble
        if not trouble and not isinstance(sent, Mapping):
            trouble = f"required: a dict, {{axis: bytes}}, yours is {kind_of(sent)}"
        for axis, size in _sent(*case).items():
            wrong = trouble or f"the dict has no entry {axis!r}"
            if not trouble and axis in sent:
                how = _known_bytes(axis, size, *case), size_text, f" of bytes along {axis}", EXACT
                wrong = wrong_number(sent[axis], size, *how)
            notes.each(axis, wrong, "right in all plans")


@functools.cache
def _sent(model: ModelSpec, plan: Plan, rank: int) -> dict[str, int]:
    """{axis: bytes} that the compiled program sends, in the order of the limits."""
    sent = dry_run(model, plan, rank=rank).traffic(by="axis").set_index("axis")["bytes"]
    return {axis: int(sent[axis]) for axis in SENT}


def _known_bytes(axis: str, size: int, model: ModelSpec, plan: Plan, rank: int) -> Mistakes:
    """size: the right bytes"""
    d, t, m = plan.dp, plan.tp, plan.microbatches
    w, first = 4 if plan.precision == "fp32" else 2, plan.place(rank).pp == 0
    a_number = f"in {plan.precision} a number has {w} bytes"
    if axis != "dp":
        yield "yours counts one micro-batch", size / m
        yield "yours counts one sample per micro-batch", size / plan.microbatch_size
        yield "yours counts the samples of all data-parallel ranks", size * d
    if axis != "pp":
        n, share = (t, "(t-1)/t") if axis == "tp" else (d, "(d-1)/d")
        yield f"an all-reduce sends 2 {share} of its tensor", size * n / (2 * (n - 1))
        yield f"the factor {share} is missing", size * n / (n - 1)
        a = share[-1]
        yield f"each of the 2 ({a}-1) steps of a ring sends a {a}-th of the tensor", size * n
        yield f"that is half of an all-reduce, or {a_number}", size / 2
    if axis == "tp":
        activation = w * plan.microbatch_size * model.seq_len * model.hidden
        once = m * 2 * (t - 1) / t * activation  # bytes of an all-reduce in every micro-batch
        again = 2 * model.layers // plan.pp * once
        if twice := plan.recompute == "full":
            said = "with recomputation forward runs twice, and so do its two all-reduces"
            yield said, size - again
        else:
            yield "yours counts recomputation, which this plan does not use", size + again
        yield "backward makes two all-reduces per block, too", size - (1 + twice) * again
        order = ", or the rank is on another stage: tp is innermost, then dp, then pp"
        if first:
            yield f"the embedding's all-reduce is missing{order}", size - once
        else:
            yield f"there is no embedding on this stage{order}", size + once
        whole = size + (plan.pp - 1) * (size - first * once)  # with one embedding
        yield "yours counts the whole model; a stage has L/p blocks", whole
    elif axis == "pp":
        if first:
            said = "the first stage has no stage before it to send gradients to"
            yield said + f", or {a_number}" * (w == 2), size * 2
        else:
            yield "a stage in the middle also sends gradients back", size / 2
        yield "every tensor-parallel rank sends the whole activation, not a t-th of it", size / t
        yield a_number, size / 2
    else:
        per_element = 2 * (d - 1) / d * w  # bytes that an element costs
        whole = per_element * model.num_params
        yield "gradients are summed once per step, not per micro-batch", size * m
        yield "yours counts the whole model; a rank holds its part of one stage", whole
        part = whole / (t * plan.pp)
        yield "yours is an equal part of all parameters, but stages differ", part
        blocks, h = model.layers // plan.pp, model.hidden
        few = size - per_element * blocks * h * (7 / t + 6)
        yield "yours counts weights, without biases and norms", few
        yield "the token embedding is sharded", size + per_element * model.vocab * h * (1 - 1 / t)
        for words, count in _replicated(model, blocks, first):
            yield words, size - per_element * count * (1 - 1 / t)
    yield a_number, size * 2


# ---- a better plan -------------------------------------------------------------------------------
LEGAL, BATCH, GPUS, FITS, DAYS = "a legal plan", "global batch", "devices", "memory", "days"
TOKENS, MOST_DAYS, MOST_GB = 450e9, 56, 70


@exercise(
    Takes("my_plan()"),
    required={
        LEGAL: "one that pl.Plan(...) accepts for the model",
        BATCH: "3,072 samples per step, as published",
        GPUS: "at most 3,072",
        FITS: f"at most {MOST_GB} GB on the rank with the highest peak",
        DAYS: f"at most {MOST_DAYS} predicted days for 450 billion tokens",
    },
)
def trillion_plan(tries: Tries) -> None:
    from paralab.theory import papers

    model, published = papers.ptdp_models()[-1]
    for notes, _, reply in ask(tries, [()]):
        plan, trouble = attempt(lambda r=reply: _legal(model, r.value))
        if not isinstance(reply.value, Mapping):
            trouble = reply.trouble or "required: a dict, {setting of pl.Plan: value}"
        notes.look(LEGAL, trouble, "legal")
        if plan is None:
            continue
        batch, required = plan.global_batch, published.global_batch
        said = f"{count_of(batch, 'sample', ',')} per step, required: {required:,}"
        notes.look(BATCH, "" if batch == required else said, f"{required:,} samples")
        ranks = plan.world_size
        notes.at_most(GPUS, ranks, published.world_size, "{:,}".format)
        if batch == required and ranks <= published.world_size:
            nodes = Cluster.preset("dgx-a100", nodes=-(-ranks // 8))
            report = predict(model, plan, nodes, steps=1, detail="actions")
            days = report.step_time * TOKENS / (batch * model.seq_len) / 86_400
            notes.at_most(FITS, report.peak_memory / 1e9, MOST_GB, "{:.1f} GB".format)
            notes.at_most(DAYS, days, MOST_DAYS, "{:.1f} days".format)


def _legal(model: ModelSpec, settings: Mapping[str, Any]) -> Plan:
    for name in ("offload", "passes"):
        if settings.get(name):
            raise illegal(name, settings[name], "not allowed in this exercise", "to leave it out")
    plan = Plan(**settings)
    plan.validate(model)
    return plan
