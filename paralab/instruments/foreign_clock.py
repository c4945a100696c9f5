"""Ranks of an observed torchrun job meet when the program makes its process group.

The parts that they write need one name, so that parts of different runs can be told apart, and the
clocks of several machines need one zero. Both are settled inside the program's own
``init_process_group``, where all ranks are, before any instrument counts.
"""

from __future__ import annotations

import functools
import os
import uuid
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from paralab.comm import Group
from paralab.instruments.clocks import measure_offset
from paralab.instruments.recorder import Recorder
from paralab.ranks.started import Started


class Meeting:
    """``with Meeting(started, device): program()``: the ranks' nodes, their common name, clocks."""

    def __init__(self, me: Started, device: str) -> None:
        self.rank, self.world_size, self.device = me.rank, me.world_size, device
        self.me, self.offset, self.uncertainty = me, 0.0, 0.0
        said = (os.environ.get("TORCHELASTIC_RUN_ID", ""), me.host, str(me.port))
        self.run_id = uuid.uuid5(uuid.NAMESPACE_OID, " ".join(said)).hex
        self.nodes = [rank // me.local_ranks for rank in range(me.world_size)]

    def __enter__(self) -> Meeting:
        self._own = own = dist.init_process_group

        @functools.wraps(own)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            self.meet()

        dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
        return self

    def __exit__(self, *raised: Any) -> None:
        dist.init_process_group = dist.distributed_c10d.init_process_group = self._own

    def meet(self) -> None:
        """Every rank is here."""
        me, store = self.me, dist.PrefixStore("paralab", dist.distributed_c10d._get_default_store())
        store.set(f"node/{me.rank}", str(me.node))
        self.nodes[:] = [int(store.get(f"node/{r}").decode()) for r in range(me.world_size)]
        if me.rank == 0:
            store.set("run_id", uuid.uuid4().hex)
        self.run_id = store.get("run_id").decode()
        if len(set(self.nodes)) > 1:
            backend = dist.get_backend()
            context = SimpleNamespace(
                rank=me.rank, nodes=self.nodes, device="cpu" if "gloo" in backend else self.device,
                backend=backend, strict=False, note=lambda text: None,
            )  # fmt: skip
            recorder = Recorder(rank=me.rank, world_size=me.world_size)
            world = Group(range(me.world_size), axis="world", context=context, recorder=recorder)
            self.offset, self.uncertainty = measure_offset(world)
