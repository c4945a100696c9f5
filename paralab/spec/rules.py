"""Which settings go together: the rules behind `Plan.validate`, as data that a search reads too.

A rule has a field, a condition (``holds``) and, for plans that violate it, the reason and the legal
values. ``holds`` is written on settings (settings.py) with operators that work for a value and for
a column of values, so one list of rules serves a single plan and all plans of a search. The texts
are formatted only for a plan that is refused: a ``ValueError`` with the field, the value and what
would be legal, before any process starts. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from math import lcm
from typing import Any, NamedTuple

from paralab.checks import illegal
from paralab.parallel.schedules import RELAY, uneven_groups
from paralab.spec.settings import Settings, grid

# Beyond any published run; the limits mostly catch a typing mistake that would run for hours.
MAX_RANKS = 65536
MAX_ACTIONS = 2**18  # micro-batches times stages
# Reports and torch count bytes in 63 bits; a step saves up to 34 bytes per element for backward.
MAX_ELEMENTS = 2**56
NONE = None  # compared by ==, which works for a value and for a column, unlike ``is None``

Words = str | Callable[[Any], str]


class Rule(NamedTuple):
    """A condition that every plan has to meet.

    holds  the condition, a function of settings
    field, why, legal  the field that an error names, and its texts: templates over settings ``s``,
                       or functions of them
    """

    field: Words
    holds: Callable[[Any], Any]
    why: Words
    legal: Words


def implies(a: Any, b: Any) -> Any:
    """Logical implication, for values or columns: b holds where a does."""
    return (a == 0) | b


def refuse(rules: Iterable[Rule], s: Settings) -> None:
    """Raise ``ValueError`` for the first rule that does not hold."""
    for rule in rules:
        if not rule.holds(s):
            field, why, legal = (
                words(s) if callable(words) else words.format(s=s)
                for words in (rule.field, rule.why, rule.legal)
            )
            raise illegal(field, s.value(field), why, legal)


# ---- how large, and the grid of a tp group ------------------------------------------------------
SIZES = (
    *(
        Rule(
            field,
            lambda s, field=field: s.only_named != field,
            "a saved plan keeps only the function's name",
            f"plan.replace({field}=the function itself)",
        )
        for field in ("schedule", "passes")
    ),
    Rule(  # names the largest degree, as the likely typing mistake
        lambda s: max("dp", "tp", "pp", key=lambda name: getattr(s, name)),
        lambda s: s.dp * s.tp * s.pp <= MAX_RANKS,
        "dp*tp*pp is {s.world_size} ranks",
        f"dp*tp*pp up to {MAX_RANKS}",
    ),
    Rule(
        "microbatch_size",
        lambda s: (
            (1.0 * s.microbatch_size * s.microbatches * s.seq_len * s.layers)
            * (s.hidden + s.heads * s.seq_len * (s.attention != "sdpa"))
            <= MAX_ELEMENTS
        ),
        "a step has too many activations to count in 63 bits",
        "smaller sizes: microbatch_size * microbatches * seq_len * layers * (hidden + heads * "
        f"seq_len) up to {MAX_ELEMENTS}, or the same without heads * seq_len if attention='sdpa'",
    ),
)


def _needed_grid(s: Any) -> str:
    shape = {"2d": "a grid of q x q ranks", "3d": "a grid of q x q x q ranks"}
    grids = "d grids of q x q ranks, " + (f"d={s.tp_depth}" if s.tp_depth else "d up to q")
    return f"tp_mode={s.tp_mode!r} needs {shape.get(s.tp_mode, grids)}"


def _degrees(s: Any) -> str:
    """The smallest numbers of ranks that make a grid of this mode."""
    fits = (tp for tp in range(1, MAX_RANKS + 1) if grid(tp, s.tp_mode, s.tp_depth).q)
    return ", ".join(map(str, islice(fits, 12))) + ", ..."


GRID = (
    Rule(
        "tp_depth",
        lambda s: (s.tp_depth == NONE) | (s.tp_mode == "2.5d"),
        "tp_mode={s.tp_mode!r} has no depth to choose",
        "None, or tp_mode='2.5d'",
    ),
    Rule(
        "tp",
        lambda s: s.grid.q > 0,
        _needed_grid,
        _degrees,
    ),
)


def _other_tp(s: Any) -> str:
    """The two nearest degrees that heads and hidden can be partitioned by."""
    grids = {tp: grid(tp, s.tp_mode, s.tp_depth) for tp in range(1, 2 * s.tp + 1)}
    fits = (tp for tp, g in grids.items() if g.q and s.heads % g.heads == s.hidden % g.hidden == 0)
    return " or ".join(map(str, sorted(sorted(fits, key=lambda tp: abs(tp - s.tp))[:2])))


def _partitioned(name: str, parts: Callable[[Any], Any]) -> Rule:
    """The rule that a size is divisible by the number of parts that a tp group makes of it."""

    def why(s: Any) -> str:
        group = f"tp={s.tp}" if s.tp_mode == "1d" else f"tp_mode={s.tp_mode!r} with q={s.grid.q}"
        return f"{group} partitions it into {parts(s)} equal parts"

    def legal(s: Any) -> str:
        value, n = getattr(s, name), parts(s)
        if name == "heads":
            if s.hidden % n:
                return f"tp such as {_other_tp(s)} (no multiple of {n} divides hidden={s.hidden})"
            return f"a multiple of {n} that divides hidden={s.hidden}, or another tp"
        if name == "hidden":
            n = lcm(n, s.heads)  # hidden is divisible by heads, too
        nearest = sorted({max(n, value // n * n), (value // n + 1) * n})
        beyond = " (no text uses the additional entries)" * (name == "vocab")
        return f"a multiple of {n}, such as {' or '.join(map(str, nearest))}{beyond}"

    return Rule(name, lambda s: getattr(s, name) % parts(s) == 0, why, legal)


TENSOR = (
    *GRID,
    Rule(
        "sequence_parallel",
        lambda s: implies(s.sequence_parallel, s.tp > 1),
        "it shards the sequence over the tp ranks, and tp=1 has only one",
        "False, or tp_mode='1d' with tp of at least 2",
    ),
    Rule(
        "sequence_parallel",
        lambda s: implies(s.sequence_parallel, s.tp_mode == "1d"),
        "tp_mode={s.tp_mode!r} shards the residual stream already",
        "False, or tp_mode='1d' with tp of at least 2",
    ),
    Rule(
        "tp_overlap",
        lambda s: implies(s.tp_mode != "1d", s.tp_overlap),
        "tp_mode={s.tp_mode!r} has no such choice: its messages are steps of its matrix products",
        "True, or tp_mode='1d'",
    ),
    Rule(
        "partition_activations",
        lambda s: implies(s.partition_activations, s.recompute == "full"),
        "it shards the block inputs that recompute='full' saves, and recompute is {s.recompute!r}",
        "False, or recompute='full'",
    ),
    Rule(
        "partition_activations",
        lambda s: implies(
            s.partition_activations,
            (s.tp > 1) & (s.tp_mode == "1d") & (s.sequence_parallel == 0),
        ),
        "it shards block inputs that are replicated over the tp ranks, and this plan has none",
        "False, or tp_mode='1d' with tp of at least 2 and sequence_parallel=False",
    ),
    Rule(
        "partition_messages",
        lambda s: implies(
            s.partition_messages,
            (s.pp > 1) & (s.tp > 1) & (s.tp_mode == "1d") & (s.sequence_parallel == 0),
        ),
        "it shards messages between stages that are replicated over the tp ranks, and this plan "
        "has none",
        "False, or tp_mode='1d' with tp and pp of at least 2 and sequence_parallel=False",
    ),
    _partitioned("heads", lambda s: s.grid.heads),
    _partitioned("hidden", lambda s: s.grid.hidden),
    _partitioned("vocab", lambda s: s.grid.vocab),
    _partitioned("microbatch_size", lambda s: s.grid.microbatch_size),
    _partitioned(
        "seq_len",
        lambda s: (
            1 + (s.tp - 1) * (s.sequence_parallel | s.partition_activations | s.partition_messages)
        ),
    ),
    Rule(
        "attention",
        lambda s: implies((s.tp > 1) & (s.dropout > 0), s.attention != "sdpa"),
        "its fused kernel draws its own dropout masks, so with tp > 1 the heads would not get the "
        "masks that they get on one device",
        "'explicit', or dropout=0",
    ),
)


# ---- the order of work --------------------------------------------------------------------------
def _most_stages(s: Any) -> str:
    most = s.layers if s.virtual_stages == 1 else s.layers // s.pp
    return f"up to {most}" if most else f"1 with pp of at most {s.layers}"


FETCHES = "schedule='l2l' fetches parameters part by part from the host or from files"
FETCHED = "zero_stage=3 with parameters on 'cpu' or 'nvme', or a pipeline schedule"
RELAYS = (
    *(
        Rule(
            field,
            lambda s, field=field: implies(s.schedule == RELAY, getattr(s, field) == 1),
            "schedule='l2l' runs the parts of the model one after the other, all on the same rank",
            "1, or a pipeline schedule",
        )
        for field in ("pp", "virtual_stages")
    ),
    Rule(
        "zero_stage",
        lambda s: implies(s.schedule == RELAY, s.zero_stage == 3),
        f"{FETCHES}, and only zero_stage=3 can keep them there",
        FETCHED,
    ),
    Rule(
        "offload",
        lambda s: implies(s.schedule == RELAY, s.place.parameters != "device"),
        f"{FETCHES}, and this plan keeps them on the device",
        FETCHED,
    ),
    Rule(
        "recompute",
        lambda s: implies(s.schedule == RELAY, s.recompute == "full"),
        "schedule='l2l' saves only the input of each block for backward, and recomputes the rest",
        "'full', or a pipeline schedule",
    ),
)
PIPELINE = (
    Rule(
        "virtual_stages",
        lambda s: implies(s.virtual_stages > 1, s.pp > 1),
        "with pp=1 all stages would be on the same rank, so there is no pipeline to interleave",
        "1, or pp of at least 2",
    ),
    Rule(
        "virtual_stages",
        lambda s: (s.virtual_stages == 1) | (s.schedule == "interleaved") | s.own_schedule,
        "schedule={s.schedule!r} has one stage per rank",
        "1, or schedule='interleaved' or a function of your own",
    ),
    *(
        Rule(
            field,
            # Each rule names one of the two degrees: the one that a user would change.
            lambda s, field=field: implies(
                (s.virtual_stages == 1) == (field == "pp"), s.pp * s.virtual_stages <= s.layers
            ),
            "pp*virtual_stages is {s.stages} stages, the model has {s.layers} blocks, and every "
            "stage needs one",
            lambda s: f"{_most_stages(s)}, or a model of at least {s.stages} layers",
        )
        for field in ("pp", "virtual_stages")
    ),
    Rule(
        "microbatches",
        lambda s: s.microbatches * s.pp * s.virtual_stages <= MAX_ACTIONS,
        "with {s.stages} stages it would take minutes to list the schedule's actions",
        lambda s: f"up to {max(1, MAX_ACTIONS // s.stages)}",
    ),
    Rule(
        "microbatches",
        lambda s: implies(s.schedule == "interleaved", s.microbatches % s.pp == 0),
        lambda s: uneven_groups(s.pp, s.microbatches)[0],
        lambda s: uneven_groups(s.pp, s.microbatches)[1],
    ),
    Rule("schedule", lambda s: s.is_schedule, "makes no list of actions", "one that does"),
)

# ---- precision ----------------------------------------------------------------------------------
PRECISION = (
    Rule(
        "grad_dtype",
        lambda s: (s.grad_dtype == NONE) | (s.precision != "fp32"),
        "with precision='fp32' gradients are accumulated in fp32 already",
        "None, or precision='bf16' or 'fp16'",
    ),
    Rule(
        "tf32",
        lambda s: implies(s.tf32, s.precision == "fp32"),
        "tf32 is for products of fp32 matrices, and precision={s.precision!r} has none",
        "False, or precision='fp32'",
    ),
)

# ---- who keeps what, and where ------------------------------------------------------------------
ZERO = (
    Rule(
        "shard",
        lambda s: (s.shard == NONE) | (s.zero_stage > 0),
        "zero_stage=0 shards nothing",
        "None, or zero_stage of 1 to 3",
    ),
    Rule(
        "shard",
        lambda s: s.dp % s.shard_degree == 0,
        "dp={s.dp} ranks cannot be divided into groups of {s.shard}",
        lambda s: ", ".join(str(n) for n in range(1, s.dp + 1) if s.dp % n == 0),
    ),
    Rule(
        "secondary_shard",
        lambda s: (
            (s.secondary_shard == NONE) | ((s.zero_stage == 3) & (s.place.parameters == "device"))
        ),
        "only zero_stage=3 with parameters on the device keeps a second copy of them",
        "None, or zero_stage=3 with parameters on 'device'",
    ),
    Rule(
        "secondary_shard",
        lambda s: s.shard_degree % s.backward_shard_degree == 0,
        "the {s.shard_degree} ranks that shard the parameters (dp, or shard) cannot be divided "
        "into groups of {s.secondary_shard}",
        "a divisor of {s.shard_degree}",
    ),
    Rule(
        "grad_sync",
        lambda s: (s.zero_stage == 0) | (s.grad_sync == "overlapped"),
        "zero_stage={s.zero_stage} sums gradients by reduce-scatters, after which each rank has "
        "its shard of the sum",
        "'overlapped', or zero_stage=0",
    ),
)


NAMED = {"optimizer": "the optimizer's states"}


def _sharded(name: str, least: int) -> Rule:
    """The rule for a state that ZeRO shards from stage ``least`` on."""
    return Rule(
        f"offload[{name!r}]",
        lambda s: implies(getattr(s.place, name) != "device", s.zero_stage >= least),
        "only sharded states are offloaded, and zero_stage={s.zero_stage} does not shard "
        + NAMED.get(name, name),
        f"'device', or zero_stage of at least {least}",
    )


def _updated(name: str) -> Rule:
    """The rule for a state that an update reads."""
    return Rule(
        f"offload[{name!r}]",
        lambda s: implies(getattr(s.place, name) != "device", s.place.optimizer != "device"),
        "the update runs on the device, where the optimizer's states are, and would have to fetch "
        f"the {name} back",
        "'device', or the optimizer on 'cpu' or 'nvme' too",
    )


OFFLOAD = (
    Rule(
        "zero_stage",
        lambda s: (s.zero_stage > 0) | ((s.offload != "cpu") & (s.offload != "nvme")),
        "offload={s.offload!r} moves the states that ZeRO shards, and zero_stage=0 shards none",
        "1 (optimizer), 2 (gradients too), 3 (parameters too), also with dp=1",
    ),
    Rule(
        "offload",
        lambda s: (s.offload == NONE) | s.place.states | (s.place.activations != "device"),
        "it leaves every state on the device",
        "None, or a state on 'cpu' or 'nvme'",
    ),
    _sharded("optimizer", 1),
    _sharded("gradients", 2),
    _updated("gradients"),
    _sharded("parameters", 3),
    _updated("parameters"),
    Rule(
        "offload['activations']",
        lambda s: implies(
            s.place.activations != "device",
            (s.recompute == "full") & (s.partition_activations == 0),
        ),
        "only the block inputs that recompute='full' saves whole are offloaded",
        "'device', or recompute='full' without partition_activations",
    ),
    Rule(
        "offload['delayed']",
        lambda s: implies(
            s.place.delayed,
            (s.place.parameters == "device")
            & (s.place.gradients == "cpu")
            & (s.place.optimizer == "cpu"),
        ),
        "the host updates its own copy of the parameters while the device computes with the "
        "previous one",
        "False, or parameters on 'device', gradients and optimizer on 'cpu'",
    ),
)

# ---- a block of the user's own ------------------------------------------------------------------
BLOCK = (
    Rule(
        "tp",
        lambda s: (s.block == NONE) | (s.tp == 1),
        "a block of your own cannot be split over tensor-parallel ranks",
        "1, or the standard block: block=None",
    ),
    Rule(
        "recompute",
        lambda s: (s.block == NONE) | (s.recompute != "selective"),
        "it recomputes the attention core, and where that is in a block of your own is not known",
        "'none', 'full', or the standard block: block=None",
    ),
    Rule("block", lambda s: s.block_runs, "does not run", "None for the standard block"),
)


RULES = (*SIZES, *TENSOR, *RELAYS, *PIPELINE, *PRECISION, *ZERO, *OFFLOAD, *BLOCK)
