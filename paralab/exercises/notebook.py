"""Reads a learner's notebook without running it: its lab, and the statements that an answer needs.

An answer needs the statements that import, define, assign or change a name that it uses. A call of
a method may change its object, xs.append(1), and a call whose result is dropped its arguments,
fill(xs), unless the function is one of Python's or of this package's.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
import symtable
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paralab import checks
from paralab.checks import illegal
from paralab.exercises import LADDERS

LEGAL = "a notebook of a lab, such as labs/05_zero.ipynb"
PYTHON = ("time", "capture", "prun")  # cell magics below which the cell is Python, run once
LOOKS = {"check", "chart", "show"}  # methods that change nothing
READ = {*dir(builtins), "display", "show", "pl", "paralab"}  # their calls change no argument
MAY_FAIL = "try:\n    exec({!r})\nexcept Exception:\n    pass  # as in the notebook"
DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
FAILS = SyntaxError, ValueError  # that parsing a text may raise


class Statement(NamedTuple):
    """One statement of a notebook.

    cell     the number of its cell
    defines  names that it defines, or assigns to
    changes  names whose objects its calls may change
    uses     names that other statements define
    always   whether every answer needs it: an import of * or from __future__
    checks   names of the exercises whose ``check`` it calls
    """

    cell: int
    text: str
    defines: frozenset[str]
    changes: frozenset[str]
    uses: frozenset[str]
    always: bool
    checks: frozenset[str]

    @property
    def touches(self) -> frozenset[str]:
        return self.defines | self.changes


class Notebook(NamedTuple):
    """A notebook whose answers are to be judged.

    name    its path as the caller gave it
    broken  in words, the cells that cannot be parsed, or ""
    """

    name: str
    path: Path
    lab: str
    statements: list[Statement]
    broken: str


def read(path: Any) -> Notebook:
    """Read a notebook. Raises ValueError if it is not the notebook of a lab."""
    file = checks.path("notebook", path, LEGAL)
    try:
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        texts = [(one["cell_type"], "".join(one["source"])) for one in cells]
    except OSError as error:
        raise illegal("notebook", str(path), error.strerror or "cannot be read", LEGAL) from error
    except (*FAILS, KeyError, TypeError) as error:
        raise illegal("notebook", str(path), "it is not a notebook", LEGAL) from error
    markdown = "\n".join(text for kind, text in texts if kind == "markdown")
    numbers = [*re.findall(r"(?m)^# (\d\d)\b", markdown), *re.findall(r"^(\d\d)_", file.name)]
    lab = next((number for number in numbers if number in LADDERS), None)
    if lab is None:
        why = "neither its title nor its name says which lab it is"
        raise illegal("notebook", str(path), why, LEGAL)
    return Notebook(
        str(path), file, lab, *statements([text for kind, text in texts if kind == "code"])
    )


def statements(cells: Sequence[str]) -> tuple[list[Statement], str]:
    """(all statements; in words, the cells that cannot be parsed)"""
    parsed: list[Statement] = []
    made: dict[str, bool] = {}  # names of imports (True), functions and classes (False)
    paths: dict[str, str] = {}  # of the values that were assigned to them
    broken = ""
    for number, cell in enumerate(cells):
        try:
            text = _code(cell)
            for node in ast.parse(text).body:
                made |= _made(node)
                parsed.append(_statement(number, text, node, made, paths))
                for one in node.targets if isinstance(node, ast.Assign) else ():
                    if isinstance(one, ast.Name):
                        paths[one.id] = _path(node.value, paths)
        except FAILS as error:
            why = f"{error.msg}, line {error.lineno}" if isinstance(error, SyntaxError) else error
            broken += f"; code cell {number + 1} cannot be read: {why}"
    return parsed, broken


def _code(cell: str) -> str:
    """A cell as Python code, in which IPython's magics and shell commands are calls of get_ipython;
    empty if the cell is in another language.
    """
    if magic := re.match(r"\s*%%(\w+).*\n?", cell):
        return "\n" + _code(cell[magic.end() :]) if magic[1] in PYTHON else ""
    try:
        ast.parse(cell)
    except SyntaxError:
        from IPython.core.inputtransformer2 import TransformerManager

        return TransformerManager().transform_cell(cell)
    return cell


def _made(node: ast.stmt) -> Iterator[tuple[str, bool]]:
    """(name, True) of what a statement imports, (name, False) of its functions and classes."""
    for one in ast.walk(node):
        if isinstance(one, (ast.Import, ast.ImportFrom)):
            yield from (((n.asname or n.name).partition(".")[0], True) for n in one.names)
        elif isinstance(one, DEFINITIONS):
            yield one.name, False


def _statement(
    cell: int, text: str, node: ast.stmt, made: dict[str, bool], paths: dict[str, str]
) -> Statement:
    source = _source(text, node)
    defines, uses = _names(source, node)
    imports = [one for one in ast.walk(node) if isinstance(one, ast.ImportFrom)]
    always = any(one.module == "__future__" or one.names[0].name == "*" for one in imports)
    changes = frozenset(_changed(node, made)) - defines - {""}
    calls = [_path(one.func, paths) for one in ast.walk(node) if isinstance(one, ast.Call)]
    checks = frozenset(path.split(".")[-2] for path in calls if path.endswith(".check"))
    return Statement(cell, source, defines, changes, uses - defines, always, checks)


def _source(text: str, node: ast.stmt) -> str:
    """The text of a statement, with its decorators."""
    source = ast.get_source_segment(text, node) or ""
    decorators = getattr(node, "decorator_list", ())
    lines = [f"@{ast.get_source_segment(text, one)}" for one in decorators]
    return "\n".join([*lines, source])


def _names(source: str, node: ast.stmt) -> tuple[frozenset[str], frozenset[str]]:
    """(names that a statement defines or assigns, names that it uses), without the local names of
    functions.
    """
    table = symtable.symtable(source, "notebook", "exec")
    names, scopes = table.get_symbols(), [*table.get_children()]
    for one in scopes:
        scopes += one.get_children()
    defines = {n.get_name() for n in names if n.is_assigned() or n.is_imported()}
    uses = {n.get_name() for n in names if n.is_referenced()}
    uses |= {n.get_name() for one in scopes for n in one.get_symbols() if n.is_global()}
    for target in _at_cell_level(node):  # table[key] = ...
        if isinstance(target, (ast.Attribute, ast.Subscript)) and isinstance(target.ctx, ast.Store):
            defines |= {_root(target)} - {""}
    return frozenset(defines), frozenset(uses)


def _at_cell_level(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are evaluated when the statement runs: of functions, lambdas and classes all
    but their bodies.
    """
    yield node
    for field, value in ast.iter_fields(node):
        if field != "body" or not isinstance(node, (*DEFINITIONS, ast.Lambda)):
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, ast.AST):
                    yield from _at_cell_level(one)


def _changed(node: ast.stmt, made: dict[str, bool]) -> Iterator[str]:
    """Names of the objects whose methods a statement calls, or that it gives to a function."""
    nodes = list(_at_cell_level(node))
    dropped = [one.value for one in nodes if isinstance(one, ast.Expr)]
    for call in (one for one in nodes if isinstance(one, ast.Call)):
        owner, method = _root(call.func), getattr(call.func, "attr", "")
        if method in LOOKS or owner in READ:
            continue
        if method and not made.get(owner):
            yield owner
        if call in dropped:
            yield from {_root(word) for word in call.args} - READ - {*made}


def _root(node: ast.AST) -> str:
    """ "table" of table[key].entry; "" if it does not begin with a name."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _path(node: ast.AST, paths: dict[str, str]) -> str:
    """The dotted path of an expression, "pl.exercises.summa.check"; of a name with an entry in
    ``paths`` that entry; "" of anything else.
    """
    if isinstance(node, ast.Name):
        return paths.get(node.id) or node.id
    if isinstance(node, ast.Attribute):
        return f"{_path(node.value, paths)}.{node.attr}"
    return ""


def until(name: str, all_statements: Sequence[Statement]) -> list[Statement]:
    """The statements up to the last check of the exercise ``name``, and those after it that define
    or change a name for the first time: a later cell may redefine an answer that was checked.
    """
    last = max((s.cell for s in all_statements if name in s.checks), default=math.inf)
    before = {name for s in all_statements if s.cell <= last for name in s.touches}
    return [s for s in all_statements if s.cell <= last or not s.touches <= before]


def needed(all_statements: Sequence[Statement], names: Sequence[str]) -> str:
    """The source of the statements that define ``names`` and of all that these need, in the
    notebook's order. Those that only call may fail, as they may have failed in the notebook.
    """
    wanted, grown = set(names), -1
    while grown != len(wanted):
        grown = len(wanted)
        for s in all_statements:
            if s.touches & wanted:
                wanted |= s.uses
    taken = [s for s in all_statements if s.always or s.touches & wanted]
    taken.sort(key=lambda s: not s.text.startswith("from __future__"))
    must = [s.always or s.defines & wanted for s in taken]
    texts = (s.text if yes else MAY_FAIL.format(s.text) for s, yes in zip(taken, must, strict=True))
    return "\n\n".join(texts)
