"""How a training step is split: `Plan`. model.py has what is trained, cluster.py on what.

All three are frozen descriptions of plain values, without torch. An illegal value of a field raises
``ValueError`` when the plan is made; rules.py has the rules for combinations.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

from paralab import checks
from paralab.checks import Description, checked, choice, count, flag, instance, one_of, whole
from paralab.parallel.schedules import RELAY, Action
from paralab.spec import forms
from paralab.spec.model import ModelSpec
from paralab.spec.rules import GRID, RULES, SIZES, refuse
from paralab.spec.settings import Settings
from paralab.spec.tiers import Offload, as_offload, resolved

# Of most sizes of a plan; beyond any use. rules.py has narrower limits for combinations.
MANY = 2**20


class Place(NamedTuple):
    """Where a rank stands on each axis of a plan."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Plan(Description):
    """How one training step is split over ranks.

    dp               data-parallel degree: copies of the model, each on its share of the batch
    tp               tensor-parallel degree: ranks that compute every layer together
    pp               pipeline-parallel degree: ranks that have the layers one after another
    microbatches     micro-batches per step on every data-parallel rank, m
    microbatch_size  samples per micro-batch, b. One step sees dp * m * b samples
    grad_sync        how dp ranks sum their gradients: "naive" (one all-reduce per parameter after
                     backward), "bucketed" (flat buckets after backward), "overlapped" (flat buckets
                     launched while backward still runs). None leaves it to ``passes``
    bucket_bytes     size at which a gradient bucket is closed: bytes, or text as "25MB"
    schedule         a pipeline's order of work: "naive", "gpipe", "1f1b", "interleaved" (whose
                     microbatches are a multiple of pp), "zb-h1", "zb-h2"; or "l2l", one rank's: a
                     relay of the model's parts, whose parameters are offloaded. Or a function of
                     your own, f(pp, microbatches) or f(pp, microbatches, virtual_stages), that
                     returns a list of actions per rank, as those of parallel/schedules.py do, or of
                     their text: "0F2" is the forward of micro-batch 2 on stage 0; B is a backward,
                     I and W its halves for inputs and weights
    virtual_stages   model chunks, or stages, per pipeline rank, v; more than one with "interleaved"
                     or a schedule of your own. Stage s of the pp * v lies on rank s % pp
    zero_stage       what data-parallel ranks shard (ZeRO): 0 nothing, 1 optimizer states,
                     2 gradients too (with pp > 1 they are reduced once a step, as with 1),
                     3 parameters too
    shard            with zero_stage 1 to 3: data-parallel ranks that share one copy of the states;
                     dp/shard replicas of it (HSDP). None: all dp of them
    secondary_shard  with stage 3: neighbouring data-parallel ranks, on one node, that share a
                     second copy of the parameters, which backward gathers (hpZ of ZeRO++)
    prefetch         units whose parameters stage 3 may gather ahead of the one in use
    recompute        activations that backward computes again: "none", "selective" (the attention
                     core), "full" (all but each block's input)
    precision        of weights, gradients and products: "fp32", or "bf16" or "fp16" with a master
                     copy in fp32
    grad_dtype       with a 16-bit ``precision``, how parameters' gradients are accumulated over
                     micro-batches and ranks: "fp32"; None: in ``precision``. In each case one
                     micro-batch's gradient is a 16-bit product, rounded as such
    tf32             with precision="fp32", on GPUs: matrix products round their operands to tf32's
                     mantissa of 10 bits, and are several times as fast. No effect on CPUs;
                     predictions use the rate that the cluster states
    tp_mode          how a layer is cut over tp ranks: "1d", "2d" (on a grid of q x q), "2.5d" (on d
                     such grids), "3d" (on a grid of q x q x q)
    tp_depth         d of "2.5d"; by default the largest up to q with tp = d q^2
    sequence_parallel  with tp_mode="1d": the residual stream is sharded over the tp ranks along
                     the sequence
    tp_overlap       with tp_mode="1d": backward's messages overlap with the computation of
                     gradients that do not need them. False: each is waited for as soon as it is
                     posted, as in Megatron-LM before 30 August 2021
    partition_activations  with recompute="full": each tp rank saves only a part of a block's input
    partition_messages  with tp_mode="1d" and pp > 1: each tp rank sends a part of a message between
                     stages, and the receivers gather the parts (PTD-P's scatter/gather)
    offload          where the states that zero_stage shards are kept instead of on the device:
                     "cpu" (the host's memory) or "nvme" (files; gradients in the host's memory). Or
                     a dict: {"parameters", "gradients", "optimizer" or "activations": "device" |
                     "cpu" | "nvme"}, and the other fields of paralab.spec.tiers.Offload. Offloaded
                     states need zero_stage 1 to 3, on one device too; activations recompute="full"
    passes           functions of your own, f(program) -> program, which change every rank's list of
                     instructions: see programs/own.py

    Ranks are assigned to the axes as numpy.arange(world_size).reshape(pp, dp, tp).
    """

    dp: int = count(1, at_most=MANY)
    tp: int = count(1, at_most=MANY)
    pp: int = count(1, at_most=MANY)
    schedule: Any = checked(forms.check_schedule, "1f1b")
    microbatches: int = count(1, at_most=MANY)
    microbatch_size: int = count(2, at_most=MANY)
    virtual_stages: int = count(1, at_most=MANY)
    zero_stage: int = count(0, at_least=0, at_most=3)
    shard: int | None = count(None, at_most=MANY)
    sequence_parallel: bool = flag(False)
    recompute: str = one_of("none", "selective", "full")
    offload: Any = checked(as_offload, None)
    precision: str = one_of("fp32", "bf16", "fp16")
    grad_dtype: str | None = one_of(None, "fp32")
    tf32: bool = flag(False)
    tp_mode: str = one_of("1d", "2d", "2.5d", "3d")
    tp_depth: int | None = count(None, at_most=MANY)
    tp_overlap: bool = flag(True)
    partition_activations: bool = flag(False)
    partition_messages: bool = flag(False)
    grad_sync: str | None = checked(
        partial(choice, options=(*forms.GRAD_SYNC_FORMS, None)), "overlapped"
    )
    bucket_bytes: int = checked(checks.num_bytes, 4 * 2**20)
    prefetch: int = count(1, at_least=0, at_most=MANY)
    secondary_shard: int | None = count(None, at_most=MANY)
    passes: tuple = checked(forms.check_passes, ())

    @property
    def tiers(self) -> Offload | None:
        """Where every state lies, or None if all of them are on the device."""
        return resolved(self.offload, self.zero_stage)

    @property
    def product_precision(self) -> str:
        """The precision of matrix products: ``precision``, or "tf32"."""
        return "tf32" if self.tf32 else self.precision

    @property
    def world_size(self) -> int:
        """Ranks this plan needs: dp * tp * pp."""
        return self.dp * self.tp * self.pp

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.dp * self.microbatches * self.microbatch_size

    @property
    def grad_precision(self) -> str:
        """The precision in which the gradients of parameters are accumulated."""
        return "fp32" if self.grad_dtype == "fp32" else self.precision

    @property
    def stages(self) -> int:
        """Number of stages into which the model is cut: pp * virtual_stages."""
        return self.pp * self.virtual_stages

    @property
    def shard_degree(self) -> int:
        """N: number of data-parallel ranks that shard one copy of the states."""
        return self.dp if self.shard is None else self.shard

    @property
    def tp_grid(self) -> tuple[int, int]:
        """(q, depth) of the grid of a tp group: q x q, d of these, or q x q x q; "1d" is (tp, 1).

        Raises ``ValueError`` with legal values if tp makes no such grid.
        """
        settings = Settings(self)
        refuse(GRID, settings)
        return settings.grid.q, settings.grid.depth

    def place(self, rank: int) -> Place:
        """Indices of a global rank: pipeline, data-parallel and tensor-parallel. Raises ValueError
        on a rank that the plan does not have.
        """
        rank = whole("rank", rank, at_least=0, at_most=self.world_size - 1)
        before_tp, tp_index = divmod(rank, self.tp)
        return Place(*divmod(before_tp, self.dp), tp_index)

    def ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """Global ranks of the group of ``rank`` along ``axis``, in group order.

        axis  "tp", "dp", "pp", and inside a data-parallel group "shard": the ranks that share one
              copy of the states, next to each other; "secondary": those of them that share a
              second copy; "replica": the ranks that keep the same share of the states. Inside a tp
              group "tp:row" and the like: the axes of its mode's grid
        """
        at = self.place(rank)
        if isinstance(axis, str) and axis.startswith("tp:"):
            from paralab.parallel.layouts import group, mode_of

            choice("axis", axis, tuple(mode_of(self).axes))
            first = rank - at.tp
            return tuple(first + index for index in group(self, axis, at.tp))
        n, tp = self.shard_degree, self.tp
        second = self.secondary_shard or n
        axes = {  # the index of the rank in its group, the group's size, the step between members
            "tp": (at.tp, tp, 1),
            "dp": (at.dp, self.dp, tp),
            "pp": (at.pp, self.pp, self.dp * tp),
            "shard": (at.dp % n, n, tp),
            "secondary": (at.dp % second, second, tp),
            "replica": (at.dp // n, self.dp // n, n * tp),
        }
        index, size, step = axes[choice("axis", axis, tuple(axes))]
        first = rank - index * step
        return tuple(range(first, first + size * step, step))

    @property
    def tp_name(self) -> str:
        """Tensor parallelism as text: "tp=4", "tp=4 in 2D", "tp=4 with sequence parallelism",
        "tp=4 without overlap"; or nothing, where there is none.
        """
        if self.tp == 1:
            return ""
        grid = "" if self.tp_mode == "1d" else f" in {self.tp_mode.upper()}"
        words = [" with sequence parallelism"] * self.sequence_parallel
        words += [" without overlap"] * (not self.tp_overlap)
        return f"tp={self.tp}{grid}" + ",".join(words)

    @property
    def grad_sync_name(self) -> str:
        """How gradients are synchronised, as text: a form's name, or "own: " and the names of the
        user's passes.
        """
        if self.grad_sync is None:
            names = (name.removeprefix(forms.OWN_FORM) for name in self.pass_names)
            return forms.OWN_FORM + ", ".join(names)
        return self.grad_sync

    @property
    def pass_names(self) -> tuple[str, ...]:
        """The user's passes as text: "own: " and a function's name."""
        return tuple(map(forms.form_name, self.passes))

    @property
    def schedule_name(self) -> str:
        """The pipeline schedule as text: its name, or "own: " and a function's."""
        return forms.form_name(self.schedule)

    @property
    def relays(self) -> bool:
        """Whether the schedule is a relay: all micro-batches pass through one part of the model
        before the next part begins.
        """
        return isinstance(self.schedule, str) and self.schedule == RELAY

    @property
    def reduces_often(self) -> bool:
        """Whether gradients are reduced after every micro-batch: under ZeRO-3, and under ZeRO-2
        without a pipeline; never in a relay.
        """
        if self.relays:
            return False
        return self.zero_stage == 3 or (self.zero_stage == 2 and self.pp == 1)

    @property
    def reduces_at_once(self) -> bool:
        """Whether backward waits for none of ZeRO's reductions: with stages 1 and 2 in a pipeline,
        because the previous pipeline stage waits for this backward. Not with one micro-batch, whose
        gradients are made and freed one after the other, nor if gradients are offloaded.
        """
        leaves = self.tiers is not None and self.tiers.gradients != "device"
        once = self.zero_stage in (1, 2) and self.pp > 1
        return once and self.microbatches > 1 and not leaves

    def actions(self) -> list[list[Action]]:
        """Per pipeline rank the list of actions of a step, validated. For "l2l" the model counts as
        one stage: all forwards, then all backwards.

        Do not modify the lists: built-in schedules are cached. Raises ``ValueError`` if these
        settings make no schedule, or if the user's own function returns none that is valid.
        """
        if forms.saved(self.schedule):
            refuse(SIZES[:1], Settings(self))
        return forms.make_schedule(self.schedule, self.pp, self.microbatches, self.virtual_stages)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; for a schedule or pass of your own, its name: it may not be copyable."""
        own = {"schedule": self.schedule_name, "passes": self.pass_names}
        if isinstance(self.offload, Offload):
            own["offload"] = self.offload.to_dict()
        return {field.name: getattr(self, field.name) for field in fields(self)} | own

    def validate(self, model: ModelSpec) -> None:
        """Raise ``ValueError`` if this plan cannot train ``model`` in this version."""
        instance("model", model, ModelSpec, "a pl.ModelSpec(...)", "model description")
        refuse(RULES, Settings(self, model))
        if self.zero_stage == 3 and self.pp > 1:
            warnings.warn(
                f"zero_stage=3 with pp={self.pp}: a stage's parameters are gathered again for "
                f"every action, 2*{self.microbatches} times a step; with zero_stage=1 they are "
                "gathered once a step",
                stacklevel=1,  # one place, so that it is said once, whatever asks for the check
            )
