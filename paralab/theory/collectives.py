"""What the all-reduces of parallel/collectives.py cost: steps, bytes, seconds, and who wins when.

In the alpha-beta model (Hockney 1994, "The communication challenge for MPP: Intel Paragon and Meiko
CS-2") a message of x bytes takes alpha + beta x seconds. With n members and a tensor of S bytes:

    algorithm              seconds                           one member sends, bytes
    ring_reduce_scatter    (n-1) (alpha + beta S/n)          (n-1)/n S
    ring_all_gather        (n-1) (alpha + beta S/n)          (n-1)/n S
    ring_all_reduce        2 (n-1) (alpha + beta S/n)        2 (n-1)/n S, the least possible
    tree_all_reduce        2 ceil(log2 n) (alpha + beta S)   S for each neighbour in the tree
    hierarchical_all_reduce  with g members per node and m = n/g nodes,
                           2 (g-1) (alpha + beta S/g) inside a node
                         + 2 (m-1) (alpha' + beta' S/(g m)) between nodes

The ring's bytes are the lower bound of Patarasuk & Yuan (2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", theorem 1). Thakur, Rabenseifner & Gropp (2005,
"Optimization of collective communication operations in MPICH", secs. 3-4) have the formulas and the
switch from trees to rings at a message size. Adding up is left out, as it is everywhere here.

Where n does not divide the tensor, chunks differ by one element and the largest sets the pace.
"""

from __future__ import annotations

from paralab.checks import choice, illegal, instance, whole
from paralab.spec.cluster import Link
from paralab.theory.traffic import share
from paralab.theory.work import ITEM

ALGORITHMS = (
    "ring_reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "tree_all_reduce",
    "hierarchical_all_reduce",
)


def steps(algorithm: str, n: int, *, node_size: int | None = None) -> int:
    """Messages one after the other: how often alpha is paid.

    node_size  members per node, of "hierarchical_all_reduce" only. Raises ValueError on anything
               that the algorithm would refuse
    """
    return sum(times for times, _ in _phases(algorithm, n, 0, node_size))


def seconds(
    algorithm: str,
    n: int,
    nbytes: int,
    link: Link,
    *,
    inter: Link | None = None,
    node_size: int | None = None,
) -> float:
    """Time until the last of ``n`` members has the result, on ``link``.

    nbytes     of the tensor, S; whole elements of fp32
    inter      the link between nodes, of "hierarchical_all_reduce" only; default: ``link``
    """
    for name, value in (("link", link), ("inter", link if inter is None else inter)):
        instance(name, value, Link, "pl.Link(alpha=seconds, bandwidth=bytes_per_s)", "link")
    phases = _phases(algorithm, n, _elements(nbytes), node_size)
    if inter is not None and node_size is None:
        raise illegal("inter", inter, f"{algorithm} knows no nodes", "None")
    return sum(
        times * each.seconds(count * ITEM)
        for (times, count), each in zip(phases, (link, inter or link), strict=True)
    )


def wire_bytes(
    algorithm: str, n: int, nbytes: int, index: int = 0, *, node_size: int | None = None
) -> int:
    """Bytes that member ``index`` sends; over all n members they add up to the table's n-fold."""
    n, group, nodes = _checked(algorithm, n, node_size)
    index = whole("index", index, at_least=0, at_most=n - 1)
    count = _elements(nbytes)
    if algorithm == "tree_all_reduce":
        return _tree_neighbours(n, index) * count * ITEM
    halves, place, node = _halves(algorithm), index % group, index // group
    own = share(count, group, (place + 1) % group)
    return (_ring(count, group, place, halves) + _ring(own, nodes, node, halves)) * ITEM


def crossover(n: int, link: Link) -> float:
    """The tensor size in bytes at which ring and tree all-reduce take the same time.

    Below it the tree wins, above it the ring. 0.0 for two and three members, where the tree saves
    no step.

        2 (n-1) (alpha + beta S/n) = 2 L (alpha + beta S),  L = ceil(log2 n)
        S = alpha / beta (n-1-L) / (L - (n-1)/n)
    """
    n = whole("n", n, at_least=2)
    instance("link", link, Link, "pl.Link(alpha=seconds, bandwidth=bytes_per_s)", "link")
    saved = n - 1 - _rounds(n)
    return link.alpha * link.bandwidth * saved / (_rounds(n) - (n - 1) / n)


def _phases(
    algorithm: str, n: int, count: int, node_size: int | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(messages one after the other, elements of each) inside a node, and between nodes."""
    n, group, nodes = _checked(algorithm, n, node_size)
    if algorithm == "tree_all_reduce":
        return (2 * _rounds(n), count), (0, 0)
    halves, chunk = len(_halves(algorithm)), -(-count // group)
    return (halves * (group - 1), chunk), (halves * (nodes - 1), -(-chunk // nodes))


def _halves(algorithm: str) -> tuple[int, ...]:
    """Of rings: 1 for a reduce-scatter, 2 for an all-gather, which an all-reduce makes in turn."""
    return {"ring_reduce_scatter": (1,), "ring_all_gather": (2,)}.get(algorithm, (1, 2))


def _checked(algorithm: str, n: int, node_size: int | None) -> tuple[int, int, int]:
    """(n, members per node, nodes)."""
    choice("algorithm", algorithm, ALGORITHMS)
    n = whole("n", n, at_least=1)
    if algorithm != "hierarchical_all_reduce":
        if node_size is not None:
            raise illegal("node_size", node_size, f"{algorithm} knows no nodes", "None")
        return n, n, 1
    group = whole("node_size", node_size, at_least=1, at_most=n)
    if n % group:
        legal = ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
        raise illegal("node_size", group, f"does not divide {n} ranks", legal)
    return n, group, n // group


def _elements(nbytes: int) -> int:
    nbytes = whole("nbytes", nbytes, at_least=0)
    if nbytes % ITEM:
        raise illegal(
            "nbytes", nbytes, f"not whole elements of {ITEM} bytes", f"a multiple of {ITEM}"
        )
    return nbytes // ITEM


def _rounds(n: int) -> int:
    return (n - 1).bit_length()  # ceil(log2 n)


def _ring(count: int, n: int, index: int, halves: tuple[int, ...]) -> int:
    """Elements that a member of a ring sends: in every half all chunks but one, the first or second
    after its own.
    """
    if n == 1:
        return 0
    return sum(count - share(count, n, (index + half) % n) for half in halves)


def _tree_neighbours(n: int, index: int) -> int:
    """With how many members ``index`` shares an edge of the binomial tree rooted in member 0."""
    distances = [2**k for k in range(_rounds(n))]
    parent = [d for d in distances if index % (2 * d) == d]
    children = [d for d in distances if index % (2 * d) == 0 and index + d < n]
    return len(parent) + len(children)
