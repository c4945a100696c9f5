"""Be there when a program calls something of torch's, for as long as an observation lasts.

[Note: before] The kernel that sees an operation's calls is one of the dispatch key BackendSelect,
which lies below autograd and the dispatch modes and above the devices' own kernels: the call passes
there on every thread, from Python and C++, inside modes and DTensor. Redispatching gives Python's
lock back, which gloo's threads need to end a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch._C import DispatchKey
from torch.library import Library


def around(
    undo: ExitStack, owner: Any, name: str, block: Callable[..., AbstractContextManager]
) -> None:
    """Until ``undo`` is closed, ``owner.name`` is called within ``with block(*its arguments)``; not
    where torch.compile traces it, which would break the graph.
    """
    own = getattr(owner, name)

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        with block(*args):
            return own(*args, **kwargs)

    undo.callback(setattr, owner, name, own)
    setattr(owner, name, call)


def stand_before(undo: ExitStack, namespace: str, name: str, seen: Callable[..., Any]) -> None:
    """Until ``undo`` is closed, a call of the operation is ``seen({argument: value}, the call)``.
    The call takes other arguments in the place of its own, or none.

    See [Note: before].
    """
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:  # another version of torch
        return
    names = [argument.name for argument in packet.default._schema.arguments]

    def kernel(keys: Any, *args: Any) -> Any:
        below = keys.remove(DispatchKey.BackendSelect)

        def own(*others: Any) -> Any:
            return packet.default.redispatch(below, *(others or args))

        return seen(dict(zip(names, args, strict=False)), own)

    library = Library(namespace, "IMPL")
    undo.callback(library._destroy)
    library.impl(name, kernel, "BackendSelect", with_keyset=True)
