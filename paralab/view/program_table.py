"""A program, and the difference of two, as compact HTML tables for a notebook, without scripts.

The colour of the square before an instruction says what it is: compute has the colours of
timelines, messages the colour of their group's axis, waits are grey. Repeated instructions are
folded: they are indented under the headline of their fold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from paralab.programs.instructions import COLLECTIVES, KEEP, KINDS, MESSAGES, WAIT, WORKERS, Instr
from paralab.view import theme

FAMILY = {"replica": "dp", "secondary": "dp", "ends": "pp"}  # axes that are part of another one
STYLE = Template(Path(__file__).with_name("program.css").read_text(encoding="utf-8"))


def program_table(shown: Any) -> str:
    """The table of an `interpret.text.ProgramText`: title, legend, lines and notes."""
    rows, lines = list(shown.rows()), []
    for row in rows:
        indent, text = f' style="padding-left:{22 * row.depth}px"', theme.text(row.what)
        cells, kind = f"<td colspan=3{indent}><b>{text}</b></td>", ""
        if row.ins is not None:
            frees = f"frees {theme.text(row.frees)}" if row.frees else ""
            cells = f'<td{indent}>{_op(row.ins)}</td><td>{text}</td><td class="faint">{frees}</td>'
            kind = ' class="wait"' if row.ins.op == WAIT else ""
        lines.append(f'<tr{kind}><td class="number">{row.position}</td>{cells}')
    return _framed([shown.title], lines, [row.ins for row in rows if row.ins], shown.notes)


def difference_table(difference: Any, signs: Mapping[str, str]) -> str:
    """The table of an `interpret.differences.Difference`; ``signs``: {sign: its meaning}."""
    lines, changes = [], difference.changes
    for change in changes:
        does, amount, subjects = map(theme.text, (change.does, change.amount, change.of))
        lines.append(
            f'<tr><td title="{signs[change.sign]}"><b>{change.sign}</b></td>'
            f"<td>{_op(change.example)}</td><td>{does}</td><td>{amount}</td>"
            f'<td class="long">{subjects}</td>'
        )
    words = ", ".join(f"{sign} {meaning}" for sign, meaning in signs.items())
    notes = [words if lines else difference.nothing]
    return _framed(difference.titles, lines, [change.example for change in changes], notes)


def meaning_of(ins: Instr) -> tuple[str, str]:
    """What the colour of an instruction means, and the colour."""
    if ins.op == WAIT:
        return "wait", theme.colour("wait")
    if ins.op in COLLECTIVES or ins.op in MESSAGES:
        axis = FAMILY.get(ins.lane, ins.lane)
        return f"messages of {axis}", theme.axis_colour(axis)
    if ins.op == KEEP or ins.lane in WORKERS:
        return "copies", theme.KIND_COLOUR["copy"]
    kind = KINDS[ins.op]
    words = {"weight_grad": "weight gradients", "copy": "copies"}
    return words.get(kind, kind), theme.KIND_COLOUR[kind]


def _swatch(fill: str) -> str:
    return f'<i style="background:{fill}"></i>'


def _op(ins: Instr) -> str:
    return f"{_swatch(meaning_of(ins)[1])}<code>{ins.op}</code>"


def _framed(
    titles: Sequence[str], lines: Sequence[str], shown: Iterable[Instr], notes: Sequence[str]
) -> str:
    head = "<br>".join(f"<b>{theme.text(title)}</b>" for title in titles)
    legend = " · ".join(  # also readable where a page drops a notebook's styles and so the colours
        f"<span>{_swatch(fill)}{theme.text(meaning)}</span>"
        for meaning, fill in sorted(set(map(meaning_of, shown)))
    )
    body = "".join(f"{line}</tr>" for line in lines)
    foot = "".join(f'<p class="faint">{theme.text(note)}</p>' for note in notes)
    look = theme.look()  # its name is a class, as a page may have older tables in another look
    style = f"<style>\n{STYLE.substitute(vars(look))}</style>"
    return (
        f'{style}<div class="paralab-program {look.name}"><p>{head}</p>'
        f'<p class="faint">{legend}</p><table>{body}</table>{foot}</div>'
    )
