"""What a device is asked to do, and how long it takes: `Work`.

A device is three numbers, and time is a sum of three terms:

    seconds = flops / cluster.flops + bytes / cluster.memory_bandwidth
              + kernels * cluster.op_overhead

A processor without instructions for 16-bit products makes up for them in software, at rates that
depend on how the operands lie in memory: measured on one core of an AMD EPYC, 64 to 75 GFLOP/s in
fp32, and in bf16 1.3 to 10 of x W^T, 1 to 2.6 of g W and 7 to 20 of g^T x. So a cluster may state
these three rates for each precision, and then they take the place of ``flops``. A GPU states them
because its 16-bit products are the faster ones; there other kernels gain too: their bytes are half
as many, and their arithmetic, counted in units of products, is as fast as the fastest of these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paralab.spec.cluster import Cluster
from paralab.spec.model import BYTES_PER_ELEMENT

ITEM = 4  # bytes of an fp32 element
PRODUCTS = ("forward", "input", "weight")  # what a matrix product makes
# Arithmetic in the unit of products, per element.
GELU_FLOPS = (400, 600)  # forward and backward, of the tanh form on a processor
EXP_FLOPS = 100  # of a softmax
DRAW_FLOPS = 1000  # of a dropout mask


@dataclass(frozen=True)
class Work:
    """What a device is asked to do. Adds up, and multiplies by a count.

    flops    of matrix products, and the arithmetic of GELU and softmax in the same unit
    bytes    that other kernels read and write, in fp32
    kernels  calls
    products of ``flops``, those of products x W^T (forward), g W (the gradient of an input,
             attention) and g^T x (of a weight)
    """

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    products: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __add__(self, other: Work) -> Work:
        a, b, c = self.products
        d, e, f = other.products
        return Work(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.kernels + other.kernels,
            (a + d, b + e, c + f),
        )

    def __mul__(self, times: float) -> Work:
        a, b, c = self.products
        return Work(
            self.flops * times,
            self.bytes * times,
            self.kernels * times,
            (a * times, b * times, c * times),
        )

    __rmul__ = __mul__

    def share(self, part: float) -> Work:
        """This part of it, in as many calls."""
        return replace(self * part, kernels=self.kernels)

    def seconds(self, cluster: Cluster, precision: str = "fp32") -> float:
        """Time on one device of ``cluster``.

        In 16 bits bytes are half as many. Where a cluster states `products_16bit`, every kind of
        product has a rate of its own, and on processors other kernels take as long as in fp32.
        """
        rates = cluster.products_16bit.get(precision)
        able = rates is None or cluster.gpus  # computes in 16 bits
        item = BYTES_PER_ELEMENT[precision] if able else ITEM
        rest, rate, products = self.flops, cluster.flops, 0.0
        if rates is not None:
            products = sum(flops / fast for flops, fast in zip(self.products, rates, strict=True))
            rest, rate = rest - sum(self.products), max(rates) if able else rate
        return (
            rest / rate
            + products
            + self.bytes * item / ITEM / cluster.memory_bandwidth
            + self.kernels * cluster.op_overhead
        )


def product(flops: float, what: str) -> Work:
    """A matrix product: "forward", "input" or "weight"."""
    x, g, w = (flops * (what == kind) for kind in PRODUCTS)
    return Work(flops, products=(x, g, w))
