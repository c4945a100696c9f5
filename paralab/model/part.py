"""The sizes of one tensor-parallel rank's part of a micro-batch. Torch-free."""

from __future__ import annotations

from paralab.parallel.layouts import activation_box, axis_of, box_shape, looked_up, mode_of
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan


class Part:
    """The sizes that ops are built from; they are equal on all ranks of a tensor-parallel group.

    tokens    tokens of the residual stream on this rank, with ``width`` features each
    inner     tokens inside a branch: with sequence parallelism those of all ranks
    lookups   tokens that this rank looks up in the embedding
    heads     attention heads, with ``head_width`` features each, over ``length`` tokens
    vocab     entries of the vocabulary whose logits the rank computes
    masks     {"residual" | "scores": elements of the whole dropout mask}, 0 without dropout
    p, item   dropout probability; bytes of an element of activations and parameters
    widens    whether gradients of parameters are accumulated in more bytes than ``item``
    q         ranks along an edge of the grid; in 1D all tensor-parallel ranks
    features_axis, logits_axis, entries_axis  the axis over which a token's features in the residual
              stream, its logits, or the embedding's entries are sharded; "": they are not
    """

    def __init__(self, spec: ModelSpec, plan: Plan) -> None:
        residual, scores, logits = (
            box_shape(activation_box(spec, plan, kind, 0))
            for kind in ("residual", "scores", "logits")
        )
        self.tokens, self.width = residual[0] * residual[1], residual[2]
        (samples, self.heads, self.length, _), self.vocab = scores, logits[2]
        self.inner, self.head_width = samples * self.length, spec.hidden // spec.heads
        own = looked_up(plan, 0)  # samples of the micro-batch
        self.lookups = (own.stop - own.start) * self.length
        self.p, self.item = spec.dropout, BYTES_PER_ELEMENT[plan.precision]
        self.widens = plan.grad_precision != plan.precision
        drawn = plan.microbatch_size * spec.seq_len * (self.p > 0)  # tokens that need a mask
        self.masks = {"residual": drawn * spec.hidden, "scores": drawn * spec.heads * spec.seq_len}
        self.q, mode = plan.tp_grid[0], mode_of(plan)
        self.features_axis = axis_of(plan, mode.residual[2])
        self.logits_axis = axis_of(plan, mode.logits[2])
        self.entries_axis = axis_of(plan, mode.weights["token"][0])

    def cut_mask(self, kind: str, used: int) -> int:
        """Bytes of the whole mask, if the rank draws it to use only ``used`` elements; else 0."""
        return self.masks[kind] * (self.masks[kind] > used)
