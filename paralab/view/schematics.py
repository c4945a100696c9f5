"""Schematics of an all-reduce on a ring and of offload's data flow, computed, not drawn by hand.

Those of ZeRO are in zero_schematics.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from paralab.checks import illegal, whole
from paralab.spec import ModelSpec, Plan
from paralab.theory.offload import link_bytes
from paralab.view import lanes, naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import Part, arrow, note
from paralab.view.marks.cells import Cell, rectangles


def drawn(
    finding: str,
    below: str,
    cells: Sequence[Cell],
    notes: Sequence[Part],
    *,
    height: int,
    x: tuple[float, float],
    y: tuple[float, float],
    keys: Sequence[Part] = (),
) -> Chart:
    """A chart of rectangles and words without axes. x, y: visible range; keys: legend traces."""
    bare: Part = {"visible": False, "fixedrange": True}
    fig = figure(
        finding,
        below,
        height=height,
        margin={"l": 10, "r": 10, "b": 10, "t": 96 if keys else 76},
        xaxis={**bare, "range": x},
        yaxis={**bare, "range": y[::-1]},
    )
    trace, words, shapes = rectangles(cells)
    return fig.draw([*keys, trace], [*notes, *words], shapes)


# ---- a ring --------------------------------------------------------------------------------------
def ring(n: int = 4) -> Chart:
    """An all-reduce on a ring of ``n`` ranks: after every step, of how many ranks' terms each chunk
    of each rank is the sum, and which chunk is sent next (parallel/collectives.py, [Note: chunks]).

    ``table``: step, rank, chunk, terms, sent (by this rank in the next step).
    """
    whole("n", n, at_least=2, at_most=8)
    steps, half = 2 * (n - 1), n - 1
    terms = [[1] * n for _ in range(n)]  # by rank and chunk
    cells, notes, rows, ink = [], [], [], theme.axis_colour("dp")
    columns = min(steps + 1, 4)
    for step in range(steps + 1):
        left, top = (step % columns) * (n + 1), (step // columns) * (n + 1.3)
        title = "start"
        if step:
            phase = "reduce-scatter" if step <= half else "all-gather"
            title = f"{phase}, step {step if step <= half else step - half}"
        notes.append(note(f"<b>{title}</b>", left + n / 2, top - 0.3, size=12))
        for r in range(n):
            notes.append(note(f"{r}", left - 0.25, top + r + 0.5, ink=theme.look().faint, size=11))
            for c, count in enumerate(terms[r]):
                sent = step < steps and c == (r - step) % n
                text = "the sum" if count == n else f"{count} of {n} terms"
                text = f"rank {r}, chunk {c}: {text}"
                text += f"<br>sent to rank {(r + 1) % n} next" * sent
                box = ((left + c + 0.03, left + c + 0.97), (top + r + 0.03, top + r + 0.97))
                fill, edge = theme.shade(ink, n - count, n + 1), theme.look().ink if sent else ""
                word = f"<b>{count} ▸</b>" if sent else str(count)
                cells.append(Cell(*box, fill, word, text, 12, edge=edge))
                rows.append((step, r, c, count, sent))
        moved = [terms[r][(r - step) % n] for r in range(n)]
        for r, count in enumerate(moved):
            to, c = terms[(r + 1) % n], (r - step) % n
            to[c] = to[c] + count if step < half else count
    lines = -(-(steps + 1) // columns)
    return drawn(
        f"After {steps} steps every rank has the sum of every chunk",
        f"rows: {n} ranks · columns: {n} chunks · number: of how many ranks a chunk is the sum · "
        "framed: sent next",
        cells,
        notes,
        height=int(110 + lines * (34 * n + 44)),
        x=(-0.6, columns * (n + 1) - 0.8),
        y=(-0.8, lines * (n + 1.3) - 1.1),
    ).tabled(("step rank chunk terms sent", rows))


# ---- offload -------------------------------------------------------------------------------------
UPDATE = "optimizer's update"
FROM_TO = {"disk read": "disk to host", "disk write": "host to disk"}  # in a sentence
ENDS = {"d2h": (0, 1), "h2d": (1, 0), "disk write": (1, 2), "disk read": (2, 1)}  # from, to


def data_flow(model: ModelSpec, plan: Plan) -> Chart:
    """What a rank moves between its device, the host and files in a step of the compiled program:
    arrows with bytes by category (after ZeRO-Offload, Ren+ 2021, arXiv:2101.06840, fig. 2).

    ``table``: link, category, bytes. Raises ValueError on a plan that does not offload.
    """
    if not isinstance(plan, Plan) or plan.tiers is None:
        raise illegal("plan", plan, "nothing leaves the device", "a plan with offload=...")
    flow = {
        link: {kind: n for kind, n in parts.items() if n}
        for link, parts in link_bytes(model, plan).items()
        if any(parts.values())
    }
    look, cells, notes = theme.look(), [], []
    sums = {link: sum(parts.values()) for link, parts in flow.items()}
    does = {"device": "forward, backward", "host": UPDATE, "files": "storage"}
    if plan.tiers.optimizer == "device":
        does |= {"device": f"{does['device']},<br>{UPDATE}", "host": "storage"}
    places = list(does)[: 2 + any("disk" in link for link in flow)]
    for i, place in enumerate(places):
        word = f"<b>{place}</b><br><span style='font-size:12px'>{does[place]}</span>"
        at = (3 * i, 3 * i + 1.2), (0.0, 2.0)
        sent, received = (sum(n for k, n in sums.items() if ENDS[k][end] == i) for end in (0, 1))
        moved = f"{theme.in_bytes(received)} come in per step, {theme.in_bytes(sent)} go out"
        cells.append(Cell(*at, look.grid, word, f"{place}: {moved}", 15, edge=look.faint))
    for link, parts in flow.items():
        start, to = ENDS[link]
        outwards = to > start  # these arrows are above, those back to the device below
        x0, x1, y, way = (1.25, -0.05, 0.45, -1) if outwards else (-0.05, 1.25, 1.55, 1)
        x0, x1 = 3 * start + x0, 3 * to + x1
        notes.append(arrow((x0, y), (x1, y), ink=look.ink))
        text = "<br>".join(
            f"<span style='color:{theme.category_colour(kind)}'>■</span> {kind} "
            f"<b>{theme.in_bytes(n)}</b>"
            for kind, n in parts.items()
        )
        near, far = ("bottom", "top") if outwards else ("top", "bottom")
        notes.append(note(text, (x0 + x1) / 2, y, anchor=near, yshift=-6 * way))
        name = {"size": 11, "ink": look.faint, "yshift": 3 * way}
        notes.append(note(lanes.ROW_NAME[link], (x0 + x1) / 2, y, anchor=far, **name))
    largest = [link for link, n in sums.items() if n == max(sums.values())]
    text = f"A rank moves {theme.in_bytes(sum(sums.values()))} per step between memory tiers"
    if len(largest) == 1:
        text += f"; the most, {theme.in_bytes(sums[largest[0]])}, goes "
        text += f"from {FROM_TO.get(largest[0]) or lanes.ROW_NAME[largest[0]]}"
    rows = [(link, kind, n) for link, parts in flow.items() for kind, n in parts.items()]
    return drawn(
        text,
        f"{naming.plan_name(plan)} · {model.num_params:,} parameters",
        cells,
        notes,
        height=330,
        x=(-0.1, 3 * len(places) - 1.7),
        y=(-0.9, 2.9),
    ).tabled(("link category bytes", rows))
