"""The texts of a search: why other plans lose, what helps if no plan fits, and the summary."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from paralab.checks import count_of, illegal
from paralab.spec import Plan
from paralab.view.theme import in_bytes, percent

if TYPE_CHECKING:
    import pandas as pd

GROWS = {
    "compute": "computing",
    "recompute": "recomputation",
    "tp": "tensor-parallel waits",
    "bubble": "the bubble",
    "pp": "messages between stages",
    "dp": "data-parallel waits",
    "offload": "offload",
    "optimizer": "the optimizer",
}
SHOWN = 10  # rows of the summary
NEAR = 0.02  # a simulated step that is longer by less is almost equal
SECONDS = {"estimated": "closed_s", "simulated": "simulated_s", "without overlap": "serial_s"}
UNLIMITED = 2**62


def counts(search: Any) -> str:
    """ "12,480 plans on 512 devices, 3,110 fit in 80 GB"."""
    plans, fits, devices = len(search.plans), int(search.fits.sum()), search.best.world_size
    room = f", {fits:,} fit{'s' * (fits == 1)} in {in_bytes(search.memory_limit)}"
    text = f"{count_of(plans, 'plan', ',')} on {count_of(devices, 'device', ',')}"
    return text + room * (search.memory_limit < UNLIMITED)


def brief(plan: Plan) -> str:
    """The settings of a plan that matter, as text: "dp=8 tp=8 pp=8 1f1b m=24 b=1 ZeRO-1"."""
    words = [f"{name}={getattr(plan, name)}" for name in ("dp", "tp", "pp")]
    if plan.pp > 1 or plan.schedule != "1f1b":
        words.append(plan.schedule_name + f" v={plan.virtual_stages}" * (plan.virtual_stages > 1))
    words += [f"m={plan.microbatches}", f"b={plan.microbatch_size}"]
    words += [f"ZeRO-{plan.zero_stage}"] * (plan.zero_stage > 0)
    words += ["sequence-parallel"] * plan.sequence_parallel
    words += [f"recompute={plan.recompute}"] * (plan.recompute != "none")
    words += [f"offload={_place(plan.offload)}"] * (plan.offload is not None)
    return " ".join(words)


def _place(value: Any) -> str:
    return value if isinstance(value, str) else "own" if value is not None else "none"


# ---- why ----------------------------------------------------------------------------------------
def losers(search: Any) -> pd.DataFrame:
    """See `Search.losers`."""
    import pandas as pd

    plans, best, node = search.plans, search.best, search.cluster.devices_per_node
    choices = [("tp", "beyond a node", plans.tp > node)] * (best.tp <= node)
    choices += [
        (name, value, plans.codes[name] == code)
        for name in search.settings
        if name not in ("dp", "microbatches")  # these follow from the others
        for code, value in enumerate(plans.values[name])
        if value != getattr(best, name)
    ]
    rows = [_row(search, *choice) for choice in choices if choice[2].any()]
    columns = ["setting", "instead", "plan", "seconds", "times", "memory", "fits", "why"]
    return pd.DataFrame(rows, columns=columns)


def _row(search: Any, name: str, value: Any, mask: np.ndarray) -> tuple[Any, ...]:
    """The row for the best plan of a mask: the first, if it fits (it is the fastest), otherwise the
    one that needs least memory.
    """
    which = np.flatnonzero(mask)
    at = int(which[0] if search.fits[which[0]] else which[search.memory[which].argmin()])
    value_text, plan = str(_place(value) if name == "offload" else value), brief(search.plans[at])
    seconds, fits, why = float(search.closed[at]), bool(search.fits[at]), _sentence(search, at)
    times = seconds / float(search.closed[0])
    return name, value_text, plan, seconds, times, float(search.memory[at]), fits, why


def _sentence(search: Any, at: int) -> str:
    """Why the plan at this position loses against the best."""
    if not search.fits[at]:
        need, limit = float(search.memory[at]), search.memory_limit
        excess = f"{in_bytes(need - limit)} too much" if need > limit else "too close to the limit"
        text = f"does not fit: the smallest such plan needs {in_bytes(need)}, {excess}"
        return f"{text}; {_largest(search, at)}"
    closed, simulated = search.closed[[at, 0]], search.simulated[[at, 0]]
    extra_seconds = closed[0] - closed[1]
    if extra_seconds <= 0.005 * closed[1] and np.isfinite(simulated).all():
        longer = simulated[0] / simulated[1] - 1
        text = f"{percent(longer)} longer if simulated, which the estimates do not show"
        text = "almost equal" if longer < NEAR else text
        text += f": simulated {simulated[0]:.4g} s against {simulated[1]:.4g} s"
        return f"{text}, estimated {closed[0]:.4g} s against {closed[1]:.4g} s"
    extra_by_term = {name: float(term[at] - term[0]) for name, term in search.terms.items()}
    order = sorted(extra_by_term, key=extra_by_term.__getitem__)
    grown = [n for n in reversed(order) if extra_by_term[n] > 0.1 * abs(extra_seconds)][:3]
    shrunk = [n for n in order if extra_by_term[n] < -0.1 * abs(extra_seconds)][:2]
    text = ", ".join(f"{GROWS[name]} +{extra_by_term[name]:.3g} s" for name in grown)
    gain = "; partly offset by " + ", ".join(f"{GROWS[n]} {extra_by_term[n]:.3g} s" for n in shrunk)
    longer = f"{extra_seconds:.3g} s longer ({100 * extra_seconds / closed[1]:+.1f} %): {text}"
    return longer + gain * bool(shrunk and grown)


def _largest(search: Any, at: int) -> str:
    """The largest category of a plan's estimated memory: "61 % of it is activations"."""
    bytes_of = {name: float(column[at]) for name, column in search.categories.items()}
    name = max(bytes_of, key=bytes_of.__getitem__)
    return f"{100 * bytes_of[name] / sum(bytes_of.values()):.0f} % of it is {name}"


def what_helps(search: Any) -> ValueError:
    """The error if no plan fits: the smallest memory that one needs, and what would reduce it."""
    compiled = np.isfinite(search.simulated)
    needs = np.where(compiled, search.memory, np.inf)
    at = int(needs.argmin())
    plan, need, room = search.plans[at], in_bytes(search.memory[at]), in_bytes(search.memory_limit)
    pinned = [name for name in reversed(search.settings) if name in search.pinned]
    helps = [f"other values of {', '.join(pinned)}"] * bool(pinned)
    helps += [f"a memory of at least {search.memory[at]:,.0f} bytes"]  # exact: need is rounded
    helps += ["more devices", "a smaller model"]
    if search.cluster.host is None:
        helps.append("a cluster that states its host's link and bandwidth, for offload")
    helps += ["precision='bf16'"] * (plan.precision == "fp32")
    some = f" of {compiled.sum()} compiled ones" * (not compiled.all())
    why = f"none of {len(needs):,} plans fits in {room}: the smallest{some} needs {need} "
    why += f"({brief(plan)}), {_largest(search, at)}"
    return illegal("memory", search.memory_limit, why, "; or ".join(helps))


def without_overlap(search: Any) -> str:
    """How much slower the best plan is without overlap, and which fitting plan is fastest then."""
    longer = max(search.serial[0] / search.simulated[0] - 1, 0.0)
    text = f"Without any overlap this plan takes {search.serial[0]:.4g} s ({100 * longer:+.0f} %)"
    at = int(np.where(search.fits, search.serial, np.inf).argmin())
    if at == 0:
        return f"{text}, and no other plan is faster without overlap."
    how = "simulated" if np.isfinite(search.simulated[at]) else "estimated"
    with_it = (search.simulated if how == "simulated" else search.closed)[at]
    text += f". The fastest plan without overlap is {brief(search.plans[at])}: it takes "
    return f"{text}{search.serial[at]:.4g} s, and {with_it:.4g} s with overlap, {how}."


# ---- the summary in a notebook ------------------------------------------------------------------
def as_html(search: Any) -> str:
    """Counts and the ten best, short enough to read."""
    top, named = search.rows(slice(SHOWN)), html.escape(brief(search.best))
    head = (
        f"<p><b>{counts(search)}</b>, global batch {search.global_batch:,}. Best: "
        f"<code>{named}</code>, simulated: {search.simulated[0]:.4g} s per step</p>"
        f"<p>{html.escape(without_overlap(search))}</p>"
    )
    same = [name for name in search.settings[3:] if len(set(map(str, top[name]))) == 1]
    shown = top[[name for name in search.settings if name not in same]].map(str)
    for name, column in SECONDS.items():
        shown[name] = [f"{s:.4g} s" if s == s else "" for s in top[column]]  # NaN: not simulated
    shown["memory"] = list(map(in_bytes, top["memory"]))
    shown["bubble"] = [percent(share, 1) for share in top["bubble"]]
    shown.index += 1
    alike = html.escape(", ".join(f"{name}={top[name].iloc[0]}" for name in same))
    return f"{head}{shown.to_html(border=0)}" + f"<p>All of these: {alike}.</p>" * bool(same)
