"""The check that ranks started by different commands train the same thing."""

from __future__ import annotations

import zlib

import torch

from paralab.checks import illegal
from paralab.comm import Group
from paralab.data import Corpus
from paralab.programs.program import Program
from paralab.ranks.errors import RankError


def agree(group: Group, *, what: str, corpus: Corpus, program: Program) -> None:
    """Raise ``RankError`` if the ranks were not started with the same model, plan, settings and
    text, or ValueError if the learner's passes made other programs for the same pipeline rank.

    what  the version, model, plan and settings of this rank, as text

    Under torchrun each machine is started by its own command line and reads its own files. A pass
    runs in every process, where random numbers and the order of a set may differ.
    """
    context = group.context
    if group.size == 1:
        return
    plan, pp = program.plan, program.plan.place(context.rank).pp
    code = repr(program.codes[pp]) if plan.passes else ""  # without passes it follows from ``what``
    files = [(f.name, size) for f, size in zip(corpus.files, corpus.sizes, strict=True)]
    facts = [zlib.crc32(repr(fact).encode()) for fact in (what, files, code)]
    mine = torch.tensor(facts, dtype=torch.int64, device=context.device)
    everyone = mine.new_empty(len(facts) * group.size)
    group.all_gather(everyone, mine, phase="setup").wait()
    for rank, theirs in enumerate(everyone.view(-1, len(facts)).tolist()):
        if theirs[0] != facts[0]:
            raise RankError(
                f"rank {rank} was started with another model, plan, settings or paralab than rank "
                f"{context.rank}; give every machine the same command line and version"
            )
        if theirs[1] != facts[1]:
            raise RankError(
                f"rank {rank} reads another text than rank {context.rank} ({corpus.root}, "
                f"{corpus.num_bytes} bytes); give every machine the same files with data="
            )
        if theirs[2] != facts[2] and plan.place(rank).pp == pp:
            raise illegal(
                "passes",
                plan.pass_names,
                f"rank {rank} got another list of instructions than rank {context.rank}, so that "
                "their calls would not match",
                "a pass that makes the same list in every process: it draws no random numbers "
                "without a seed, and loops over no set of names without sorted()",
            )
