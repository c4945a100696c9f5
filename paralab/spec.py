"""What to train, how to split it, on what: ModelSpec, Plan, Cluster.

Everything a learner can ask for is one of these three frozen descriptions. They hold numbers, never
tensors (torch is not imported here), and every rule about what is legal lives in this file: a wrong
value raises ``ValueError`` naming the field, the value and what would be legal, before any process
starts.

Units: bytes, seconds, FLOP/s, bytes/s. Counts are plain integers.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BYTES_PER_ELEMENT = {"fp32": 4}  # of a parameter and of its gradient, by precision


def illegal(name: str, value: object, why: str, legal: str) -> ValueError:
    """The one form of every refusal: what was asked, why it cannot be, what would work."""
    return ValueError(f"{name}={value!r}: {why}; legal: {legal}")


def whole(name: str, value: object, *, at_least: int, at_most: int = 2**62) -> int:
    """``value`` as an int in range, or the refusal. Booleans and floats are not whole numbers."""
    legal = f"a whole number of at least {at_least}"
    if at_most < 2**62:
        legal = f"a whole number from {at_least} to {at_most}"
    if isinstance(value, bool):
        raise illegal(name, value, "a yes/no value is not a count", legal)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # numpy integers pass, 2.0 does not
    except TypeError:
        raise illegal(name, value, "not a whole number", legal) from None
    if not at_least <= number <= at_most:
        raise illegal(name, value, "out of range", legal)
    return number


def real(
    name: str, value: object, *, above: float | None = None, at_least: float | None = None
) -> float:
    """``value`` as a finite float in range, or the refusal."""
    bound = f"above {above:g}" if above is not None else f"of at least {at_least:g}"
    legal = f"a finite number {bound}"
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise illegal(name, value, "not a number", legal)
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise illegal(name, value, "not finite", legal)
    if (above is not None and number <= above) or (at_least is not None and number < at_least):
        raise illegal(name, value, "out of range", legal)
    return number


def choice(name: str, value: object, options: tuple[Any, ...]) -> Any:
    """``value`` if it is one of ``options``, or the refusal listing them."""
    if not any(type(value) is type(o) and value == o for o in options):
        raise illegal(name, value, "unknown choice", " | ".join(repr(o) for o in options))
    return value


class _Spec:
    """What the three descriptions share: a change of some fields, and a plain-dict form to save."""

    def replace(self, **changes: Any) -> Any:
        """A copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any:
        """The inverse of ``to_dict``. Raises ``ValueError`` on a field it does not know."""
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise illegal(
                    name,
                    values[name],
                    f"{cls.__name__} has no such field",
                    ", ".join(sorted(known)),
                )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(_Spec):
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
class Plan(_Spec):
    """How one training step is split over ranks.

    dp, tp, pp       degrees of data, tensor and pipeline parallelism
    microbatches     micro-batches per step on every data-parallel rank, m
    microbatch_size  samples per micro-batch, b; one step sees dp * m * b samples
    grad_sync        data parallelism's ladder: "naive" (one all-reduce per parameter after
                     backward), "bucketed" (flat buckets after backward), "overlapped" (flat buckets
                     launched while backward still runs)
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
    grad_sync: str = "overlapped"
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
        choice("grad_sync", self.grad_sync, ("naive", "bucketed", "overlapped"))
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

    def validate(self, model: ModelSpec) -> None:
        """Raise ``ValueError`` if this plan cannot train ``model`` in this version."""
        if not isinstance(model, ModelSpec):
            raise illegal("model", model, "not a model description", "a pl.ModelSpec(...)")
        for name, (only, what) in _NOT_YET.items():
            if getattr(self, name) != only:
                raise illegal(
                    name, getattr(self, name), f"{what} is not in this version", repr(only)
                )
        if self.world_size > MAX_RANKS:
            raise illegal(
                "dp", self.dp, f"dp*tp*pp is {self.world_size} ranks", f"up to {MAX_RANKS}"
            )


MAX_RANKS = 65536  # beyond any published run; mostly catches a slipped digit


@dataclass(frozen=True, kw_only=True)
class Link(_Spec):
    """The alpha-beta model of one kind of wire: a message of n bytes takes alpha + n / bandwidth.

    alpha      seconds before the first byte
    bandwidth  bytes per second that one rank can send
    """

    alpha: float
    bandwidth: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", real("alpha", self.alpha, at_least=0.0))
        object.__setattr__(self, "bandwidth", real("bandwidth", self.bandwidth, above=0.0))

    def seconds(self, wire_bytes: float) -> float:
        """Time for one rank to send ``wire_bytes``."""
        return self.alpha + wire_bytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Cluster(_Spec):
    """Nodes of devices, and two levels of links: inside a node and between nodes.

    flops             multiply-add rate that matrix products really reach, FLOP/s per device
    memory_bandwidth  bytes/s that elementwise kernels really reach, per device
    op_overhead       seconds every kernel costs before it does any work
    memory            bytes per device
    intra, inter      links inside a node and between nodes
    collectives       links measured per operation inside a node; they go before `intra`
    cores             processor cores that this cluster's devices share; None where each device
                      computes on its own (a laptop's ranks share cores, GPUs do not)
    """

    name: str = "stated"
    nodes: int = 1
    devices_per_node: int = 8
    flops: float
    memory_bandwidth: float
    op_overhead: float = 0.0
    memory: int = 2**62
    intra: Link
    inter: Link | None = None
    collectives: Mapping[str, Link] = field(default_factory=dict)
    cores: int | None = None

    def __post_init__(self) -> None:
        def as_link(name: str, value: object) -> Link:
            if isinstance(value, Mapping):
                value = Link(**value)
            if not isinstance(value, Link):
                raise illegal(
                    name, value, "not a link", "pl.Link(alpha=seconds, bandwidth=bytes_per_s)"
                )
            return value

        for name in ("nodes", "devices_per_node", "memory"):
            object.__setattr__(self, name, whole(name, getattr(self, name), at_least=1))
        for name in ("flops", "memory_bandwidth"):
            object.__setattr__(self, name, real(name, getattr(self, name), above=0.0))
        object.__setattr__(self, "op_overhead", real("op_overhead", self.op_overhead, at_least=0.0))
        object.__setattr__(self, "intra", as_link("intra", self.intra))
        inter = self.intra if self.inter is None else as_link("inter", self.inter)
        object.__setattr__(self, "inter", inter)
        if not isinstance(self.collectives, Mapping):
            raise illegal("collectives", self.collectives, "not a table", "{operation: pl.Link}")
        measured = {op: as_link(f"collectives[{op!r}]", v) for op, v in self.collectives.items()}
        object.__setattr__(self, "collectives", measured)
        if self.cores is not None:
            object.__setattr__(self, "cores", whole("cores", self.cores, at_least=1))

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        """Ranks fill one node after the other."""
        return rank // self.devices_per_node

    def link(self, op: str, level: str) -> Link:
        """The link that collective ``op`` runs on at ``level``, "intra" or "inter"."""
        choice("level", level, ("intra", "inter"))
        if level == "inter":
            return self.inter  # type: ignore[return-value]  # __post_init__ filled it
        return self.collectives.get(op, self.intra)

    @classmethod
    def local(cls, *, refresh: bool = False) -> Cluster:
        """This machine, measured: a few seconds the first time, then read from a cache."""
        from paralab.observe.calibrate import local_cluster

        return local_cluster(refresh=refresh)

    @classmethod
    def preset(cls, name: str, *, nodes: int = 1) -> Cluster:
        """A machine of the literature. ``nodes`` of it; device speed as a stated share of peak."""
        if name not in CLUSTER_PRESETS:
            raise illegal("preset", name, "unknown cluster", ", ".join(CLUSTER_PRESETS))
        return cls(name=name, nodes=nodes, **CLUSTER_PRESETS[name])


def _dgx(
    peak: float, memory_gb: int, memory_gbs: float, intra_gbs: float, inter_gbs: float
) -> dict:
    """Dense 16-bit peak at 62 %, memory at 80 %: shares that large training kernels reach."""
    return {
        "devices_per_node": 8,
        "flops": 0.62 * peak,
        "memory_bandwidth": 0.8e9 * memory_gbs,
        "op_overhead": 5e-6,
        "memory": memory_gb * 10**9,
        "intra": Link(alpha=10e-6, bandwidth=intra_gbs * 1e9),
        "inter": Link(alpha=20e-6, bandwidth=inter_gbs * 1e9),
    }


# Datasheet figures: 16-bit dense peak, memory size and bandwidth, one-way GB/s per GPU inside a
# node (NVLink) and between nodes (one HDR / NDR port per GPU).
CLUSTER_PRESETS: dict[str, dict[str, Any]] = {
    "dgx-a100": _dgx(312e12, 80, 2039, 300, 25),
    "dgx-h100": _dgx(989e12, 80, 3350, 450, 50),
}
