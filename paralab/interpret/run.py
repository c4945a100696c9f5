"""Run a program on one rank, with torch: one method per kind of instruction.

Values are kept in ``store``. A state is a tuple of tensors, a unit's parameters or gradient a
`Flat`, a shard a flat tensor, and what is saved for backward a list with an entry per op. An
instruction with a lane is only begun; its result may be used after its WAIT, which
programs/derive.py has placed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from traceback import walk_tb
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
    wait,
)
from paralab.programs.names import Names
from paralab.spec import TIED

Groups = dict[str, Any]  # {axis: comm.Group}


class Env:
    """What ops need in addition to weights and states: targets, masks, messages of their own."""

    def __init__(self, state: State, groups: Groups) -> None:
        spec, plan, tp = state.program.spec, state.program.plan, state.tp
        self.spec, self.plan, self.groups, self.recorder = spec, plan, groups, state.recorder
        self.seed, self.device, self.dtype = state.seed, state.device, DTYPES[plan.precision]
        self.step = self.sample = 0
        self.share: Any = loss_share(plan)
        self.targets = self.regathered = None
        self.keeping = True  # whether forward saves anything for backward
        self.modules: dict[str, Any] = {}  # of the user's own ops
        self.boxes = {  # this tp rank's slices of a micro-batch's whole activations
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
        self.in_flight: list[Any] = []  # calls begun with `start_overlapped`

    def mask(self, name: str, p: float, what: str) -> Tensor:
        """Which elements of this rank's part dropout keeps: "residual" (T, width), "scores"
        (b, a, s, s). The mask is drawn for the whole activation, as on one device, and then sliced.
        """
        spec, batch = self.spec, self.plan.microbatch_size
        s = spec.seq_len
        whole = (batch, s, spec.hidden) if what == "residual" else (batch, spec.heads, s, s)
        seed = draws.mask_seed(self.seed, self.step, self.sample, name)
        mask = draws.mask(whole, p, seed=seed, device=self.device)
        part = mask[self.boxes[what]]
        if part.shape != mask.shape:
            mask = part.clone()
        return mask.flatten(0, 1) if what == "residual" else mask

    def drawing(self, name: str, p: float) -> contextlib.AbstractContextManager:
        """A context in which torch's generator has this op's seed, if anything is dropped."""
        if not p:
            return contextlib.nullcontext()
        seed = draws.mask_seed(self.seed, self.step, self.sample, name)
        return draws.drawing(seed, self.device)

    def buffers(self, *tensors: Tensor) -> None:
        """Count these tensors as communication buffers."""
        self.recorder.owns("buffers", *tensors)

    def call(self, op: Op, method: str, number: int, *tensors: Tensor) -> None:
        """Make call ``number`` of those that ``op`` lists for ``method``, and wait for it."""
        self.start(op, method, number, *tensors).wait()

    def start(self, op: Op, method: str, number: int, *tensors: Tensor) -> Any:
        """Begin the call. tensors: as the group's method takes them, contiguous."""
        call = op.calls[method][number]
        group = self.groups[call.axis]
        flat = [t.view(-1) for t in tensors]
        if call.root >= 0:
            return getattr(group, call.op)(*flat, root=group.ranks[call.root], phase=call.phase)
        return getattr(group, call.op)(*flat, phase=call.phase)

    def start_overlapped(self, op: Op, method: str, number: int, *tensors: Tensor) -> None:
        """Begin the call; `settle` waits once the op's weight half is computed or deferred."""
        self.in_flight.append(self.start(op, method, number, *tensors))

    def settle(self) -> None:
        """Wait for the calls begun with `start_overlapped`."""
        while self.in_flight:
            self.in_flight.pop(0).wait()

    def roots(self, op: Op, method: str, number: int) -> bool:
        """Whether this rank is the root of a broadcast or a reduce."""
        call = op.calls[method][number]
        return self.groups[call.axis].index == call.root


class Rank:
    """One rank of a program: its values, and a method per kind of instruction.

    pending        {values that a call writes: (its handle, what to do after the wait, or None)}
    before_update  if set, called with a unit's number once its gradient is final
    steps          (method, instruction, span of the timeline) of each instruction
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
        self.workers = None if state.host is None else Workers(state, self._allocate)
        self.first_sample = 0
        self.before_update: Callable[[int], None] | None = None
        self.named = [(op, op.owned | op.borrows | op.reads) for op in self.model.ops]
        self._bound: dict[tuple[int, int], list] = {}
        self.steps = [
            (self._method(ins), ins, span)
            for ins, span in zip(self.code, spans(program, self.code), strict=True)
        ]

    def _method(self, ins: Instr) -> Callable[[Instr], None]:
        """The function to call with this instruction; ops are bound to weights here, once, where
        the weights last from step to step.
        """
        if ins.lane in WORKERS and ins.op != WAIT:
            return self._begin
        method = getattr(self, ins.op)
        gathered = any(v[0] == "w" and not lasts(v) for v in ins.reads)
        if ins.op not in COMPUTE or ins.op == BACKWARD_WEIGHT or gathered:
            return method
        if ins.at not in self._bound:
            self._bound[ins.at] = self._ops(ins)
        return partial(method, ops=self._bound[ins.at])

    # ---- a step ----------------------------------------------------------------------------------
    def step(self, batches: Callable[[int], Tensor]) -> list[Tensor]:
        """Go through the list once. batches(k): the text of micro-batch k, (b, s + 1).

        Returns the losses by micro-batch on a rank with the model's last stage, else [].
        """
        self.batches, self.losses = batches, {}
        self.state.begin()
        store, recorder, workers, entered = self.store, self.recorder, self.workers, None
        for position, (method, ins, span) in enumerate(self.steps):
            self.position = position
            if span != entered:
                if entered is not None:
                    recorder.leave()
                if span is not None:
                    recorder.enter(*span)
                entered = span
            method(ins)
            for value in ins.frees:
                held = store.pop(value, None)
                if workers is not None:
                    workers.free(value, held)
                held = None
        if entered is not None:
            recorder.leave()
        return [self.losses[k] for k in sorted(self.losses)]

    def where(self, error: Exception) -> str:
        """The instruction that raised ``error``, and which of its ops, in words."""
        names = Names(self.program, self.pp, self.recorder.rank)
        text = f"instruction {self.position}, {names.instruction(self.code[self.position])}"
        in_frames = (frame.f_locals.get("op") for frame, _ in walk_tb(error.__traceback__))
        op = next((op for op in in_frames if isinstance(op, Op)), None)
        return text if op is None else f"{text}: {op.name}"

    # ---- compute ---------------------------------------------------------------------------------
    def FORWARD(self, ins: Instr, ops: list | None = None) -> None:
        (i, j), store, env, k = ins.at, self.store, self.env, ins.mb
        env.sample = self.first_sample + k
        env.keeping = keep = ins.op == RECOMPUTE or keeps(ins)
        kept, last = [], j == len(self.model.ops)
        if last:  # each token's target is the next token, (T,)
            env.targets = self.batches(k)[env.boxes["logits"][0], 1:].long().flatten()
        if i:
            state = store[ins.reads[0]]
        else:  # the tokens, (b, s), which nothing else holds
            state = (self.batches(k)[env.boxes["token samples"], :-1].long(),)
        for op, _, weights in ops or self._ops(ins):
            state, saved = op.forward(weights, state, env)
            if keep:
                kept.append(saved)
                if self.recorder.ledger is not None:  # `_owns` asks, too: a call for each op
                    self._owns("activations", saved)
            saved = None  # what the op would have saved is freed before the next op runs
        env.targets, output = None, ins.writes[0]
        if last:
            if ins.op == FORWARD:
                self.losses[k] = state[-1].detach()
        elif output[0] in ("x", "r"):
            store[output] = state
            self._owns(output, state[-1])
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
        split, deferred, flats = ins.op == BACKWARD_INPUT, [], self._gradients(ins)
        for op, names, weights in reversed(ops or self._ops(ins)):
            grads, rest = op.input_grad(weights, kept.pop(), grads, env)
            if rest is None:
                continue
            if split:
                deferred.append((op, names, rest))
            else:
                op.weight_grad(rest, Into(names, flats), env)
            rest = None  # freed before the next op runs
            env.settle()
        if i:
            store["g", i, k] = grads
            self._owns(("g", i, k), grads[-1])
        if split:
            store["deferred", ins.at, k] = deferred
            self._owns("activations", deferred)

    BACKWARD_INPUT = BACKWARD

    def BACKWARD_WEIGHT(self, ins: Instr) -> None:
        flats, deferred, env = self._gradients(ins), self.store.pop(ins.reads[0]), self.env
        env.regathered = next((self.store[v] for v in ins.reads if v[0] == "again"), None)
        while deferred:  # the tensors of each op are freed as soon as they are used
            op, names, rest = deferred.pop(0)
            op.weight_grad(rest, Into(names, flats), env)
        env.regathered = None

    def _ops(self, ins: Instr) -> list[tuple[Op, dict[str, str], dict[str, Tensor]]]:
        """(op, {local: full name}, {local name: weight}) of the ops that an instruction runs."""
        views: dict[str, Tensor] = {}
        for v in ins.reads:
            if v[0] == "w":
                views |= self.store[v].views
        return [
            (op, names, {local: views[name] for local, name in names.items()})
            for op, names in self.named[slice(*ins.at)]
        ]

    def _gradients(self, ins: Instr) -> list[Flat]:
        """The units' gradients that the instruction adds to."""
        return [self._allocated(v) for v in ins.writes if v[0] == "grad"]

    def KEEP(self, ins: Instr) -> None:
        self.store[ins.writes[0]] = tensor = flat_of(self.store.pop(ins.reads[0]))
        self.recorder.owns("gradients", tensor)

    def ADD(self, ins: Instr) -> None:
        flat_of(self.store[ins.writes[0]]).add_(flat_of(self.store[ins.reads[0]]))

    def COPY(self, ins: Instr) -> None:
        """A copy by the rank itself. What is copied follows from the kind that is written:
        "host.verdict", the verdict on the gradients, for the host's jobs, as the next step may
        change the device's; "second", a secondary shard (hpZ); else this tp rank's part of a state,
        along the sequence.
        """
        value, target = self.store[ins.reads[0]], ins.writes[0]
        if target[0] == "host.verdict":
            self.store[target] = self.workers.copied(self.state.decided(value))
        elif target[0] == "second":
            group = self.groups["secondary"]
            self.store[target] = part = value.flat.chunk(group.size)[group.index].clone()
            self.recorder.owns("parameters", part)
        else:
            source, group, samples = value[0], self.groups["tp"], self.plan.microbatch_size
            part = source.view(samples, group.size, -1, source.shape[1])[:, group.index]
            part = part.clone(memory_format=torch.contiguous_format).view(-1, source.shape[1])
            self.store[target] = (part,)
            self._owns(target, part)

    # ---- the optimizer ---------------------------------------------------------------------------
    def NORM(self, ins: Instr) -> None:
        grads = {v[1]: flat_of(self.store[v]) for v in ins.reads}
        from_host = ins.reads[0][0] == "host.norm"
        self.store[ins.writes[0]] = norm = self.state.squares(grads, from_host=from_host)
        self.recorder.owns("buffers", norm)

    def UPDATE(self, ins: Instr) -> None:
        self._update_begins(ins.unit)
        grad = self.store[ins.reads[0]]
        norm = next((self.store[v] for v in ins.reads if v[0] == "norm"), None)
        self.state.update(ins.unit, grad, norm)

    def RESCALE(self, ins: Instr) -> None:
        self.state.rescale()

    def _update_begins(self, unit: int) -> None:
        if self.before_update is not None:
            with self.recorder.unwatched():
                self.before_update(unit)

    # ---- other memory ----------------------------------------------------------------------------
    def _begin(self, ins: Instr) -> None:
        """Hand an instruction to the thread of its lane."""
        if ins.op == UPDATE:
            self._update_begins(ins.unit)
        self._call(ins, self.workers.begin(ins))

    def settle(self) -> None:
        """After a step: make the copies of a delayed update that would belong to the next step, and
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
                    self.WAIT(wait(ins))
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
        group, target, value = self.groups[ins.lane], ins.writes[0], self.store[ins.reads[0]]
        if isinstance(value, Flat):
            part, parts = self._allocated(target), value.flat
        else:
            *others, whole = value
            parts = _by_rank(whole, self.plan.microbatch_size, group.size)
            part = whole.new_empty((whole.shape[0] // group.size, whole.shape[1]))
            self.store[target] = (*others, part)
            self._owns(target, part)
            if parts is not whole:
                self.recorder.owns("buffers", parts)
        self._call(ins, group.reduce_scatter(part.view(-1), parts.view(-1), phase=ins.phase))

    def ALL_GATHER(self, ins: Instr) -> None:
        group, target, value = self.groups[ins.lane], ins.writes[0], self.store[ins.reads[0]]
        if target[0] in ("w", "grad"):
            flat = self._allocated(target).flat
            self._call(ins, group.all_gather(flat, flat_of(value), phase=ins.phase))
            return
        *others, part = value if isinstance(value, (tuple, list)) else (value,)
        if len(ins.writes) > 1:
            self.store[ins.writes[1]] = (part,)
            self._owns("activations", part)
        whole = part.new_empty((group.size * part.shape[0], part.shape[1]))
        self._owns(target, whole)

        def arrived() -> None:
            ordered = _by_sample(whole, self.plan.microbatch_size, group.size)
            self._owns(target, ordered)
            self.store[target] = ordered if target[0] == "again" else (*others, ordered)

        parts = part.contiguous().view(-1)
        self._call(ins, group.all_gather(whole.view(-1), parts, phase=ins.phase), arrived)

    def SEND(self, ins: Instr) -> None:
        group, tensor = self.groups["pp"], self.store[ins.reads[0]][-1]
        self._call(ins, group.send(tensor, to=group.ranks[ins.peer], phase=ins.phase))

    def RECEIVE(self, ins: Instr) -> None:
        group, tensor = self.groups["pp"], self._allocated(ins.writes[0])[-1]
        self._call(ins, group.recv(tensor, source=group.ranks[ins.peer], phase=ins.phase))

    def _call(self, ins: Instr, pending: Any, finish: Callable | None = None) -> None:
        self.pending[ins.writes] = (pending, finish)

    def WAIT(self, ins: Instr) -> None:
        call = self.pending.pop(ins.reads, None)
        if call is not None:
            pending, finish = call
            pending.wait()
            if finish is not None:
                finish()

    # ---- memory ----------------------------------------------------------------------------------
    def _allocated(self, v: Value) -> Any:
        """The value, allocated on the device if it does not exist yet."""
        if v not in self.store:
            self.store[v] = self._allocate(v)
        return self.store[v]

    def _allocate(self, v: Value) -> Any:
        """Allocate a state between two ops, a unit, or a shard of one on the device."""
        _, category, size = self.program.size(v, self.pp)
        of_state, dtype = v[0] in STATES, DTYPES[self.program.precision_of(v[0])]
        shape = (size // dtype.itemsize,)
        if of_state:
            shape = (self.model.tokens // (self.plan.tp if v[0] in PARTS else 1), self.model.width)
        tensor = torch.empty(shape, dtype=dtype, device=self.env.device)
        self.recorder.owns(category, tensor)
        if v[0] in ("w", "grad"):
            return Flat(self.units[v[1]], tensor, self.model)
        return (tensor,) if of_state else tensor

    def _owns(self, what: str | Value, kept: Any) -> None:
        """Count the tensors of ``kept`` in a category, or in that of a value of the program."""
        if self.recorder.ledger is not None:
            category = what if isinstance(what, str) else self.program.size(what, self.pp).category
            self.recorder.owns(category, *_tensors(kept))


def _tensors(kept: Any) -> Iterator[Tensor]:
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, (tuple, list)):
        for entry in kept:
            yield from _tensors(entry)


def _by_rank(whole: Tensor, samples: int, n: int) -> Tensor:
    """(samples * s, h), with each sample's sequence cut in n parts, to (n, samples, s / n, h)."""
    if samples == 1:
        return whole
    return whole.view(samples, n, -1, whole.shape[1]).transpose(0, 1).contiguous()


def _by_sample(whole: Tensor, samples: int, n: int) -> Tensor:
    """The inverse of `_by_rank`: the gathered parts, rank after rank, to (samples * s, h)."""
    if samples == 1:
        return whole
    parts = whole.view(n, samples, -1, whole.shape[1])
    return parts.transpose(0, 1).reshape(whole.shape)
