"""A test bench in a notebook: sliders, a prediction that follows them, a button for the real thing.

`Bench` is the part that all widgets share. A subclass says what to predict (`_predict`), what to
run (`_measure`) and how to show the two beside one another (`_compare`). Nothing depends on a
mouse or on a browser:

    bench.predict(ranks=8)          the same picture as a plain call; no slider moves
    bench.set(ranks=8)              move sliders
    bench.run(ranks=8).wait()       «Run it», and the picture when it has ended
    bench.stop()                    the Stop button

The real run happens in a thread of its own: the page stays alive, and so does the kernel. What goes
wrong in it is shown in the widget; nothing is printed. Results are kept by the settings that they
depend on, so a slider that comes back to them finds them again.
"""

from __future__ import annotations

import html
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import ipywidgets as ipw
import plotly.graph_objects as go

from paralab.checks import illegal
from paralab.ranks.errors import Stopped
from paralab.view.chart import MAX_REPR, Chart
from paralab.view.widget_live import WIDTH, live, show
from paralab.view.widget_parts import Knob, Sketch, button, grid, table, trouble
from paralab.view.widget_shared import count

Progress = Callable[[int, int, int], None]
FOLLOWS = "Move a slider: the prediction follows. "


@dataclass
class _Run:
    """One press on «Run it»."""

    knobs: dict[str, Any]
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    done: dict[int, int] = field(default_factory=dict)  # steps by rank
    error: Exception | None = None


def _all_live(charts: list[Chart]) -> list[go.FigureWidget]:
    return [live(chart, first=i == 0) for i, chart in enumerate(charts)]


class Bench(ipw.VBox):
    """Sliders, prediction, «Run it» and «Stop». See the module's text for the calls.

    state   "idle" | "running" | "done" | "stopped" | "error"
    values  {knob: value} as the sliders stand
    knobs   {knob: its ipywidget}
    figure  the plotly FigureWidget on screen; ``chart`` the Chart it shows. Of several views they
            are the first of ``figures`` and ``charts``
    error   what a run ended with, or what cannot be predicted, as long as that is shown
    """

    name = "Bench"
    counts = True  # whether a run tells how far it is
    width = WIDTH  # pixels that its knobs take at most
    _now: _Run | None = None  # also of one whose settings were refused, which is closed like any

    def __init__(self, knobs: dict[str, Knob]) -> None:
        self._kinds = knobs
        self.knobs = {name: knob.widget() for name, knob in knobs.items()}
        self.state, self.error, self.charts = "idle", None, [Chart()]
        self.refresh_seconds: deque[float] = deque(maxlen=100)
        self._results: dict[Any, Any] = {}
        self._lock = threading.RLock()  # JupyterLab answers sliders beside a busy cell
        self._held = self._displayed = False
        self._upper: float | None = None
        self._go = button("Run it", "play", "primary")
        self._halt = button("Stop", "stop", "danger")
        self._bar = ipw.IntProgress(min=0, max=1, layout={"width": "150px", "height": "20px"})
        self._status = ipw.HTML(layout={"flex": "1 1 300px", "margin": "0 0 0 8px"})
        self._numbers, self._trouble = ipw.HTML(), ipw.HTML()
        self.figures = _all_live(self._sketch())
        self._views = self._arranged()
        board = grid([knob.row(self.knobs[name]) for name, knob in knobs.items()], self.width)
        buttons = ipw.HBox([self._go, self._halt, self._bar, self._status])
        buttons.layout.align_items, buttons.layout.margin = "center", "6px 0"
        super().__init__(
            [board, buttons, self._trouble, self._numbers, self._views], layout={"width": "100%"}
        )
        for widget in self.knobs.values():
            widget.observe(self._moved, names="value")
        self._go.on_click(lambda _: self.run() if self.state != "running" else None)
        self._halt.on_click(lambda _: self.stop())
        self._enter("idle")

    # ---- what a subclass says -----------------------------------------------------------------
    def _predict(self, knobs: dict[str, Any]) -> Sketch:
        """The prediction for these settings. Raises ``ValueError`` on what cannot be."""
        raise NotImplementedError

    def _measure(self, knobs: dict[str, Any], *, stop: threading.Event, progress: Progress) -> Any:
        """The real thing. In a thread of its own; ends with ``Stopped`` soon after ``stop``."""
        raise NotImplementedError

    def _compare(self, knobs: dict[str, Any], found: Any) -> Sketch:
        """Prediction and result beside one another."""
        raise NotImplementedError

    def _needs(self, knobs: dict[str, Any]) -> Any:
        """The settings that a result depends on, hashable; others need no new run."""
        return tuple(knobs.items())

    def _hint(self, knobs: dict[str, Any]) -> str:
        """What «Run it» would do."""
        return f"«Run it» trains on {count(self._ranks(knobs), 'real process', 'es')}."

    def _starting(self, knobs: dict[str, Any]) -> str:
        """What is said until the first step is done."""
        return f"starting {count(self._ranks(knobs), 'process', 'es')} …"

    def _blocked(self, knobs: dict[str, Any]) -> str:
        """Why «Run it» cannot be pressed at these settings, as a sentence; "" if it can."""
        return ""

    def _ranks(self, knobs: dict[str, Any]) -> int:
        """Processes that a run has, all of which tell how far they are."""
        return knobs.get("ranks", 1)

    def _arranged(self) -> ipw.Box:
        """The figures on the page."""
        return ipw.VBox(self.figures)

    def _refuse(self, error: Exception) -> None:
        """Say that nothing can be predicted for the settings as they stand."""
        self._complain(error)

    # ---- plain calls --------------------------------------------------------------------------
    @property
    def figure(self) -> go.FigureWidget:
        return self.figures[0]

    @property
    def chart(self) -> Chart:
        return self.charts[0]

    @property
    def values(self) -> dict[str, Any]:
        return {name: widget.value for name, widget in self.knobs.items()}

    @property
    def result(self) -> Any:
        """What the real run gave at the settings as they stand; None if there was none."""
        return self._results.get(self._needs(self.values))

    def predict(self, **knobs: Any) -> Chart:
        """The prediction as a picture; settings that are not named are where the sliders stand.

        Raises ``ValueError`` on a setting that the bench does not have or cannot take.
        """
        return self._predict(self._asked(knobs)).chart

    def set(self, **knobs: Any) -> Bench:
        """Move sliders; the picture follows once."""
        asked = self._asked(knobs)
        with self._lock:
            self._held = True
            try:
                for name, value in asked.items():
                    self.knobs[name].value = value
            finally:
                self._held = False
            self._refresh()
        return self

    def run(self, **knobs: Any) -> Bench:
        """«Run it», after moving the sliders that are named. Returns at once; see `wait`.

        Raises ``RuntimeError`` while a run is under way.
        """
        with self._lock:
            if self.state == "running":
                raise RuntimeError("a run is under way here: .wait() for it, or .stop() it")
            if knobs:
                self.set(**knobs)
            self._start()
        return self

    def stop(self) -> None:
        """End the run that is under way, within a second; without one, nothing happens."""
        run = self._now
        if run is not None and self.state == "running":
            run.stop.set()
            self._tell("stopping …")

    def wait(self, timeout: float | None = None) -> Chart:
        """The picture once the run has ended. An interrupt stops the run.

        Raises what the run ended with, unless it was stopped; ``TimeoutError`` after ``timeout``
        seconds.
        """
        run = self._now
        if run is not None:
            try:
                run.thread.join(timeout)
            except KeyboardInterrupt:
                self.stop()
                raise
            if run.thread.is_alive():
                raise TimeoutError(f"the run has not ended within {timeout:g} s")
            if run.error is not None and not isinstance(run.error, Stopped):
                raise run.error
        return self.chart

    def close(self) -> None:
        """Take the widget off the page; a run that is under way ends."""
        self.stop()
        super().close()

    def refresh_median(self) -> float:
        """Seconds from a slider's move to the finished picture, median of the last hundred."""
        return median(self.refresh_seconds) if self.refresh_seconds else float("nan")

    def __repr__(self) -> str:
        knobs = [self._kinds[name].says(value) for name, value in self.values.items()]
        said = f"{self.name}({', '.join(knobs)})"
        return said if len(said) <= MAX_REPR else f"{said[: MAX_REPR - 2]}…)"

    # ---- sliders ------------------------------------------------------------------------------
    def _asked(self, knobs: dict[str, Any]) -> dict[str, Any]:
        values = self.values
        for name, value in knobs.items():
            if name not in values:
                raise illegal(name, value, f"{self.name} has no such knob", ", ".join(values))
            values[name] = self._kinds[name].check(name, value)
        return values

    def _moved(self, _: Any) -> None:
        if not self._held:
            with self._lock:
                self._refresh()

    def _refresh(self) -> None:
        """Draw what belongs to the settings as they stand. Never raises: a page would not show."""
        began = time.perf_counter()
        try:
            self._draw(self._sketch())
        except Exception as error:
            if self.state != "running":  # else it can wait for the run's end
                self._refuse(error)
        else:
            self.refresh_seconds.append(time.perf_counter() - began)
            if self.state != "running":
                self._enter("done" if self.result is not None else "idle")

    def _draw(self, charts: list[Chart]) -> None:
        """A figure that no page has seen yet is made anew: it would not learn of changes. The old
        one is not closed: a page that just makes itself a model of it would fail, and say so.
        """
        if self._displayed:
            for figure, chart in zip(self.figures, charts, strict=True):
                show(figure, chart)
            return
        self.figures = _all_live(charts)
        self._views.children = self.figures

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        self._displayed = True
        return super()._repr_mimebundle_(**kwargs)

    def _sketch(self) -> list[Chart]:
        knobs, found = self.values, self.result
        sketch = self._predict(knobs) if found is None else self._compare(knobs, found)
        self.charts, self._said = [self._steady(sketch.chart), *sketch.beside], sketch.said
        self._numbers.value = table(sketch.rows)
        return self.charts

    def _steady(self, chart: Chart) -> Chart:
        """Its time axis stays while it can, so that a shorter step looks shorter."""
        bounds = chart.layout.xaxis.range
        if not bounds:
            return chart
        if self._upper is None or not 0.4 * self._upper <= bounds[1] <= self._upper:
            self._upper = bounds[1]
        chart.layout.xaxis.range = [-0.005 * self._upper, self._upper]
        return chart

    # ---- the real run -------------------------------------------------------------------------
    def _start(self) -> None:
        run = _Run(self.values)
        run.thread = threading.Thread(target=self._work, args=(run,), daemon=True)
        self._now, self._bar.value, self._bar.max = run, 0, 1
        self._enter("running", self._starting(run.knobs))
        run.thread.start()

    def _work(self, run: _Run) -> None:
        def progress(rank: int, done: int, total: int) -> None:
            run.done[rank] = done
            self._progress(run, total)

        try:
            found = self._measure(run.knobs, stop=run.stop, progress=progress)
        except Exception as error:
            run.error = error
            with self._lock:
                self._complain(error)
            return
        with self._lock:
            self._results[self._needs(run.knobs)] = found
            self.state = "idle"  # `_refresh` says what it is now
            self._refresh()

    def _progress(self, run: _Run, total: int) -> None:
        done = min(run.done.values()) if len(run.done) == self._ranks(run.knobs) else 0
        self._bar.max, self._bar.value = total, done
        if done and not run.stop.is_set():
            self._tell(f"running: step {done} of {total}")

    # ---- what is shown ------------------------------------------------------------------------
    def _enter(self, state: str, said: str = "", error: Exception | None = None) -> None:
        running = state == "running"
        self.state, self.error = state, error
        self._go.disabled = running or bool(self._blocked(self.values))
        self._halt.disabled = not running
        for widget in self.knobs.values():
            widget.disabled = running
        self._bar.layout.display = "flex" if running and self.counts else "none"
        self._go.description = "Run again" if state == "done" else "Run it"
        self._trouble.value = ""
        self._tell(said or (self._said if state == "done" else FOLLOWS + self._hint(self.values)))

    def _tell(self, said: str) -> None:
        self._status.value = f'<div style="line-height:1.4">{html.escape(said)}</div>'

    def _complain(self, error: Exception) -> None:
        """Show what went wrong as text: in the widget, for a thread's traceback finds no reader."""
        if isinstance(error, Stopped):
            said = str(error)
            self._enter("stopped", f"{said[:1].upper()}{said[1:]}.", error)
            return
        self._enter("error", "It did not work: see below. Change a setting and run again.", error)
        self._trouble.value = trouble(error)
