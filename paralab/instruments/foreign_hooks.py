"""Intercept a program's calls of torch's functions and operations while an observation lasts.

[Note: before] An operation is intercepted by a kernel for the dispatch key BackendSelect, which
comes after autograd and the dispatch modes and before the kernels of the devices. So the kernel
sees the call on every thread, from Python and from C++, inside modes and inside DTensor. It then
redispatches, which releases Python's lock: gloo's threads need it to end a call.

[Note: self] While torch.profiler records stacks, it takes every frame that runs the code object of
``Module.__call__`` for a call of a module, and reads the local ``self``. So the replacement of a
method names its first argument ``self``, and has a code object of its own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch._C import DispatchKey
from torch.library import Library

UNSEEN = contextlib.nullcontext()  # the block around a call that is not recorded


def around(undo: ExitStack, owner: Any, name: str, handler: Callable[..., Any]) -> None:
    """Until ``undo`` is closed, ``owner.name(*args)`` is ``handler(call, *args)``, and ``call()``
    makes the call. Not while torch.compile traces it, as a handler would break the graph.
    """
    original = getattr(owner, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, *args, **kwargs)
        return call() if torch.compiler.is_compiling() else handler(call, *args)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, self, *args, **kwargs)
        return call() if torch.compiler.is_compiling() else handler(call, self, *args)

    method.__code__ = method.__code__.replace()  # a copy: see [Note: self]
    undo.callback(setattr, owner, name, original)
    replacement = method if isinstance(owner, type) else function
    setattr(owner, name, functools.wraps(original)(replacement))


def untraced(function: Any) -> Any:
    """Return the function, after telling torch.compile to skip it and whatever it calls. Without
    this a compiled program that calls it would be compiled together with it.
    """
    _set_compiler_action("SKIP", function.__code__)
    return function


def compile_again() -> bool:
    """Let torch.compile compile the code that it met under a dispatch mode, and would skip for good
    otherwise. Code that is compiled stays compiled. Returns whether it has met any code.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.convert_frame import input_codes

    met = [code for reference in input_codes.seen if (code := reference()) is not None]
    _set_compiler_action("DEFAULT", *met)
    return bool(met)


def within_compiled() -> bool:
    """Whether this is in a call of a function of torch.compile. At its end torch says again that
    there is a dispatch mode, if one was there at its beginning.
    """
    frames = (frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._getframe()))
    return "torch._dynamo" in sys.modules and "compile_wrapper" in frames


def _set_compiler_action(action: str, *codes: Any) -> None:
    """Set what torch.compile does with frames of these code objects, and with what they call."""
    from torch._C._dynamo import eval_frame

    value = getattr(eval_frame._FrameAction, action)
    strategy = eval_frame._FrameExecStrategy(value, value)  # for the frame; for what it calls
    for code in codes:
        eval_frame.set_code_exec_strategy(code, strategy)


def stand_before(undo: ExitStack, namespace: str, name: str, handler: Callable[..., Any]) -> None:
    """Until ``undo`` is closed, a call of the operation is ``handler({name: argument}, original)``;
    ``original`` makes the call, with other arguments if it is given any. See [Note: before].
    """
    packet = getattr(getattr(torch.ops, namespace), name)
    names = [argument.name for argument in packet.default._schema.arguments]

    def kernel(keys: Any, *args: Any) -> Any:
        below = keys.remove(DispatchKey.BackendSelect)

        def original(*replaced: Any) -> Any:
            return packet.default.redispatch(below, *(replaced or args))

        return handler(dict(zip(names, args, strict=False)), original)

    library = Library(namespace, "IMPL")
    undo.callback(library._destroy)
    library.impl(name, untraced(kernel), "BackendSelect", with_keyset=True)
