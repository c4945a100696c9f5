"""What one tensor-parallel rank has of a micro-batch. Torch-free."""

from __future__ import annotations

from paralab.parallel.layouts import activation_box, axis_of, box_shape, looked_up, mode_of
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan


class Part:
    """The sizes that ops are made of; all ranks of a tensor-parallel group have the same.

    tokens    in the residual stream, with ``width`` features each
    inner     inside a branch: with sequence parallelism those of all ranks
    lookups   tokens that are looked up in the embedding
    heads     of the attention, with ``head_width`` features each, over ``length`` tokens
    vocab     entries of the vocabulary whose logits the rank computes
    masks     {"residual" | "scores": elements of the dropout mask of all ranks}, 0 without dropout
    p, item   probability of dropout; bytes of an element
    widens    whether gradients of parameters are added up in more bytes than that
    q         ranks along an edge of the grid; in 1D all of them
    features_axis, logits_axis, entries_axis  of the ranks that have the other parts of a token's
              features in the residual stream, of its logits, of the embedding's entries, or ""
    """

    def __init__(self, spec: ModelSpec, plan: Plan) -> None:
        residual, scores, logits = (
            box_shape(activation_box(spec, plan, what, 0))
            for what in ("residual", "scores", "logits")
        )
        self.tokens, self.width = residual[0] * residual[1], residual[2]
        (samples, self.heads, self.length, _), self.vocab = scores, logits[2]
        self.inner, self.head_width = samples * self.length, spec.hidden // spec.heads
        looked = looked_up(plan, 0)
        self.lookups = (looked.stop - looked.start) * self.length
        self.p, self.item = spec.dropout, BYTES_PER_ELEMENT[plan.precision]
        self.widens = plan.grad_precision != plan.precision
        whole = plan.microbatch_size * spec.seq_len * (self.p > 0)
        self.masks = {"residual": whole * spec.hidden, "scores": whole * spec.heads * spec.seq_len}
        self.q, mode = plan.tp_grid[0], mode_of(plan)
        self.features_axis = axis_of(plan, mode.residual[2])
        self.logits_axis = axis_of(plan, mode.logits[2])
        self.entries_axis = axis_of(plan, mode.weights["token"][0])

    def cut_mask(self, what: str, mine: int) -> int:
        """Bytes of a mask that is drawn whole, where the rank needs ``mine`` elements of it."""
        return self.masks[what] * (self.masks[what] > mine)
