"""Build the notebooks of labs/ from tests/labs/src: percent scripts in, executed notebooks out.

    python tests/labs/build.py                    every lab
    python tests/labs/build.py 01_collectives     one of them

A source src/NN_name.py makes labs/NN_name.ipynb, the student's notebook. If anything in it is
marked as a solution, it makes labs/solutions/NN_name.ipynb too. Four marks:

    ### BEGIN SOLUTION          code between these two lines, at any indentation, is the answer's;
    ### STUB: return None       the student gets what the STUB lines say instead (any number of
    return 2 * (n - 1) / n      them; none: raise NotImplementedError("your turn")), indented as
    ### END SOLUTION            BEGIN is. No notebook shows the mark lines themselves
    ### ANSWER: name            here comes paralab/exercises/answers/name.py, or answers/name.py, a
                                second solution; marks and all, without its docstring
                                (marks.py inserts it)
    # %% tags=["solution-only"]             this cell, code or markdown, is in the solutions only
    # %% [markdown] tags=["student-only"]   and this one in the student's notebook only

Everything else, the other tags included, is the same in both. The figure of the cell tagged
``readme-picture`` is written to pictures/timeline.png. A stray or misspelled mark is an error that
names the cell.

Two builds give byte-identical files, except for what cells tagged ``measured`` show: cell ids come
from the cells' text, metadata is fixed, and neither timings nor widget state are stored. Every
plotly figure and every widget is stored with a picture of itself, which is what GitHub and
nbconvert show; drawing it needs chromium. What is no longer true `make nbval` says.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser import chromium
from lab_outputs import PLOTLY, PNG, WIDGET
from marks import solution, student
from paralab.view import widget_picture
from widget_png import drawn as drawn_widget

HERE = Path(__file__).resolve().parent
LABS = HERE.parents[1] / "labs"
SOURCES = HERE / "src"
CELL_TIMEOUT_S = 300  # against a cell that hangs
README_PICTURE, README_TAG = HERE / "pictures" / "timeline.png", "readme-picture"
PICTURE_WIDTH = widget_picture.WIDTH[1]
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SOLUTION_ONLY, STUDENT_ONLY = "solution-only", "student-only"
READER_NOTES = ("lines_to_next_cell", "lines_to_end_of_cell_marker")  # jupytext's, of the script


def cells_of(source: Path, *, solved: bool = False) -> NotebookNode:
    """The notebook that a percent script describes, not yet run.

    solved  the one with solutions, not the student's
    Raises ValueError naming source and cell where a mark is astray.
    """
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    left_out = STUDENT_ONLY if solved else SOLUTION_ONLY
    notebook.cells = [c for c in notebook.cells if left_out not in c.metadata.get("tags", ())]
    seen: dict[str, int] = {}
    for number, cell in enumerate(notebook.cells):
        for note in READER_NOTES:
            cell.metadata.pop(note, None)
        tags = [t for t in cell.metadata.pop("tags", ()) if t not in (SOLUTION_ONLY, STUDENT_ONLY)]
        if tags:
            cell.metadata["tags"] = tags
        if cell.cell_type == "code":
            try:
                cell.source = (solution if solved else student)(cell.source)
            except ValueError as error:
                raise ValueError(f"{source.name}, cell {number}: {error}") from None
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def notebooks_of(source: Path) -> dict[Path, bool]:
    """What ``source`` makes: each notebook's path, and whether it is the one with solutions."""
    made = {LABS / f"{source.stem}.ipynb": False}
    if cells_of(source) != cells_of(source, solved=True):
        made[LABS / "solutions" / f"{source.stem}.ipynb"] = True
    return made


def execute(notebook: NotebookNode, folder: Path, *, pictures: bool) -> NotebookNode:
    """Run every cell in ``folder`` and keep what it shows. Raises nbclient's errors."""
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
    )
    client.extra_arguments = ["--IPKernelApp.log_level=ERROR"]  # else one warning per kernel
    drawn = {widget_picture.VARIABLE: "1"} if pictures else {}
    client.execute(env={**os.environ, "PLOTLY_RENDERER": "plotly_mimetype", **drawn})
    if pictures:
        draw_pictures(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)  # nbclient notes the kernel's exact version
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET, None)
            if "traceback" in output:
                output.traceback = [_portable(line) for line in output.traceback]
    return notebook


def draw_pictures(notebook: NotebookNode) -> None:
    """Put a picture next to every figure and in the place of every widget. Not in the kernel: a
    browser's noise is no output.
    """
    import plotly.io

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    for data in (output.data for output in outputs if PLOTLY in output.get("data", {})):
        figure = {"data": data[PLOTLY]["data"], "layout": data[PLOTLY]["layout"]}
        drawn = plotly.io.to_image(
            figure, format="png", width=PICTURE_WIDTH, scale=1, validate=False
        )
        data[PNG] = base64.b64encode(drawn).decode()
    for data in (output.get("data", {}) for output in outputs):
        if widget := data.pop(widget_picture.FIGURES, None):
            data[PNG] = base64.b64encode(drawn_widget(widget)).decode()


def _portable(line: str) -> str:
    """A traceback's line without the folder this clone or this environment happens to be in."""
    for folder in (str(LABS.parent), sys.prefix):
        for spelling in (folder, folder.replace(str(Path.home()), "~", 1)):
            line = line.replace(spelling + os.sep, "")
    return line


def build(source: Path, target: Path, *, solved: bool = False, pictures: bool = True) -> None:
    """Write the executed notebook of ``source`` to ``target``, at once or not at all."""
    target.parent.mkdir(exist_ok=True)
    notebook = execute(cells_of(source, solved=solved), target.parent, pictures=pictures)
    partial = target.with_suffix(".partial")
    partial.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    partial.replace(target)


def keep_readme_picture(lab: Path) -> None:
    """Write the first figure of the cell tagged ``readme-picture`` to where README shows it."""
    cells = nbformat.read(lab, as_version=4).cells
    tagged = [cell for cell in cells if README_TAG in cell.metadata.get("tags", ())]
    shown = [output.get("data", {}) for cell in tagged for output in cell.get("outputs", [])]
    if pictures := [data[PNG] for data in shown if PNG in data]:
        README_PICTURE.parent.mkdir(exist_ok=True)
        README_PICTURE.write_bytes(base64.b64decode(pictures[0]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the notebooks of labs/.")
    parser.add_argument("labs", nargs="*", metavar="LAB", help="e.g. 00_one_device; default: all")
    chosen = parser.parse_args(arguments)
    sources = {path.stem: path for path in sorted(SOURCES.glob("[0-9]*.py"))}
    for name in chosen.labs:
        if name not in sources:
            parser.error(f"LAB={name!r}: no such script; legal: {', '.join(sources) or 'none yet'}")
    wanted = chosen.labs or list(sources)
    if (browser := chromium.find()) is None:
        print(chromium.ADVICE.format(python=sys.executable), file=sys.stderr)
        return 1
    os.environ["BROWSER_PATH"] = browser  # what draws the pictures reads this
    return 1 if sum(_trouble(name, sources[name]) for name in wanted) else 0


def _trouble(name: str, source: Path) -> int:
    """Build every notebook of one source; how many went wrong."""
    try:
        for target, solved in notebooks_of(source).items():
            build(source, target, solved=solved)
            if not solved:
                keep_readme_picture(target)
            shown = target.relative_to(LABS).with_suffix("")
            print(f"{shown}: {target.stat().st_size / 1000:.0f} kB", flush=True)
    except (CellExecutionError, DeadKernelError, ValueError) as error:
        print(f"{name}: {_first_lines(error)}", file=sys.stderr)
        return 1
    return 0


def _first_lines(error: Any) -> str:
    """nbclient's message without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()


if __name__ == "__main__":
    sys.exit(main())
