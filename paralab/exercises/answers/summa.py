"""Lab 08's exercise: SUMMA, there and back."""


class MySumma:
    """Y = X W on q x q ranks, of which rank (i, j) has block (i, j) of every matrix."""

    def __init__(self, row, column):
        # row: the ranks (i, 0) ... (i, q-1); column: the ranks (0, j) ... (q-1, j)
        self.row, self.column = row, column

    def forward(self, x, w):
        """x: (m, k), w: (k, n), this rank's blocks. Returns its block of Y = X W, (m, n)."""
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        y = x.new_zeros(x.shape[0], w.shape[1])
        for step in range(self.row.size):
            y += self.spread(self.row, x, step) @ self.spread(self.column, w, step)
        return y
        ### END SOLUTION

    def backward(self, x, w, dy):
        """dy: (m, n), the block of Y's gradient. Returns those of X' = Y' W^T and W' = X^T Y',
        where X' is the gradient of X."""
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        for step in range(self.row.size):
            part = dy @ self.spread(self.column, w, step).t()  # a term of X'[i, step]
            self.row.reduce(part, root=self.row.ranks[step]).wait()
            if self.row.index == step:
                dx = part
            part = self.spread(self.row, x, step).t() @ dy  # a term of W'[step, j]
            self.column.reduce(part, root=self.column.ranks[step]).wait()
            if self.column.index == step:
                dw = part
        return dx, dw
        ### END SOLUTION

    ### BEGIN SOLUTION
    ### STUB: # more methods, if you want some
    def spread(self, group, block, step):
        """Member `step`'s block, on every member of the row or column."""
        block = block if group.index == step else block.new_empty(block.shape)
        group.broadcast(block, root=group.ranks[step]).wait()
        return block

    ### END SOLUTION
