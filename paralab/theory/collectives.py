"""The cost of the collectives of parallel/collectives.py: messages in sequence, bytes, seconds.

In the alpha-beta model (Hockney 1994, "The communication challenge for MPP: Intel Paragon and Meiko
CS-2") a message of x bytes takes alpha + beta x seconds. With n members and a tensor of S bytes:

    algorithm              seconds                           bytes that one member sends
    ring_reduce_scatter    (n-1) (alpha + beta S/n)          (n-1)/n S
    ring_all_gather        (n-1) (alpha + beta S/n)          (n-1)/n S
    ring_all_reduce        2 (n-1) (alpha + beta S/n)        2 (n-1)/n S, the least possible
    tree_all_reduce        2 ceil(log2 n) (alpha + beta S)   S for each neighbour in the tree

A hierarchical all-reduce consists of two rings: one over the g members of a node, and one over the
n/g nodes, which sums S/g bytes: each member sends 2 (1 - g/n) S/g of them to another node.

The ring's bytes are the lower bound of Patarasuk & Yuan (2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", theorem 1). Thakur, Rabenseifner & Gropp (2005,
"Optimization of collective communication operations in MPICH", secs. 3-4) use the same model. They
too choose the algorithm by message size: recursive doubling for short all-reduces, and for long
ones recursive halving and doubling, which for n a power of two sends the ring's bytes in 2 log2 n
steps (lab 01). The time of the additions is neglected.

Where n does not divide the tensor, chunks differ by one element and the largest sets the pace.
"""

from __future__ import annotations

from paralab.checks import choice, illegal, instance, whole
from paralab.spec.links import Link, rounds
from paralab.theory.traffic import share
from paralab.theory.work import ITEM

TREE = "tree_all_reduce"
# {ring: its halves, 1 for a reduce-scatter and 2 for an all-gather}
HALVES = {"ring_reduce_scatter": (1,), "ring_all_gather": (2,), "ring_all_reduce": (1, 2)}
ALGORITHMS = (*HALVES, TREE)


def steps(algorithm: str, n: int) -> int:
    """Messages in sequence, so how often alpha is paid. Raises ValueError for what the algorithm
    refuses.
    """
    choice("algorithm", algorithm, ALGORITHMS)
    n = whole("n", n, at_least=1)
    return 2 * rounds(n) if algorithm == TREE else len(HALVES[algorithm]) * (n - 1)


def seconds(algorithm: str, n: int, nbytes: int, link: Link) -> float:
    """Time until the last of ``n`` members has the result, on ``link``.

    nbytes  bytes S of the tensor, a whole number of fp32 elements
    """
    instance("link", link, Link, "pl.Link(alpha=seconds, bandwidth=bytes_per_s)", "link")
    times, count = steps(algorithm, n), _elements(nbytes)
    return times * link.seconds((count if algorithm == TREE else -(-count // n)) * ITEM)


def wire_bytes(algorithm: str, n: int, nbytes: int, index: int = 0) -> int:
    """Bytes that member ``index`` sends; members of a ring send the table's figure on average."""
    steps(algorithm, n)  # refuses an unknown algorithm and an n below 1
    index = whole("index", index, at_least=0, at_most=n - 1)
    count = _elements(nbytes)
    if algorithm == TREE:
        return _tree_neighbours(n, index) * count * ITEM
    if n == 1:
        return 0
    # In every half a member sends all chunks but one, the first or second after its own.
    return sum(count - share(count, n, (index + k) % n) for k in HALVES[algorithm]) * ITEM


def _elements(nbytes: int) -> int:
    nbytes = whole("nbytes", nbytes, at_least=0)
    if nbytes % ITEM:
        why = f"not a whole number of elements of {ITEM} bytes"
        raise illegal("nbytes", nbytes, why, f"a multiple of {ITEM}")
    return nbytes // ITEM


def _tree_neighbours(n: int, index: int) -> int:
    """The parent and the children of member ``index`` in the binomial tree rooted in member 0."""
    distances = [2**k for k in range(rounds(n))]
    return (index > 0) + sum(index % (2 * d) == 0 and index + d < n for d in distances)
