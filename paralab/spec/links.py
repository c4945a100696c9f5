"""Links inside a node and between nodes, and the time of a collective call on them.

[Note: ports] A group with n members, k on each node, uses k ports of a node at once: NCCL runs k
rings, one per port, and each member is the last of its node in one of them. So the bytes of a ring
collective leave a node at k times the bandwidth of one port, but no faster than links inside the
node deliver them. Gloo runs one ring, through one port. In an all-to-all, which over gloo a
reduce-scatter is too, every member sends (n-k)/(n-1) of its bytes to other nodes, through its own
port. In a reduce over gloo n-1 members send straight to the root: all their bytes arrive on the
root's link, those from other nodes at its port. NCCL reduces and broadcasts along a ring that
passes pieces on (its src/graph/tuning.cc): no member receives or sends more than the tensor.

[Note: slow links] Two of gloo's ranks have one connection for both ways, on which a receiver's
announcement waits behind data. On a link of 100 Mbit/s an all-gather of two ranks took 1.5 times
as long as its bytes, and an all-to-all or a reduce-scatter up to 2 times: this is not modelled.

[Note: latency] Alpha is paid for every message that has to wait for an earlier one:

    ring   n-1 messages (an all-reduce: twice), of which nodes-1 go from node to node. Gloo's
           members receive and send before they go on, so each of the n-1 waits for other nodes
    tree   of an all-reduce: up and down ceil(log2 k) rounds inside a node and ceil(log2 nodes)
           between them, and each carries the whole tensor

[Note: messages] Gloo sends every message of a pair as soon as both its ends are posted, and their
bytes follow one another. So a message occupies its link for its bytes alone, in one direction, and
arrives alpha after they have left: the alphas of several in flight overlap. The sender's wait is
over when they have left. On a link with a round trip of 40 ms and 12.5 MB/s eight messages of 4 kB
arrived 42 to 46 ms after both ranks had posted all, four of 1 MB after 127, 212, 300 and 380 ms. A
receive that is posted early saves half of alpha there (not on loopback), and gloo has two threads
for collectives: 1, 2, 4 and 8 all-reduces of 4 kB in flight took 94, 89, 167 and 367 ms. Neither is
modelled: all calls of a group follow one another, with alpha, as over NCCL messages do, too.

With alpha + bytes / bandwidth for a message (Hockney 1994) that is the model of Thakur,
Rabenseifner & Gropp (2005), and of theory/collectives.py, which writes each algorithm out. NCCL has
another tree, and its own cost model to choose by (tuning.cc): a chain through a node and two trees
between nodes, each for half of the tensor in pieces, so that every member sends twice the tensor in
all, at `TREE` of the ring's rate. A link that a cluster measured for one operation includes the
algorithm that the cluster used, so there is none to choose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paralab.checks import Description, amount

ALGORITHMS = ("ring", "tree")
TREE = 0.9  # rate of NCCL's trees, as a share of its rings'


@dataclass(frozen=True, kw_only=True)
class Link(Description):
    """The alpha-beta model of one kind of link: a message of n bytes takes alpha + n / bandwidth.

    alpha      seconds before the first byte. Over gloo a message waits until its receiver has said
               that it is ready: between machines this makes alpha a round trip, as ping shows it
    bandwidth  bytes per second that one rank can send
    """

    alpha: float = amount(at_least=0.0)
    bandwidth: float = amount(above=0.0)

    def seconds(self, wire_bytes: float) -> float:
        """Time for one rank to send ``wire_bytes``."""
        return self.alpha + wire_bytes / self.bandwidth


class Reach(NamedTuple):
    """How a group of ranks is spread over nodes.

    members  n, the number of members
    near     k, the number of members on one node; if nodes differ, on the one with the fewest
    nodes    the number of nodes with members
    """

    members: int
    near: int
    nodes: int

    @classmethod
    def of(cls, ranks: Sequence[int], node_of: Callable[[int], int]) -> Reach:
        """The reach of a group of ``ranks``; ``node_of`` gives the node of a rank."""
        nodes = Counter(map(node_of, ranks))
        return cls(len(ranks), min(nodes.values()), len(nodes))


def furthest(reaches: Iterable[Reach]) -> Reach:
    """The reach that is spread most thinly over nodes: equal groups proceed at its pace."""
    return max(reaches, key=lambda reach: (reach.nodes > 1, -reach.near, reach.nodes))


class Way(NamedTuple):
    """The time of a call by one algorithm: ``latency + wire_bytes / bandwidth`` seconds.

    latency    seconds: alpha, once for each message that waits for an earlier one
    bandwidth  bytes/s, for the bytes that the busiest member sends
    """

    latency: float
    bandwidth: float

    def seconds(self, wire_bytes: float) -> float:
        return self.latency + wire_bytes / self.bandwidth


def ways(
    op: str, reach: Reach, near: Link, far: Link, *, nccl: bool = False, port: float = math.inf
) -> dict[str, Way]:
    """{algorithm: `Way`} of an operation. See [Note: ports] and [Note: latency].

    near  link between two members on one node
    far   link between two members on different nodes, with one member's share of the ports
    nccl  whether NCCL makes the calls, otherwise gloo does
    port  bytes/s of a ring between nodes at most: over gloo those of one port
    """
    n, k, nodes = reach
    if n == 1:
        return {"ring": Way(0.0, near.bandwidth)}
    ring_rate = member_rate = near.bandwidth
    if nodes > 1:
        ring_rate = min(k * far.bandwidth, near.bandwidth, port)
        member_rate = min(far.bandwidth * (n - 1) / (n - k), near.bandwidth)
    tree_latency = rounds(k) * near.alpha + rounds(nodes) * far.alpha
    if op in ("send", "recv") or (op == "reduce" and not nccl):  # no message waits for another
        messages_in = n - 1 if op == "reduce" else 1
        return {"direct": Way((far if nodes > 1 else near).alpha, member_rate / messages_in)}
    if op == "broadcast" and not nccl:  # down a tree, whose root sends the tensor in every round
        return {"tree": Way(tree_latency, ring_rate)}
    halves = 2 if op == "all_reduce" else 1
    pairwise = op == "all_to_all" or (op == "reduce_scatter" and not nccl)
    name, rate = ("pairwise", member_rate) if pairwise else ("ring", ring_rate)
    if op == "broadcast":  # wire_bytes are a tree root's; in a ring a member sends the tensor once
        rate *= rounds(n)
    cross = n - 1 if nodes > 1 and name == "ring" and not nccl else nodes - 1
    by_algorithm = {name: Way(halves * ((n - 1 - cross) * near.alpha + cross * far.alpha), rate)}
    if op == "all_reduce" and nccl:
        latency = 2 * ((k - 1) * near.alpha + rounds(nodes) * far.alpha)
        by_algorithm["tree"] = Way(latency, TREE * (n - 1) / n * ring_rate)
    elif op == "all_reduce":
        whole = rounds(k) / near.bandwidth + rounds(nodes) / ring_rate  # seconds per tensor byte
        # ``wire_bytes`` are those of a ring: (n - 1) / n of the tensor, twice.
        by_algorithm["tree"] = Way(2 * tree_latency, (n - 1) / n / whole)
    return by_algorithm


def messages(op: str, n: int) -> int:
    """How often a call inside one node pays alpha: its messages that follow one another."""
    unit = Link(alpha=1.0, bandwidth=1.0)
    return round(next(iter(ways(op, Reach(n, n, 1), unit, unit).values())).latency)


def rounds(n: int) -> int:
    """ceil(log2 n), the rounds of a tree of n members."""
    return (n - 1).bit_length()
