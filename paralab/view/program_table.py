"""A program, and the difference of two, as compact tables for a notebook. No script, own style.

The colour of a line's edge says what it is: compute as in a timeline, messages by the axis of their
group, waits grey. Lines of a fold are indented under its headline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from paralab.programs.instructions import COLLECTIVES, KEEP, KINDS, MESSAGES, WAIT, WORKERS, Instr
from paralab.view import theme

FAMILY = {"replica": "dp", "secondary": "dp", "ends": "pp"}  # axes that a wider one contains
STYLE = Template(Path(__file__).with_name("program.css").read_text(encoding="utf-8"))


def program_table(shown: Any) -> str:
    """An `interpret.text.ProgramText`: title, what the colours mean, lines, notes."""
    rows, lines = list(shown.rows()), []
    for row in rows:
        indent, what = f' style="padding-left:{22 * row.depth}px"', theme.text(row.what)
        cells, kind = f"<td colspan=3{indent}><b>{what}</b></td>", ""
        if row.ins is not None:
            frees = f"frees {theme.text(row.frees)}" if row.frees else ""
            cells = f'<td{indent}>{_op(row.ins)}</td><td>{what}</td><td class="faint">{frees}</td>'
            kind = ' class="wait"' if row.ins.op == WAIT else ""
        lines.append(f'<tr{kind}><td class="number">{row.position}</td>{cells}')
    return _framed([shown.title], lines, [row.ins for row in rows if row.ins], shown.notes)


def difference_table(difference: Any, signs: Mapping[str, str]) -> str:
    """An `interpret.differences.Difference`; ``signs``: what each sign of a change means."""
    lines, changes = [], difference.changes
    for change in changes:
        does, amount, of = map(theme.text, (change.does, change.amount, change.of))
        lines.append(
            f'<tr><td title="{signs[change.sign]}"><b>{change.sign}</b></td>'
            f"<td>{_op(change.example)}</td><td>{does}</td><td>{amount}</td>"
            f'<td class="long">{of}</td>'
        )
    words = ", ".join(f"{sign} {said}" for sign, said in signs.items())
    notes = [words if lines else "no difference"]
    return _framed(difference.titles, lines, [change.example for change in changes], notes)


def meaning_of(ins: Instr) -> tuple[str, str]:
    """What an instruction's colour says, and the colour."""
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
    legend = " · ".join(  # a page that takes no style from a notebook has words alone
        f"<span>{_swatch(fill)}{theme.text(meaning)}</span>"
        for meaning, fill in sorted(set(map(meaning_of, shown)))
    )
    body = "".join(f"{line}</tr>" for line in lines)
    foot = "".join(f'<p class="faint">{theme.text(note)}</p>' for note in notes)
    look = theme.look()  # by name: a page may hold older tables, in another look
    style = f"<style>\n{STYLE.substitute(vars(look))}</style>"
    return (
        f'{style}<div class="paralab-program {look.name}"><p>{head}</p>'
        f'<p class="faint">{legend}</p><table>{body}</table>{foot}</div>'
    )
