"""Be there when a program calls something of torch's, for as long as an observation lasts.

[Note: before] The kernel that sees an operation's calls is one of the dispatch key BackendSelect,
which lies below autograd and the dispatch modes and above the devices' own kernels: the call passes
there on every thread, from Python and C++, inside modes and DTensor. Redispatching gives Python's
lock back, which gloo's threads need to end a call.

[Note: self] While torch.profiler records stacks, it takes every frame with the code of
``Module.__call__`` for a call of a module, and reads its ``self``. So what stands in for a method
has that name, and a code object that nothing else runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch._C import DispatchKey
from torch.library import Library

UNSEEN = contextlib.nullcontext()  # around what is let by


def around(
    undo: ExitStack, owner: Any, name: str, block: Callable[..., AbstractContextManager]
) -> None:
    """Until ``undo`` is closed, ``owner.name`` is called within ``with block(*its arguments)``; not
    where torch.compile traces it, which would break the graph. What the block yields, if anything,
    is called with the result.
    """
    own = getattr(owner, name)

    def within(*args: Any, **kwargs: Any) -> Any:
        with block(*args) as heard:
            result = own(*args, **kwargs)
            if heard is not None:
                heard(result)
            return result

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (own if torch.compiler.is_compiling() else within)(self, *args, **kwargs)

    def function(*args: Any, **kwargs: Any) -> Any:
        return (own if torch.compiler.is_compiling() else within)(*args, **kwargs)

    method.__code__ = method.__code__.replace()  # a copy: see [Note: self]
    undo.callback(setattr, owner, name, own)
    call = method if isinstance(owner, type) else function
    setattr(owner, name, functools.wraps(own)(call))


def untraced(function: Any) -> Any:
    """The function, which torch.compile takes for no part of the program, nor what it calls: code
    that a compiled program meets on its way would be compiled with it.
    """
    _compiler("SKIP", function.__code__)
    return function


def compile_again() -> bool:
    """What torch.compile has met under a dispatch mode, it skips for good: let it look again. What
    it has compiled stays. Whether it has met anything.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.convert_frame import input_codes

    met = [code for seen in input_codes.seen if (code := seen()) is not None]
    _compiler("DEFAULT", *met)
    return bool(met)


def _compiler(action: str, *codes: Any) -> None:
    """What torch.compile does with frames of these codes, and with what they call."""
    with contextlib.suppress(ImportError):  # another version of torch
        from torch._C._dynamo import eval_frame

        does = getattr(eval_frame._FrameAction, action)
        always = eval_frame._FrameExecStrategy(does, does)
        for code in codes:
            eval_frame.set_code_exec_strategy(code, always)


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
    library.impl(name, untraced(kernel), "BackendSelect", with_keyset=True)
