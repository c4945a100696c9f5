"""torch.distributed.checkpoint for tensors cut anywhere: every part of one is a few boxes of it.

DCP stores a tensor as chunks, boxes that together fill it, and a reader asks for boxes of its own;
what lies in both is read (its resharding). Tensor parallelism cuts a matrix into boxes. ZeRO's
parts end in the middle of a row, which is no box, but three: the end of a row, whole rows, the
beginning of a row (`pieces.boxes`).

    boxes: {name: [(offsets, values), ...]}      values have the box's shape and are views

A box that several ranks hold the same (replicas) is written by one of them: DCP deals those out so
that each rank writes about as much. Needs ranks, and 0.6 s for its import: so it is imported where
it is used.
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

Boxes = Mapping[str, Sequence[tuple[tuple[int, ...], Tensor]]]


def _chunk(offsets: tuple[int, ...], values: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=values.shape)


def _lookup(boxes: Boxes) -> dict[MetadataIndex, Tensor]:
    return {MetadataIndex(name, offsets): values
            for name, found in boxes.items() for offsets, values in found}  # fmt: skip


class SaveBoxes(DefaultSavePlanner):
    """What this rank can write. ``shapes``: {name: of the whole tensor}."""

    def __init__(self, boxes: Boxes, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes, self.shapes, self.values = boxes, shapes, _lookup(boxes)

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, found in self.boxes.items():
            for offsets, values in found:
                data = TensorWriteData(
                    chunk=_chunk(offsets, values),
                    properties=TensorProperties.create_from_tensor(values),
                    size=torch.Size(self.shapes[name]),
                )
                index = MetadataIndex(name, offsets)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.values[index]


class LoadBoxes(DefaultLoadPlanner):
    """What this rank wants filled. Raises ``ValueError`` where the checkpoint has not all of it."""

    def __init__(self, boxes: Boxes) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes, self.values = boxes, _lookup(boxes)

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, found in self.boxes.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if stored is None:
                raise ValueError(f"{name} is not in the checkpoint")
            reads = create_read_items_for_chunk_list(name, stored, [_chunk(*one) for one in found])
            wanted = sum(values.numel() for _, values in found)
            there = sum(read.lengths.numel() for read in reads)
            if there != wanted:
                raise ValueError(f"the checkpoint has {there} of {wanted} elements of {name}")
            items += reads
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.values[index]
