"""Where a rank's states lie if not all of them fit its device: `Offload`, a setting of a plan.

    device  the accelerator's own memory, which ``memory_limit`` bounds
    cpu     the host's memory, pinned if there is a GPU: the tier "host" in a report
    nvme    plain files in a folder: the tier "file"

Torch-free: training, prediction and pictures read the same description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from paralab.checks import Description, checked, choice, flag, illegal, num_bytes, one_of, shown

PLACES = ("device", "cpu", "nvme")
LINKS = ("h2d", "d2h", "disk")
WAYS = ("h2d", "d2h", "disk read", "disk write")  # the directions of copies over LINKS
_STATES = ("parameters", "gradients", "optimizer", "activations")


def _limits(name: str, value: Any) -> tuple[tuple[str, int], ...]:
    """The setting ``bandwidth`` as pairs, because a plan can be a key."""
    try:
        stated = dict(value or ())
    except (TypeError, ValueError):
        legal = 'bytes per second by link, such as {"disk": "500MB"}'
        raise illegal(name, value, "not a table", legal) from None
    limits = [(choice(name, link, LINKS), of) for link, of in stated.items()]
    return tuple(sorted((link, num_bytes(f"{name}[{link!r}]", of)) for link, of in limits))


@dataclass(frozen=True, kw_only=True)
class Offload(Description):
    """Where each state lies, and limits on the links between the places.

    parameters   the place of each rank's shard of the parameters (stage 3)
    gradients    the place of each rank's shard of their sum (stages 2 and 3)
    optimizer    the place of the moments and fp32 master weights; off the device, the Adam step
                 runs on the host's processor
    activations  the place of the block inputs that recompute="full" saves
    delayed      the host updates while the device already computes the next step, whose gradients
                 then belong to weights one update old (ZeRO-Offload, arXiv:2101.06840, sec. 5.2).
                 A checkpoint ends the delay: the step after it has the newest weights
    folder       the folder of the files of "nvme"; None: the system's folder for temporary files
    cached       leave the files in the operating system's page cache. By default every write has
                 reached the disk when it ends, and no read comes from the cache
    bandwidth    {"h2d", "d2h" or "disk": bytes per second, a number or text ("1GB")}: an upper
                 bound, to see the effect of a slower link
    """

    called: ClassVar[str] = "offload[{!r}]"
    parameters: str = one_of(*PLACES)
    gradients: str = one_of(*PLACES)
    optimizer: str = one_of(*PLACES)
    activations: str = one_of(*PLACES)
    delayed: bool = flag(False)
    folder: str | None = checked(lambda _, folder: str(folder), None)
    cached: bool = flag(False)
    bandwidth: Any = checked(_limits, ())

    @property
    def limits(self) -> dict[str, int]:
        """{link: the most bytes per second}, for links with a limit."""
        return dict(self.bandwidth)

    @property
    def states(self) -> bool:
        """Whether anything but activations leaves the device."""
        return any(getattr(self, name) != "device" for name in _STATES[:3])

    def uses(self, place: str) -> bool:
        """Whether any state lies in ``place``."""
        return any(getattr(self, name) == place for name in _STATES)


def as_offload(name: str, value: Any) -> str | Offload:
    """The checked value of the setting ``offload`` that `Plan` stores."""
    if isinstance(value, Offload):
        return value
    if isinstance(value, str):
        return choice(name, value, PLACES[1:])
    if isinstance(value, Mapping):
        known = [field.name for field in fields(Offload)]
        for field in value:
            if field not in known:
                why, legal = "Offload has no such field", ", ".join(known)
                raise illegal(f"{name}[{shown(field)}]", value[field], why, legal)
        return Offload(**value)
    legal = "None | 'cpu' | 'nvme' | {'parameters': 'cpu', 'optimizer': 'nvme', ...}"
    raise illegal(name, value, "not a place", legal)


def resolved(value: str | Offload | None, zero_stage: int) -> Offload | None:
    """The place of every state, from the setting ``offload``. "cpu" moves all states that
    ``zero_stage`` shards to the host. "nvme" moves sharded parameters and optimizer states to
    files; gradients go to the host, where the update reads each of them once.
    """
    if not isinstance(value, str):
        return value
    return Offload(
        parameters=value if zero_stage == 3 else "device",
        gradients="cpu" if zero_stage >= 2 else "device",
        optimizer=value,
    )
