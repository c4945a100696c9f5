"""Links inside a node and between nodes, and what a call of a group of ranks takes on them.

[Note: ports] A group whose n members are spread over nodes, k on each, sends through k ports of a
node at once: in a ring's k copies, one per port, every member is the one at the border once. So a
ring's bytes leave a node at k times one port's bandwidth, and never faster than links inside the
node bring them there. In an all-to-all every member sends what goes elsewhere, (n-k)/(n-1) of its
bytes, through its own port. So it is where n-1 members reduce straight to a root, as over gloo: all
their bytes come in on its link, those from other nodes at its port. NCCL reduces and broadcasts
along a ring that passes pieces on (its src/graph/tuning.cc): no member takes in, or sends, more
than the tensor.

[Note: latency] Alpha is paid for every message that has to come after another one:

    ring   n-1 messages (an all-reduce: twice), of which nodes-1 go from node to node
    tree   of an all-reduce: up and down ceil(log2 k) rounds inside a node and ceil(log2 nodes)
           between them, and each carries the whole tensor

With alpha + bytes / bandwidth for a message (Hockney 1994) that is the model of Thakur,
Rabenseifner & Gropp (2005), and of theory/collectives.py, which writes each algorithm out. NCCL's
tree is another one, and NCCL chooses by its own sums (tuning.cc): a chain through a node and two
trees between nodes, each for half of the tensor in pieces, so that every member sends twice the
tensor in all, at `TREE` of the ring's rate. What a cluster has measured of an operation was
measured with the algorithm that it has there, so nothing is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paralab.checks import Description, real

ALGORITHMS = ("ring", "tree")
TREE = 0.9  # of a ring's rate, NCCL's trees


@dataclass(frozen=True, kw_only=True)
class Link(Description):
    """The alpha-beta model of one kind of link: a message of n bytes takes alpha + n / bandwidth.

    alpha      seconds before the first byte
    bandwidth  bytes per second that one rank can send
    """

    alpha: float
    bandwidth: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", real("alpha", self.alpha, at_least=0.0))
        object.__setattr__(self, "bandwidth", real("bandwidth", self.bandwidth, above=0.0))

    def seconds(self, wire_bytes: float) -> float:
        """Time for one rank to send ``wire_bytes``."""
        return self.alpha + wire_bytes / self.bandwidth


class Reach(NamedTuple):
    """Where a group's members are.

    members  n of them
    near     k, of them on one node: on the node that has fewest
    nodes    that have some
    """

    members: int
    near: int
    nodes: int

    @classmethod
    def of(cls, ranks: Sequence[int], node_of: Callable[[int], int]) -> Reach:
        """Of a group of these ranks, on these nodes."""
        nodes = Counter(map(node_of, ranks))
        return cls(len(ranks), min(nodes.values()), len(nodes))


def furthest(reaches: Iterable[Reach]) -> Reach:
    """The one that is spread over nodes most thinly: at its pace the groups alike go on."""
    return max(reaches, key=lambda reach: (reach.nodes > 1, -reach.near, reach.nodes))


class Way(NamedTuple):
    """What a call takes by one algorithm: ``latency + wire_bytes / bandwidth`` seconds.

    latency    seconds: alpha, once for each message that comes after another
    bandwidth  bytes/s for the bytes that the member sends that sends most
    """

    latency: float
    bandwidth: float

    def seconds(self, wire_bytes: float) -> float:
        return self.latency + wire_bytes / self.bandwidth


def ways(op: str, reach: Reach, near: Link, far: Link, *, nccl: bool = False) -> dict[str, Way]:
    """{algorithm: `Way`} of an operation. See [Note: ports] and [Note: latency].

    near  between two members on one node
    far   between two on different nodes, with as many ports as one member has
    nccl  makes the calls, else gloo does
    """
    n, k, nodes = reach
    if n == 1:
        return {"ring": Way(0.0, near.bandwidth)}
    ports = own = near.bandwidth
    if nodes > 1:
        ports = min(k * far.bandwidth, near.bandwidth)
        own = min(far.bandwidth * (n - 1) / (n - k), near.bandwidth)
    down = rounds(k) * near.alpha + rounds(nodes) * far.alpha  # a tree's messages
    if op in ("send", "recv") or (op == "reduce" and not nccl):  # one message after no other
        comes_in = n - 1 if op == "reduce" else 1
        return {"direct": Way((far if nodes > 1 else near).alpha, own / comes_in)}
    if op == "broadcast" and not nccl:  # down a tree, whose root sends the tensor in every round
        return {"tree": Way(down, ports)}
    halves = 2 if op == "all_reduce" else 1
    name, sent = ("pairwise", own) if op == "all_to_all" else ("ring", ports)
    if op == "broadcast":  # wire bytes are a tree's root's; in a ring each sends the tensor once
        sent *= rounds(n)
    found = {name: Way(halves * ((n - nodes) * near.alpha + (nodes - 1) * far.alpha), sent)}
    if op == "all_reduce" and nccl:
        latency = 2 * ((k - 1) * near.alpha + rounds(nodes) * far.alpha)
        found["tree"] = Way(latency, TREE * (n - 1) / n * ports)
    elif op == "all_reduce":
        whole = rounds(k) / near.bandwidth + rounds(nodes) / ports  # per byte of the tensor
        found["tree"] = Way(2 * down, (n - 1) / n / whole)  # per byte that a ring's member sends
    return found


def messages(op: str, n: int) -> int:
    """Of a call inside one node, those that come one after the other: how often alpha is paid."""
    unit = Link(alpha=1.0, bandwidth=1.0)
    return round(next(iter(ways(op, Reach(n, n, 1), unit, unit).values())).latency)


def rounds(n: int) -> int:
    """ceil(log2 n): of a tree of n members."""
    return (n - 1).bit_length()
