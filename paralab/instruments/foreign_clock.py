"""Ranks of an observed torchrun job meet when the program makes its process group.

The parts that they write need one name, so that parts of different runs can be told apart, and the
clocks of several machines need one zero. Both are settled inside the program's own
``init_process_group``, where all ranks are, before any instrument counts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from paralab.comm import Group
from paralab.instruments.clocks import measure_offset
from paralab.instruments.recorder import Recorder
from paralab.ranks.started import Started


@contextlib.contextmanager
def meeting(me: Started, device: str) -> Iterator[SimpleNamespace]:
    """Who this rank is, and what it learns when ranks meet: nodes, run_id, its clock's offset."""
    name = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {me.host} {me.port}"
    met = SimpleNamespace(rank=me.rank, world_size=me.world_size, device=device)
    met.run_id, met.offset, met.uncertainty = uuid.uuid5(uuid.NAMESPACE_OID, name).hex, 0.0, 0.0
    met.nodes = [rank // me.local_ranks for rank in range(me.world_size)]
    own = dist.init_process_group

    @functools.wraps(own)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        _meet(me, met)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    try:
        yield met
    finally:
        dist.init_process_group = dist.distributed_c10d.init_process_group = own


def _meet(me: Started, met: SimpleNamespace) -> None:
    store = dist.PrefixStore("paralab", dist.distributed_c10d._get_default_store())
    store.set(f"node/{me.rank}", str(me.node))
    met.nodes[:] = [int(store.get(f"node/{r}").decode()) for r in range(me.world_size)]
    if me.rank == 0:
        store.set("run_id", uuid.uuid4().hex)
    met.run_id = store.get("run_id").decode()
    if len(set(met.nodes)) > 1:
        backend, quiet = dist.get_backend(), {"strict": False, "note": lambda text: None}
        device = "cpu" if "gloo" in backend else met.device
        context = SimpleNamespace(**vars(met) | quiet | {"device": device, "backend": backend})
        recorder = Recorder(rank=me.rank, world_size=me.world_size)
        world = Group(range(me.world_size), axis="world", context=context, recorder=recorder)
        met.offset, met.uncertainty = measure_offset(world)
