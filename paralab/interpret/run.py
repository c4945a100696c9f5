"""Run a program: what every instruction does on one rank, with torch. A method each.

Values live in ``store``: a state is a tuple of tensors, a unit's parameters or gradient a `Flat`, a
share a flat tensor, what is kept for backward a list with an entry per op. An instruction with a
lane is begun here and its result may be used behind its WAIT, placed by programs/derive.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paralab.interpret.flat import DTYPES, Flat, Into, flat_of
from paralab.interpret.spans import spans
from paralab.interpret.state import State
from paralab.interpret.workers import Workers
from paralab.model import draws
from paralab.model.build import loss_share
from paralab.model.ops import Op
from paralab.parallel.layouts import activation_box, holding, looked_up
from paralab.programs.derive import lasts
from paralab.programs.instructions import (
    ALL_GATHER,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    COPY,
    FORWARD,
    LATE,
    PARTS,
    RECOMPUTE,
    STATES,
    UPDATE,
    WAIT,
    WORKERS,
    Instr,
    Value,
    keeps,
    sums_shared,
)
from paralab.spec import TIED

Groups = dict[str, Any]  # {axis: comm.Group}


class Env:
    """What ops ask for in addition to weights and states: targets, masks, messages of their own."""

    def __init__(self, state: State, groups: Groups) -> None:
        spec, plan, tp = state.program.spec, state.program.plan, state.tp
        self.spec, self.plan, self.groups, self.recorder = spec, plan, groups, state.recorder
        self.seed, self.device, self.dtype = state.seed, state.device, DTYPES[plan.precision]
        self.step = self.sample = 0
        self.share: Any = loss_share(plan)
        self.targets = self.regathered = None
        self.keeping = True  # whether what forward leaves for backward is kept
        self.modules: dict[str, Any] = {}  # of the user's own ops
        self.boxes = {  # slices of a micro-batch's whole activations that this tp rank has
            what: activation_box(spec, plan, what, tp) for what in ("residual", "scores", "logits")
        }
        self.boxes["token samples"] = looked_up(plan, tp)
        self.first_token = holding(spec, plan, TIED[0], tp).box[0].start if plan.tp > 1 else 0
        self.first_logit = self.boxes["logits"][2].start
        self.future_mask: Tensor | None = None  # True where a token would look ahead, (s, s)
        if spec.attention != "sdpa" and spec.block is None:
            ones = torch.ones(spec.seq_len, spec.seq_len, dtype=torch.bool, device=self.device)
            self.future_mask = ones.triu(1)
            self.recorder.owns("buffers", self.future_mask)
        self.in_flight: list[Any] = []  # calls during which an op's weight half is computed

    def mask(self, name: str, p: float, what: str) -> Tensor:
        """Which elements of this rank's part dropout keeps: "residual" (T, width), "scores"
        (b, a, s, s). It is drawn whole, as one device would, and cut.
        """
        spec, batch = self.spec, self.plan.microbatch_size
        s = spec.seq_len
        whole = (batch, s, spec.hidden) if what == "residual" else (batch, spec.heads, s, s)
        seed = draws.mask_seed(self.seed, self.step, self.sample, name)
        found = draws.mask(whole, p, seed=seed, device=self.device)
        part = found[self.boxes[what]]
        if part.shape != found.shape:
            found = part.clone()
        return found.flatten(0, 1) if what == "residual" else found

    def drawing(self, name: str, p: float) -> contextlib.AbstractContextManager:
        """torch's own generator draws from this op's seed in here, if anything is dropped."""
        if not p:
            return contextlib.nullcontext()
        seed = draws.mask_seed(self.seed, self.step, self.sample, name)
        return draws.drawing(seed, self.device)

    def buffers(self, *tensors: Tensor) -> None:
        """These are what a message works on."""
        self.recorder.owns("buffers", *tensors)

    def call(self, op: Op, method: str, number: int, *tensors: Tensor) -> None:
        """Make message ``number`` of those that ``op`` lists for ``method``, and wait for it."""
        self.start(op, method, number, *tensors).wait()

    def start(self, op: Op, method: str, number: int, *tensors: Tensor) -> Any:
        """The same without waiting. tensors: as the group's method takes them, contiguous."""
        call = op.calls[method][number]
        group = self.groups[call.axis]
        flat = [t.view(-1) for t in tensors]
        if call.root >= 0:
            return getattr(group, call.op)(*flat, root=group.ranks[call.root], phase=call.phase)
        return getattr(group, call.op)(*flat, phase=call.phase)

    def beside(self, op: Op, method: str, number: int, *tensors: Tensor) -> None:
        """Begin it; `settle` waits, when the op's weight half is computed or deferred."""
        self.in_flight.append(self.start(op, method, number, *tensors))

    def settle(self) -> None:
        """Wait for what was begun."""
        while self.in_flight:
            self.in_flight.pop(0).wait()

    def roots(self, op: Op, method: str, number: int) -> bool:
        """Whether this rank is the root of a broadcast or a reduce."""
        call = op.calls[method][number]
        return self.groups[call.axis].index == call.root


class Rank:
    """One rank of a program: its values, and a method per kind of instruction.

    env  what its ops ask for
    """

    def __init__(self, state: State, groups: Groups) -> None:
        self.state, self.groups, self.store = state, groups, state.store
        self.program = program = state.program
        self.env = Env(state, groups)
        self.plan, self.model, self.code = program.plan, program.model, program.codes[state.pp]
        self.units, self.pp, self.recorder = state.units, state.pp, state.recorder
        self.pending: dict[tuple[Value, ...], tuple[Any, Callable | None]] = {}
        self.losses: dict[int, Tensor] = {}
        self.batches: Callable[[int], Tensor] = lambda k: torch.empty(0)
        self.workers = None if state.host is None else Workers(state, self._room)
        self.first_sample = 0
        self.before_update: Callable[[int], None] | None = None
        self.named = [(op, _names(op)) for op in self.model.ops]
        self._lasting: dict[tuple[int, int], list] = {}
        self.steps = [
            (self._method(ins), ins, span)
            for ins, span in zip(self.code, spans(program, self.code), strict=True)
        ]

    def _method(self, ins: Instr) -> Callable[[Instr], None]:
        """The function to call with this instruction; ops are bound to weights that last."""
        if ins.lane in WORKERS and ins.op != WAIT:
            return self._begin
        method = getattr(self, ins.op)
        own_weights = any(v[0] == "w" and not lasts(v) for v in ins.reads)
        if ins.op not in COMPUTE or ins.op == BACKWARD_WEIGHT or own_weights:
            return method
        if ins.at not in self._lasting:
            self._lasting[ins.at] = self._ops(ins)
        return partial(method, ops=self._lasting[ins.at])

    # ---- a step ----------------------------------------------------------------------------------
    def step(self, batches: Callable[[int], Tensor]) -> list[Tensor]:
        """Go through the list once. batches(k): the text of micro-batch k, (b, s + 1).

        Returns the losses in the order of the micro-batches, where the model ends here.
        """
        self.batches, self.losses = batches, {}
        self.state.begin()
        store, recorder, workers, here = self.store, self.recorder, self.workers, None
        for position, (method, ins, span) in enumerate(self.steps):
            self.position = position
            if span is not here:
                if span != here:
                    if here is not None:
                        recorder.leave()
                    if span is not None:
                        recorder.enter(*span)
                here = span
            method(ins)
            for value in ins.frees:
                held = store.pop(value, None)
                if workers is not None:
                    workers.free(value, held)
                held = None
        if here is not None:
            recorder.leave()
        return [self.losses[k] for k in sorted(self.losses)]

    def where(self) -> str:
        """What this rank is doing, for an error's message."""
        ins = self.code[self.position]
        ops = self.model.ops[slice(*ins.at)] if ins.op in COMPUTE else ()
        at = " " + " to ".join(dict.fromkeys((ops[0].name, ops[-1].name))) if ops else ""
        return f"{ins.op}{at}" + (f", micro-batch {ins.mb}" if ins.mb >= 0 else "")

    # ---- compute ---------------------------------------------------------------------------------
    def FORWARD(self, ins: Instr, ops: list | None = None) -> None:
        (i, j), store, env, k = ins.at, self.store, self.env, ins.mb
        env.sample = self.first_sample + k
        env.keeping = keep = ins.op == RECOMPUTE or keeps(ins)
        kept, last = [], j == len(self.model.ops)
        counted = self.recorder.ledger is not None
        if last:  # each token's target is the one behind it, (T,)
            env.targets = self.batches(k)[env.boxes["logits"][0], 1:].long().flatten()
        if i:
            state = store[ins.reads[0]]
        else:  # what the first op is given, (b, s): nothing else holds it
            state = (self.batches(k)[env.boxes["token samples"], :-1].long(),)
        for op, _, weights in ops or self._ops(ins):
            state, more = op.forward(weights, state, env)
            if keep:
                kept.append(more)
                if counted:
                    self._owns("activations", more)
            more = None
        env.targets, made = None, ins.writes[0]
        if last:
            if ins.op == FORWARD:
                self.losses[k] = state[-1].detach()
        elif made[0] in ("x", "r"):
            store[made] = state
            self._owns(made, state[-1])
        if keep:
            store[ins.writes[-1]] = kept
            self._owns("activations", kept)
            if op.keeps_result:
                self._owns("activations", state[-1])

    RECOMPUTE = FORWARD

    def BACKWARD(self, ins: Instr, ops: list | None = None) -> None:
        (i, j), store, env, k = ins.at, self.store, self.env, ins.mb
        kept = store.pop(ins.reads[0])
        grads = store.pop(ins.reads[1]) if j < len(self.model.ops) else ()
        halves, deferred, flats = ins.op == BACKWARD_INPUT, [], self._gradients(ins)
        for op, names, weights in reversed(ops or self._ops(ins)):
            grads, rest = op.input_grad(weights, kept.pop(), grads, env)
            if rest is None:
                continue
            if halves:
                deferred.append((op, names, rest))
            else:
                op.weight_grad(rest, Into(names, flats), env)
            rest = None
            env.settle()
        if i:
            store["g", i, k] = grads
            self._owns(("g", i, k), grads[-1])
        if halves:
            store["deferred", ins.at, k] = deferred
            self._owns("activations", deferred)

    BACKWARD_INPUT = BACKWARD

    def BACKWARD_WEIGHT(self, ins: Instr) -> None:
        flats, deferred, env = self._gradients(ins), self.store.pop(ins.reads[0]), self.env
        env.regathered = next((self.store[v] for v in ins.reads if v[0] == "again"), None)
        while deferred:  # each is let go as soon as it is used
            op, names, rest = deferred.pop(0)
            op.weight_grad(rest, Into(names, flats), env)
        env.regathered = None

    def _ops(self, ins: Instr) -> list[tuple[Op, dict[str, str], dict[str, Tensor]]]:
        """The ops of the range, each with its names and with its weights, by local name."""
        views: dict[str, Tensor] = {}
        for v in ins.reads:
            if v[0] == "w":
                views |= self.store[v].views
        return [
            (op, names, {local: views[name] for local, name in names.items()})
            for op, names in self.named[slice(*ins.at)]
        ]

    def _gradients(self, ins: Instr) -> list[Flat]:
        """What gradients are written to, or added to."""
        return [self._made(v) for v in ins.writes if v[0] == "grad"]

    def KEEP(self, ins: Instr) -> None:
        self.store[ins.writes[0]] = tensor = flat_of(self.store.pop(ins.reads[0]))
        self.recorder.owns("gradients", tensor)

    def ADD(self, ins: Instr) -> None:
        flat_of(self.store[ins.writes[0]]).add_(flat_of(self.store[ins.reads[0]]))

    def COPY(self, ins: Instr) -> None:
        """Without a lane. By what is written: "wide", a gradient in fp32; "host.verdict", what the
        norm says about the gradients, which the host reads and the next step may not change;
        "second", a shard for hpZ; else this tp rank's part of a state, along the sequence.
        """
        held, made = self.store[ins.reads[0]], ins.writes[0]
        if made[0] == "wide":
            with self.recorder.making("gradients"):
                self.store[made] = flat_of(held).float()
        elif made[0] == "host.verdict":
            self.store[made] = self.workers.copied(self.state.decided(held))
        elif made[0] == "second":  # this rank's part of a unit, as long as backward needs it
            group = self.groups["secondary"]
            self.store[made] = part = held.flat.chunk(group.size)[group.index].clone()
            self.recorder.owns("parameters", part)
        else:
            source, group, samples = held[0], self.groups["tp"], self.plan.microbatch_size
            part = source.view(samples, group.size, -1, source.shape[1])[:, group.index]
            part = part.clone(memory_format=torch.contiguous_format).view(-1, source.shape[1])
            self.store[made] = (part,)
            self._owns(made, part)

    # ---- the optimizer ---------------------------------------------------------------------------
    def NORM(self, ins: Instr) -> None:
        grads = {v[1]: flat_of(self.store[v]) for v in ins.reads}
        away = ins.reads[0][0] == "host.norm"
        self.store[ins.writes[0]] = norm = self.state.squares(grads, away=away)
        self.recorder.owns("buffers", norm)

    def UPDATE(self, ins: Instr) -> None:
        self._update_begins(ins.unit)
        grad = self.store[ins.reads[0]]
        norm = next((self.store[v] for v in ins.reads if v[0] == "norm"), None)
        self.state.update(ins.unit, grad, norm)

    def RESCALE(self, ins: Instr) -> None:
        self.state.rescale()

    def _update_begins(self, unit: int) -> None:
        """Tell `before_update`, if it is set, that the gradient of this unit is final."""
        if self.before_update is not None:
            with self.recorder.unwatched():
                self.before_update(unit)

    # ---- other memory ----------------------------------------------------------------------------
    def _begin(self, ins: Instr) -> None:
        """An instruction that another thread works on."""
        if ins.op == UPDATE:
            self._update_begins(ins.unit)
        self._call(ins, self.workers.begin(ins))

    def settle(self) -> None:
        """After a step: bring a delayed update's result to where the next step would bring it, and
        wait until nothing is in flight.
        """
        if self.workers is None:
            return
        late = [ins for ins in self.code if ins.op == COPY and ins.phase == LATE]
        if late:
            late += [ins for ins in self.code if ins.op == ALL_GATHER and lasts(ins.writes[0])]
        with self.recorder.unwatched(), self.recorder.unwritten():
            for ins in late:
                self._method(ins)(ins)
                if ins.lane != "host":
                    self.WAIT(Instr(WAIT, reads=ins.writes))
            for v in (v for ins in late for v in (*ins.reads, *ins.writes) if not lasts(v)):
                self.workers.free(v, self.store.pop(v, None))
            self.workers.host.settle()

    # ---- calls -----------------------------------------------------------------------------------
    def ALL_REDUCE(self, ins: Instr) -> None:
        group = self.groups[ins.lane]
        if not sums_shared(ins):
            flat = flat_of(self.store[ins.reads[0]])
            self._call(ins, group.all_reduce(flat, phase=ins.phase))
        elif parts := self.state.shared_parts(ins.at):
            with self.recorder.making("buffers"):
                flat = torch.cat(parts)

            def put_back() -> None:
                for part, summed in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                    part.copy_(summed)

            self._call(ins, group.all_reduce(flat, phase=ins.phase), put_back)

    def REDUCE_SCATTER(self, ins: Instr) -> None:
        group, made, value = self.groups[ins.lane], ins.writes[0], self.store[ins.reads[0]]
        if isinstance(value, Flat):
            part, parts = self._made(made), value.flat
        else:
            *others, whole = value
            parts = _by_rank(whole, self.plan.microbatch_size, group.size)
            part = whole.new_empty((whole.shape[0] // group.size, whole.shape[1]))
            self.store[made] = (*others, part)
            self._owns(made, part)
            if parts is not whole:
                self.recorder.owns("buffers", parts)
        self._call(ins, group.reduce_scatter(part.view(-1), parts.view(-1), phase=ins.phase))

    def ALL_GATHER(self, ins: Instr) -> None:
        group, made, value = self.groups[ins.lane], ins.writes[0], self.store[ins.reads[0]]
        if made[0] in ("w", "grad"):
            flat = self._made(made).flat
            self._call(ins, group.all_gather(flat, flat_of(value), phase=ins.phase))
            return
        *others, part = value if isinstance(value, (tuple, list)) else (value,)
        if len(ins.writes) > 1:
            self.store[ins.writes[1]] = (part,)
            self._owns("activations", part)
        whole = part.new_empty((group.size * part.shape[0], part.shape[1]))
        self._owns(made, whole)

        def arrived() -> None:
            found = _by_sample(whole, self.plan.microbatch_size, group.size)
            self._owns(made, found)
            self.store[made] = found if made[0] == "again" else (*others, found)

        parts = part.contiguous().view(-1)
        self._call(ins, group.all_gather(whole.view(-1), parts, phase=ins.phase), arrived)

    def SEND(self, ins: Instr) -> None:
        group, tensor = self.groups["pp"], self.store[ins.reads[0]][-1]
        self._call(ins, group.send(tensor, to=group.ranks[ins.peer], phase=ins.phase))

    def RECEIVE(self, ins: Instr) -> None:
        group, tensor = self.groups["pp"], self._made(ins.writes[0])[-1]
        self._call(ins, group.recv(tensor, source=group.ranks[ins.peer], phase=ins.phase))

    def _call(self, ins: Instr, pending: Any, finish: Callable | None = None) -> None:
        self.pending[ins.writes] = (pending, finish)

    def WAIT(self, ins: Instr) -> None:
        found = self.pending.pop(ins.reads, None)
        if found is not None:
            pending, finish = found
            pending.wait()
            if finish is not None:
                finish()

    # ---- memory ----------------------------------------------------------------------------------
    def _made(self, v: Value) -> Any:
        """A value, for which there is room on the device from now on."""
        if v not in self.store:
            self.store[v] = self._room(v)
        return self.store[v]

    def _room(self, v: Value) -> Any:
        """Room on the device for a state between two ops, for a unit, or for a share of one."""
        _, category, size = self.program.size(v, self.pp)
        of_state, dtype = v[0] in STATES, DTYPES[self.program.precision_of(v[0])]
        shape = (size // dtype.itemsize,)
        if of_state:
            shape = (self.model.tokens // (self.plan.tp if v[0] in PARTS else 1), self.model.width)
        made = torch.empty(shape, dtype=dtype, device=self.env.device)
        self.recorder.owns(category, made)
        if v[0] in ("w", "grad"):
            return Flat(self.units[v[1]], made, self.model)
        return (made,) if of_state else made

    def _owns(self, what: str | Value, kept: Any) -> None:
        """What is kept counts as this category, or as the program says that this value does."""
        if self.recorder.ledger is not None:
            category = what if isinstance(what, str) else self.program.size(what, self.pp).category
            self.recorder.owns(category, *_tensors(kept))


def _names(op: Op) -> dict[str, str]:
    """{local name: full name} of everything that an op reads or adds to."""
    return {local: f"{op.name}.{local}" for local in op.params} | op.borrows | op.reads


def _tensors(kept: Any) -> Iterator[Tensor]:
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, (tuple, list)):
        for more in kept:
            yield from _tensors(more)


def _by_rank(whole: Tensor, samples: int, n: int) -> Tensor:
    """(samples * s, h), the sequence of each sample in n parts, as (n, samples, s / n, h)."""
    if samples == 1:
        return whole
    return whole.view(samples, n, -1, whole.shape[1]).transpose(0, 1).contiguous()


def _by_sample(whole: Tensor, samples: int, n: int) -> Tensor:
    """The way back, from what the ranks sent one after the other."""
    if samples == 1:
        return whole
    parts = whole.view(n, samples, -1, whole.shape[1])
    return parts.transpose(0, 1).reshape(whole.shape)
