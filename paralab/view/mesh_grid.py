"""The places of the cells of a mesh: rows of pipeline ranks, blocks of data-parallel indices, which
of them are drawn if there are too many, and the frames of nodes around them.

Lengths are in cells, y grows downwards. See rank_mesh.py for what it means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paralab.spec import Cluster, Plan
from paralab.view import naming, theme
from paralab.view.marks import note
from paralab.view.marks.cells import heat

ROWS, COLUMNS = 10, 24  # cells at most: each has to have room for a rank of four digits
TP_CELLS = 12
BLOCK_GAP, LEFT_OUT = 0.35, 1.0  # in cells: between blocks; where some are left out
NARROWEST = 6.0  # cells that the picture is wide: of fewer ranks none is a bar
ROW_GAP = 0.5  # in rows: room for the node's name


@dataclass(frozen=True)
class Group:
    """One group of one rank.

    ranks    all of its members, in group order
    sends    what flows in it
    level    "intra", or "inter" if a call in it leaves a node; "" where no cluster is stated
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
    """Which cells are drawn, and where. x, y: left and upper edges, in cells; y grows downwards."""

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
        narrow = plan.tp == 1 and len(dps) > 12  # then "dp" stands before the first number alone
        self.blocks = [  # middle and name
            (start + wide / 2, f"{'dp ' * (not narrow or i == 0)}{d}")
            for i, (d, start) in enumerate(at_dp.items())
        ]
        self.y, self.row_gaps, self.bottom = placed(pps, 1.0, ROW_GAP, LEFT_OUT + ROW_GAP)

    def rank(self, pp: int, dp: int, tp: int) -> int:
        return (pp * self.plan.dp + dp) * self.plan.tp + tp

    def cells(
        self, colours: dict[str, str], of: dict[int, str], cluster: Cluster | None
    ) -> dict[str, Any]:
        """All cells as one heat map whose numbers are colours; holes between them. of: the axis of
        the group that a rank shares with ``own``.
        """
        codes = {name: code for code, name in enumerate(colours)}
        (across, columns), (down, rows) = edges(self.x), edges(self.y)

        def cell(p: int | None, place: tuple[int, int] | None) -> tuple[int | None, str, str]:
            if p is None or place is None:
                return None, "", ""
            r = self.rank(p, *place)
            axis, said = of.get(r, "other"), f"rank {r}: pp {p}, dp {place[0]}, tp {place[1]}"
            said += f", node {cluster.node_of(r)}" if cluster is not None else ""
            if axis not in ("other", "rank"):
                said += f"<br>in the {axis} group of rank {self.own}"
            return codes[axis], str(r), said

        made = [[cell(p, place) for place in columns] for p in rows]
        z, text, said = ([[one[i] for one in line] for line in made] for i in range(3))
        widest = len(str(self.plan.world_size - 1))
        size = 13 if self.right <= 17 else 11 if widest < 4 or self.right <= 20 else 9
        size -= 2 * (theme.letter_scale() > 1 and widest > 3)
        look = {"colours": list(colours.values()), "most": len(colours) - 1}
        look |= {"textfont": {"size": size}, "name": "ranks", "showlegend": False}
        return heat(across, down, z, text, said, **look)

    def _pieces(self, cluster: Cluster) -> list[list[Any]]:
        """[node, left, right, upper, lower] of every rectangle that a node's cells make."""
        made: list[list[Any]] = []
        for p, y in self.y.items():
            runs: list[list[Any]] = []  # [node, left, right] of neighbours in this row
            for (d, t), x in self.x.items():
                node = cluster.node_of(self.rank(p, d, t))
                if runs and runs[-1][0] == node and x - runs[-1][2] < LEFT_OUT:
                    runs[-1][2] = x + 1.0
                else:
                    runs.append([node, x, x + 1.0])
            for run in runs:
                above = [one for one in made if one[:3] == run and y - one[4] < LEFT_OUT]
                if above:
                    above[0][4] = y + 1.0
                else:
                    made.append([*run, y, y + 1.0])
        return made

    def nodes(self, cluster: Cluster | None) -> tuple[list[dict], list[dict]]:
        """The nodes' names and the frames around their cells: notes and shapes.

        Nodes side by side share the line between them, for frames that overlap look like a mistake.
        A name is above a frame's left corner; its number alone where there is no room, and of low
        rows the first's alone.
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

    def dots(self) -> list[dict[str, Any]]:
        """Where cells are left out."""
        style = {"size": 16, "ink": theme.look().faint}
        middle = next(iter(self.y.values())) + 0.5
        dots = [note("⋯", x, middle, **style) for x in self.gaps]
        return dots + [note("⋮", self.right / 2, y, **style) for y in self.row_gaps]


def shown(n: int, own: int, most: int) -> list[int]:
    """At most ``most`` of n indices: own and its neighbours, the first ones, the last."""
    if n <= most:
        return list(range(n))
    wanted = dict.fromkeys([own, 0, n - 1, own + 1, own - 1, *range(n)])
    return sorted([i for i in wanted if 0 <= i < n][:most])


def placed(
    indices: Sequence[int], each: float, apart: float, left_out: float
) -> tuple[dict[int, float], list[float], float]:
    """{index: where it begins}, the middles of what is left out, and where the last one ends.

    each  how long one is; apart, left_out: from one to its neighbour, and to the next one drawn
    """
    starts, gaps, now = {}, [], 0.0
    for index, before in zip(indices, [None, *indices], strict=False):
        if before is not None and index - before > 1:
            gaps.append(now + LEFT_OUT / 2)
            now += left_out
        elif before is not None:
            now += apart
        starts[index] = now
        now += each
    return starts, gaps, now


def edges(starts: dict[Any, float]) -> tuple[list[float], list[Any]]:
    """Edges of cells of width 1 and of the holes between them; what is between two edges: a key of
    ``starts``, or None for a hole.
    """
    keys = {round(start, 9): key for key, start in starts.items()}  # sums of floats leave cracks
    made = sorted({*keys, *(round(start + 1.0, 9) for start in keys)})
    return made, [keys.get(edge) for edge in made[:-1]]
