"""What is in memory at each moment of a training step, read off the tensors themselves.

One rank builds the model, runs forward, backward and the optimizer, and adds up the bytes of what
it then finds there: parameters, what autograd has put away for backward (each storage once, however
many views of it are kept), gradients, optimizer state. So the numbers are those of this model on
this version of torch, and theory/memory.py can be held against them, category by category.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal, whole
from paralab.spec import ModelSpec, Plan

if TYPE_CHECKING:
    import pandas as pd

CATEGORIES = ("parameters", "activations", "gradients", "optimizer")
WHEN = {
    "parameters": "always",
    "activations": "from forward to backward",
    "gradients": "from backward to the optimizer",
    "optimizer": "always, from the first step on",
}


def anatomy(
    model: ModelSpec, *, microbatch_size: int = 2, optimizer: str = "adamw"
) -> pd.DataFrame:
    """Bytes of one device's tensors by category, beside the formula.

    Columns: tensors, bytes, formula_bytes, per_parameter, when. One real rank is launched and makes
    one step on ``microbatch_size`` samples.
    """
    import pandas as pd

    from paralab.launch import launch
    from paralab.theory import memory

    if not isinstance(model, ModelSpec):
        raise illegal("model", model, "not a model description", "a pl.ModelSpec(...)")
    size = whole("microbatch_size", microbatch_size, at_least=1)
    choice("optimizer", optimizer, memory.OPTIMIZERS)
    found = launch(_count, ranks=1, args=(model, size, optimizer), device="cpu")[0]
    states = memory.state_bytes(model, Plan(), optimizer=optimizer)
    formula = {**states, "activations": memory.activation_bytes(model, size)}
    return pd.DataFrame(
        {
            "tensors": [found[name][0] for name in CATEGORIES],
            "bytes": [found[name][1] for name in CATEGORIES],
            "formula_bytes": [formula[name] for name in CATEGORIES],
            "per_parameter": [round(found[name][1] / model.num_params, 2) for name in CATEGORIES],
            "when": [WHEN[name] for name in CATEGORIES],
        },
        index=pd.Index(CATEGORIES, name="what"),
    )


def _count(model: ModelSpec, size: int, optimizer: str) -> dict[str, tuple[int, int]]:
    """In a rank: {category: (tensors, bytes)} of one step."""
    import torch

    from paralab.model import GPT
    from paralab.train import make_optimizer

    gpt = GPT(model)
    parameters = list(gpt.parameters())
    owned = {t.untyped_storage().data_ptr() for t in (*parameters, *gpt.buffers())}
    tokens = torch.zeros(size, model.seq_len, dtype=torch.int64)
    targets = torch.zeros_like(tokens)
    with kept_for_backward(owned) as kept:
        loss = gpt(tokens, targets)
    activations = (len(kept), sum(number for number, _ in kept.values()))
    kept.clear()
    loss.backward()
    gradients = [p.grad for p in parameters]
    step = make_optimizer(parameters, optimizer, 1e-3)
    step.step()
    states = [t for state in step.state.values() for t in state.values()]
    return {
        "parameters": (len(parameters), sum(p.nbytes for p in parameters)),
        "activations": activations,
        "gradients": (len(gradients), sum(g.nbytes for g in gradients)),
        "optimizer": (len(states), sum(t.nbytes for t in states if hasattr(t, "nbytes"))),
    }


class kept_for_backward:  # noqa: N801  # reads as what it is: with kept_for_backward(owned) as kept
    """Collect every storage that autograd saves inside the ``with``: {address: (bytes, tensor)}.

    owned  addresses of storages to leave out: parameters and buffers, which are there anyway. The
           tensors are held, so that an address stays its own until the dict is cleared.
    """

    def __init__(self, owned: set[int]) -> None:
        import torch

        self.owned, self.kept = owned, {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> dict[int, tuple[int, Any]]:
        self.hooks.__enter__()
        return self.kept

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def _pack(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.owned:
            self.kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor
