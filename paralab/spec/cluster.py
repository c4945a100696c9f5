"""What a plan runs on: nodes of devices, and links inside a node and between nodes.

Units: seconds, bytes, FLOP/s, bytes/s. A cluster is measured (`Cluster.local`), taken from the
literature (`Cluster.preset`), or stated field by field.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from paralab import checks
from paralab.checks import amount, checked, choice, count, count_of, illegal, instance
from paralab.spec.links import ALGORITHMS, Link, Reach, Way, ways
from paralab.theory.traffic import OPS

ELEMENTS = ("gelu", "gelu_backward", "exp", "draw")
PRODUCTS = ("bf16", "fp16", "tf32")
# Where Linux has a container's limits; and there the files with its microseconds of processor in a
# period, and the period, in both versions of control groups.
CGROUP, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
QUOTAS = (("", "cpu.max"), ("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))


def _link(name: str, value: Any) -> Link:
    if isinstance(value, Mapping) and value.keys() == {"alpha", "bandwidth"}:
        value = Link(**value)
    return instance(name, value, Link, "pl.Link(alpha=seconds, bandwidth=bytes_per_s)", "link")


def _three(name: str, rates: Any) -> tuple[float, ...]:
    if not isinstance(rates, (tuple, list)) or len(rates) != 3:
        raise illegal(name, rates, "not three rates", "(FLOP/s of x W^T, of g W, of g^T x)")
    return tuple(checks.real(name, rate, above=0.0) for rate in rates)


def _table(keys: tuple[str, ...], check: Callable[[str, Any], Any], legal: str) -> Any:
    """A field for a mapping from some of ``keys`` to values that pass ``check``."""

    def table(name: str, value: Any) -> dict[str, Any]:
        entries = instance(name, value, Mapping, legal, "table").items()
        return {choice(name, key, keys): check(f"{name}[{key!r}]", of) for key, of in entries}

    return checked(table, default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True)
class Cluster(checks.Description):
    """Nodes of devices, and two levels of links: inside a node and between nodes.

    name              what reports and figures call it
    nodes, devices_per_node   how many; a plan's ranks fill one node after the other
    flops             FLOP/s per device that large matrix products reach in practice; in fp32 if
                      ``products`` states other precisions
    peak_flops        FLOP/s of the device's data sheet, in 16 bits if the device has such products.
                      None: not stated, and reports give no utilisation
    half_rate_tokens  tokens of a micro-batch at which products reach half of ``flops``, if small
                      products are slower: n_1/2 of Hockney's r = r_inf n / (n + n_1/2). 0: they are
                      not
    memory_bandwidth  bytes/s per device that elementwise kernels reach in practice
    operand_bandwidth bytes/s at which products read their operands and write their results, in
                      addition to the time of computing, so that a product's rate depends on its
                      shape. None: caches hide this time, as on a processor
    elements          seconds of arithmetic per element, in addition to moving it: of "gelu" and
                      "gelu_backward", of an "exp" in a softmax, and of a "draw" for a dropout mask.
                      Missing entries take no time, as on a GPU, whose memory is the bottleneck
    fused             whether scale, mask and dropout are fused into softmax, and bias, GELU,
                      dropout and residual into one kernel, so that their intermediate results are
                      not moved. Megatron-LM's kernels are fused, those of `pl.run` are not
    op_overhead       seconds that every kernel costs before it does any work
    launch_overhead   seconds that the host's program takes to launch a kernel. The host runs ahead
                      of the device, so a computation takes the longer of the two times
    call_overhead     seconds that posting a call takes on a device that posts its calls itself
    wait_overhead     seconds that the work after a wait takes longer on a core whose caches other
                      ranks have used meanwhile
    wait_work         seconds of work after a wait that pay half of ``wait_overhead``, because
                      little work needs little of the caches. 0: any work pays all of it
    memory            bytes per device, or text as "80GB"; default: unlimited, so every plan fits
    intra, inter      links inside a node, and between nodes (of one port). inter=None: the same as
                      intra, so state it if there is more than one node
    ports             number of a node's ports to other nodes; None: one per device. See
                      spec/links.py
    algorithm         of all-reduces: "ring" or "tree"; None: the faster of the two for each call
    host, disk        links between a device and its host, each way, and to files. None: not stated,
                      and plans that use the link are refused
    host_bandwidth    bytes/s at which a device's share of the host's processor updates states
    collectives       links measured per operation inside a node, with alpha per message; they take
                      precedence over `intra`
    products          {"bf16", "fp16" or "tf32": FLOP/s of products x W^T, g W, g^T x} where these
                      differ from fp32's: theory/work.py, `rate`; empty: `flops` in any precision
    odd_products      share of their rate that products in 16 bits reach with an odd number of
                      columns. Tensor cores need rows whose bytes are a multiple of 16
    cores             processor cores that the cluster's devices share; None if each device computes
                      on its own (a laptop's ranks share cores, GPUs do not)
    """

    name: str = checked(
        partial(instance, kind=str, legal='a text such as "ours"', noun="text"), "stated"
    )
    nodes: int = count(1, at_most=2**20)
    devices_per_node: int = count(8, at_most=2**20)
    flops: float = amount(above=0.0)
    memory_bandwidth: float = amount(above=0.0)
    operand_bandwidth: float | None = amount(None, above=0.0)
    elements: Mapping[str, float] = _table(
        ELEMENTS, partial(checks.real, at_least=0.0), '{"exp": 1e-9}'
    )
    fused: bool = checks.flag(False)
    op_overhead: float = amount(0.0, at_least=0.0)
    launch_overhead: float = amount(0.0, at_least=0.0)
    call_overhead: float = amount(0.0, at_least=0.0)
    wait_overhead: float = amount(0.0, at_least=0.0)
    wait_work: float = amount(0.0, at_least=0.0)
    memory: int = checked(checks.num_bytes, 2**62)
    intra: Link = checked(_link)
    inter: Link | None = checked(_link, None)
    ports: int | None = count(None, at_most=2**20)
    algorithm: str | None = checks.one_of(None, *ALGORITHMS)
    host: Link | None = checked(_link, None)
    disk: Link | None = checked(_link, None)
    host_bandwidth: float | None = amount(None, above=0.0)
    collectives: Mapping[str, Link] = _table(OPS, _link, "{operation: pl.Link}")
    products: Mapping[str, tuple[float, float, float]] = _table(
        PRODUCTS, _three, '{"bf16": (7e9, 1.5e9, 16e9)}'
    )
    cores: int | None = count(None, at_most=2**20)
    peak_flops: float | None = amount(None, above=0.0)
    half_rate_tokens: float = amount(0.0, at_least=0.0)
    odd_products: float = amount(1.0, above=0.0)
    # The function behind `local`. instruments/calibrate.py sets it, because measuring runs plans,
    # and spec/ imports nothing that runs a plan. `import paralab` loads both.
    measure: ClassVar[Callable[..., Cluster]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.odd_products > 1:
            raise illegal(
                "odd_products", self.odd_products, "a share is at most 1", "above 0, at most 1"
            )
        if self.inter is None:
            object.__setattr__(self, "inter", self.intra)

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.nodes * self.devices_per_node

    @property
    def gpus(self) -> bool:
        """Whether every device computes on its own, as GPUs do; ranks on processors share cores."""
        return self.cores is None

    def rate(self, precision: str) -> float:
        """Mean FLOP/s of a layer's three products, in "fp32", "bf16", "fp16" or "tf32"."""
        choice("precision", precision, ("fp32", *PRODUCTS))
        rates = self.products.get(precision)
        return 3 / sum(1 / rate for rate in rates) if rates else self.flops

    def node_of(self, rank: int) -> int:
        """The node of a rank; ranks fill one node after the other."""
        return rank // self.devices_per_node

    def reach(self, ranks: Sequence[int]) -> Reach:
        """How a group of ranks is spread over this cluster's nodes."""
        return Reach.of(ranks, self.node_of)

    @cached_property
    def _far(self) -> Link:
        """The link between two devices on different nodes, with one device's share of the ports."""
        share = 1.0 if self.ports is None else self.ports / self.devices_per_node
        far: Link = self.inter  # type: ignore[assignment]  # __post_init__ filled it
        return far.replace(bandwidth=share * far.bandwidth)

    def ways(self, op: str, reach: Reach) -> dict[str, Way]:
        """{algorithm: `Way`} of the algorithms from which this cluster chooses for a call."""
        near = self.collectives.get(op, self.intra)
        tree = op == "broadcast" and op in self.collectives  # the link was fitted to a tree's bytes
        port = math.inf if self.gpus else self.inter.bandwidth  # type: ignore[union-attr]
        choices = ways(op, reach, near, self._far, nccl=self.gpus and not tree, port=port)
        if op in self.collectives and "ring" in choices:
            return {"ring": choices["ring"]}
        return {self.algorithm: choices[self.algorithm]} if self.algorithm in choices else choices

    def call(self, op: str, wire_bytes: float, reach: Reach) -> tuple[str, float]:
        """(algorithm, seconds) of a call whose busiest member sends ``wire_bytes``."""
        choice("op", op, OPS)
        seconds = {name: way.seconds(wire_bytes) for name, way in self.ways(op, reach).items()}
        return min(seconds.items(), key=lambda entry: entry[1])

    def message(self, size: float, reach: Reach) -> tuple[float, float]:
        """(seconds for which a message occupies its link, more of them until it has arrived): see
        [Note: messages] in spec/links.py.
        """
        (way,) = self.ways("send", reach).values()
        return (way.seconds(size), 0.0) if self.gpus else (size / way.bandwidth, way.latency)

    def copy_seconds(self, lane: str, size: int, limit: float | None = None) -> float:
        """Seconds to copy ``size`` bytes over "h2d", "d2h" or "disk", at most ``limit`` bytes/s;
        the cluster has to state the link.
        """
        link = self.disk if lane == "disk" else self.host
        return max(link.seconds(size), size / limit if limit else 0.0)

    def host_seconds(self, size: Any, calls: Any) -> Any:
        """Seconds of a job of ``calls`` torch calls on the host's processor, which reads and writes
        ``size`` bytes; numbers or arrays. A host calls as fast as it launches kernels, or, where
        the devices are processors too, as they do.
        """
        calling = calls * max(self.op_overhead, self.launch_overhead)
        return calling + size / (self.host_bandwidth or 1.0)  # None: no plan has such jobs

    @classmethod
    def local(cls, *, device: str | None = None, refresh: bool = False) -> Cluster:
        """This machine, measured: ten to fifteen seconds the first time (GPUs take longer), then
        from a cache. Its ``inter`` is the link to other machines if `paralab doctor --calibrate`
        under torchrun has measured one (of processors, over gloo):
        ``Cluster.local().replace(nodes=2, devices_per_node=4)`` are two machines of 4 ranks each.

        device   "cuda" for its GPUs, one rank on each and NCCL between them; "cpu" for its
                 processors; None: what `pl.set_default_device` says, else the processors
        refresh  measure again

        Raises ValueError if ``device`` is "cuda" and there is no GPU.
        """
        return cls.measure(device=device, refresh=refresh)

    @classmethod
    def preset(cls, name: str, *, nodes: int = 1) -> Cluster:
        """``nodes`` machines known from the literature.

        name  "dgx-a100" or "dgx-h100", of 8 devices. Rates are those that published benchmarks
              reach, and kernels are fused as Megatron-LM's are. Each states its link to the host,
              and none a disk: cluster.replace(disk=pl.Link(...))
        """
        if not isinstance(name, str) or name not in CLUSTER_PRESETS:
            raise illegal("preset", name, "unknown cluster", ", ".join(CLUSTER_PRESETS))
        return cls(name=name, nodes=nodes, **CLUSTER_PRESETS[name])


def check_devices(cluster: Any, ranks: int) -> None:
    """Refuse what is neither a cluster nor None, or has fewer devices than ranks."""
    instance("cluster", cluster, Cluster | None, "a pl.Cluster(...) or None")
    if cluster is not None and ranks > cluster.num_devices:
        why = f"it has {count_of(cluster.num_devices, 'device')}, and {ranks} ranks need one each"
        raise illegal("cluster", cluster.name, why, "a cluster with more nodes, or None")


def control_groups(files: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    """What files say in each control group that this process is in, the outermost first. That one
    has a container's limits; those further in have the limits that a JupyterHub gives each user.

    files  of either version: the controller ("" in version 2), and the names of its files
    """
    for controller, *names in files:
        folder, own = CGROUP / controller, "/"
        with contextlib.suppress(OSError, ValueError):  # a name may be no text
            for line in OWN_GROUPS.read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                own = path if controller in controllers.split(",") else own
        for part in Path(own).parts:
            folder = folder / part.strip("/")
            with contextlib.suppress(OSError):  # there is no such file
                yield [(folder / name).read_text() for name in names]


def available_cores() -> int:
    """Processor cores that this process and its ranks may use at the same time: the machine's, or
    the share of them that its container or its user has.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for said in control_groups(QUOTAS):
        with contextlib.suppress(ValueError):  # "max"
            quota, period = map(int, " ".join(said).split())
            cores = min(cores, max(1, quota // period)) if quota > 0 else cores
    return cores


def _dgx(
    peaks: Mapping[str, float],
    reached: float,
    memory_gb: int,
    memory_gbs: float,
    intra_gbs: float,
    port_gbs: float,
    host_gbs: float,
    host_memory_gbs: float,
) -> dict:
    """The fields of a preset, see CLUSTER_PRESETS; figures in GB and GB/s.

    peaks    {precision: FLOP/s of the data sheet}
    reached  the share of these peaks that large products reach
    """
    rates = {name: reached * peak for name, peak in peaks.items()}
    return {
        "peak_flops": peaks["fp16"],
        "flops": rates.pop("fp32"),
        "products": {name: (rate, rate, rate) for name, rate in rates.items()},
        "memory_bandwidth": 0.65e9 * memory_gbs,
        "operand_bandwidth": 0.65e9 * memory_gbs,
        "fused": True,
        "op_overhead": 5e-6,
        "launch_overhead": 30e-6,
        "memory": memory_gb * 10**9,
        "intra": Link(alpha=7e-6, bandwidth=1e9 * intra_gbs),
        "inter": Link(alpha=20e-6, bandwidth=0.96e9 * port_gbs),
        "host": Link(alpha=10e-6, bandwidth=0.8e9 * host_gbs),
        "host_bandwidth": 0.8e9 * host_memory_gbs,
    }


# From data sheets: dense peaks by precision; memory size and bandwidth; one-way GB/s of a port to
# other nodes (HDR or NDR InfiniBand, one port per GPU); PCIe x16 to the host, one way; and an
# eighth of both sockets' memory bandwidth (8 channels each of DDR4-3200, of DDR5-4800). Disks
# differ from site to site: state yours.
#
# Published measurements:
# - Products: the best bf16 rate of any shape (stas00/ml-engineering, MAMF: 271.2 TFLOP/s of an
#   A100, 794.5 of an H100), as a share of the peak. For other precisions nothing is published, so
#   the same share is used (an H100 of ours reached 0.77 of its fp32 peak).
# - All-reduces between 8 GPUs of a node: 229 GB/s for A100s, where they take at least 92 us for 14
#   messages, so 7 us each (VIA-Research/vTrain, its tables); 370 GB/s for H100s (a maintainer of
#   NCCL, nccl-tests issue 212), without the faster reduction in the switches (NVLink SHARP).
#   Between nodes 0.96 of the ports: 192 of 200 GB/s between DGX A100s (NCCL issue 812).
#
# Fitted to runs inside one node and on 64 to 512 A100s (tests/benchmarks/bench_published.py): 65 %
# of the memory's bandwidth, and 30 us per kernel for Megatron-LM's host program.
_A100 = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
_H100 = {"fp32": 67e12, "tf32": 494.5e12, "bf16": 989e12, "fp16": 989e12}
CLUSTER_PRESETS: dict[str, dict[str, Any]] = {
    "dgx-a100": _dgx(_A100, 271.2 / 312, 80, 2039, 229, 25, 31, 51),
    "dgx-h100": _dgx(_H100, 794.5 / 989, 80, 3350, 370, 50, 63, 77),
}
