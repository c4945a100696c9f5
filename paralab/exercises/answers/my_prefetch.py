"""Lab 05's prefetch: MyZero3, whose next unit is in flight while this one computes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from paralab.exercises.answers.my_zero3 import MyZero3


class MyPrefetch(MyZero3):
    """ZeRO-3 that has gathers in flight while it computes, of one unit ahead at most."""

    def __init__(self, units: Sequence[nn.Module], lr: float) -> None:
        ### BEGIN SOLUTION
        ### STUB: super().__init__(units, lr)
        ### STUB: raise NotImplementedError("your turn")
        self.flying = {}  # {unit: the gather that will have to be waited for}
        super().__init__(units, lr)
        ### END SOLUTION

    ### BEGIN SOLUTION
    ### STUB: # the methods of MyZero3 that have to change
    def post(self, i: int) -> None:
        """The gather of unit i is in flight when this returns, if there is such a unit."""
        if 0 <= i < len(self.units) and i not in self.flying:
            flat = self.flats[i]
            flat.untyped_storage().resize_(flat.nbytes)
            work = dist.all_gather_into_tensor(flat, self.shards[i], async_op=True)
            self.flying[i] = work

    def gather_unit(self, i: int, following: int = 1) -> None:
        """Unit i is whole when this returns, and the unit that follows is in flight."""
        self.post(i)
        self.post(i + following)
        self.flying.pop(i).wait()
        self.missing[i] = len(list(self.units[i].parameters()))

    def used(self, i: int, output: torch.Tensor) -> None:
        """Forward of this unit is over; in backward the units follow in the opposite order."""
        self.free(i)
        output.register_hook(lambda _: self.gather_unit(i, following=-1))

    ### END SOLUTION
