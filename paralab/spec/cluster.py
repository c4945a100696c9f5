"""What a plan runs on: nodes of devices, and links inside a node and between nodes.

Units: seconds, bytes, FLOP/s, bytes/s. A cluster is measured (`Cluster.local`), a machine of the
literature (`Cluster.preset`), or stated field by field.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paralab.checks import Description, choice, count, illegal, real
from paralab.theory.traffic import OPS


@dataclass(frozen=True, kw_only=True)
class Link(Description):
    """The alpha-beta model of one kind of link: a message of n bytes takes alpha + n / bandwidth.

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
class Cluster(Description):
    """Nodes of devices, and two levels of links: inside a node and between nodes.

    name              what reports and figures call it
    nodes, devices_per_node   how many; a plan's ranks fill one node after the other
    flops             multiply-add rate that matrix products really reach, FLOP/s per device
    peak_flops        FLOP/s that a device's datasheet promises in the precision that is trained in;
                      None: not stated, and no report says how much of it a step uses
    half_rate_tokens  tokens of a micro-batch at which products reach half of ``flops``, where small
                      ones are slower: n_1/2 of Hockney's r = r_inf n / (n + n_1/2). 0: they are not
    memory_bandwidth  bytes/s that elementwise kernels really reach, per device
    op_overhead       seconds every kernel costs before it does any work
    call_overhead     seconds that posting a call takes from a device that posts its own
    wait_overhead     seconds that what follows a wait takes longer on a core whose caches others
                      have used meanwhile
    memory            bytes per device
    intra, inter      links inside a node and between nodes
    host, disk        links between a device and its host, each way, and to files; None: not stated,
                      and plans that offload are refused
    host_bandwidth    bytes/s at which a device's share of the host's processor updates states
    collectives       links measured per operation inside a node; they go before `intra`
    products_16bit    {"bf16" or "fp16": FLOP/s of products x W^T, g W, g^T x} where they differ
                      from fp32's: theory/work.py; empty: `flops` in any precision
    cores             processor cores that this cluster's devices share; None where each device
                      computes on its own (a laptop's ranks share cores, GPUs do not)
    """

    name: str = "stated"
    nodes: int = count(1, at_most=2**20)
    devices_per_node: int = count(8, at_most=2**20)
    flops: float
    memory_bandwidth: float
    op_overhead: float = 0.0
    call_overhead: float = 0.0
    wait_overhead: float = 0.0
    memory: int = count(2**62)
    intra: Link
    inter: Link | None = None
    host: Link | None = None
    disk: Link | None = None
    host_bandwidth: float | None = None
    collectives: Mapping[str, Link] = field(default_factory=dict)
    products_16bit: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    cores: int | None = count(None, at_most=2**20)
    peak_flops: float | None = None
    half_rate_tokens: float = 0.0
    # How `local` measures. instruments/calibrate.py sets it, because measuring runs plans, and what
    # describes a plan imports nothing that runs one. `import paralab` loads both.
    measure: ClassVar[Callable[..., Cluster]]

    def __post_init__(self) -> None:
        def as_link(name: str, value: object) -> Link:
            if isinstance(value, Mapping) and value.keys() == {"alpha", "bandwidth"}:
                value = Link(**value)
            if not isinstance(value, Link):
                raise illegal(
                    name, value, "not a link", "pl.Link(alpha=seconds, bandwidth=bytes_per_s)"
                )
            return value

        self.check_counts()
        for name in ("flops", "memory_bandwidth"):
            object.__setattr__(self, name, real(name, getattr(self, name), above=0.0))
        for name in ("op_overhead", "call_overhead", "wait_overhead", "half_rate_tokens"):
            object.__setattr__(self, name, real(name, getattr(self, name), at_least=0.0))
        object.__setattr__(self, "intra", as_link("intra", self.intra))
        inter = self.intra if self.inter is None else as_link("inter", self.inter)
        object.__setattr__(self, "inter", inter)
        for name in ("host", "disk"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_link(name, getattr(self, name)))
        for name in ("host_bandwidth", "peak_flops"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, real(name, getattr(self, name), above=0.0))
        if not isinstance(self.collectives, Mapping):
            raise illegal("collectives", self.collectives, "not a table", "{operation: pl.Link}")
        measured = {
            choice("collectives", op, OPS): as_link(f"collectives[{op!r}]", v)
            for op, v in self.collectives.items()
        }
        object.__setattr__(self, "collectives", measured)
        if not isinstance(self.products_16bit, Mapping):
            raise illegal(
                "products_16bit", self.products_16bit, "not a table", '{"bf16": (7e9, 1.5e9, 16e9)}'
            )
        rates = {name: _three(name, of) for name, of in self.products_16bit.items()}
        object.__setattr__(self, "products_16bit", rates)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def gpus(self) -> bool:
        """Whether every device computes on its own, as GPUs do; ranks on processors share cores."""
        return self.cores is None

    def node_of(self, rank: int) -> int:
        """Ranks fill one node after the other."""
        return rank // self.devices_per_node

    def link(self, op: str, level: str) -> Link:
        """The link that collective ``op`` runs on at ``level``, "intra" or "inter"."""
        choice("level", level, ("intra", "inter"))
        if level == "inter":
            return self.inter  # type: ignore[return-value]  # __post_init__ filled it
        return self.collectives.get(op, self.intra)

    def copy_seconds(self, lane: str, size: int, limit: float | None = None) -> float:
        """Of ``size`` bytes over "h2d", "d2h" or "disk", at no more than ``limit`` bytes/s."""
        link = self.disk if lane == "disk" else self.host
        return max(link.seconds(size), size / limit if limit else 0.0)

    @classmethod
    def local(cls, *, device: str | None = None, refresh: bool = False) -> Cluster:
        """This machine, measured: fifteen seconds the first time (GPUs take longer), then from a
        cache.

        device   "cuda" for its GPUs, one rank on each and NCCL between them; None or "cpu" for its
                 processors
        refresh  measure again

        Raises ValueError if GPUs are asked for where there is none.
        """
        return cls.measure(device=device, refresh=refresh)

    @classmethod
    def preset(cls, name: str, *, nodes: int = 1) -> Cluster:
        """A machine of the literature. ``nodes`` of it; device speed as a stated share of peak."""
        if not isinstance(name, str) or name not in CLUSTER_PRESETS:
            raise illegal("preset", name, "unknown cluster", ", ".join(CLUSTER_PRESETS))
        return cls(name=name, nodes=nodes, **CLUSTER_PRESETS[name])


def _three(precision: str, rates: Any) -> tuple[float, ...]:
    choice("precision", precision, ("bf16", "fp16"))
    name = f"products_16bit[{precision!r}]"
    if not isinstance(rates, (tuple, list)) or len(rates) != 3:
        raise illegal(name, rates, "not three rates", "FLOP/s of x W^T, g W and g^T x")
    return tuple(real(name, rate, above=0.0) for rate in rates)


def available_cores() -> int:
    """Processor cores that this process and its ranks may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _dgx(
    peak: float,
    memory_gb: int,
    memory_gbs: float,
    intra_gbs: float,
    inter_gbs: float,
    host_gbs: float,
    host_memory_gbs: float,
    devices: int = 8,
) -> dict:
    """Dense 16-bit peak at 62 %, memory at 80 %: shares that large training kernels reach."""
    return {
        "devices_per_node": devices,
        "peak_flops": peak,
        "flops": 0.62 * peak,
        "memory_bandwidth": 0.8e9 * memory_gbs,
        "op_overhead": 5e-6,
        "memory": memory_gb * 10**9,
        "intra": Link(alpha=10e-6, bandwidth=intra_gbs * 1e9),
        "inter": Link(alpha=20e-6, bandwidth=inter_gbs * 1e9),
        "host": Link(alpha=10e-6, bandwidth=0.8e9 * host_gbs),
        "host_bandwidth": 0.8e9 * host_memory_gbs,
    }


# Datasheet figures: 16-bit dense peak, memory size and bandwidth, one-way GB/s per GPU inside a
# node (NVLink) and between nodes (one HDR / NDR port per GPU); PCIe x16 to the host, one way, and
# an eighth of both sockets' memory bandwidth (8 channels each of DDR4-3200, of DDR5-4800). Disks
# differ from site to site: state yours. "dgx-v100" is the DGX-2 that the ZeRO papers ran on: 16
# V100 of 32 GB behind NVSwitch, 800 Gbit/s between nodes (arXiv:1910.02054, sec. 10), PCIe 3 to
# hosts of 6 channels of DDR4-2666 a socket.
CLUSTER_PRESETS: dict[str, dict[str, Any]] = {
    "dgx-v100": _dgx(125e12, 32, 900, 150, 6.25, 16, 16, devices=16),
    "dgx-a100": _dgx(312e12, 80, 2039, 300, 25, 31, 51),
    "dgx-h100": _dgx(989e12, 80, 3350, 450, 50, 63, 77),
}
