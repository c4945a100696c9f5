"""A learner's notebook, read and not run: its lab, and what an answer in it needs.

An answer needs the statements that import, define, assign or change a name that it uses. A call in
a cell may change what it is called on and what it is given: xs.append(1), setattr(C, "up", f),
@add_to(C). Read alone are the arguments of a call whose result is kept, of Python's own functions,
and of this package's; a function that is an argument stays what it is.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import symtable
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paralab import checks
from paralab.checks import illegal

LEGAL = "a notebook of a lab, as labs/05_zero.ipynb"
PYTHON = ("time", "capture", "prun")  # cell magics below which the cell is Python, run once
CHANGE = {"setattr", "delattr", "next", "exec"}  # of Python's own functions
READ = {*dir(builtins), "display", "show"} - CHANGE
LOOKS = {"check", "chart", "show"}  # methods
FAILS = SyntaxError, ValueError, RecursionError, MemoryError  # what reading a text may raise


class Statement(NamedTuple):
    """One statement of a notebook.

    cell     which one it is in
    defines  names that it defines, or assigns to
    changes  names that calls in it may change
    uses     names that it takes from others
    always   any answer may need it: what it defines is not known, or holds everywhere
    calls    what it calls, as written with dots
    names    {name: what it assigns to it, as written with dots}
    """

    cell: int
    text: str
    defines: frozenset[str]
    changes: frozenset[str]
    uses: frozenset[str]
    always: bool
    calls: tuple[str, ...]
    names: dict[str, str]

    @property
    def touches(self) -> frozenset[str]:
        return self.defines | self.changes


class Known(NamedTuple):
    """Names of a notebook: what it imports, of that what is this package's, and what it defines by
    def or class.
    """

    imported: set[str]
    ours: set[str]
    defined: set[str]

    def add(self, node: ast.stmt) -> None:
        for one in ast.walk(node):
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.defined.add(one.name)
            elif isinstance(one, (ast.Import, ast.ImportFrom)):
                for name in one.names:
                    told = (name.asname or name.name).partition(".")[0]
                    source = getattr(one, "module", None) or name.name
                    self.imported.add(told)
                    self.ours.update({told} if source.partition(".")[0] == "paralab" else ())


class Notebook(NamedTuple):
    """What there is to judge. name: the path as it was given; broken: what to say about cells that
    cannot be read, or "".
    """

    name: str
    path: Path
    lab: str
    statements: list[Statement]
    broken: str


def read(path: Any, labs: set[str]) -> Notebook:
    """Raises ValueError if the file is no notebook of one of these labs."""
    file = checks.path("notebook", path, LEGAL)
    try:
        cells = json.loads(file.read_text(encoding="utf-8-sig"))["cells"]
        texts = [(one["cell_type"], "".join(one["source"])) for one in cells]
    except OSError as error:
        raise illegal("notebook", str(path), error.strerror or "cannot be read", LEGAL) from error
    except (*FAILS, KeyError, TypeError) as error:
        raise illegal("notebook", str(path), "this is no notebook", LEGAL) from error
    words = "\n".join(text for kind, text in texts if kind == "markdown")
    found = [*re.findall(r"(?m)^# (\d\d)\b", words), *re.findall(r"^(\d\d)_", file.name)]
    lab = next((number for number in found if number in labs), None)
    if lab is None:
        why = "neither its title nor its name says which lab it is"
        raise illegal("notebook", str(path), why, LEGAL)
    return Notebook(
        str(path), file, lab, *statements([text for kind, text in texts if kind == "code"])
    )


def statements(cells: Sequence[str]) -> tuple[list[Statement], str]:
    """(every statement, what to say about cells that cannot be read)"""
    found: list[Statement] = []
    known, broken = Known({"get_ipython"}, set(), set()), ""
    for number, cell in enumerate(cells):
        try:
            text = _code(cell)
            for node in ast.parse(text).body:
                known.add(node)
                if not _is_magic(node):
                    found.append(_statement(number, text, node, known))
        except FAILS as error:
            why = f"{error.msg}, line {error.lineno}" if isinstance(error, SyntaxError) else error
            broken += f"; code cell {number + 1} cannot be read: {why}"
    return found, broken


def _code(cell: str) -> str:
    """A cell as Python: with IPython's magics and shell commands as calls of its, and empty if it
    is in another language.
    """
    if magic := re.match(r"\s*%%(\w+).*\n?", cell):
        return "\n" + _code(cell[magic.end() :]) if magic[1] in PYTHON else ""
    try:
        ast.parse(cell)
    except SyntaxError:
        from IPython.core.inputtransformer2 import TransformerManager

        return TransformerManager().transform_cell(cell)
    return cell


def _is_magic(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and _path(node.value).startswith("get_ipython.")


def _statement(cell: int, text: str, node: ast.stmt, known: Known) -> Statement:
    source = _source(text, node)
    defines, uses = _names(source, node)
    imports = [one for one in ast.walk(node) if isinstance(one, ast.ImportFrom)]
    always = any(one.module == "__future__" or one.names[0].name == "*" for one in imports)
    changes = frozenset(_changed(node, known)) - defines
    calls = tuple(_path(one.func) for one in ast.walk(node) if isinstance(one, ast.Call))
    targets = node.targets if isinstance(node, ast.Assign) else []
    names = {one.id: _path(node.value) for one in targets if isinstance(one, ast.Name)}
    return Statement(cell, source, defines, changes, uses - defines, always, calls, names)


def _source(text: str, node: ast.stmt) -> str:
    """Its text, with its decorators."""
    source = ast.get_source_segment(text, node) or ""
    decorators = getattr(node, "decorator_list", ())
    marks = [f"@{ast.get_source_segment(text, one)}" for one in decorators]
    return "\n".join([*marks, source])


def _names(source: str, node: ast.stmt) -> tuple[frozenset[str], frozenset[str]]:
    """What a statement defines or assigns to in the notebook, and what it takes from it: names that
    are a function's own are neither.
    """
    table = symtable.symtable(source, "notebook", "exec")
    names, inner = table.get_symbols(), [*table.get_children()]
    for one in inner:
        inner += one.get_children()
    defines = {n.get_name() for n in names if n.is_assigned() or n.is_imported()}
    defines |= {n.get_name() for n in names if n.is_namespace()}  # functions and classes
    uses = {n.get_name() for n in names if n.is_referenced()}
    uses |= {n.get_name() for one in inner for n in one.get_symbols() if n.is_global()}
    for place in _at_cell_level(node):  # table[key] = ...
        if isinstance(place, (ast.Attribute, ast.Subscript)) and isinstance(place.ctx, ast.Store):
            defines |= _root(place)
    return frozenset(defines), frozenset(uses)


def _at_cell_level(node: ast.AST) -> Iterator[ast.AST]:
    """What is evaluated when the statement is run: of functions and classes what stands around
    their bodies.
    """
    yield node
    for field, value in ast.iter_fields(node):
        kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda
        if field != "body" or not isinstance(node, kinds):
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, ast.AST):
                    yield from _at_cell_level(one)


def _changed(node: ast.stmt, known: Known) -> Iterator[str]:
    """Names that the calls of a statement may change."""
    level = list(_at_cell_level(node))
    dropped = [one.value for one in level if isinstance(one, ast.Expr)]  # results that none keeps
    marks = [mark for one in level for mark in getattr(one, "decorator_list", ())]
    for call in (one for one in level if isinstance(one, ast.Call)):
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        of = _root(call.func)
        if method in LOOKS or name in READ or of & known.ours:
            continue
        yield from () if name else of - known.imported
        words = (*call.args, *(one.value for one in call.keywords))
        given = {one for word in words for one in _root(word)} - known.imported - READ - CHANGE
        if call in marks or name in CHANGE:
            yield from given
        elif call in dropped:
            yield from given - known.defined


def _root(node: ast.AST) -> set[str]:
    """{"table"} of table[key].entry"""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _path(node: ast.AST) -> str:
    """ "pl.exercises.summa.check"; of what is called, and of what is called by a text, its name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_path(node.value)}.{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{_path(node.value)}.{node.slice.value}"
    return _path(node.func) if isinstance(node, ast.Call) else ""


def until(name: str, found: Sequence[Statement]) -> list[Statement]:
    """Without those behind the last check of the exercise ``name`` that only define or change again
    what was defined.
    """
    known: dict[str, str] = {}
    checks = []
    for one in found:
        if any(f".{_told(path, known)}".endswith(f".{name}.check") for path in one.calls):
            checks.append(one.cell)
        known |= {new: _told(path, known) for new, path in one.names.items()}
    last = max(checks, default=len(found))
    before = {name for one in found if one.cell <= last for name in one.touches}
    return [one for one in found if one.cell <= last or not one.touches <= before]


def _told(path: str, known: dict[str, str]) -> str:
    """A path whose first name stands for what was assigned to it."""
    first, dot, rest = path.partition(".")
    return f"{known.get(first) or first}{dot}{rest}"


def needed(found: Sequence[Statement], names: Sequence[str]) -> list[tuple[str, bool]]:
    """(source, whether it may fail) of what defines ``names`` and of everything that they need, in
    the notebook's order. A call that only changes something may have failed there, too.
    """
    wanted, grown = set(names), -1
    while grown != len(wanted):
        grown = len(wanted)
        for one in found:
            if one.touches & wanted:
                wanted |= one.uses
    taken = [one for one in found if one.always or one.touches & wanted]
    taken.sort(key=lambda one: not one.text.startswith("from __future__"))
    return [(one.text, not (one.always or one.defines & wanted)) for one in taken]
