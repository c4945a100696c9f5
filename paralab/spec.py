"""What to train and how to split it: ModelSpec and Plan. (On what: `Cluster`, in cluster.py.)

Both are frozen descriptions. They hold numbers, never tensors (torch is not imported here), and
every rule about what is legal lives here: a wrong value raises ``ValueError`` naming the field, the
value and what would be legal, before any process starts.

Units: bytes and plain counts.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from paralab.checks import Description, choice, illegal, real, whole
from paralab.cluster import Cluster, Link

__all__ = ["Cluster", "Link", "ModelSpec", "Plan"]

BYTES_PER_ELEMENT = {"fp32": 4}  # of a parameter and of its gradient, by precision

GRAD_SYNC_FORMS = ("naive", "bucketed", "overlapped")
GRAD_SYNC_MOMENTS = ("grad_ready", "finish", "reset")  # what an own form is asked for
OWN_FORM = "own: "  # a saved plan keeps this and the name of an own form, not its code


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Description):
    """A GPT: pre-LayerNorm blocks, learned positions, 4x GELU MLP, as in GPT-2 and Megatron-LM.

    layers    number of transformer blocks, l
    hidden    width of the residual stream, h
    heads     attention heads, a; must divide hidden
    seq_len   tokens per sample, s
    vocab     entries of the embedding, V; bytes of text need 256
    tied      the output head shares the token embedding's weight
    dropout   probability of dropping an activation while training
    attention "explicit" writes the s x s score matrix (what the papers' activation formulas
              assume), "sdpa" uses torch's fused kernel
    """

    layers: int
    hidden: int
    heads: int
    seq_len: int
    vocab: int = 256
    tied: bool = True
    dropout: float = 0.0
    attention: str = "explicit"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq_len", "vocab"):
            object.__setattr__(self, name, whole(name, getattr(self, name), at_least=1))
        if self.hidden % self.heads:
            legal = [a for a in range(1, min(self.hidden, 64) + 1) if self.hidden % a == 0]
            raise illegal(
                "heads",
                self.heads,
                f"hidden={self.hidden} is not divisible by it",
                ", ".join(map(str, legal)),
            )
        choice("tied", self.tied, (True, False))
        object.__setattr__(self, "dropout", real("dropout", self.dropout, at_least=0.0))
        if self.dropout >= 1.0:
            raise illegal("dropout", self.dropout, "would drop everything", "from 0 to below 1")
        choice("attention", self.attention, ("explicit", "sdpa"))

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trainable tensor of the single-device model, in order of registration.

        A linear layer's weight is (out, in), as in torch. A tied head has no row of its own.
        """
        h, shapes = self.hidden, {}
        shapes["embedding.token.weight"] = (self.vocab, h)
        shapes["embedding.position.weight"] = (self.seq_len, h)
        for i in range(self.layers):
            block = {
                "norm1.weight": (h,),
                "norm1.bias": (h,),
                "attention.qkv.weight": (3 * h, h),
                "attention.qkv.bias": (3 * h,),
                "attention.proj.weight": (h, h),
                "attention.proj.bias": (h,),
                "norm2.weight": (h,),
                "norm2.bias": (h,),
                "mlp.up.weight": (4 * h, h),
                "mlp.up.bias": (4 * h,),
                "mlp.down.weight": (h, 4 * h),
                "mlp.down.bias": (h,),
            }
            shapes.update({f"blocks.{i}.{name}": shape for name, shape in block.items()})
        shapes["head.norm.weight"] = (h,)
        shapes["head.norm.bias"] = (h,)
        if not self.tied:
            shapes["head.output.weight"] = (self.vocab, h)
        return shapes

    @property
    def num_params(self) -> int:
        """Psi, all trainable elements: l(12h^2 + 13h) + (V + s)h + 2h, and Vh more if not tied.

        PTD-P (Narayanan+ 2021, arXiv:2104.04473) eq. 2 has the same terms without the last
        LayerNorm's 2h.
        """
        h = self.hidden
        untied = 0 if self.tied else self.vocab * h
        blocks = self.layers * (12 * h * h + 13 * h)
        return blocks + (self.vocab + self.seq_len) * h + 2 * h + untied

    @classmethod
    def preset(cls, name: str) -> ModelSpec:
        """A model of the literature, or one that a laptop trains in seconds."""
        if name not in MODEL_PRESETS:
            raise illegal("preset", name, "unknown model", ", ".join(MODEL_PRESETS))
        return cls(**MODEL_PRESETS[name])


def _megatron(layers: int, hidden: int, heads: int) -> dict[str, int]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "seq_len": 2048, "vocab": 51200}


MODEL_PRESETS: dict[str, dict[str, int]] = {
    "laptop": {"layers": 4, "hidden": 128, "heads": 4, "seq_len": 64, "vocab": 256},
    "gpt2": {"layers": 12, "hidden": 768, "heads": 12, "seq_len": 1024, "vocab": 50257},
    # PTD-P, arXiv:2104.04473, Table 1: sequence 2048, vocabulary 51200.
    "ptdp-1.7b": _megatron(24, 2304, 24),
    "ptdp-7.5b": _megatron(36, 4096, 32),
    "ptdp-39b": _megatron(48, 8192, 64),
    "ptdp-145b": _megatron(80, 12288, 96),
    "ptdp-1t": _megatron(128, 25600, 160),
    "gpt3-175b": _megatron(96, 12288, 96),  # GPT-3 as PTD-P trains it (sec. 5.1)
}

# What each setting that this version cannot run yet is limited to. An entry leaves this table in
# the same change that makes `run` and `predict` understand it.
_NOT_YET: dict[str, tuple[Any, str]] = {
    "tp": (1, "tensor parallelism"),
    "pp": (1, "pipeline parallelism"),
    "virtual_stages": (1, "interleaved pipelines"),
    "zero_stage": (0, "ZeRO"),
    "sequence_parallel": (False, "sequence parallelism"),
    "recompute": ("none", "activation recomputation"),
    "offload": (None, "offload"),
    "tp_mode": ("1d", "tensor parallelism in 2D, 2.5D and 3D"),
    "precision": ("fp32", "mixed precision"),
}


@dataclass(frozen=True, kw_only=True)
class Plan(Description):
    """How one training step is split over ranks.

    dp, tp, pp       degrees of data, tensor and pipeline parallelism
    microbatches     micro-batches per step on every data-parallel rank, m
    microbatch_size  samples per micro-batch, b; one step sees dp * m * b samples
    grad_sync        data parallelism's ladder: "naive" (one all-reduce per parameter after
                     backward), "bucketed" (flat buckets after backward), "overlapped" (flat buckets
                     launched while backward still runs); or a class of your own, called as
                     ``form(parameters, group=group, bucket_bytes=bucket_bytes)`` on every rank,
                     with the methods grad_ready(parameter), finish() and reset() of
                     parallel/data_parallel.py. `run` runs it, `predict` refuses it
    bucket_bytes     size at which a gradient bucket is closed
    schedule, virtual_stages, zero_stage, sequence_parallel, recompute, offload, precision,
    tp_mode, prefetch: the settings of the other paradigms; `validate` says what this version runs
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    schedule: Any = "1f1b"
    microbatches: int = 1
    microbatch_size: int = 2
    virtual_stages: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    offload: Any = None
    precision: str = "fp32"
    tp_mode: str = "1d"
    grad_sync: Any = "overlapped"
    bucket_bytes: int = 4 * 2**20
    prefetch: int = 1

    def __post_init__(self) -> None:
        counts = (
            "dp",
            "tp",
            "pp",
            "microbatches",
            "microbatch_size",
            "virtual_stages",
            "bucket_bytes",
        )
        for name in counts:
            object.__setattr__(self, name, whole(name, getattr(self, name), at_least=1))
        object.__setattr__(self, "prefetch", whole("prefetch", self.prefetch, at_least=0))
        object.__setattr__(
            self, "zero_stage", whole("zero_stage", self.zero_stage, at_least=0, at_most=3)
        )
        _check_grad_sync(self.grad_sync)
        choice("precision", self.precision, ("fp32", "bf16", "fp16"))
        choice("recompute", self.recompute, ("none", "selective", "full"))
        choice("tp_mode", self.tp_mode, ("1d", "2d", "2.5d", "3d"))
        choice("sequence_parallel", self.sequence_parallel, (True, False))
        if not callable(self.schedule):
            choice(
                "schedule",
                self.schedule,
                ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"),
            )

    @property
    def world_size(self) -> int:
        """Ranks this plan needs: dp * tp * pp."""
        return self.dp * self.tp * self.pp

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.dp * self.microbatches * self.microbatch_size

    @property
    def grad_sync_name(self) -> str:
        """How gradients are synchronised, as text: a form's name, or "own: " and a class's."""
        if callable(self.grad_sync):
            kind = type(self.grad_sync).__name__
            return OWN_FORM + getattr(self.grad_sync, "__name__", kind)
        return self.grad_sync

    def to_dict(self) -> dict[str, Any]:
        """Plain values; of an own ``grad_sync`` its name."""
        return {**super().to_dict(), "grad_sync": self.grad_sync_name}

    def validate(self, model: ModelSpec) -> None:
        """Raise ``ValueError`` if this plan cannot train ``model`` in this version."""
        if not isinstance(model, ModelSpec):
            raise illegal("model", model, "not a model description", "a pl.ModelSpec(...)")
        if isinstance(self.grad_sync, str) and self.grad_sync.startswith(OWN_FORM):
            raise illegal("grad_sync", self.grad_sync, "a saved plan keeps only the class's name",
                          "plan.replace(grad_sync=the class itself)")  # fmt: skip
        for name, (only, what) in _NOT_YET.items():
            if getattr(self, name) != only:
                raise illegal(
                    name, getattr(self, name), f"{what} is not in this version", repr(only)
                )
        if self.world_size > MAX_RANKS:
            raise illegal(
                "dp", self.dp, f"dp*tp*pp is {self.world_size} ranks", f"up to {MAX_RANKS}"
            )


def _check_grad_sync(form: Any) -> None:
    """Refuse what could not synchronise gradients, as far as can be known before it is called."""
    if isinstance(form, str) and form.startswith(OWN_FORM):
        return
    if not callable(form):
        choice("grad_sync", form, GRAD_SYNC_FORMS)
        return
    legal = " | ".join(map(repr, GRAD_SYNC_FORMS)) + " | a class with grad_ready, finish, reset"
    missing = [m for m in GRAD_SYNC_MOMENTS if not callable(getattr(form, m, None))]
    if isinstance(form, type) and missing:
        raise illegal("grad_sync", form, f"the class has no method {' and no '.join(missing)}",
                      legal)  # fmt: skip
    try:
        signature = inspect.signature(form)
    except (TypeError, ValueError):  # built in: what it takes shows when it is called
        return
    try:
        signature.bind([], group=None, bucket_bytes=1)
    except TypeError as error:
        raise illegal("grad_sync", form, f"cannot be called ({error})",
                      "one called as form(parameters, group=group, bucket_bytes=bytes)"
                      ) from None  # fmt: skip


MAX_RANKS = 65536  # beyond any published run; mostly catches a slipped digit
