"""Where a rank's states lie when not all of them fit its device: `Offload`, one setting of a plan.

    device  the accelerator's own memory; what ``memory_limit`` bounds
    cpu     the host's memory, pinned where there is a GPU: the tier "host" in a report
    nvme    plain files in a folder: the tier "file"

Torch-free: training, prediction and pictures read the same description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paralab.checks import Description, choice, illegal, num_bytes, shown

PLACES = ("device", "cpu", "nvme")
LINKS = ("h2d", "d2h", "disk")
WAYS = ("h2d", "d2h", "disk read", "disk write")  # over them, from the device outwards
_STATES = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True, kw_only=True)
class Offload(Description):
    """Where each state lies, and the links between.

    parameters   what ZeRO's stage 3 shards of them
    gradients    each rank's share of their sum (stage 2 and 3)
    optimizer    moments and fp32 master weights; whose Adam step then runs on the host's processor
    activations  the inputs of the blocks that recompute="full" keeps
    delayed      the host updates while the device computes the next step already, whose gradients
                 are then of weights one update old (ZeRO-Offload, arXiv:2101.06840, sec. 5.2)
    folder       where "nvme" writes; None: the system's folder for temporary files
    cached       leave the files in the operating system's page cache. By default every write has
                 reached the disk when it is done, and nothing is read from the cache
    bandwidth    {"h2d", "d2h" or "disk": bytes per second}, at most, as a number or text ("1GB"): a
                 slower link than there is, to see what it would do
    """

    parameters: str = "device"
    gradients: str = "device"
    optimizer: str = "device"
    activations: str = "device"
    delayed: bool = False
    folder: str | None = None
    cached: bool = False
    bandwidth: Any = ()  # kept as pairs: a plan can be a key

    def __post_init__(self) -> None:
        for name in _STATES:
            choice(f"offload[{name!r}]", getattr(self, name), PLACES)
        for name in ("delayed", "cached"):
            choice(f"offload[{name!r}]", getattr(self, name), (True, False))
        if self.folder is not None:
            object.__setattr__(self, "folder", str(self.folder))
        try:
            limits = dict(self.bandwidth or ())
        except (TypeError, ValueError):
            legal = '{"disk": "500MB"}: bytes per second by link'
            raise illegal("offload['bandwidth']", self.bandwidth, "not a table", legal) from None
        for name in limits:
            choice("offload['bandwidth']", name, LINKS)
        most = {n: num_bytes(f"offload['bandwidth'][{n!r}]", v) for n, v in limits.items()}
        object.__setattr__(self, "bandwidth", tuple(sorted(most.items())))

    @property
    def limits(self) -> dict[str, int]:
        """{link: bytes per second that it moves at most} of those that are slowed down."""
        return dict(self.bandwidth)

    @property
    def states(self) -> bool:
        """Whether anything but activations leaves the device."""
        return any(getattr(self, name) != "device" for name in _STATES[:3])

    def uses(self, place: str) -> bool:
        """Whether anything lies there."""
        return any(getattr(self, name) == place for name in _STATES)


def as_offload(value: Any) -> str | Offload | None:
    """What `Plan` keeps of the setting ``offload``, checked."""
    if value is None or isinstance(value, Offload):
        return value
    if isinstance(value, str):
        return choice("offload", value, PLACES[1:])
    if isinstance(value, Mapping):
        known = [field.name for field in fields(Offload)]
        for name in value:
            if name not in known:
                why, legal = "Offload has no such field", ", ".join(known)
                raise illegal(f"offload[{shown(name)}]", value[name], why, legal)
        return Offload(**value)
    legal = "None | 'cpu' | 'nvme' | {'parameters': 'cpu', 'optimizer': 'nvme', ...}"
    raise illegal("offload", value, "not a place", legal)


def resolved(value: str | Offload | None, zero_stage: int) -> Offload | None:
    """The places of everything: "cpu" moves all that ``zero_stage`` shards, "nvme" writes of
    these parameters and optimizer states to files. Gradients stay on the host then: each is written
    once and read once by the update that runs there.
    """
    if not isinstance(value, str):
        return value
    return Offload(
        parameters=value if zero_stage == 3 else "device",
        gradients="cpu" if zero_stage >= 2 else "device",
        optimizer=value,
    )
