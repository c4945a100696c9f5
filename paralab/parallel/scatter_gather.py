"""Messages between stages in parts: the scatter/gather of PTD-P.

Under 1D tensor parallelism all t ranks of a stage hold the same x, and each would send all of it to
its counterpart in the next stage, over the slow links between nodes. Instead each sends a t-th, and
the receivers all-gather the parts over tp, which is usually inside a node (PTD-P, Narayanan+ 2021,
arXiv:2104.04473, sec. 4.1; also github.com/deepspeedai/DeepSpeed,
deepspeed/runtime/pipe/engine.py, `is_pipe_partitioned`). Per message and rank, in elements,
x = b s h:

                 between stages    over tp
    whole        x                 0
    in parts     x / t             (t-1)/t x

With sequence parallelism each rank has its own t-th of x anyway. The results equal those of whole
messages bit for bit. Lab 12 counts both.
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
    """Each SEND and RECEIVE moves a part of the state; the received parts are all-gathered before
    the first instruction that reads the state.
    """
    new_code, received = [], set()  # received: states of which this rank has only its part
    for ins in code:
        if ins.op == SEND:
            [whole] = ins.reads
            position = len(new_code)
            # The copy goes in front of adjacent messages, next to the compute that made the state.
            while position and new_code[position - 1].op in MESSAGES:
                position -= 1
            new_code.insert(position, Instr(COPY, whole[1], ins.mb, -1, (whole,), (_part(whole),)))
            ins = ins._replace(reads=(_part(whole),))
        elif ins.op == RECEIVE:
            [whole] = ins.writes
            received.add(whole)
            ins = ins._replace(writes=(_part(whole),))
        for whole in [v for v in ins.reads if v in received]:
            received.remove(whole)
            gather = Instr(ALL_GATHER, whole[1], ins.mb, -1, (_part(whole),), (whole,), "tp")
            new_code.append(gather._replace(phase="activations"))
        new_code.append(ins)
    return new_code


def _part(whole: Value) -> Value:
    """This rank's part of a state, or of a state's gradient."""
    return (f"{whole[0]}slice", *whole[1:])
