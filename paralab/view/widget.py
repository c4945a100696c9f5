"""A widget in a notebook: knobs, a prediction that follows them, a button for the real thing.

`Widget` is the shell that all share. A declaration says what it starts from and which knobs there
are (``board``), and for settings and the run that they had, if any, what is drawn (`_charts`),
which numbers stand above it (`_rows`) and what is said of the run (`_done`). Model, plan and
cluster follow from what the knobs set. Nothing depends on a mouse or on a browser:

    widget.predict(ranks=8)          the same picture as a plain call; no slider moves
    widget.set(ranks=8)              move sliders
    widget.run(ranks=8).wait()       “Run it”, and the picture when it has ended
    widget.stop()                    the Stop button

The real run happens in a thread of its own: the page stays alive, and so does the kernel. What goes
wrong in it is shown in the widget; nothing is printed. Results are kept by the settings that they
depend on, so a slider that comes back to them finds them again.
"""

from __future__ import annotations

import contextlib
import html
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import ipywidgets as ipw
import plotly.graph_objects as go

from paralab.checks import illegal, instance
from paralab.interpret import quick
from paralab.interpret.predict import predict
from paralab.ranks.errors import Stopped
from paralab.report.tables import Tables
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.view import widget_parts as parts
from paralab.view import widget_picture
from paralab.view.chart import MAX_REPR, Chart
from paralab.view.widget_live import View
from paralab.view.widget_parts import Knob, here, processes

STALE = "paralab-stale"
GREY = f"<style>.{STALE} {{ opacity: 0.2; pointer-events: none; }}</style>"


class At(dict[str, Any]):
    """Settings of a widget, {knob: value}, and what follows from them, made when asked for.

    plan, model, cluster   what the settings mean. Raises ``ValueError`` where they mean nothing
    expect                 the predicted step
    found, replayed        the run that these settings had, and its replay on ``cluster``
    """

    def __init__(self, widget: Widget, values: dict[str, Any], found: Any = None) -> None:
        super().__init__(values)
        self.widget, self.found = widget, found

    plan: Plan = cached_property(lambda self: self.widget._plan(self))
    model: ModelSpec = cached_property(lambda self: self.widget._model(self))
    cluster: Cluster = cached_property(lambda self: self.widget._cluster(self))
    expect: Tables = cached_property(lambda self: self.widget._expected(self))
    replayed: Tables = cached_property(lambda self: self.widget._replay(self))

    def but(self, **changed: Any) -> At:
        """These settings with some of them changed."""
        return At(self.widget, {**self, **changed}, self.found)


@dataclass
class _Run:
    """One press on “Run it”."""

    at: At
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    done: dict[int, int] = field(default_factory=dict)  # steps by rank
    error: Exception | None = None


class Widget(ipw.VBox):
    """Knobs, prediction, “Run it” and “Stop”. See the module's text for the calls.

    state   "idle" | "running" | "done" | "stopped" | "error"
    values  {knob: value} as the sliders stand, with what follows from them (`At`)
    knobs   {knob: its ipywidget}
    chart   what is shown; of several views, ``charts``, the first
    figure  the plotly FigureWidget on screen that shows it; of several, ``figures``
    error   what a run ended with, or what cannot be predicted, as long as that is shown

    model, plan   what the knobs start from
    cluster       what is predicted and replayed on; None: this machine, as `pl.run` would take it
    """

    name = "widget"
    model, plan = ModelSpec.preset("laptop"), Plan()
    cluster: Cluster | None = None
    board: dict[str, Knob] = {}
    steps = 6  # of a real run
    steady = False  # whether the time axis stays while it can, so that a shorter step looks shorter
    width = "1200px"  # at most
    detail: str | None = None  # of the prediction, as `pl.predict` has it
    replays: Mapping[str, Any] = {}  # how `replay` is asked, but for the cluster
    _now: _Run | None = None  # also of one whose settings were refused, which is closed like any

    def __init__(
        self,
        model: ModelSpec | None = None,
        plan: Plan | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        given = {"model": (model, ModelSpec), "plan": (plan, Plan), "cluster": (cluster, Cluster)}
        for name, (value, kind) in given.items():
            said = "model description" if kind is ModelSpec else ""
            instance(name, value, kind | None, f"a pl.{kind.__name__}(...) or None", said)
            if value is not None:
                setattr(self, name, value)
        self._kept: dict[Any, tuple[Any, Any]] = {}
        self._check()
        self._kinds = {name: self._starting(name, knob) for name, knob in self.board.items()}
        self.knobs = {name: knob.widget() for name, knob in self._kinds.items()}
        self.state, self.error, self.charts, self._said = "idle", None, [Chart()], ""
        self._results: dict[Any, Any] = {}
        self._notes: list[str] = []  # what the prediction warns of, to be shown
        self._lock = threading.RLock()  # JupyterLab answers sliders while a cell is busy
        self._held = False
        self._upper: float | None = None
        self._go = parts.button("Run it", "play", "primary")
        self._halt = parts.button("Stop", "stop", "danger")
        self._bar = ipw.IntProgress(min=0, max=1, layout={"width": "150px", "height": "20px"})
        self._status = ipw.HTML(layout={"flex": "1 1 300px", "margin": "0 0 0 8px"})
        self._numbers, self._trouble, self._code = ipw.HTML(), ipw.HTML(), ipw.HTML()
        self._views = parts.grid("max(min(100%, 560px), 34%)", "12px 16px", self.width)
        knobs = parts.grid(f"{parts.KNOB}px", "0 28px", self.width)
        knobs.children = [knob.row(self.knobs[name]) for name, knob in self._kinds.items()]
        buttons = ipw.HBox([self._go, self._halt, self._bar, self._status])
        buttons.layout.align_items, buttons.layout.margin = "center", "6px 0"
        told = [buttons, self._trouble, self._numbers, self._code, self._views]
        super().__init__([knobs, *told], layout={"width": "100%"})
        self._draw(self._sketch())
        for widget in self.knobs.values():
            widget.observe(self._moved, names="value")
        self._go.on_click(lambda _: self.run() if self.state != "running" else None)
        self._halt.on_click(lambda _: self.stop())
        self._enter("idle")

    # ---- what a declaration says -------------------------------------------------------------
    def _charts(self, at: At) -> list[Chart]:
        """The prediction, and with it what a run found, if there was one: a view or several."""
        raise NotImplementedError

    def _rows(self, at: At) -> list[dict[str, str]]:
        """The table: a row for each clock."""
        raise NotImplementedError

    def _done(self, at: At) -> str:
        """How the run compares, as the end of a sentence."""
        raise NotImplementedError

    def _check(self) -> None:
        """Refuse a plan that the widget is not about."""
        self.plan.validate(self.model)

    def _offered(self, name: str, value: Any) -> bool:
        """Whether a knob has this value for this model and cluster."""
        return True

    def _idle(self, name: str) -> bool:
        """Whether a knob changes nothing, as the others stand."""
        return False

    def _measure(self, at: At, **how: Any) -> Any:
        """The real thing. In a thread of its own; ends with ``Stopped`` soon after ``stop``."""
        from paralab.experiment import run

        return run(at.model, at.plan, steps=self.steps, **how)

    def _blocked(self, at: At) -> str:
        """Why “Run it” cannot be pressed at these settings, as a sentence; "" if it can."""
        many = self._ranks(at) > parts.MOST_RANKS
        return f"“Run it” takes up to {parts.MOST_RANKS} ranks, not {self._ranks(at)}" * many

    def _refused(self, at: At) -> str:
        """Why these settings cannot run here, seen when they are to run; "" if they can."""
        each, ranks = sum(quick.fullest(at.model, at.plan)[1].values()), at.plan.world_size
        return parts.no_room(ranks, each, parts.there(at.cluster, ranks))

    def _needs(self, at: At) -> Any:
        """What a result depends on: what is trained, and how. A knob that changes neither needs no
        new run. Raises ``ValueError`` where the settings mean nothing.
        """
        return at.model, at.plan

    def _hint(self, at: At) -> str:
        """What “Run it” would do."""
        return f"“Run it” trains on {processes(self._ranks(at))}."

    def _ranks(self, at: At) -> int:
        """Processes that a run has, all of which report how far they are."""
        return at.get("ranks") or at.plan.world_size

    # ---- what settings mean ------------------------------------------------------------------
    def _starting(self, name: str, knob: Knob) -> Knob:
        """The knob, with the value that it starts with and the values that there are."""
        link = knob.link and knob.link(self.cluster or self._here(self.plan.world_size))
        if link:
            return knob.at(link)
        start = knob.start(self) if callable(knob.start) else knob.start
        if start is None:
            of = self.plan if hasattr(self.plan, knob.sets or name) else self.model
            start = getattr(of, knob.sets or name)
        if isinstance(knob.offers, dict):
            return replace(knob, start=start)
        offers = [value for value in knob.offers if self._offered(name, value)]
        return replace(knob, start=start, offers=offers)

    def _set(self, at: At, kind: type) -> dict[str, Any]:
        """{field: value} of those fields of a plan or a model that knobs set."""
        known = {one.name for one in fields(kind)}
        named = {knob.sets or name: at[name] for name, knob in self._kinds.items()}
        return {name: value for name, value in named.items() if name in known}

    def _plan(self, at: At) -> Plan:
        return self.plan.replace(**self._set(at, Plan))

    def _model(self, at: At) -> ModelSpec:
        """With the attention that suits the devices, as a prediction and a run have it."""
        sizes = self._set(at, ModelSpec)
        if sizes.get("hidden", self.model.hidden) != self.model.hidden:
            sizes["heads"] = self._heads(sizes["hidden"])
        return self.model.replace(**sizes).resolved(gpus=self._gpus(at))

    def _heads(self, hidden: int) -> int:
        """Heads as wide as the model's, up to 64 of them."""
        most = max(1, min(64, hidden * self.model.heads // self.model.hidden))
        return next(n for n in range(most, 0, -1) if hidden % n == 0)

    def _here(self, ranks: int) -> Cluster:
        """This machine, as the widget saw it first: one that is measured again meanwhile would move
        what a knob has led back to. (Whether a run fits is asked of it as it is then.)
        """
        return self._once(("here", parts.device_of_run(ranks)), None, lambda: here(ranks))

    def _machine(self, at: At) -> Cluster:
        """The cluster that the widget was given, else this machine."""
        return self.cluster or self._here(self._ranks(at))

    def _gpus(self, at: At) -> bool:
        """Whether devices are GPUs, which is known before anything is measured."""
        if self.cluster is None:
            return parts.device_of_run(self._ranks(at)) == "cuda"
        return self.cluster.gpus

    def _cluster(self, at: At) -> Cluster:
        """Its links are as fast as the knob "bandwidth" says, if there is one; latencies stay."""
        cluster = self._machine(at)
        if "bandwidth" not in at or at["bandwidth"] == self._kinds["bandwidth"].start:
            return cluster
        link, inter = (
            one.replace(bandwidth=at["bandwidth"])
            for one in (parts.links_of(cluster), cluster.inter)
        )
        return cluster.replace(intra=link, inter=inter, collectives={})

    def _expected(self, at: At, what: str = "chosen") -> Tables:
        """The predicted step; kept until ``what`` is asked for with other settings."""
        of = at.model, at.plan, at.cluster

        def made() -> tuple[Tables, list[str]]:
            with warnings.catch_warnings(record=True) as heard:  # it is shown, not printed
                warnings.simplefilter("always")
                report = predict(*of, steps=1, detail=self.detail)
            return report, [str(one.message) for one in heard]

        report, said = self._once(what, of, made)
        self._notes += [note for note in dict.fromkeys(said) if note not in self._notes]
        return report

    def _replay(self, at: At) -> Tables:
        of = at.found, at.cluster
        return self._once("replay", of, lambda: at.found.replay(at.cluster, **self.replays))

    def _once(self, what: Any, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gave for ``key`` the last time, if that was the last key of ``what``."""
        if what not in self._kept or self._kept[what][0] != key:
            self._kept[what] = key, make()
        return self._kept[what][1]

    # ---- plain calls -------------------------------------------------------------------------
    @property
    def chart(self) -> Chart:
        return self.charts[0]

    @property
    def figures(self) -> list[go.FigureWidget]:
        return [view.figure for view in self._views.children]

    @property
    def figure(self) -> go.FigureWidget:
        return self.figures[0]

    @property
    def values(self) -> At:
        at = At(self, {name: widget.value for name, widget in self.knobs.items()})
        at.found = self._results.get(self._key(at))
        return at

    def _key(self, at: At) -> Any:
        """Of a result; None for settings that mean nothing."""
        try:
            needs = self._needs(at)
        except ValueError:
            return None
        try:
            hash(needs)
        except TypeError:  # code of one's own may be an object that cannot be hashed
            return repr(needs)
        return needs

    @property
    def result(self) -> Any:
        """What the real run gave at the settings as they stand; None if there was none."""
        return self.values.found

    def at(self, **knobs: Any) -> At:
        """The settings as they stand, with these changed; without what a run of them found.

        Raises ``ValueError`` on a setting that the widget does not have or cannot take.
        """
        for name, value in knobs.items():
            if name not in self.knobs:
                legal = ", ".join(self.knobs)
                raise illegal(name, value, f"{self.name} has no such knob", legal)
            knobs[name] = self._kinds[name].check(name, value)
        return At(self, {**self.values, **knobs})

    def predict(self, **knobs: Any) -> Chart:
        """The prediction as a picture; settings that are not named are where the sliders stand."""
        with self._aside():
            return self._charts(self.at(**knobs))[0]

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """What is asked for in here leaves no note on the page."""
        kept, self._notes = self._notes, []
        try:
            yield
        finally:
            self._notes = kept

    def set(self, **knobs: Any) -> Widget:
        """Move sliders; the picture follows once."""
        asked = self.at(**knobs)
        with self._lock:
            self._held = True
            try:
                for name, value in asked.items():
                    self.knobs[name].value = value
            finally:
                self._held = False
            self._refresh()
        return self

    def run(self, **knobs: Any) -> Widget:
        """“Run it”, after moving the sliders that are named. Returns at once; see `wait`.

        Raises ``RuntimeError`` while a run is in progress.
        """
        with self._lock:
            if self.state == "running":
                raise RuntimeError("a run is in progress here: .wait() for it, or .stop() it")
            if knobs:
                self.set(**knobs)
            if self._stale:
                raise self.error
            run = self._now = _Run(self.values)
            run.thread = threading.Thread(target=self._work, args=(run,), daemon=True)
            self._bar.value, self._bar.max = 0, 1
            self._enter("running", "starting real processes …")
            run.thread.start()
        return self

    def stop(self) -> None:
        """End the run that is in progress, within a second; without one, nothing happens."""
        if self._now is not None and self.state == "running":
            self._now.stop.set()
            self._tell("stopping …")

    def wait(self, timeout: float | None = None) -> Chart:
        """The picture once the run has ended. An interrupt stops the run.

        Raises what the run ended with, unless it was stopped; ``TimeoutError`` after ``timeout``
        seconds.
        """
        if (run := self._now) is not None:
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
        """Take the widget off the page; a run that is in progress ends."""
        self.stop()
        super().close()

    def __repr__(self) -> str:
        knobs = [self._kinds[name].repr(value) for name, value in self.values.items()]
        said = f"{self.name}({', '.join(knobs)})"
        return said if len(said) <= MAX_REPR else f"{said[: MAX_REPR - 2]}…)"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if self._stale:
            return bundle
        return bundle | widget_picture.bundle(self.charts, repr(self))

    # ---- sliders -----------------------------------------------------------------------------
    def _moved(self, _: Any) -> None:
        if not self._held:
            with self._lock:
                self._refresh()

    def _refresh(self) -> None:
        """Draw what belongs to the settings as they stand. Never raises: a page would not show."""
        try:
            self._draw(self._sketch())
        except Exception as error:
            if self.state != "running":  # else it can wait for the run's end
                self._refuse(error)
        else:
            if self.state != "running":
                self._enter("done" if self.result is not None else "idle")

    def _sketch(self) -> list[Chart]:
        at, self._notes = self.values, []
        first, *others = self._charts(at)
        self._numbers.value = parts.table(self._rows(at))
        if at.found is not None:
            self._said = f"Done, {processes(self._ranks(at))}: {self._done(at)}."
        self.charts = [self._steadied(first), *others]
        return self.charts

    def _draw(self, charts: list[Chart]) -> None:
        if not self._views.children:
            self._views.children = [View(chart, first=i == 0) for i, chart in enumerate(charts)]
        for view, chart in zip(self._views.children, charts, strict=True):
            view.show(chart)

    def _steadied(self, chart: Chart) -> Chart:
        """The chart with the time axis of the last one, while that is not far too long."""
        bounds = chart.layout.xaxis.range
        if self.steady and bounds:
            if self._upper is None or not 0.4 * self._upper <= bounds[1] <= self._upper:
                self._upper = bounds[1]
            chart.layout.xaxis.range = [-0.005 * self._upper, self._upper]
        return chart

    # ---- the real run ------------------------------------------------------------------------
    def _work(self, run: _Run) -> None:
        def progress(rank: int, done: int, total: int) -> None:
            run.done[rank] = done
            least = min(run.done.values()) if len(run.done) == self._ranks(run.at) else 0
            self._bar.max, self._bar.value = total, least
            if least and not run.stop.is_set():
                self._tell(f"running: step {least} of {total}")

        found = None
        try:
            if why := self._blocked(run.at) or self._refused(run.at):
                raise ValueError(why)
            found = self._measure(run.at, stop=run.stop, progress=progress)
        except BaseException as error:  # also one that would end the thread
            run.error = error
        with self._lock:
            if run.error is None:
                self._results[self._key(run.at)] = found
            self.state = "idle"  # `_refresh` says what it is now, of settings that may be others
            self._refresh()
            if run.error is not None and not self._stale:  # else it is said what cannot be
                self._complain(run.error)

    # ---- what is shown -----------------------------------------------------------------------
    @property
    def _stale(self) -> bool:
        """The settings cannot be, and the pictures are of other ones, greyed."""
        return STALE in self._views._dom_classes

    def _enter(self, state: str, said: str = "", error: BaseException | None = None) -> None:
        running, at = state == "running", self.values
        blocked = self._blocked(at) if state in ("idle", "done") else ""
        self.state, self.error = state, error
        self._go.disabled, self._halt.disabled = running or bool(blocked), not running
        for name, widget in self.knobs.items():
            widget.disabled = running or self._idle(name)
        self._bar.layout.display = "flex" if running else "none"
        self._go.description = "Run again" if state == "done" else "Run it"
        self._views.remove_class(STALE)
        notes = [html.escape(f"{note[:1].upper()}{note[1:]}.") for note in self._notes]
        self._trouble.value = parts.noted(*notes) if state != "error" else ""
        if state == "idle":
            hint = f"{blocked}." if blocked else self._hint(at)
            said = said or f"Move a slider: the prediction follows. {hint}"
        self._tell(said or self._said)

    def _tell(self, said: str) -> None:
        self._status.value = f'<div style="line-height:1.4">{html.escape(said)}</div>'

    def _refuse(self, error: Exception) -> None:
        """The reason in place of the views, which stay, greyed; there is nothing to run."""
        cannot = isinstance(error, ValueError)
        said = "This combination cannot be" if cannot else "This did not work"
        self._enter("error", f"{said}: see below. Move a slider.", error)
        self._go.disabled = True
        self._trouble.value = GREY + (parts.impossible if cannot else parts.trouble)(error)
        self._numbers.value = self._code.value = ""
        self._views.add_class(STALE)

    def _complain(self, error: BaseException) -> None:
        """Show what went wrong as text: in the widget, for a thread's traceback finds no reader."""
        blocked = self._go.disabled
        if isinstance(error, Stopped):
            said = str(error)
            self._enter("stopped", f"{said[:1].upper()}{said[1:]}.", error)
        else:
            said = "It did not work: see below. Change a setting and run again."
            self._enter("error", said, error)
            self._trouble.value = parts.trouble(error)
        self._go.disabled = blocked
