"""What a search says: why the losers lose, what helps where nothing fits, the short summary."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from paralab.checks import illegal
from paralab.spec import Plan

if TYPE_CHECKING:
    import pandas as pd

    from paralab.theory.search import Search

GROWS = {
    "compute": "computing", "recompute": "recomputation", "tensor": "tensor-parallel waits",
    "bubble": "the bubble", "messages": "messages between stages",
    "gradients": "data-parallel waits", "offload": "offload", "optimizer": "the optimizer",
}  # fmt: skip
ASKED = ("tp", "pp", "microbatch_size", "schedule", "virtual_stages", "zero_stage",
         "sequence_parallel", "recompute", "offload")  # fmt: skip
SHOWN = 10  # rows of the summary
UNLIMITED = 2**62


def size(count: float) -> str:
    """ "80 GB": decimal, as devices are sold."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= factor:
            return f"{count / factor:,.3g} {unit}"
    return f"{count / 1e3:,.3g} kB"


def counts(search: Search) -> str:
    """ "12,480 plans on 512 devices, 3,110 fit in 80 GB"."""
    plans, fits = len(search.space), int(search.fits.sum())
    limit = search.memory_limit
    room = "" if limit >= UNLIMITED else f", {fits:,} fit in {size(limit)}"
    return f"{plans:,} plans on {search.devices:,} device{'s' * (search.devices > 1)}{room}"


def brief(plan: Plan) -> str:
    """The settings of a plan that matter, as text: "dp=8 tp=8 pp=8 1f1b m=24 b=1 ZeRO-1"."""
    said = [f"{name}={getattr(plan, name)}" for name in ("dp", "tp", "pp")]
    if plan.pp > 1 or plan.schedule != "1f1b":
        said.append(plan.schedule_name + f" v={plan.virtual_stages}" * (plan.virtual_stages > 1))
    said += [f"m={plan.microbatches}", f"b={plan.microbatch_size}"]
    said += [f"ZeRO-{plan.zero_stage}"] * (plan.zero_stage > 0)
    said += ["sequence-parallel"] * plan.sequence_parallel
    said += [f"recompute={plan.recompute}"] * (plan.recompute != "none")
    said += [f"offload={_place(plan.offload)}"] * (plan.offload is not None)
    return " ".join(said)


def _place(value: Any) -> str:
    return value if isinstance(value, str) else "own" if value is not None else "none"


# ---- why ----------------------------------------------------------------------------------------
def reasons(search: Search) -> list[str]:
    """A few words per plan, in the table's order: what it loses by."""
    order, limit = search.order, search.memory_limit
    names, best = list(search.terms), order[0]
    more = np.array([search.terms[name] - search.terms[name][best] for name in names])[:, order]
    most, over = more.argmax(0).tolist(), more.max(0).tolist()
    even = 1e-3 * search.closed[best]
    said = [f"{GROWS[names[at]]} +{by:.3g} s" if by > even else "hardly any slower"
            for at, by in zip(most, over, strict=True)]  # fmt: skip
    for at, (fits, need) in enumerate(
        zip(search.fits[order].tolist(), search.memory[order].tolist(), strict=True)
    ):
        if not fits:
            said[at] = f"needs {size(need)}, {need / limit:.3g} times what there is"
    said[0] = "the best"
    return said


def losers(search: Search) -> pd.DataFrame:
    """See `Search.losers`."""
    import pandas as pd

    rows = []
    fields = [*ASKED, *(name for name in search.settings if name not in ASKED
                        and name not in ("dp", "microbatches"))]  # fmt: skip
    best = search.best
    for name in fields:
        column = search.space.column(name)
        mine = getattr(best, name)
        for value in sorted(set(column.tolist()), key=_in_order):
            same = column == value if value is not None else np.equal(column, None)
            if value != mine:
                rows.append(_row(search, name, value, np.flatnonzero(same)))
    beyond = np.flatnonzero(search.space.tp > search.cluster.devices_per_node)
    if len(beyond) and best.tp <= search.cluster.devices_per_node:
        rows.insert(0, _row(search, "tp", "beyond a node", beyond))
    columns = ["setting", "instead", "plan", "seconds", "times", "memory", "fits", "why"]
    return pd.DataFrame(rows, columns=columns)


def _in_order(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value if isinstance(value, (int, float, str)) else str(value)


def _row(search: Search, name: str, value: Any, which: np.ndarray) -> tuple[Any, ...]:
    """The best plan among those at ``which``: the fastest that fits, or else the smallest."""
    fits = which[search.fits[which]]
    best = search.order[0]
    if len(fits):
        known = np.where(np.isfinite(search.simulated), search.simulated, search.closed)[fits]
        at = fits[np.lexsort((known, ~np.isfinite(search.simulated[fits])))[0]]
    else:
        at = which[search.memory[which].argmin()]
    seconds, times = search.closed[at], search.closed[at] / search.closed[best]
    return (name, str(_place(value) if name == "offload" else value),
            brief(search.space.plan(at)), float(seconds), float(times), float(search.memory[at]),
            bool(search.fits[at]), _sentence(search, int(at)))  # fmt: skip


def _sentence(search: Search, at: int) -> str:
    """Why the plan at this position loses against the best."""
    best = int(search.order[0])
    if not search.fits[at]:
        need, limit = search.memory[at], search.memory_limit
        name = max(search.categories, key=lambda name: search.categories[name][at])
        share = search.categories[name][at] / sum(c[at] for c in search.categories.values())
        return (f"does not fit: the smallest such plan needs {size(need)}, {size(need - limit)} "
                f"too much; {share:.0%} of it {name}")  # fmt: skip
    late = search.closed[at] - search.closed[best]
    both = search.simulated[[at, best]]
    if late <= 0.005 * search.closed[best] and np.isfinite(both).all():
        return (f"hardly: simulated {both[0]:.4g} s against {both[1]:.4g} s, closed form "
                f"{search.closed[at]:.4g} s against {search.closed[best]:.4g} s")  # fmt: skip
    more = {name: float(term[at] - term[best]) for name, term in search.terms.items()}
    grown = sorted((n for n in more if more[n] > 0.1 * abs(late)), key=lambda n: -more[n])[:3]
    shrunk = sorted((n for n in more if more[n] < -0.1 * abs(late)), key=lambda n: more[n])[:2]
    said = ", ".join(f"{GROWS[name]} +{more[name]:.3g} s" for name in grown)
    gain = ", ".join(f"{GROWS[name]} {more[name]:.3g} s" for name in shrunk)
    return (f"{late:.3g} s longer ({late / search.closed[best]:+.1%}): {said}"
            + f"; it saves less: {gain}" * bool(gain and said))  # fmt: skip


# ---- where nothing fits --------------------------------------------------------------------------
def what_helps(search: Search) -> ValueError:
    """The smallest need, and what would bring it down."""
    at = int(search.memory.argmin())
    need, plan = search.memory[at], search.space.plan(at)
    parts = {name: column[at] for name, column in search.categories.items()}
    name = max(parts, key=lambda name: parts[name])
    share = parts[name] / sum(parts.values())
    pinned = [n for n in ("recompute", "zero_stage", "offload", "sequence_parallel", "tp", "pp",
                          "microbatch_size", "schedule") if n in search.pinned]  # fmt: skip
    helps = [f"not pinning {', '.join(pinned)}"] * bool(pinned)
    helps += [f"a memory of at least {size(need)}", "more devices", "a smaller model"]
    helps += ["a cluster that states its links to host and files (offload)"] * (
        search.cluster.host is None
    )
    helps += ["precision='bf16'"] * (plan.precision == "fp32")
    return illegal("memory", search.memory_limit,
                   f"none of {len(search.space):,} plans fits in {size(search.memory_limit)}: the "
                   f"smallest needs {size(need)} ({brief(plan)}), {share:.0%} of it {name}",
                   "; or ".join(helps))  # fmt: skip


# ---- the summary in a notebook -------------------------------------------------------------------
def as_html(search: Search) -> str:
    """Counts and the ten best, short enough to read."""
    top = search.rows(search.order[:SHOWN])
    best = search.simulated[search.order[0]]
    named = html.escape(brief(search.best))
    head = (f"<p><b>{counts(search)}</b>, global batch {search.global_batch:,}. Best: "
            f"<code>{named}</code>, {best:.4g} s per step simulated</p>")  # fmt: skip
    same = [name for name in search.settings if len(set(map(str, top[name]))) == 1
            and name not in ("dp", "tp", "pp")]  # fmt: skip
    names = [name for name in search.settings if name not in same]
    shown = [*names, "closed form", "simulated", "memory", "bubble"]
    titles = "".join(f"<th>{html.escape(name)}</th>" for name in shown)
    lines = [f"<tr><th>#</th>{titles}</tr>"]
    for at, row in enumerate(top.to_dict("records")):
        known = row["simulated_s"] == row["simulated_s"]
        cells = [html.escape(str(row[name])) for name in names]
        cells += [
            f"{row['closed_s']:.4g} s",
            f"{row['simulated_s']:.4g} s" if known else "",
            size(row["memory"]),
            f"{row['bubble']:.1%}",
        ]
        lines.append(f"<tr><td>{at + 1}</td>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    alike = ", ".join(f"{name}={top[name].iloc[0]}" for name in same)
    foot = f"<p>All of these: {html.escape(alike)}.</p>" if alike else ""
    return head + "<table>" + "".join(lines) + "</table>" + foot
