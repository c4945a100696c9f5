"""Lab 07's exercise: an MLP whose weights lie on several ranks."""


class MyMLP:
    """z = relu(x A + b) B + c, where each of t ranks keeps a t-th of A, b and B."""

    def __init__(self, A, b, B, c, *, group):
        # A: (h, k), b: (k,), B: (k, h), c: (h,): whole, the same on every rank; t divides k
        self.group = group
        ### BEGIN SOLUTION
        ### STUB: # what does this rank keep? (a slice of a tensor keeps the whole tensor alive)
        width = A.shape[1] // group.size
        own = slice(group.index * width, (group.index + 1) * width)
        self.A, self.b, self.B = A[:, own].clone(), b[own].clone(), B[own].clone()
        self.c = c
        ### END SOLUTION

    def forward(self, x):
        """x: (n, h), the same on every rank. Returns z: (n, h), on every rank."""
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        self.x, self.inside = x, (x @ self.A + self.b).relu()  # (n, k/t)
        z = self.inside @ self.B
        self.group.all_reduce(z).wait()
        return z + self.c
        ### END SOLUTION

    def backward(self, grad):
        """grad: (n, h), of z, the same on every rank. Returns x's gradient, on every rank.

        Leaves the gradients of what this rank keeps in `self.gradients`, by name.
        """
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        of_inside = (grad @ self.B.t()) * (self.inside > 0)  # (n, k/t)
        self.gradients = {
            "A": self.x.t() @ of_inside,
            "b": of_inside.sum(0),
            "B": self.inside.t() @ grad,
            "c": grad.sum(0),
        }
        of_x = of_inside @ self.A.t()
        self.group.all_reduce(of_x).wait()
        return of_x
        ### END SOLUTION
