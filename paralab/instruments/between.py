"""The link between the machines of a torchrun job, measured, and kept in the calibration of each.

`paralab doctor --calibrate` under torchrun measures each machine by its first rank, as without
torchrun. Then messages of all sizes go round the ring of these ranks, over one link at a time: the
same messages, and the same fit, as inside one machine. A ring is as fast as its slowest link, so
this one becomes `Cluster.inter`, on every machine and for any number of nodes.

The clocks of machines differ, so only the receiver's clock is read. Gloo sends when the receiver
has said that it is ready; after a barrier the sender has been ready before that arrives. So what
the receiver sees, from its launch to the end, is a whole round trip and the bytes: the alpha of
spec/links.py.
"""

from __future__ import annotations

from typing import Any

from paralab.checks import illegal
from paralab.instruments import calibrate
from paralab.instruments.measure import links_of, workloads
from paralab.ranks.started import variable
from paralab.spec import Cluster
from paralab.theory.fit import fit_link

JOIN_S = 300.0  # within which every machine has been measured, some of them later than others
TIMEOUT_S = 600.0  # that all other links may take in which a rank has no part
SMALL = 4  # sizes that alone say what alpha is: with the others a slow link has time for 3 rounds


def calibrate_nodes(device: str) -> int:
    """Be one rank of a torchrun job that measures its machines and the links between them. Returns
    the number of machines, or 0 on a rank that is not the first of its own: it has nothing to say.

    device  "cpu"; links between GPUs on several machines are not measured

    Raises ``RankError`` if the ranks cannot meet, and ``ValueError`` for another device.
    """
    if device != "cpu":
        why, legal = "the link between nodes is measured over gloo", "'cpu'; or without torchrun"
        raise illegal("device", device, why, legal)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    local_rank, local_ranks, ranks = (int(variable(name, number=True)) for name in names)
    if local_rank == 0:
        Cluster.local(device=device, refresh=True)
    if local_ranks == ranks:
        return int(local_rank == 0)
    import torch.distributed as dist  # this process is a rank, so it may import torch

    from paralab.ranks.torchrun import torchrun_context

    context = torchrun_context(timeout=TIMEOUT_S, device=device, join_timeout=JOIN_S)
    found = measure_inter(context)
    if local_rank == 0:
        calibrate.keep_inter(found)
    dist.destroy_process_group()
    return found["nodes"] * (local_rank == 0)


def measure_inter(context: Any) -> dict[str, Any]:
    """Runs in every rank: {"link": alpha and bandwidth of the slowest link between two nodes that
    are neighbours in a ring, "nodes", "made"}.
    """
    import torch.distributed as dist

    from paralab.comm import everyone

    world, nodes = everyone(context), sorted(set(context.nodes))
    sizes = workloads(context).messages
    first = [context.nodes.index(node) for node in nodes]
    mine = []
    for source, end in zip(first, first[1:] + first[:1], strict=True):
        if group := world.subgroup((source, end), axis="pp"):
            rows = links_of(group, ("send",), sizes[:SMALL], budget=4)
            rows += links_of(group, ("send",), sizes[SMALL:])
            mine += [rows] * (context.rank == end)
    every: list[Any] = [None] * context.world_size
    dist.all_gather_object(every, mine)
    links = []
    for rows in sum(every, []):
        points = calibrate.from_last_launch([rows, rows], 2)  # the receiver's clock for both
        links.append(fit_link(points)[0])
    slowest = max(links, key=lambda link: link.seconds(2**20))
    return {"link": slowest.to_dict(), "nodes": len(nodes), "made": calibrate.timestamp()}
