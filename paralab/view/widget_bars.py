"""Widgets that compare alternatives, a bar for each: what a device holds, and what it sends.

Both numbers come from the compiled program (interpret/quick.py), padding included, without delay
and for any number of devices. “Run it” trains the chosen alternative with one real process per
device; the ledger's peak and the counted bytes of that run are then shown below the prediction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from paralab.checks import count_of, illegal
from paralab.interpret import quick
from paralab.spec import ModelSpec, Plan
from paralab.theory.zero import volume
from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import bars as mark
from paralab.view.matrix_blocks import MODE_NAME
from paralab.view.memory_curves import curves, fullest
from paralab.view.theme import in_bytes
from paralab.view.widget import At, Widget
from paralab.view.widget_parts import buttons, refusal, slider

STAGES = {0: "plain DP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
PRECISIONS = {"fp32": "fp32", "bf16, mixed": "bf16", "fp16, mixed": "fp16"}
RECOMPUTE = {"all saved": "none", "selective recompute": "selective", "full recompute": "full"}
WIDE = "hidden {:,}".format
MEMORY, TRAFFIC = (0.0, 0.62), (0.68, 1.0)  # parts of the picture's width
Kept = Mapping[str, int]


class Alternatives(Widget):
    """A bar for each value of one knob, the chosen one in full colour.

    among   the name of the knob        called   {its value: the name of that alternative}
    axis    of parallelism, along which bytes are sent        each   the word for a rank
    listed  names of those that have a row in the table also if they are not chosen
    """

    among: str
    called: Mapping[Any, str]
    listed: Collection[str]
    axis: str
    each: str

    def held(self, at: At) -> Kept:
        """{category: bytes} at the peak of a step, on each device."""
        return quick.peak(at.model, at.plan, gloo=not self._gpus(at))

    def sent(self, at: At) -> Fraction:
        """Bytes that a device sends per step, padding included; the mean over a tp group."""
        return quick.sent(at.model, at.plan)

    def alternatives(self, at: At) -> dict[str, At]:
        """{name: settings} of the alternatives that are possible."""
        return {name: at.but(**{self.among: value}) for value, name in self.called.items()}

    def _extra(self, at: At) -> dict[str, str]:
        """Columns of the table that only an alternative's prediction has."""
        return {}

    def _finding(self, at: At) -> str:
        """The picture's title."""
        raise NotImplementedError

    def _found(self, at: At) -> dict[str, tuple[Kept, Fraction]]:
        """{name: (bytes held at the peak, bytes sent)} of the possible alternatives, and next to
        the chosen one those of the run, "measured", if there is one.
        """
        found: dict[str, tuple[Kept, Fraction]] = {}
        for name, settings in self.alternatives(at).items():
            found[name] = self.held(settings), self.sent(settings)
            if at.measured is not None and name == self.called[at[self.among]]:
                held, sent = fullest(curves(at.measured)).held, at.measured.traffic()["bytes"]
                found["measured"] = held, Fraction(round(sent.sum()), len(sent))  # the mean
        return found

    def _charts(self, at: At) -> list[Chart]:
        """Bars of memory by category, and next to each a bar of the bytes that are sent."""
        found = self._found(at)
        bars = {name: held for name, (held, _) in found.items()}
        sent = {name: int(n) for name, (_, n) in found.items()}
        model, clock = at.model, "predicted" + " and measured" * (at.measured is not None)
        below = f"{clock}, per {self.each} and step · {model.layers} layers, h = {model.hidden:,}"
        below += f", {model.num_params:,} parameters · 1 MB = 10<sup>6</sup> bytes"
        bright = (self.called[at[self.among]], "measured")
        rows, sent_rows = mark.rows_of(bars), [(name, "sent", n) for name, n in sent.items()]
        totals, pale = mark.totals(rows), [name for name in bars if name not in bright]
        end, far = 1.22 * max([*totals.values(), 1]), 1.45 * max(*sent.values(), 1)
        bold = [name if name in pale else f"<b>{name}</b>" for name in bars]
        on_left = {"domain": MEMORY, "showgrid": False}
        on_right = {"domain": TRAFFIC, "showgrid": False, "anchor": "y", "nticks": 5}
        fig = figure(
            self._finding(at),
            below,
            height=150 + 52 * len(bars),
            xaxis=mark.bytes_axis("peak memory (MB)", end, 1e6, **on_left),
            xaxis2=mark.bytes_axis("sent per step (MB)", far, 1e6, **on_right),
            yaxis=mark.labels(list(bars), tickvals=list(bars), ticktext=bold),
            **mark.FITTING,
        )
        held = mark.bars(rows, per=1e6, end=end, letter=mark.LETTER / MEMORY[1], pale=pale)
        present = {kind for _, kind, n in rows if n}
        for trace in held:
            trace["showlegend"] = trace["name"] in present
        sums = mark.bars(
            sent_rows,
            per=1e6,
            end=far,
            look=lambda _: ("sent per device and step", theme.axis_colour(self.axis)),
            kinds=["sent"],
            axes=("x2", "y"),
            letter=0,
            pale=pale,
            showlegend=False,
            name="sent",
        )
        notes = mark.ends(totals, 1e6, size=13) + mark.ends(sent, 1e6, axes=("x2", "y"), size=13)
        fig.draw([*held, *sums], notes).tabled(("bar category bytes", rows + sent_rows))
        return [fig]

    def _rows(self, at: At) -> list[dict[str, str]]:
        chosen, found, rows = self.called[at[self.among]], self._found(at), []
        for name, settings in self.alternatives(at).items():
            if name == chosen or name in self.listed:
                row = _row(f"{name}, predicted", *found[name])
                rows.append(row | self._extra(settings))
        if at.measured is not None:
            row = _row(f"{chosen}, measured", *found["measured"])
            rows.append(dict.fromkeys(rows[0], "") | row)
        return rows

    def _outcome(self, at: At) -> str:
        found = self._found(at)
        (held, sent), (expected, due) = found["measured"], found[self.called[at[self.among]]]
        exact = "exactly as predicted" if sent == due else f"predicted: {in_bytes(float(due))}"
        peaks = [in_bytes(sum(kept.values())) for kept in (held, expected)]
        text = f"the peak is {peaks[0]} (predicted: {peaks[1]}), and a rank sends"
        return f"{text} {in_bytes(float(sent))} ({exact})"


class Zero(Alternatives):
    """Knobs: stage, devices N, micro-batches m, hidden size, precision, recomputation.

    model  the model, whose hidden size a knob changes; default: 8 layers
    plan   where the other knobs start; of its other settings bucket_bytes, prefetch and
           microbatch_size are used
    """

    name, steps = "zero", 4
    among, called, axis, each, listed = "stage", STAGES, "dp", "device", (STAGES[0],)
    used = ("dp", "zero_stage", "microbatches", "microbatch_size", "precision", "recompute")
    used += ("bucket_bytes", "prefetch")
    model = ModelSpec(layers=8, hidden=128, heads=4, seq_len=64)  # ZeRO-3 gathers one block of 8
    plan = Plan(dp=4, zero_stage=2, microbatches=2, microbatch_size=1, bucket_bytes=2**18)
    board = {
        "stage": buttons("stage", {name: n for n, name in STAGES.items()}, sets="zero_stage"),
        "ranks": slider("devices N", (1, 2, 3, 4, 8, 16, 64), "device", sets="dp"),
        "microbatches": slider("micro-batches", (1, 2, 3, 4, 8), "micro-batch"),
        "hidden": slider("hidden size", (64, 96, 128, 192, 256, 384), WIDE),
        "precision": buttons("precision", PRECISIONS),
        "recompute": buttons("activations", RECOMPUTE),
    }

    def _extra(self, at: At) -> dict[str, str]:
        states = quick.states(quick.program_of(at.model, at.plan, "adamw", 0), 0)
        times = volume(at["stage"], at.plan.microbatches) if at.plan.dp > 1 else 0
        return {
            "bytes per parameter": f"{sum(states.values()) / at.model.num_params:.2f}",
            "sent, formula": f"{times} Ψ(N−1)/N" if times else "0",
        }

    def _finding(self, at: At) -> str:
        plain, stage = at.but(stage=0), at["stage"]
        held = sum(self.held(plain).values())
        text = f"{STAGES[stage]} on {count_of(at['ranks'], 'device')}: "
        if stage == 0:
            holder = "each" if at["ranks"] > 1 else "it"
            return f"{text}{holder} holds all states, {in_bytes(held)} at its peak"
        text += f"{100 * sum(self.held(at).values()) / held:.0f} % of the memory of plain DP"
        if not self.sent(plain):
            return f"{text}; one device has nothing to shard"
        times = float(self.sent(at) / self.sent(plain))
        traffic = "the same" if abs(times - 1) < 0.01 else f"{theme.times(times)} the"
        return f"{text} for {traffic} traffic"


class Tensor(Alternatives):
    """Knobs: mode, tokens per step, hidden size, ranks.

    model  the model, whose hidden size a knob changes; default: 2 layers, 32 tokens per sample
    plan   where mode, ranks and micro-batch size start; default: 2D on 4 ranks, 4 samples
    """

    name, steps = "tensor", 2
    among, called, axis, each, listed = "mode", MODE_NAME, "tp", "rank", MODE_NAME.values()
    model = ModelSpec(layers=2, hidden=64, heads=8, seq_len=32)
    plan = Plan(tp=4, tp_mode="2d", microbatch_size=4)
    board = {
        "mode": buttons("mode", {name: mode for mode, name in MODE_NAME.items()}, sets="tp_mode"),
        "tokens": slider(
            "tokens",
            (128, 256, 512, 2048, 8192, 32768, 131072),
            "token",
            start=lambda widget: widget.plan.microbatch_size * widget.model.seq_len,
        ),
        "hidden": slider("hidden size", (64, 128, 256, 512, 2048, 8192, 12288), WIDE),
        "ranks": slider("ranks P", (4, 8, 16, 64), "rank", sets="tp"),
    }

    def _check(self) -> None:
        if self.plan.world_size > self.plan.tp or self.plan.tp == 1:
            why = "this widget is about tensor parallelism alone"
            raise illegal("plan", self.plan, why, "tp of at least 2, and pp=1, dp=1")

    def _offered(self, name: str, value: Any) -> bool:
        return name != "tokens" or value % self.model.seq_len == 0

    def _plan(self, at: At) -> Plan:
        """Raises ``ValueError`` if the mode is impossible with these ranks, heads or samples."""
        samples = at["tokens"] // self.model.seq_len
        plan = Plan(tp=at["ranks"], tp_mode=at["mode"], microbatch_size=samples)
        plan.validate(at.model)
        return plan

    def _missing(self, at: At) -> tuple[str, str]:
        """Why the chosen mode is impossible, and what would work; "" twice if it is possible."""
        try:
            self._plan(at)
        except ValueError as error:
            asked, why, legal = refusal(error)
            return f"{asked} is impossible: {why}", legal
        return "", ""

    def _blocked(self, at: At) -> str:
        why, _ = self._missing(at)
        said = f"“Run it” cannot train with {self.called[at['mode']]}, as {why}"
        return said if why else super()._blocked(at)

    def _charts(self, at: At) -> list[Chart]:
        """The possible modes; if the chosen one is not among them, notes say why."""
        why, legal = self._missing(at)
        if why:
            at.notes += [f"{self.called[at['mode']]} is not drawn, as {why}"]
            at.notes += [f"what would work: {legal}"]
        return super()._charts(at)

    def alternatives(self, at: At) -> dict[str, At]:
        """{name: settings} of the possible modes, without 2.5D if that is 2D and not chosen."""
        possible = {}
        for name, settings in super().alternatives(at).items():
            try:
                plan = settings.plan
            except ValueError:
                continue
            if plan.tp_mode != "2.5d" or plan.tp_grid[1] > 1 or at["mode"] == "2.5d":
                possible[name] = settings
        if not possible:
            tokens = f"{at.model.heads} heads and {at['tokens']:,} tokens"
            why = f"no mode can shard {tokens} over so many ranks"
            legal = "fewer ranks, more tokens or a larger hidden size"
            raise illegal("ranks", at["ranks"], why, legal)
        return possible

    def _finding(self, at: At) -> str:
        sent = {name: self.sent(settings) for name, settings in self.alternatives(at).items()}
        chosen, least = self.called[at["mode"]], min(sent, key=sent.__getitem__)
        text = f"{at['ranks']} ranks, {at['tokens']:,} tokens: "
        if chosen not in sent:
            return f"{text}{chosen} is impossible; {least} sends the least"
        if chosen == least:
            return f"{text}{chosen} sends the least"
        times = float(sent[chosen] / sent[least])
        return f"{text}{chosen} sends {theme.times(times)} as much as {least}"


def _row(name: str, held: Kept, sent: Fraction) -> dict[str, str]:
    parts = {
        "parameters": held.get("parameters", 0),
        "gradients, optimizer": held.get("gradients", 0) + held.get("optimizer", 0),
        "activations": held.get("activations", 0),
        "buffers": held.get("buffers", 0),
    }
    total = sum(held.values())
    parts |= {"other": total - sum(parts.values()), "total": total, "sent": float(sent)}
    return {"at the peak": name, **{head: in_bytes(size) for head, size in parts.items()}}
