"""Ranks that were started apart make sure that they were started alike."""

from __future__ import annotations

import zlib

import torch

from paralab.comm import Group
from paralab.data import Corpus


def agree(group: Group, *, what: str, corpus: Corpus) -> None:
    """Raise on every rank if the ranks were not started with the same model, plan, settings and
    text.

    On several machines each is started by its own command line and reads its own files.
    """
    context = group.context
    if group.size == 1:
        return
    facts = [zlib.crc32(what.encode()), int(corpus.fingerprint, 16) % 2**31]
    mine = torch.tensor(facts, dtype=torch.int64, device=context.device)
    everyone = mine.new_empty(2 * group.size)
    group.all_gather(everyone, mine, phase="setup").wait()
    for rank, theirs in enumerate(everyone.view(-1, 2).tolist()):
        if theirs[0] != facts[0]:
            raise ValueError(
                f"rank {rank} was started with another model, plan or settings than rank "
                f"{context.rank}; give every machine the same command line"
            )
        if theirs[1] != facts[1]:
            raise ValueError(
                f"rank {rank} reads another text than rank {context.rank} ({corpus.root}, "
                f"{corpus.num_bytes} bytes); give every machine the same files with data="
            )
