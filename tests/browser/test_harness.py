"""The harness sees what it is for: a page with every known fault is accused of each of them."""

from __future__ import annotations

from patience import HANG_S

FAULTS = {
    "request off loopback: http://unknown.example/pixel.png": (
        "from IPython.display import HTML\nHTML('<img src=\"http://unknown.example/pixel.png\">')"
    ),
    "console error: the page complains": (
        "from IPython.display import Javascript\n"
        "Javascript('console.error(\"the page complains\")')"
    ),
    "shows stderr: a warning": "import sys\nprint('a warning', file=sys.stderr)",
    "cell 3: a figure without data": (
        "empty = {'application/vnd.plotly.v1+json': {'data': [], 'layout': {}}}\n"
        "display(empty, raw=True)"
    ),
    "an error outside of any cell: ZeroDivisionError": (
        "import ipywidgets\nbutton = ipywidgets.Button(description='Divide')\n"
        "button.on_click(lambda _: 1 / 0)\nbutton"
    ),
    "stderr (during comm_msg)": (
        "log = ipywidgets.Button(description='Log')\n"
        "log.on_click(lambda _: print('from a callback', file=sys.stderr))\nlog"
    ),
    "KeyError: 'no such rank'": "raise KeyError('no such rank')",
}


def test_every_fault_of_a_page_is_named(open_notebook):
    notebook = open_notebook(cells=list(FAULTS.values()))
    notebook.run_all()
    for name in ("Divide", "Log"):
        notebook.page.get_by_role("button", name=name).click()
    named = lambda: "\n".join(notebook.complaints())  # noqa: E731
    notebook.wait(
        lambda: all(fault in named() for fault in FAULTS), HANG_S,
        lambda: f"missing {[fault for fault in FAULTS if fault not in named()]} in:\n{named()}",
    )  # fmt: skip
