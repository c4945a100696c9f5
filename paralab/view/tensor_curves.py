"""Which tensor parallelism sends least: elements per rank over tokens, in 1D, 2D, 2.5D and 3D.

The elements are those of an MLP's two layers, forward and backward (theory/tensor.py). Every curve
is a straight line a M + b in the tokens M: b are the weights that are sent, of which 1D sends none;
a is for activations, which grids shard over more ranks. So 1D is best with few tokens.
"""

from __future__ import annotations

from paralab.checks import instance, whole
from paralab.spec import ModelSpec, Plan
from paralab.spec.settings import grid
from paralab.theory.tensor import depth_elements, linear_elements
from paralab.view.chart import Chart
from paralab.view.links import Axes, algorithms
from paralab.view.matrix_blocks import MODE_NAME

PAIR = ("up", "down")
TOKENS = [round(2 ** (n / 8)) for n in range(8 * 8, 8 * 20 + 1)]  # 256 to 2^20
MILLION = 10**6
SENT = Axes(
    x="tokens per micro-batch",
    x_unit="tokens",
    y="million elements sent per rank",
    y_unit="million elements",
    best="sends least",
)


def modes(tp: int) -> list[str]:
    """The modes that are possible with ``tp`` ranks; 2.5D on one grid is 2D and is left out."""
    grids = {mode: grid(tp, mode, None) for mode in MODE_NAME}
    return [mode for mode, it in grids.items() if it.q and (mode != "2.5d" or it.depth > 1)]


def crossover(model: ModelSpec, tp: int = 64, *, name: str = "") -> Chart:
    """Elements that a rank sends for an MLP's two layers, forward and backward, over the tokens per
    micro-batch, in every mode possible with ``tp`` ranks; ``name``: the model's, for the title.

    ``table``: tp, mode, tokens, elements. Raises ValueError on fewer than two ranks.
    """
    instance("model", model, ModelSpec, "a pl.ModelSpec(...)", "model description")
    whole("tp", tp, at_least=2)
    rows = [(tp, mode, n, _elements(model, tp, mode, n)) for mode in modes(tp) for n in TOKENS]
    curves: dict[str, list[tuple[int, float]]] = {}
    for _, mode, tokens, elements in rows:
        curves.setdefault(MODE_NAME[mode], []).append((tokens, elements / MILLION))
    chart, name = algorithms(curves, axes=SENT), name or f"h={model.hidden:,}"
    return chart.retitled(
        f"{name}, MLP on {tp} ranks: {chart.finding}",
        "both layers, forward and backward, one micro-batch · counted, not run",
    ).tabled(("tp mode tokens elements", rows))


def _elements(model: ModelSpec, tp: int, mode: str, tokens: int) -> float:
    model, plan = model.replace(seq_len=tokens), Plan(tp=tp, tp_mode=mode, microbatch_size=1)
    each = (sum(linear_elements(model, plan, r)) + depth_elements(model, plan, r) for r in PAIR)
    return float(sum(each))
