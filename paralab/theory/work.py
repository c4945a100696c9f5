"""What a device is asked to do, and how long it takes: `Work`.

Time is a sum, of what `spec.Cluster` says of the device:

    seconds = flops / cluster.flops + operands / cluster.operand_bandwidth
              + bytes / cluster.memory_bandwidth + elements * cluster.elements
              + kernels * cluster.op_overhead

and no less than kernels * cluster.launch_overhead, the time in which the host has asked for it. A
product of shapes (m, k) and (k, n) computes 2 m k n and moves m k + k n + m n elements, so narrow
ones reach a lower rate (the roofline of Williams, Waterman & Patterson 2009, with a sum in place of
its maximum). Few tokens and odd numbers of columns lower ``flops``, where the cluster says so.

A processor without instructions for 16-bit products makes up for them in software, at rates that
depend on how the operands lie in memory: measured on one core of an AMD EPYC, 64 to 75 GFLOP/s in
fp32, and in bf16 1.3 to 10 of x W^T, 1 to 2.6 of g W and 7 to 20 of g^T x. So a cluster may state
these three rates for each precision, and then they take the place of ``flops``. A GPU states them
because its 16-bit products are the faster ones; there other kernels gain too: their bytes are half
as many. With tf32 its products gain and nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add, mul
from typing import Any

from paralab.spec.cluster import ELEMENTS, Cluster
from paralab.spec.model import BYTES_PER_ELEMENT

ITEM = 4  # bytes of an fp32 element
# FLOPs of products that take a processor as long as the arithmetic of one element: of the tanh form
# of GELU, of its backward, of a softmax's exponential, and of a dropout mask. Measured on one core.
ARITHMETIC = {"gelu": 400, "gelu_backward": 600, "exp": 100, "draw": 1000}


@dataclass(frozen=True)
class Work:
    """What a device is asked to do. Adds up, and multiplies by a count.

    flops     of matrix products
    bytes     that other kernels read and write, in fp32
    exact     the same of kernels whose bytes are as many in every precision
    kernels   calls
    products  of ``flops``, those of products x W^T (forward), g W (the gradient of an input,
              attention) and g^T x (of a weight)
    operands  bytes that products read and write, in fp32
    fused     of ``bytes``, those that fused kernels do not move
    odd       of ``flops``, those with an odd number of columns; of those with an even one that is
              not divisible by eight, half
    elements  that need arithmetic, as in `Cluster.elements`, in the order of its ELEMENTS
    """

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    products: tuple[float, float, float] = (0.0, 0.0, 0.0)
    operands: float = 0.0
    fused: float = 0.0
    elements: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    exact: float = 0.0
    odd: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*map(_sum, vars(self).values(), vars(other).values()))

    def __mul__(self, times: float) -> Work:
        return Work(
            *[
                tuple([n * times for n in value]) if type(value) is tuple else value * times
                for value in vars(self).values()
            ]
        )

    __rmul__ = __mul__

    def share(self, part: float) -> Work:
        """This part of it, in as many calls."""
        return replace(self * part, kernels=self.kernels)

    @property
    def arithmetic(self) -> float:
        """FLOPs, and what takes a processor as long: ARITHMETIC."""
        return self.flops + sum(map(mul, self.elements, ARITHMETIC.values()))

    def seconds(self, cluster: Cluster, precision: str = "fp32") -> float:
        """Time on one device of ``cluster``. precision: of a plan, or "tf32".

        In 16 bits bytes are half as many. Where a cluster states `products`, every kind of
        product has a rate of its own, and on processors other kernels take as long as in fp32.
        """
        rates = cluster.products.get(precision)
        able = rates is None or cluster.gpus  # computes in 16 bits
        item = ITEM if precision == "tf32" or not able else BYTES_PER_ELEMENT[precision]
        wide = item / ITEM
        rest, taken = self.flops, 0.0
        if rates is not None:
            taken = sum(flops / fast for flops, fast in zip(self.products, rates, strict=True))
            rest -= sum(self.products)
        if self.odd and item < ITEM and cluster.odd_products < 1:
            taken += self.odd * (1 / cluster.odd_products - 1) / cluster.rate(precision)
        if cluster.operand_bandwidth is not None:
            taken += self.operands * wide / cluster.operand_bandwidth
        if cluster.elements:
            each = (cluster.elements.get(name, 0.0) for name in ELEMENTS)
            taken += sum(map(mul, self.elements, each))
        moved = (self.bytes - self.fused * cluster.fused) * wide + self.exact
        taken += rest / cluster.flops + moved / cluster.memory_bandwidth
        return max(
            taken + self.kernels * cluster.op_overhead, self.kernels * cluster.launch_overhead
        )


def _sum(one: Any, other: Any) -> Any:
    return tuple(map(add, one, other)) if type(one) is tuple else one + other


def linear(tokens: float, inputs: float, outputs: float, times: int = 1) -> tuple[Work, Work, Work]:
    """x W^T, g W and g^T x of x (tokens, inputs) and W (outputs, inputs), ``times`` of each: what a
    linear layer multiplies forward, and in the two halves of backward.
    """
    flops = 2 * tokens * inputs * outputs * times
    odd = flops * (1 if inputs % 2 or outputs % 2 else 0.5 * bool(inputs % 8 or outputs % 8))
    moved = ITEM * times * (tokens * inputs + inputs * outputs + tokens * outputs)
    kinds = ((flops, 0.0, 0.0), (0.0, flops, 0.0), (0.0, 0.0, flops))
    x, g, w = (Work(flops, products=kind, operands=moved, odd=odd) for kind in kinds)
    return x, g, w


def on_processor(flops: float) -> dict[str, float]:
    """`Cluster.elements` of a processor that multiplies at this rate."""
    return {name: count / flops for name, count in ARITHMETIC.items()}


def elementwise(**counts: float) -> Work:
    """The arithmetic of so many elements, by their names in ELEMENTS."""
    return Work(elements=tuple(counts.get(name, 0.0) for name in ELEMENTS))
