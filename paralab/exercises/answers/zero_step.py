"""Lab 05's exercise: one step of ZeRO's first stage."""


class MyZero1:
    """SGD with momentum, in which every rank keeps the momentum of its own N-th only."""

    def __init__(self, parameters, *, group, lr, momentum):
        # parameters: (numel,), the same on every rank; N need not divide numel
        self.parameters, self.group = parameters, group
        self.lr, self.momentum = lr, momentum
        ### BEGIN SOLUTION
        ### STUB: # what does this rank keep from step to step?
        self.part = -(-parameters.numel() // group.size)  # elements of an N-th, rounded up
        self.velocity = parameters.new_zeros(self.part)
        ### END SOLUTION

    def step(self, gradient):
        """gradient: (numel,), of this rank's share; their sum over the ranks is the mean.

        When this returns, `self.parameters` holds the new ones, on every rank.
        """
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        own_gradient = gradient.new_empty(self.part)
        self.group.reduce_scatter(own_gradient, self.padded(gradient)).wait()
        self.velocity.mul_(self.momentum).add_(own_gradient)
        full = self.padded(self.parameters)
        own = full.chunk(self.group.size)[self.group.index]  # a view of full
        own.sub_(self.lr * self.velocity)
        self.group.all_gather(full, own).wait()
        self.parameters.copy_(full[: self.parameters.numel()])
        ### END SOLUTION

    ### BEGIN SOLUTION
    ### STUB: # more methods, if you want some
    def padded(self, flat):
        """`flat` and so many zeros behind it that there are N equal parts."""
        buffer = flat.new_zeros(self.group.size * self.part)
        buffer[: flat.numel()] = flat
        return buffer

    ### END SOLUTION
