"""A plan as a program: instructions, how they are made and checked. Torch-free.

The names that passes of your own are written with can be imported from here (own.py shows one).
"""

from paralab.programs.instructions import (  # noqa: F401
    ADD,
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    COPY,
    FORWARD,
    KEEP,
    NORM,
    RECEIVE,
    RECOMPUTE,
    REDUCE_SCATTER,
    SEND,
    UPDATE,
    WAIT,
    Instr,
    all_gather,
    all_reduce,
    completed,
    gradients,
    insert,
    reduce_scatter,
    wait,
)
