"""The one signal that a gradient is complete, whoever schedules backward and whoever listens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor


class GradientSignal:
    """Says once per step and parameter that its gradient is complete: ``grad_ready(parameter)``.

    Counts the micro-batches that added to each parameter, so that whoever listens (data
    parallelism, ZeRO) need not know how backward is scheduled. Autograd's accumulate hooks come in
    here; a gradient that is computed outside autograd calls `accumulated` itself.

    every  say it after each micro-batch instead: the listener takes the gradient away each time
    twice  parameters that every micro-batch adds to twice: a tied weight, whose two uses are
           differentiated apart (relay.py)
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, microbatches: int,
        listener: Callable[[Tensor], None], every: bool = False, twice: Iterable[Tensor] = (),
    ) -> None:  # fmt: skip
        self.parameters, self.listener, self.every = list(parameters), listener, every
        self.expected = dict.fromkeys(self.parameters, microbatches)
        self.expected.update(dict.fromkeys(twice, 2 * microbatches))
        self.reset()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.accumulated)

    def reset(self) -> None:
        self.seen = dict.fromkeys(self.parameters, 0)

    def check_complete(self) -> None:
        """Raise ``RuntimeError`` if backward is over and a gradient is not complete.

        Whoever listens would synchronise nothing for it, and the ranks' weights would drift apart.
        """
        missing = sum(count != self.expected[p] for p, count in self.seen.items())
        if missing:
            raise RuntimeError(
                f"{missing} of {len(self.parameters)} gradients were never complete: their "
                "parameters took no part in the loss of every micro-batch; use them, or leave them "
                "out of the model"
            )

    def accumulated(self, parameter: Tensor) -> None:
        self.seen[parameter] += 1
        if self.every or self.seen[parameter] == self.expected[parameter]:
            self.listener(parameter)
