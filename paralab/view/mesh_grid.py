"""The cells of a mesh: the places of pipeline ranks and data-parallel blocks, which of them are
drawn if there are too many, and the frames of nodes around them.

Lengths are in cells, y grows downwards. rank_mesh.py says what the picture means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paralab.spec import Cluster, Plan
from paralab.view import naming, theme
from paralab.view.marks import Part, note
from paralab.view.marks.cells import heat

ROWS, COLUMNS = 10, 24  # at most so many cells, as each needs room for a rank of four digits
TP_CELLS = 12
BLOCK_GAP, LEFT_OUT = 0.35, 1.0  # in cells: between two blocks, and where blocks are left out
NARROWEST = 6.0  # cells: the least width of the picture, so that no cell becomes a wide bar
ROW_GAP = 0.5  # in rows: between two rows, for the names of nodes


class Group(NamedTuple):
    """One group of one rank.

    ranks    all of its members, in group order
    sends    what its members send each other
    level    "intra", or "inter" if a call in it leaves a node; "" if no cluster is given
    """

    axis: str
    ranks: tuple[int, ...]
    sends: str
    level: str

    @property
    def name(self) -> str:
        """ "tp: 8 ranks inside a node, all-reduce of activations"."""
        place = f" {naming.LEVEL_NAME[self.level]}" if self.level else ""
        return f"{self.axis}: {len(self.ranks)} ranks{place}, {self.sends}"


class Grid:
    """Which cells are drawn, and where; ``own`` is the rank whose groups are shown.

    x, y      {(dp, tp): left edge of a cell}, {pp: upper edge of a row}
    blocks    (middle, name) of the data-parallel blocks
    left_out  texts that say how many indices are drawn
    """

    def __init__(self, plan: Plan, own: int) -> None:
        self.plan, self.own, at = plan, own, plan.place(own)
        tps = shown(plan.tp, at.tp, TP_CELLS)
        dps = shown(plan.dp, at.dp, max(2, COLUMNS // len(tps)))
        pps = shown(plan.pp, at.pp, ROWS)
        self.left_out = [
            f"{len(shown)} of {of} {name} drawn"
            for name, shown, of in (
                ("stages", pps, plan.pp),
                ("dp indices", dps, plan.dp),
                ("tp indices", tps, plan.tp),
            )
            if len(shown) < of
        ]
        at_tp, gaps, wide = placed(tps, 1.0, 0.0, LEFT_OUT)
        at_dp, self.gaps, self.right = placed(dps, wide, BLOCK_GAP * (plan.tp > 1), LEFT_OUT)
        self.gaps += [start + gap for start in at_dp.values() for gap in gaps]
        self.x = {(d, t): at_dp[d] + at_tp[t] for d in dps for t in tps}  # left edges
        narrow = plan.tp == 1 and len(dps) > 12  # then only the first block's name has "dp" in it
        self.blocks = [
            (start + wide / 2, f"{'dp ' * (not narrow or i == 0)}{d}")
            for i, (d, start) in enumerate(at_dp.items())
        ]
        self.y, self.row_gaps, self.bottom = placed(pps, 1.0, ROW_GAP, LEFT_OUT + ROW_GAP)

    def rank(self, pp: int, dp: int, tp: int) -> int:
        return (pp * self.plan.dp + dp) * self.plan.tp + tp

    def cells(
        self, colours: dict[str, str], axis_of: dict[int, str], cluster: Cluster | None
    ) -> Part:
        """All cells as one heat map with holes in between; its values are indices of ``colours``.

        axis_of  {rank: axis of the group that it shares with ``own``}
        """
        codes = {name: code for code, name in enumerate(colours)}
        (across, columns), (down, rows) = edges(self.x), edges(self.y)

        def cell(p: int | None, place: tuple[int, int] | None) -> tuple[int | None, str, str]:
            if p is None or place is None:
                return None, "", ""
            r = self.rank(p, *place)
            axis = axis_of.get(r, "other")
            hover_text = f"rank {r}: pp {p}, dp {place[0]}, tp {place[1]}"
            hover_text += f", node {cluster.node_of(r)}" if cluster is not None else ""
            if axis not in ("other", "rank"):
                hover_text += f"<br>in the {axis} group of rank {self.own}"
            return codes[axis], str(r), hover_text

        widest = len(str(self.plan.world_size - 1))
        size = 13 if self.right <= 17 else 11 if widest < 4 or self.right <= 20 else 9
        size -= 2 * (theme.letter_scale() > 1 and widest > 3)
        look = {"colours": list(colours.values()), "most": len(colours) - 1}
        look |= {"textfont": {"size": size}, "name": "ranks", "showlegend": False}
        return heat(across, down, [[cell(p, at) for at in columns] for p in rows], **look)

    def _pieces(self, cluster: Cluster) -> list[tuple[int, float, float, float, float]]:
        """(node, left, right, upper, lower) of every rectangle of cells of one node; it ends where
        cells are left out.
        """
        rows: dict[tuple, list[float]] = {}  # {(node, left, right, gaps above): upper edges}
        for p, y in self.y.items():
            in_row: dict[tuple, list[float]] = {}  # {(node, gaps on the left): left edges}
            for (d, t), x in self.x.items():
                key = cluster.node_of(self.rank(p, d, t)), sum(gap < x for gap in self.gaps)
                in_row.setdefault(key, []).append(x)
            gaps = sum(gap < y for gap in self.row_gaps)
            for (node, _), lefts in in_row.items():
                rows.setdefault((node, lefts[0], lefts[-1] + 1.0, gaps), []).append(y)
        return [(*key[:3], uppers[0], uppers[-1] + 1.0) for key, uppers in rows.items()]

    def nodes(self, cluster: Cluster | None) -> tuple[list[Part], list[Part]]:
        """The nodes' names and the frames around their cells: notes and shapes.

        Nodes side by side share the line between them, as overlapping frames look like a mistake.
        Names are above the left corners of frames, without the word node if there is no room for
        it; in a small figure with many rows only the first row has names.
        """
        pieces = [] if cluster is None else self._pieces(cluster)
        begun, ended = {left for _, left, *_ in pieces}, {right for _, _, right, *_ in pieces}
        frames = [
            {
                "type": "rect",
                "x0": left - 0.02 * (left not in ended),
                "x1": right + 0.02 * (right not in begun),
                "y0": upper - 0.07,
                "y1": lower + 0.07,
                "line": {"color": theme.look().faint, "width": 1.5},
            }
            for _, left, right, upper, lower in pieces
        ]
        if theme.letter_scale() > 1 and len(self.y) > 5:
            highest = min((upper for *_, upper, _ in pieces), default=0.0)
            pieces = [piece for piece in pieces if piece[3] == highest]
        wide = min((right - left for _, left, right, _, _ in pieces), default=0.0)
        word = "node " if wide >= 0.075 * self.right else ""
        style = {"size": 10, "ink": theme.look().faint, "anchor": "left bottom", "borderpad": 0}
        names = [
            note(f"{word}{node}", left, upper - 0.07, **style) for node, left, _, upper, _ in pieces
        ]
        return names, frames

    def dots(self) -> list[Part]:
        """Dots where cells are left out."""
        style = {"size": 16, "ink": theme.look().faint}
        middle = next(iter(self.y.values())) + 0.5
        dots = [note("⋯", x, middle, **style) for x in self.gaps]
        return dots + [note("⋮", self.right / 2, y, **style) for y in self.row_gaps]


def shown(n: int, own: int, most: int) -> list[int]:
    """At most ``most`` of n indices: ``own`` and its neighbours, the first ones and the last."""
    if n <= most:
        return list(range(n))
    wanted = dict.fromkeys([own, 0, n - 1, own + 1, own - 1, *range(n)])
    return sorted([i for i in wanted if 0 <= i < n][:most])


def spread(many: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the items, evenly spaced, with the first and the last among them."""
    if len(many) <= most:
        return list(many)
    return [many[round(i * (len(many) - 1) / max(1, most - 1))] for i in range(most)]


def placed(
    indices: Sequence[int], each: float, apart: float, left_out: float
) -> tuple[dict[int, float], list[float], float]:
    """{index: its start}, the middles of the gaps where indices are left out, and the end.

    each             length of an index
    apart, left_out  gap to the next index, and gap where indices are left out in between
    """
    starts, gaps, position = {}, [], 0.0
    for index in indices:
        if starts and index - 1 not in starts:
            gaps.append(position + LEFT_OUT / 2)
            position += left_out
        elif starts:
            position += apart
        starts[index] = position
        position += each
    return starts, gaps, position


def edges(starts: dict[Any, float]) -> tuple[list[float], list[Any]]:
    """The edges of cells of width 1 and of the holes between them, and what is between each two
    edges: a key of ``starts``, or None for a hole.
    """
    keys = {round(start, 9): key for key, start in starts.items()}  # equal but for rounding errors
    positions = sorted({*keys, *(round(start + 1.0, 9) for start in keys)})
    return positions, [keys.get(edge) for edge in positions[:-1]]
