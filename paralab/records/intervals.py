"""torch.distributed.checkpoint for tensors cut anywhere: every tensor is one-dimensional.

DCP stores a tensor as chunks, boxes that together fill it, and a reader asks for boxes of its own;
what lies in both is read (its resharding). ZeRO's parts end in the middle of a matrix's row, which
is no box of the matrix, but is an interval of the matrix flattened. So all that is stored here is
flat, and a rank's share of it is a list of intervals.

    intervals: {name: [(first element, values), ...]}      values (n,), a view

An interval that several ranks hold the same (replicas) is written by one of them: DCP deals those
out so that each rank writes about as much. Needs ranks, and 0.6 s for its import: so it is imported
where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import ChunkStorageMetadata, DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

Intervals = Mapping[str, Sequence[tuple[int, Tensor]]]


def _chunk(start: int, values: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([start]), sizes=values.shape)


def _lookup(intervals: Intervals) -> dict[MetadataIndex, Tensor]:
    return {MetadataIndex(name, [start]): values
            for name, found in intervals.items() for start, values in found}  # fmt: skip


class SaveIntervals(DefaultSavePlanner):
    """What this rank can write. ``sizes``: {name: elements of the whole tensor}."""

    def __init__(self, intervals: Intervals, sizes: Mapping[str, int]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.intervals, self.sizes, self.values = intervals, sizes, _lookup(intervals)

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, found in self.intervals.items():
            for start, values in found:
                data = TensorWriteData(
                    chunk=_chunk(start, values),
                    properties=TensorProperties.create_from_tensor(values),
                    size=torch.Size([self.sizes[name]]),
                )
                index = MetadataIndex(name, [start])
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.values[index]


class LoadIntervals(DefaultLoadPlanner):
    """What this rank wants filled. Raises ``ValueError`` where the checkpoint has not all of it."""

    def __init__(self, intervals: Intervals) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.intervals, self.values = intervals, _lookup(intervals)

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, found in self.intervals.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if stored is None:
                raise ValueError(f"{name} is not in the checkpoint")
            reads = create_read_items_for_chunk_list(name, stored, [_chunk(*one) for one in found])
            wanted = sum(values.numel() for _, values in found)
            there = sum(read.lengths[0] for read in reads)
            if there != wanted:
                raise ValueError(f"the checkpoint has {there} of {wanted} elements of {name}")
            items += reads
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.values[index]
