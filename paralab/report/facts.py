"""Facts about a report that figures and metrics share: which ranks, steps and calls they count, and
which kinds of report they must refuse.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from paralab.checks import illegal
from paralab.report.tables import DRY, Tables
from paralab.spec.forms import saved
from paralab.spec.links import Reach
from paralab.theory.traffic import BOOKKEEPING, ends

if TYPE_CHECKING:
    import pandas as pd

Answer = TypeVar("Answer")


def remembered(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """A function of a report whose results, one for each other argument, the report keeps: it never
    changes.
    """

    @functools.wraps(function)
    def known(report: Tables, *key: Any) -> Answer:
        answers = vars(report).setdefault("_answers", {}).setdefault(function.__name__, {})
        if key not in answers:
            answers[key] = function(report, *key)
        return answers[key]

    return known


def needs_tables(report: Any, name: str = "report") -> None:
    """Raise ValueError for an object without a report's tables, given as ``name``. A `Report`
    passes, and so does what `pl.observe` yields, which has its tables.
    """
    if not hasattr(report, "steps"):
        legal = "what pl.run(...) or pl.predict(...) returned"
        raise illegal(name, report, "not a report", legal)


def num_params(report: Tables) -> int | None:
    """Ψ; None for a traced function, or if a block of the user's own was saved by name alone."""
    model = report.model
    return None if model is None or saved(model.block) else model.num_params


def needs_times(report: Tables, what: str) -> None:
    """Raise ValueError for a dry run; ``what`` names what needs times."""
    if report.clock == DRY:
        why = f"{what} needs times, and a dry run has none: "
        why += "it knows only what happens, and in which order"
        legal = "a report of pl.predict or pl.run; or of this report summary(), peaks(), "
        legal += "traffic(), copied(), memory_chart(), traffic_chart()"
        raise illegal("clock", DRY, why, legal)


def needs_own_devices(report: Tables, what: str) -> None:
    """Raise ValueError if ranks shared a GPU: a span's time includes the other ranks' kernels."""
    if report.meta.get("shared_gpu"):
        why = f"{what} needs the compute time of each rank, and the ranks shared this GPU: "
        why += "the time of each includes the work of the others"
        legal = "a run with device='cpu', or with a GPU for each rank"
        raise illegal("device", report.meta.get("device"), why, legal)


def device_of(report: Tables) -> str:
    """The kind of device of a run, "cpu" or "cuda"; "cpu" for a report of no run."""
    return str(report.meta.get("device") or "cpu").partition(":")[0]


def node_of(report: Tables, rank: int) -> int:
    """The node that ``rank`` ran on; one node where the report does not say."""
    nodes = report.meta.get("nodes") or []
    return nodes[rank] if rank < len(nodes) else 0


def machines(report: Tables) -> Counter[int]:
    """{node: how many ranks it has}"""
    return Counter(node_of(report, rank) for rank in range(report.world_size))


def clock_uncertainty(report: Tables) -> float:
    """Seconds by which the clocks of ranks on several machines may be apart; 0 on one machine."""
    return max(report.meta.get("clock_offsets", {}).get("uncertainty_s", []), default=0.0)


def shared_cores(report: Tables, cores: int | None = None) -> tuple[int, int]:
    """(ranks, cores) of the machine with the most ranks, if in a run they shared cores; or (0, 0).
    cores: where the report does not say, of its one machine, whose nodes may be virtual, as those
    of `pl.trace` and `pl.observe` always are
    """
    said, ranks = report.meta.get("cores"), report.world_size
    if said and not report.meta.get("one_machine"):
        ranks = max(machines(report).values())
    cores = said or cores or ranks
    return (ranks, cores) if report.clock == "measured" and cores < ranks else (0, 0)


def reach(report: Tables, op: str, rank: int, peer: int, ranks: Sequence[int]) -> Reach:
    """The `Reach` of a call: of its group, or of the two ends of a message."""
    return Reach.of(ends(op, rank, peer, ranks), functools.partial(node_of, report))


def own_calls(report: Tables) -> pd.DataFrame:
    """The collectives of the algorithm, without the bookkeeping calls of a loss or a clock."""
    calls = report.collectives
    return calls[~calls["phase"].isin(BOOKKEEPING)]


def in_outline(report: Tables) -> bool:
    """Whether the report has one rank per pipeline stage and one box per action
    (interpret/outline.py). A box's cost is the rank's compute in it; for the rest of the box the
    rank is idle.
    """
    return report.meta.get("detail") == "actions"


def reported_ranks(report: Tables) -> list[int]:
    """The ranks with rows in the tables: all, or in outline one per pipeline stage."""
    return sorted(set(report.steps["rank"].tolist())) or list(range(report.world_size))


def measured_steps(report: Tables) -> list[int]:
    """The steps that metrics count: all but step 0, or step 0 if there is no other."""
    steps = sorted(set(report.steps["step"].tolist()))
    return [s for s in steps if s >= 1] or steps
