"""Mixture of experts in numbers: the room that an expert has for tokens.

Switch Transformers (Fedus+ 2021, arXiv:2101.03961), sec. 2.2, eq. 3: with T tokens per batch and N
experts each has room for

    expert capacity = T/N * capacity factor

tokens. What an expert gets beyond that is dropped (the layer's input passes by on the residual
stream), what it gets less is padding: a factor above 1 buys fewer dropped tokens for more work and
bytes. paralab trains dense models; these are formulas for the paper's table 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from paralab.checks import real, whole


def expert_capacity(tokens: int, experts: int, factor: float = 1.0) -> Fraction:
    """Tokens that each expert has room for, T/N * capacity factor; eq. 3. Buffers round it up."""
    tokens, experts = whole("tokens", tokens, at_least=1), whole("experts", experts, at_least=1)
    return Fraction(tokens, experts) * Fraction(str(real("factor", factor, above=0.0)))


def dropped(routed: Sequence[int], factor: float = 1.0) -> int:
    """Tokens that find no room. routed: how many were sent to each expert."""
    counts = [whole("routed", count, at_least=0) for count in routed]
    if not sum(counts):
        return 0
    room = -(-expert_capacity(sum(counts), len(counts), factor) // 1)
    return sum(max(0, count - room) for count in counts)
