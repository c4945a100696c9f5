"""Schematics: how a mechanism works, drawn from the objects that do it.

    ring          an all-reduce on a ring, chunk by chunk
    data_flow     what offload moves between device, host and files, with bytes on the arrows

ZeRO's are in zero_schematics.py; a matrix cut by columns, rows, blocks and cubes is `view.blocks`;
schedules on one axis are `view.schedules`.
"""

from __future__ import annotations

from paralab.checks import illegal, whole
from paralab.spec import ModelSpec, Plan
from paralab.theory.offload import link_bytes
from paralab.view import lanes, naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import note
from paralab.view.marks.cells import Cell, rectangles

BARE = {"visible": False, "fixedrange": True}


# ---- a ring --------------------------------------------------------------------------------------
def ring(n: int = 4) -> Chart:
    """An all-reduce on a ring of ``n`` ranks: after every step, how many ranks' terms every chunk
    of every rank holds, and which chunk was sent on (parallel/collectives.py, [Note: chunks]).

    ``table``: step, rank, chunk, terms, sent (by this rank, in the next step).
    """
    whole("n", n, at_least=2, at_most=8)
    steps = 2 * (n - 1)
    terms = [[1] * n for _ in range(n)]  # of rank r, chunk c
    cells, notes, rows, ink = [], [], [], theme.axis_colour("dp")
    columns = min(steps + 1, 4)
    for step in range(steps + 1):
        sends = [(r - step) % n if step < n - 1 else (r + 1 - step + n - 1) % n for r in range(n)]
        left, top = (step % columns) * (n + 1), (step // columns) * (n + 1.3)
        phase = "start" if not step else "reduce-scatter" if step < n else "all-gather"
        title = phase if not step else f"{phase}, step {step if step < n else step - n + 1}"
        notes.append(note(f"<b>{title}</b>", left + n / 2, top - 0.3, size=12))
        for r in range(n):
            notes.append(note(f"{r}", left - 0.25, top + r + 0.5, ink=theme.look().faint, size=11))
            for c in range(n):
                sent, count = step < steps and sends[r] == c, terms[r][c]
                fill = theme.shade(ink, n - count, n + 1)
                said = (
                    f"rank {r}, chunk {c}: {'the sum' if count == n else f'{count} of {n} terms'}"
                )
                said += f"<br>sent to rank {(r + 1) % n} next" * sent
                box = ((left + c + 0.03, left + c + 0.97), (top + r + 0.03, top + r + 0.97))
                word = f"<b>{count} ▸</b>" if sent else str(count)
                edge = theme.look().ink if sent else ""
                cells.append(Cell(*box, fill, word, said, 12, edge=edge))
                rows.append((step, r, c, count, sent))
        if step == steps:
            break
        leaving = [(r, sends[r], terms[r][sends[r]]) for r in range(n)]
        for r, c, count in leaving:
            to = terms[(r + 1) % n]
            to[c] = to[c] + count if step < n - 1 else count
    lines = -(-(steps + 1) // columns)
    fig = figure(
        f"After {steps} steps every rank has every sum, and has sent 2(N−1)/N of the tensor",
        f"{n} ranks (rows), {n} chunks (columns) · number: how many ranks' terms are in a chunk · "
        "framed: sent to the next rank",
        height=int(110 + lines * (34 * n + 44)),
        margin={"l": 10, "r": 10, "b": 10, "t": 76},
        xaxis={**BARE, "range": [-0.6, columns * (n + 1) - 0.8]},
        yaxis={**BARE, "range": [lines * (n + 1.3) - 1.1, -0.8]},
    )
    traces, words, shapes = rectangles(cells)
    fig.draw(traces, [*notes, *words], shapes)
    return fig.explained(
        f"ring all-reduce of {n} ranks, step by step", ("step rank chunk terms sent", rows)
    )


# ---- offload -------------------------------------------------------------------------------------
def data_flow(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw") -> Chart:
    """What a rank moves between its device, the host and files in a step, as the compiled program
    has it: bytes by category on arrows (ZeRO-Offload, Ren+ 2021, arXiv:2101.06840, fig. 2).

    ``table``: link, category, bytes. Raises ValueError on a plan that does not offload.
    """
    if not isinstance(plan, Plan) or plan.tiers is None:
        raise illegal("plan", plan, "nothing leaves the device", "a plan with offload=...")
    flow = link_bytes(model, plan, optimizer=optimizer)
    rows = [(link, kind, n) for link, parts in flow.items() for kind, n in parts.items() if n]
    places = (
        ["device", "host", "files"] if any("disk" in r[0] for r in rows) else ["device", "host"]
    )
    does = {"device": "forward, backward", "host": "optimizer's update", "files": "storage"}
    cells, notes = [], []
    for i, place in enumerate(places):
        word = f"<b>{place}</b><br><span style='font-size:12px'>{does[place]}</span>"
        edge = theme.look().faint
        cells.append(
            Cell((3 * i, 3 * i + 1.2), (0.0, 2.0), theme.look().grid, word, size=15, edge=edge)
        )
    ends = {
        "d2h": (0, 1, 0.45),
        "h2d": (1, 0, 1.55),
        "disk write": (1, 2, 0.45),
        "disk read": (2, 1, 1.55),
    }
    for link, (start, to, y) in ends.items():
        parts = {kind: n for at, kind, n in rows if at == link}
        if not parts:
            continue
        x0, x1 = (
            (3 * start + 1.25, 3 * to - 0.05) if to > start else (3 * start - 0.05, 3 * to + 1.25)
        )
        arrow = {
            "showarrow": True,
            "arrowhead": 2,
            "arrowwidth": 2.5,
            "arrowcolor": theme.look().ink,
        }
        arrow |= dict.fromkeys(("axref", "xref"), "x") | dict.fromkeys(("ayref", "yref"), "y")
        notes.append(note("", x1, y, ax=x0, ay=y, **arrow))
        said = "<br>".join(
            f"<span style='color:{theme.category_colour(kind)}'>■</span> {kind} "
            f"<b>{theme.scaled(n, 'B')}</b>"
            for kind, n in parts.items()
        )
        side = "bottom" if y < 1 else "top"
        notes.append(note(said, (x0 + x1) / 2, y, yanchor=side, yshift=6 if y < 1 else -6))
        notes.append(
            note(
                lanes.ROW_NAME[link],
                (x0 + x1) / 2,
                y,
                size=11,
                ink=theme.look().faint,
                yanchor="top" if y < 1 else "bottom",
                yshift=-3 if y < 1 else 3,
            )
        )
    sums = {link: sum(n for at, _, n in rows if at == link) for link in ends}
    most = [link for link, n in sums.items() if n == max(sums.values())]
    said = f"A rank moves {theme.scaled(sum(sums.values()), 'B')} per step between its tiers"
    if len(most) == 1:
        said += f", most of it on the link {lanes.ROW_NAME[most[0]]}"
    fig = figure(
        said,
        f"{naming.plan_name(plan)} · {model.num_params:,} parameters",
        height=330,
        margin={"l": 10, "r": 10, "b": 10, "t": 76},
        xaxis={**BARE, "range": [-0.1, 3 * len(places) - 1.7]},
        yaxis={**BARE, "range": [2.9, -0.9]},
    )
    traces, words, shapes = rectangles(cells)
    fig.draw(traces, [*notes, *words], shapes)
    return fig.explained(
        f"data flow of {naming.plan_name(plan)}: {len(rows)} flows", ("link category bytes", rows)
    )
