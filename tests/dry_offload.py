"""A rank's other memory on torch's "meta" device: sizes and names, and nothing is moved.

In `dry_host` the witness of predicted memory (witness_memory.py) runs its plans: a job is written
down, and over; host memory has no bytes, and files are nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def dry_host() -> Iterator[None]:
    """The lanes, the memory and the files that a `Host` is made of are dry ones in here."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from paralab.interpret import host, lanes

    class DryLane(lanes.Lane):
        def __init__(self, name: str, recorder: Any, **_: Any) -> None:
            self.name, self.recorder, self.stream, self._last = name, recorder, None, None
            self.note: Callable[[str], None] = lambda text: None
            self._queue = self

        def put(self, job: lanes.Job) -> None:
            job.after, job.work = (), None
            job.issued.set()
            job.done.set()

        def close(self) -> None:
            pass

    class DryFiles:
        def __init__(self, folder: Any, *, cached: bool) -> None:
            self.sizes: dict[str, int] = {}

        def create(self, name: str, size: int) -> None:
            self.sizes[name] = size

        def write(self, name: str, tensor: Any) -> None:
            pass

        def close(self) -> None:
            pass

    def aligned(size: int) -> Any:
        with _disable_current_modes():  # the ledger counts what is on the device
            return torch.empty(size, dtype=torch.uint8, device="meta")

    with ExitStack() as patched:
        for name, dry in {"Lane": DryLane, "Files": DryFiles, "aligned": aligned}.items():
            patched.enter_context(patch.object(host, name, dry))
        yield
