"""What is trained: the description of a GPT, its number of parameters, and the models of papers.

The model itself is in model/; this file holds no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from paralab.checks import Description, checked, choice, count, flag, illegal, real
from paralab.spec.forms import block_shapes, check_block, form_name

TIED = ("embedding.token.weight", "head.output.weight")  # one weight, where a model is tied
# By precision. AdamW also keeps a 4-byte master copy of 16-bit parameters.
BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}
MAX_WEIGHTS = 2**52  # layers * hidden^2; 12 weights of up to 16 bytes each, counted in 63 bits


def _probability(name: str, value: Any) -> float:
    probability = real(name, value)
    if not 0.0 <= probability < 1.0:
        raise illegal(name, value, "not a probability below 1", "from 0 to below 1")
    return probability


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Description):
    """A GPT: pre-LayerNorm blocks, learned positions, 4x GELU MLP, as in GPT-2 and Megatron-LM.

    layers    number of transformer blocks, l
    hidden    width of the residual stream, h
    heads     attention heads, a; must divide hidden
    seq_len   tokens per sample, s
    vocab     entries of the embedding, V; bytes of text need 256
    tied      the output head shares the token embedding's weight
    dropout   probability of dropping an activation while training, from 0 to below 1
    attention  "explicit" (writes the s x s score matrix, as the papers' activation formulas assume)
              or "sdpa" (torch's fused kernel); by default what suits the device. See `resolved`
    block     a block of your own in place of the standard one: a class or function, called as
              ``block(spec)``, that makes an ``nn.Module`` which maps (b, s, h) to (b, s, h). It
              trains with autograd inside; each block is one op of the program. Every call
              has to make the same module, because each rank makes its own. Its parameters are
              initialised as GPT-2's, by name and shape, whatever values the module has given them:
              biases 0, norms and other parameters of one dimension 1, all others drawn with
              standard deviation 0.02. Buffers keep their values
    """

    layers: int = count(at_most=2**16)  # parameters are listed layer by layer
    hidden: int = count(at_most=2**20)
    heads: int = count(at_most=2**10)
    seq_len: int = count(at_most=2**24)
    vocab: int = count(256, at_most=2**24)
    tied: bool = flag(True)
    dropout: float = checked(_probability, 0.0)
    attention: str | None = checked(partial(choice, options=("explicit", "sdpa", None)), None)
    block: Callable[[ModelSpec], Any] | None = checked(check_block, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers * self.hidden**2 > MAX_WEIGHTS:
            most = math.isqrt(MAX_WEIGHTS // self.layers)
            why = f"{self.layers} such layers have too many parameters to count in 63 bits"
            raise illegal("hidden", self.hidden, why, f"up to {most}")
        if self.hidden % self.heads:
            legal = [a for a in range(1, min(self.hidden, 64) + 1) if self.hidden % a == 0]
            why = f"hidden={self.hidden} is not divisible by it"
            raise illegal("heads", self.heads, why, ", ".join(map(str, legal)))

    def resolved(self, *, gpus: bool) -> ModelSpec:
        """This model with ``attention`` set: None becomes "sdpa" on GPUs, and "explicit" on
        processors and with dropout, because the fused kernel draws its dropout masks itself, so
        that they would depend on how the heads are split. Reports have the resolved model.
        """
        if self.attention is not None:
            return self
        return self.replace(attention="sdpa" if gpus and not self.dropout else "explicit")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of the single-device model, in order of registration.

        A linear layer's weight is (out, in), as in torch. A tied head has no row of its own.
        """
        h, shapes = self.hidden, {}
        shapes[TIED[0]] = (self.vocab, h)
        shapes["embedding.position.weight"] = (self.seq_len, h)
        layers = {"norm1": (h,), "attention.qkv": (3 * h, h), "attention.proj": (h, h)}
        layers |= {"norm2": (h,), "mlp.up": (4 * h, h), "mlp.down": (h, 4 * h)}
        block = {}
        for name, shape in layers.items():
            block |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        if self.block is not None:
            block = block_shapes(self.block, self)
        for i in range(self.layers):
            shapes.update({f"blocks.{i}.{name}": shape for name, shape in block.items()})
        shapes["head.norm.weight"] = (h,)
        shapes["head.norm.bias"] = (h,)
        if not self.tied:
            shapes[TIED[1]] = (self.vocab, h)
        return shapes

    @property
    def num_params(self) -> int:
        """Psi, all elements: l(12h^2 + 13h) + (V + s)h + 2h, and Vh more if not tied; with a block
        of your own, those of its parameters in the place of 12h^2 + 13h.

        PTD-P (Narayanan+ 2021, arXiv:2104.04473) eq. 2 has the same terms without the last
        LayerNorm's 2h.
        """
        h, of_block = self.hidden, 12 * self.hidden**2 + 13 * self.hidden
        if self.block is not None:
            of_block = sum(map(math.prod, block_shapes(self.block, self).values()))
        matrices = 1 if self.tied else 2  # V x h: the token embedding and the output's weight
        return self.layers * of_block + (matrices * self.vocab + self.seq_len + 2) * h

    def to_dict(self) -> dict[str, Any]:
        """Plain values; for a ``block`` of your own, its name."""
        return {**super().to_dict(), "block": form_name(self.block)}

    @classmethod
    def preset(cls, name: str) -> ModelSpec:
        """A model known from the literature: "gpt2", "gpt3-175b", or PTD-P's "ptdp-1.7b",
        "ptdp-7.5b", "ptdp-39b", "ptdp-145b" and "ptdp-1t"; or "laptop", which trains in seconds on
        a laptop.
        """
        if not isinstance(name, str) or name not in MODEL_PRESETS:
            raise illegal("preset", name, "unknown model", ", ".join(MODEL_PRESETS))
        return cls(**MODEL_PRESETS[name])


def megatron(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """The fields of a model that PTD-P or Korthikanti+ trained with Megatron-LM."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "seq_len": 2048, "vocab": 51200}
    return {**sizes, "attention": "explicit"}  # as the paper's code and its formulas have it


MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "laptop": {"layers": 4, "hidden": 128, "heads": 4, "seq_len": 64, "vocab": 256},
    "gpt2": {"layers": 12, "hidden": 768, "heads": 12, "seq_len": 1024, "vocab": 50257},
    # PTD-P, arXiv:2104.04473, Table 1: sequence 2048, vocabulary 51200.
    "ptdp-1.7b": megatron(24, 2304, 24),
    "ptdp-7.5b": megatron(36, 4096, 32),
    "ptdp-39b": megatron(48, 8192, 64),
    "ptdp-145b": megatron(80, 12288, 96),
    "ptdp-1t": megatron(128, 25600, 160),
    "gpt3-175b": megatron(96, 12288, 96),  # GPT-3 as PTD-P trains it (sec. 5.1)
}
