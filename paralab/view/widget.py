"""The base of all widgets: knobs, a prediction that follows them, and a button for a real run.

A subclass of `Widget` declares what it starts from (``model``, ``plan``, ``cluster``) and its knobs
(``board``). For given settings, and the run made with them, if any, it says what is drawn
(`_charts`), which numbers are in the table above (`_rows`) and how the run compares with the
prediction (`_outcome`). Everything also works without a mouse and without a browser:

    widget.predict(ranks=8)          the same picture as a plain call; no slider moves
    widget.set(ranks=8)              move sliders
    widget.run(ranks=8).wait()       “Run it”, and the picture when it has ended
    widget.stop()                    the Stop button

The real run has a thread of its own, so page and kernel stay responsive. Its errors are shown in
the widget; nothing is printed. Results are kept by the settings on which they depend, so a slider
that returns to these settings finds them again.
"""

from __future__ import annotations

import html
import math
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import ipywidgets as ipw

from paralab.checks import illegal, instance
from paralab.interpret.predict import predict
from paralab.ranks.errors import Stopped
from paralab.report.tables import Tables
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.view import widget_parts as parts
from paralab.view import widget_picture
from paralab.view.chart import MAX_REPR, Chart
from paralab.view.comms import heard_while_busy
from paralab.view.widget_live import View
from paralab.view.widget_parts import Knob, processes, this_machine

STALE = "paralab-stale"
GREY = f"<style>.{STALE} {{ opacity: 0.2; pointer-events: none; }}</style>"


class At(dict[str, Any]):
    """Settings of a widget, {knob: value}, and what follows from them, computed when first read.

    plan, model, cluster   what the settings mean. Reading them raises ``ValueError`` if the
                           settings are impossible
    predicted              the predicted step
    measured, replayed     the result of a run with these settings, or None; its replay on
                           ``cluster``
    notes                  what the page says of them: warnings of the prediction, and the like
    """

    def __init__(self, widget: Widget, values: dict[str, Any], measured: Any = None) -> None:
        super().__init__(values)
        self.widget, self.measured, self.notes = widget, measured, []

    plan: Plan = cached_property(lambda self: self.widget._plan(self))
    model: ModelSpec = cached_property(lambda self: self.widget._model(self))
    cluster: Cluster = cached_property(lambda self: self.widget._cluster(self))
    predicted: Tables = cached_property(lambda self: self.widget._prediction(self))
    replayed: Tables = cached_property(lambda self: self.widget._replay(self))

    @property
    def runs(self) -> list[Tables]:
        """A run's replay, and what was measured; [] without a run."""
        return [] if self.measured is None else [self.replayed, self.measured]

    def but(self, **changed: Any) -> At:
        """These settings with some of them changed; their notes are noted here too."""
        other = At(self.widget, {**self, **changed}, self.measured)
        other.notes = self.notes
        return other


@dataclass
class _Run:
    """One press on “Run it”."""

    at: At
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    error: Exception | None = None


class Widget(ipw.VBox):
    """Knobs, prediction, “Run it” and “Stop”. The module's docstring has the calls.

    state   "idle" | "running" | "done" | "stopped" | "error"
    values  the current settings, {knob: value}, with what follows from them (`At`)
    knobs   {knob: its ipywidget}
    chart   the chart on screen; ``charts`` are those of all views, of which it is the first
    error   the error of a run, or the one that says what is impossible, while it is shown

    model, plan   what the knobs start from
    cluster       what is predicted and replayed on; None: this machine, as `pl.run` would take it
    """

    name = "widget"
    model, plan = ModelSpec.preset("laptop"), Plan()
    cluster: Cluster | None = None
    used: tuple[str, ...] = ()  # settings of the plan: others have their defaults; (): all are used
    board: dict[str, Knob] = {}
    steps, longest = 6, math.inf  # of a real run: its steps, and the seconds that it may take
    steady = False  # whether the time axis stays while steps fit: a shorter step then looks shorter
    width = "1200px"  # at most
    detail: str | None = None  # of the prediction, as `pl.predict` takes it
    replays: Mapping[str, Any] = {}  # arguments of `replay`, except the cluster
    _current_run: _Run | None = None  # a default, as `close` also runs if __init__ has raised
    _moving = False  # whether `set` moves several sliders, after which it draws once
    _axis_end = 0.0  # of the time axis, if that is steady

    def __init__(
        self,
        model: ModelSpec | None = None,
        plan: Plan | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        given = {"model": (model, ModelSpec), "plan": (plan, Plan), "cluster": (cluster, Cluster)}
        for name, (value, kind) in given.items():
            noun = "model description" if kind is ModelSpec else ""
            instance(name, value, kind | None, f"a pl.{kind.__name__}(...) or None", noun)
            if value is not None:
                setattr(self, name, value)
        self._cache: dict[Any, tuple[Any, Any]] = {}
        self._check()
        self._declared = {name: self._with_start(name, knob) for name, knob in self.board.items()}
        self.knobs = {name: knob.widget() for name, knob in self._declared.items()}
        self._results: dict[Any, Any] = {}
        self._lock = threading.RLock()  # sliders and buttons are handled also while a cell runs
        self._run_button, self._stop_button = (
            ipw.Button(description=text, icon=icon, button_style=style, layout={"width": "110px"})
            for text, icon, style in (("Run it", "play", "primary"), ("Stop", "stop", "danger"))
        )
        self._progress = ipw.IntProgress(min=0, max=1, layout={"width": "150px", "height": "20px"})
        self._status = ipw.HTML(layout={"flex": "1 1 300px", "margin": "0 0 0 8px"})
        self._numbers, self._trouble, self._code = ipw.HTML(), ipw.HTML(), ipw.HTML()
        self._views = parts.grid([], "max(min(100%, 560px), 34%)", "12px 16px", self.width)
        rows = [knob.row(self.knobs[name]) for name, knob in self._declared.items()]
        knobs = parts.grid(rows, f"{parts.KNOB}px", "0 28px", self.width)
        buttons = ipw.HBox([self._run_button, self._stop_button, self._progress, self._status])
        buttons.layout.align_items, buttons.layout.margin = "center", "6px 0"
        shown = [self._trouble, self._numbers, self._code, self._views]
        super().__init__([knobs, buttons, *shown], layout={"width": "100%"})
        self._draw()
        for widget in self.knobs.values():
            widget.observe(self._moved, names="value")
        self._run_button.on_click(lambda _: self.run() if self.state != "running" else None)
        self._stop_button.on_click(lambda _: self.stop())
        self._enter("idle")
        heard_while_busy(self)

    # ---- what a declaration says -------------------------------------------------------------
    def _charts(self, at: At) -> list[Chart]:
        """The views: the prediction, and with it the result of a run, if there is one."""
        raise NotImplementedError

    def _rows(self, at: At) -> list[dict[str, str]]:
        """The rows of the table, one for each clock."""
        raise NotImplementedError

    def _outcome(self, at: At) -> str:
        """How the run compares with the prediction, as the end of a sentence."""
        raise NotImplementedError

    def _check(self) -> None:
        """Drop what is not used of the plan; ``ValueError`` if the widget is not about the rest."""
        if self.used:
            self.plan = Plan(**{name: getattr(self.plan, name) for name in self.used})
        self.plan.validate(self.model)

    def _offered(self, name: str, value: Any) -> bool:
        """Whether a knob offers this value for the widget's model and cluster."""
        return True

    def _unused(self, name: str) -> bool:
        """Whether a knob has no effect at the values of the other knobs."""
        return False

    def _measure(self, at: At, **how: Any) -> Any:
        """Make the real run, in a thread of its own; raises ``Stopped`` soon after ``stop``."""
        from paralab.experiment import run

        return run(at.model, at.plan, steps=self.steps, **how)

    def _blocked(self, at: At) -> str:
        """Why “Run it” is disabled at these settings, as a sentence; "" if it is enabled."""
        many = self._ranks(at) > parts.MOST_RANKS
        return f"“Run it” takes up to {parts.MOST_RANKS} ranks, not {self._ranks(at)}" * many

    def _refused(self, at: At) -> str:
        """Why these settings cannot run on this machine, checked before a run; "" if they can."""
        cluster, ranks = at.cluster, at.plan.world_size
        machine = cluster if parts.is_local(cluster) else this_machine(ranks)
        if ranks > cluster.num_devices:  # a run needs no device for each rank, a prediction does
            at = at.but()
            at.cluster = cluster.replace(devices_per_node=ranks)
        return parts.no_room(at.predicted, machine, self.steps, self.longest)

    def _depends_on(self, at: At) -> Any:
        """What a result depends on: what is trained, and how. A knob that changes neither needs no
        new run. Raises ``ValueError`` if the settings are impossible.
        """
        return at.model, at.plan

    def _hint(self, at: At) -> str:
        """What “Run it” would do."""
        return f"“Run it” trains on {processes(self._ranks(at))}."

    def _ranks(self, at: At) -> int:
        """How many processes a run has, each of which reports its progress."""
        return at.get("ranks") or at.plan.world_size

    # ---- what settings mean ------------------------------------------------------------------
    def _with_start(self, name: str, knob: Knob) -> Knob:
        """The knob with its start value and the values that it offers for model and cluster."""
        link = knob.link and knob.link(self._machine(self.plan.world_size))
        if link:
            return knob.at(link)
        start, offers, sets = knob.start, knob.offers, knob.sets or name
        if start is None:
            start = getattr(self.plan if hasattr(self.plan, sets) else self.model, sets)
        elif callable(start):
            start = start(self)
        if not isinstance(offers, dict):
            offers = [value for value in offers if self._offered(name, value)]
        return replace(knob, start=start, offers=offers)

    def _fields_set(self, at: At, kind: type) -> dict[str, Any]:
        """{field: value} of those fields of a plan or a model that knobs set."""
        named = {knob.sets or name: at[name] for name, knob in self._declared.items()}
        return {one.name: named[one.name] for one in fields(kind) if one.name in named}

    def _plan(self, at: At) -> Plan:
        return self.plan.replace(**self._fields_set(at, Plan))

    def _model(self, at: At) -> ModelSpec:
        """The model, with the attention that a prediction and a run use on these devices."""
        sizes = self._fields_set(at, ModelSpec)
        if sizes.get("hidden", self.model.hidden) != self.model.hidden:
            sizes["heads"] = self._heads(sizes["hidden"])
        return self.model.replace(**sizes).resolved(gpus=self._gpus(at))

    def _heads(self, hidden: int) -> int:
        """How many heads the model has at this hidden size: as wide as before, at most 64."""
        most = max(1, min(64, hidden * self.model.heads // self.model.hidden))
        return next(n for n in range(most, 0, -1) if hidden % n == 0)

    def _here(self, ranks: int) -> Cluster:
        """This machine as the widget first saw it: even if it is calibrated again, a knob that
        returns to a value gives the same prediction again.
        """
        return self._cached(("here", parts.device_of_run(ranks)), None, lambda: this_machine(ranks))

    def _machine(self, ranks: int) -> Cluster:
        """The cluster that the widget was given, else this machine."""
        return self.cluster or self._here(ranks)

    def _gpus(self, at: At) -> bool:
        """Whether the devices are GPUs, which is known without calibrating anything."""
        given = self.cluster
        return given.gpus if given else parts.device_of_run(self._ranks(at)) == "cuda"

    def _cluster(self, at: At) -> Cluster:
        """The cluster; if there is a knob "bandwidth", links have that, with their own latency."""
        cluster = self._machine(self._ranks(at))
        if "bandwidth" not in at or at["bandwidth"] == self._declared["bandwidth"].start:
            return cluster
        link, inter = (
            one.replace(bandwidth=at["bandwidth"])
            for one in (parts.links_of(cluster), cluster.inter)
        )
        return cluster.replace(intra=link, inter=inter, collectives={})

    def _prediction(self, at: At, what: str = "chosen") -> Tables:
        """The predicted step; the last one of each name ``what`` is kept."""
        inputs = at.model, at.plan, at.cluster

        def predicted() -> tuple[Tables, list[str]]:
            with warnings.catch_warnings(record=True) as caught:  # they are shown, not printed
                warnings.simplefilter("always")
                report = predict(*inputs, steps=1, detail=self.detail)
            return report, [str(warning.message) for warning in caught]

        report, messages = self._cached(what, inputs, predicted)
        at.notes += [note for note in dict.fromkeys(messages) if note not in at.notes]
        return report

    def _replay(self, at: At) -> Tables:
        run, cluster = inputs = at.measured, at.cluster
        return self._cached("replay", inputs, lambda: run.replay(cluster, **self.replays))

    def _cached(self, what: Any, key: Any, make: Callable[[], Any]) -> Any:
        """The result kept as ``what`` if it was made for this ``key``; else a new one, now kept."""
        kept = self._cache.get(what)  # a run's thread may replace it meanwhile
        if kept is None or kept[0] != key:
            kept = self._cache[what] = key, make()
        return kept[1]

    # ---- plain calls -------------------------------------------------------------------------
    @property
    def chart(self) -> Chart:
        return self.charts[0]

    @property
    def values(self) -> At:
        at = At(self, {name: widget.value for name, widget in self.knobs.items()})
        at.measured = self._results.get(self._key(at))
        return at

    def _key(self, at: At) -> Any:
        """The key of a result; None for impossible settings."""
        try:
            needs = self._depends_on(at)
            hash(needs)
        except ValueError:
            return None
        except TypeError:  # a user's function may be an object that cannot be hashed
            return repr(needs)
        return needs

    @property
    def result(self) -> Any:
        """The result of the real run at the current settings; None if there was none."""
        return self.values.measured

    def at(self, **knobs: Any) -> At:
        """The current settings with these changed, and without the result of a run.

        Raises ``ValueError`` on a knob that the widget does not have and on a value that it does
        not offer.
        """
        for name, value in knobs.items():
            if name not in self.knobs:
                legal = ", ".join(self.knobs)
                raise illegal(name, value, f"the widget {self.name} has no such knob", legal)
            knobs[name] = self._declared[name].check(name, value)
        return At(self, {**self.values, **knobs})

    def predict(self, **knobs: Any) -> Chart:
        """The prediction as a picture; knobs that are not named have the sliders' values."""
        return self._charts(self.at(**knobs))[0]

    def set(self, **knobs: Any) -> Widget:
        """Move sliders; the picture is drawn once."""
        settings = self.at(**knobs)
        with self._lock:
            self._moving = True
            try:
                for name, value in settings.items():
                    self.knobs[name].value = value
            finally:
                self._moving = False
            self._refresh()
        return self

    def run(self, **knobs: Any) -> Widget:
        """Press “Run it”, after moving the sliders that are named. Returns at once; see `wait`.

        Raises ``RuntimeError`` while a run is in progress.
        """
        with self._lock:
            if self.state == "running":
                raise RuntimeError("a run is in progress here: .wait() for it, or .stop() it")
            if knobs:
                self.set(**knobs)
            if self._stale:
                raise self.error
            run = self._current_run = _Run(self.values)
            run.thread = threading.Thread(target=self._execute, args=(run,), daemon=True)
            self._progress.value, self._progress.max = 0, 1
            self._enter("running")
            run.thread.start()
        return self

    def stop(self) -> None:
        """End the run that is in progress, within a second; without one, nothing happens."""
        if self._current_run is not None and self.state == "running":
            self._current_run.stop.set()
            self._show_status("stopping …")

    def wait(self, timeout: float | None = None) -> Chart:
        """The picture once the run has ended. An interrupt stops the run.

        Raises the run's error, unless it was stopped, and ``TimeoutError`` after ``timeout``
        seconds.
        """
        if (run := self._current_run) is not None:
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
        knobs = [self._declared[name].repr(value) for name, value in self.values.items()]
        text = f"{self.name}({', '.join(knobs)})"
        return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 2]}…)"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if self._stale:
            return bundle
        return bundle | widget_picture.bundle(self.charts, repr(self))

    # ---- sliders -----------------------------------------------------------------------------
    def _moved(self, _: Any) -> None:
        if not self._moving:
            with self._lock:
                self._refresh()

    def _refresh(self, ended: _Run | None = None) -> None:
        """Draw the current settings. Never raises: a page would not show a callback's error.

        ended  the run that has just ended; while one is in progress, the state stays "running"
        """
        state, error, outcome, stale = "idle", ended and ended.error, "", False
        try:
            self._draw()
            at = self.values
            if error is not None:
                state = "stopped" if isinstance(error, Stopped) else "error"
            elif at.measured is not None:
                state, outcome = "done", self._outcome(at)
        except Exception as impossible:
            state, error, stale = "error", impossible, True
        if ended or self.state != "running":
            self._enter(state, error, outcome, stale=stale)

    def _draw(self) -> None:
        """Charts and table for the current settings."""
        at = self.values
        self._notes = at.notes
        first, *others = self._charts(at)
        self._numbers.value = parts.table(self._rows(at))
        self.charts = [self._steadied(first), *others]
        if not self._views.children:
            views = [View(chart, first=i == 0) for i, chart in enumerate(self.charts)]
            self._views.children = views
        for view, chart in zip(self._views.children, self.charts, strict=True):
            view.show(chart)

    def _steadied(self, chart: Chart) -> Chart:
        """The chart with the time axis of the last one, if it fits in and is not far shorter."""
        if self.steady and (axis_range := chart.layout.xaxis.range):
            self._axis_end = self._end(axis_range[1])
            chart.layout.xaxis.range = [-0.005 * self._axis_end, self._axis_end]
        return chart

    def _end(self, end: float) -> float:
        return self._axis_end if 0.4 * self._axis_end <= end <= self._axis_end else end

    # ---- the real run ------------------------------------------------------------------------
    def _execute(self, run: _Run) -> None:
        done: dict[int, int] = {}  # {rank: steps that it has done}

        def progress(rank: int, steps: int, total: int) -> None:
            done[rank] = steps
            least = min(done.values()) if len(done) == self._ranks(run.at) else 0
            self._progress.max, self._progress.value = total, least
            if least and not run.stop.is_set():
                self._show_status(f"running: step {least} of {total}")

        result = None
        try:
            if why := self._blocked(run.at) or self._refused(run.at):
                raise ValueError(why)
            result = self._measure(run.at, stop=run.stop, progress=progress)
        except BaseException as error:  # also one that would end the thread silently
            run.error = error
        with self._lock:
            if run.error is None:
                self._results[self._key(run.at)] = result
            self._refresh(run)  # for the settings, which may be others by now

    # ---- what is shown -----------------------------------------------------------------------
    @property
    def _stale(self) -> bool:
        """Whether the settings are impossible and the pictures, greyed, are those of others."""
        return STALE in self._views._dom_classes

    def _enter(
        self,
        state: str,
        error: BaseException | None = None,
        outcome: str = "",
        *,
        stale: bool = False,
    ) -> None:
        """Show a state and its error, as no one would see the traceback of a thread.

        outcome  how the run that is done compares with its prediction
        stale    whether the settings are impossible: the old views stay, greyed
        """
        running, at = state == "running", self.values
        blocked = "" if running or stale else self._blocked(at)
        self.state, self.error = state, error
        self._run_button.disabled = running or stale or bool(blocked)
        self._stop_button.disabled = not running
        for name, widget in self.knobs.items():
            widget.disabled = running or self._unused(name)
        self._progress.layout.display = "flex" if running else "none"
        self._run_button.description = "Run again" if state == "done" else "Run it"
        if stale:
            self._views.add_class(STALE)
        else:
            self._views.remove_class(STALE)
        trouble = parts.noted(*(html.escape(_sentence(note)) for note in self._notes))
        if stale:
            status = "There is no prediction: see below. Move a slider."
            trouble = GREY + parts.impossible(error)
            self._numbers.value = self._code.value = ""
        elif state == "error":
            status = "The run failed: see below. Change a setting and run again."
            trouble = parts.trouble(error)
        elif state == "idle":
            hint = f"{blocked}." if blocked else self._hint(at)
            status = f"Move a slider: the prediction follows. {hint}"
        elif state == "stopped":
            status = _sentence(error)
        elif running:
            status = "starting real processes …"
        else:
            status = f"Done, {processes(self._ranks(at))}: {outcome}."
        self._trouble.value = trouble
        self._show_status(status)

    def _show_status(self, text: str) -> None:
        self._status.value = f'<div style="line-height:1.4">{html.escape(text)}</div>'


def _sentence(words: object) -> str:
    text = str(words)
    return f"{text[:1].upper()}{text[1:]}."
