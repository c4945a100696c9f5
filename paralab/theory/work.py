"""`Work`: FLOPs, bytes and kernels that a device executes, and the seconds that they take.

The seconds are a sum, with the rates that `spec.Cluster` states for the device:

    seconds = flops / cluster.flops + operands / cluster.operand_bandwidth
              + bytes / cluster.memory_bandwidth + elements * cluster.elements
              + kernels * cluster.op_overhead

but at least kernels * cluster.launch_overhead, in which the host launches the kernels. A product of
shapes (m, k) and (k, n) computes 2 m k n FLOPs and moves m k + k n + m n elements, so products with
a small dimension reach a lower rate (the roofline of Williams, Waterman & Patterson 2009, with a
sum in place of its maximum). Few tokens and odd numbers of columns lower the FLOP/s, if the cluster
says so.

A CPU without instructions for 16-bit products emulates them in software, at rates that depend on
the layout of the operands: measured on one core of an AMD EPYC, 64 to 75 GFLOP/s in fp32, and in
bf16 1.3 to 10 for x W^T, 1 to 2.6 for g W and 7 to 20 for g^T x. So a cluster may state these three
rates for each precision, which then replace ``flops``. A GPU states them because its 16-bit
products are faster; its other kernels are faster too, as they move half the bytes. With tf32 only
its products are faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add, mul
from typing import Any

from paralab.spec.cluster import ELEMENTS, Cluster
from paralab.spec.model import BYTES_PER_ELEMENT

ITEM = 4  # bytes of an fp32 element
# {arithmetic of one element: FLOPs of products that take a CPU as long}, measured on one core. The
# arithmetic is GELU's tanh form, its backward, a softmax's exponential, a dropout mask's element.
ARITHMETIC = {"gelu": 400, "gelu_backward": 600, "exp": 100, "draw": 1000}


@dataclass(frozen=True)
class Work:
    """The work of a device. Works can be added, and multiplied by a count.

    flops     FLOPs of matrix products
    bytes     bytes that other kernels read and write, counted as in fp32
    exact     bytes of kernels that move equally many in every precision
    kernels   number of kernel calls
    products  the part of ``flops`` in products x W^T (forward), g W (the gradient of an input, and
              attention) and g^T x (the gradient of a weight)
    operands  bytes that products read and write, counted as in fp32
    fused     the part of ``bytes`` that fused kernels do not move
    odd       the part of ``flops`` in products with an odd number of columns, and half of that with
              an even number which eight does not divide
    elements  numbers of elements that need arithmetic, for each name in ELEMENTS of spec/cluster.py
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
        """A fraction of the work, in equally many kernels."""
        return replace(self * part, kernels=self.kernels)

    @property
    def arithmetic(self) -> float:
        """FLOPs, plus the FLOPs that take a CPU as long as the arithmetic of the elements."""
        return self.flops + sum(map(mul, self.elements, ARITHMETIC.values()))

    def seconds(self, cluster: Cluster, precision: str = "fp32") -> float:
        """Seconds on one device of ``cluster``. precision: of a plan, or "tf32".

        In 16 bits half as many bytes move. Where a cluster states `products` for the precision,
        each kind of product has its own rate, and a CPU's other kernels take as long as in fp32.
        """
        rates = cluster.products.get(precision)
        native = rates is None or cluster.gpus  # no software emulates the precision
        item = ITEM if precision == "tf32" or not native else BYTES_PER_ELEMENT[precision]
        width = item / ITEM
        rest, seconds = self.flops, 0.0
        if rates is not None:
            seconds = sum(flops / rate for flops, rate in zip(self.products, rates, strict=True))
            rest -= sum(self.products)
        if self.odd and item < ITEM and cluster.odd_products < 1:
            seconds += self.odd * (1 / cluster.odd_products - 1) / cluster.rate(precision)
        if cluster.operand_bandwidth is not None:
            seconds += self.operands * width / cluster.operand_bandwidth
        if cluster.elements:
            per_element = (cluster.elements.get(name, 0.0) for name in ELEMENTS)
            seconds += sum(map(mul, self.elements, per_element))
        moved = (self.bytes - self.fused * cluster.fused) * width + self.exact
        seconds += rest / cluster.flops + moved / cluster.memory_bandwidth
        return max(
            seconds + self.kernels * cluster.op_overhead, self.kernels * cluster.launch_overhead
        )


def _sum(a: Any, b: Any) -> Any:
    return tuple(map(add, a, b)) if type(a) is tuple else a + b


def linear(tokens: float, inputs: float, outputs: float, times: int = 1) -> tuple[Work, Work, Work]:
    """The products x W^T, g W and g^T x of a linear layer, x (tokens, inputs) and W (outputs,
    inputs): forward, input half, and weight half; ``times`` of each.
    """
    flops = 2 * tokens * inputs * outputs * times
    odd = flops * (1 if inputs % 2 or outputs % 2 else 0.5 * bool(inputs % 8 or outputs % 8))
    moved = ITEM * times * (tokens * inputs + inputs * outputs + tokens * outputs)
    kinds = ((flops, 0.0, 0.0), (0.0, flops, 0.0), (0.0, 0.0, flops))
    x, g, w = (Work(flops, products=kind, operands=moved, odd=odd) for kind in kinds)
    return x, g, w


def on_processor(flops: float) -> dict[str, float]:
    """`Cluster.elements` of a CPU whose products reach ``flops`` FLOP/s."""
    return {name: count / flops for name, count in ARITHMETIC.items()}


def elementwise(**counts: float) -> Work:
    """The arithmetic of elements: {name in ELEMENTS: number of elements}."""
    return Work(elements=tuple(counts.get(name, 0.0) for name in ELEMENTS))
