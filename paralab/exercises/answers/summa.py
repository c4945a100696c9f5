"""Lab 08's exercise: SUMMA, forward and backward."""

import torch
import torch.distributed as dist


class MySumma:
    """Y = X W on q x q ranks, of which rank (i, j) has block (i, j) of every matrix."""

    def __init__(self, row: dist.ProcessGroup, column: dist.ProcessGroup) -> None:
        # row: the ranks (i, 0) ... (i, q-1), this one is member j; column: the ranks (0, j) ...
        # (q-1, j), this one is member i
        self.row, self.column = row, column

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x: (m, k), w: (k, n), this rank's blocks. Returns its block of Y = X W, (m, n)."""
        ### BEGIN SOLUTION
        y = x.new_zeros(x.shape[0], w.shape[1])
        for step in range(dist.get_world_size(self.row)):
            y += self.sent(self.row, x, step) @ self.sent(self.column, w, step)
        return y
        ### END SOLUTION

    def backward(
        self, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dy: (m, n), this rank's block of dY. Returns its blocks of dX = dY Wᵀ, (m, k), and of
        dW = Xᵀ dY, (k, n)."""
        ### BEGIN SOLUTION
        for step in range(dist.get_world_size(self.row)):
            part = dy @ self.sent(self.column, w, step).t()  # a term of dX[i, step]
            dist.reduce(part, group_dst=step, group=self.row)
            if dist.get_rank(self.row) == step:
                dx = part
            part = self.sent(self.row, x, step).t() @ dy  # a term of dW[step, j]
            dist.reduce(part, group_dst=step, group=self.column)
            if dist.get_rank(self.column) == step:
                dw = part
        return dx, dw
        ### END SOLUTION

    ### BEGIN SOLUTION
    ### STUB: # more methods, if you want some
    def sent(self, group: dist.ProcessGroup, block: torch.Tensor, step: int) -> torch.Tensor:
        """Member `step`'s block, on every member of the row or column."""
        block = block if dist.get_rank(group) == step else torch.empty_like(block)
        dist.broadcast(block, group_src=step, group=group)
        return block

    ### END SOLUTION
