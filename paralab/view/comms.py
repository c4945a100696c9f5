"""Between a page and its widgets: sliders and buttons are handled also while a cell runs."""

from __future__ import annotations

from typing import Any


def heard_while_busy(widget: Any) -> None:
    """Let what the page says to an ipywidget, and to all in it, be handled while a cell runs.

    JupyterLab addresses it to a thread that the kernel has for widgets. From version 7.4 on
    ipykernel gives it to the thread from which the widget last sent something instead, so that a
    cell can await it. As a rule that is the thread of the cells: a button would wait for them.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = None
    for child in getattr(widget, "children", ()):
        heard_while_busy(child)
