"""What the all-reduces of parallel/collectives.py cost: steps, bytes, seconds, and who wins when.

In the alpha-beta model (Hockney 1994, "The communication challenge for MPP: Intel Paragon and Meiko
CS-2") a message of x bytes takes alpha + beta x seconds. With n members and a tensor of S bytes:

    algorithm              seconds                           one member sends, bytes
    ring_reduce_scatter    (n-1) (alpha + beta S/n)          (n-1)/n S
    ring_all_gather        (n-1) (alpha + beta S/n)          (n-1)/n S
    ring_all_reduce        2 (n-1) (alpha + beta S/n)        2 (n-1)/n S, the least possible
    tree_all_reduce        2 ceil(log2 n) (alpha + beta S)   S for each neighbour in the tree

A hierarchical all-reduce is two rings: one of the g members of a node, and one of the n/g nodes on
S/g bytes, over the link between them.

The ring's bytes are the lower bound of Patarasuk & Yuan (2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", theorem 1). Thakur, Rabenseifner & Gropp (2005,
"Optimization of collective communication operations in MPICH", secs. 3-4) have the model and switch
at a message size too, an all-reduce from recursive doubling to halving and doubling, which for n a
power of two has the ring's bytes in 2 log2 n steps (lab 01). Adding up is left out, as it is
everywhere here.

Where n does not divide the tensor, chunks differ by one element and the largest sets the pace.
"""

from __future__ import annotations

from paralab.checks import choice, illegal, instance, whole
from paralab.spec.links import Link, rounds
from paralab.theory.traffic import share
from paralab.theory.work import ITEM

TREE = "tree_all_reduce"
ALGORITHMS = ("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce", TREE)


def steps(algorithm: str, n: int) -> int:
    """Messages one after the other: how often alpha is paid. Raises ValueError on anything that the
    algorithm would refuse.
    """
    choice("algorithm", algorithm, ALGORITHMS)
    n = whole("n", n, at_least=1)
    return 2 * rounds(n) if algorithm == TREE else len(_halves(algorithm)) * (n - 1)


def seconds(algorithm: str, n: int, nbytes: int, link: Link) -> float:
    """Time until the last of ``n`` members has the result, on ``link``.

    nbytes     of the tensor, S; whole elements of fp32
    """
    instance("link", link, Link, "pl.Link(alpha=seconds, bandwidth=bytes_per_s)", "link")
    times, count = steps(algorithm, n), _elements(nbytes)
    return times * link.seconds((count if algorithm == TREE else -(-count // n)) * ITEM)


def wire_bytes(algorithm: str, n: int, nbytes: int, index: int = 0) -> int:
    """Bytes that member ``index`` sends; over all n members they add up to the table's n-fold."""
    steps(algorithm, n)  # refuses what is wrong
    index = whole("index", index, at_least=0, at_most=n - 1)
    count = _elements(nbytes)
    if algorithm == TREE:
        return _tree_neighbours(n, index) * count * ITEM
    if n == 1:
        return 0
    # In every half all chunks but one, the first or second after its own.
    halves = _halves(algorithm)
    return sum(count - share(count, n, (index + half) % n) for half in halves) * ITEM


def _halves(algorithm: str) -> tuple[int, ...]:
    """Of rings: 1 for a reduce-scatter, 2 for an all-gather, which an all-reduce makes in turn."""
    return {"ring_reduce_scatter": (1,), "ring_all_gather": (2,)}.get(algorithm, (1, 2))


def _elements(nbytes: int) -> int:
    nbytes = whole("nbytes", nbytes, at_least=0)
    if nbytes % ITEM:
        why = f"not whole elements of {ITEM} bytes"
        raise illegal("nbytes", nbytes, why, f"a multiple of {ITEM}")
    return nbytes // ITEM


def _tree_neighbours(n: int, index: int) -> int:
    """With how many members ``index`` shares an edge of the binomial tree rooted in member 0."""
    distances = [2**k for k in range(rounds(n))]
    parent = [d for d in distances if index % (2 * d) == d]
    children = [d for d in distances if index % (2 * d) == 0 and index + d < n]
    return len(parent) + len(children)
