"""Messages between stages in parts: the scatter/gather of PTD-P.

Under 1D tensor parallelism all t ranks of a stage hold the same x, and each would send all of it to
its counterpart in the next stage, over the slow links between nodes. So each sends a t-th, and the
receivers put theirs together by an all-gather over tp, which is usually inside a node (PTD-P,
Narayanan+ 2021, arXiv:2104.04473, sec. 4.1; also github.com/deepspeedai/DeepSpeed,
deepspeed/runtime/pipe/engine.py, `is_pipe_partitioned`). Per message and rank, in elements,
x = b s h:

                 between stages    over tp
    whole        x                 0
    in parts     x / t             (t-1)/t x

With sequence parallelism each rank has its own t-th of x anyway. The numbers are those of whole
messages, bit for bit. Lab 12 counts both.
"""

from __future__ import annotations

from paralab.programs.instructions import (
    ALL_GATHER,
    COPY,
    MESSAGES,
    RECEIVE,
    SEND,
    Code,
    Instr,
    Value,
)


def scatter_gather(code: Code) -> Code:
    """A part of each state is sent and received; a received part is all-gathered before the first
    instruction that reads the state.
    """
    made, parts = [], {}
    for ins in code:
        if ins.op == SEND:
            [whole] = ins.reads
            at = len(made)
            while at and made[at - 1].op in MESSAGES:  # the part is made where the whole is
                at -= 1
            made.insert(at, Instr(COPY, whole[1], ins.mb, -1, (whole,), (_part(whole),)))
            ins = ins._replace(reads=(_part(whole),))
        elif ins.op == RECEIVE:
            [whole] = ins.writes
            parts[whole] = _part(whole)
            ins = ins._replace(writes=(parts[whole],))
        for whole in [v for v in ins.reads if v in parts]:
            values = (parts.pop(whole),), (whole,)
            made.append(Instr(ALL_GATHER, whole[1], ins.mb, -1, *values, "tp", phase="activations"))
        made.append(ins)
    return made


def _part(whole: Value) -> Value:
    """Of a state, or of its gradient, this rank's."""
    return (f"{whole[0]}slice", *whole[1:])
