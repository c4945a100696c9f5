"""The reference: a GPT in plain PyTorch on one process, with which every plan is compared.

Autograd computes its gradients and torch.optim updates its weights. It shares with the ops that
ranks run nothing but the random numbers of draws.py: initial weights and dropout masks. So a plan
that trains the same model arrives at the same losses, gradients and weights, and code of your own
can start from it, on any rank:

    spec = pl.ModelSpec(layers=2, hidden=64, heads=4, seq_len=32)
    gpt = pl.reference.GPT(spec)
    optimizer = pl.reference.optimizer(gpt.parameters(), "adamw", lr=1e-3)
    for step in range(4):
        gpt.zero_grad()
        for tokens, targets in pl.reference.batches(spec, step=step, microbatches=2):
            (gpt(tokens, targets) / 2).backward()
        optimizer.step()

`Stage` is the part of the model that one stage of a pipeline computes. `train` is this loop with
mixed precision and clipping. Shapes: B samples, s tokens, h hidden, a heads, d = h/a, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paralab.checks import choice, count_of, illegal, real, whole
from paralab.data import Corpus
from paralab.model import draws
from paralab.model.step import Step
from paralab.parallel.partition import partition
from paralab.spec import ModelSpec

__all__ = ["GPT", "Stage", "Step", "batches", "optimizer", "train"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
DEFAULT_LR = {"adamw": 1e-3, "sgd": 0.1}
FIRST_SCALE = 2.0**16  # of fp16's loss


# ---- the model ----------------------------------------------------------------------------------
class Moment:
    """The position of a training: what a dropout mask depends on in addition to its name."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step, self.microbatch = seed, 0, 0

    def seed_of(self, name: str) -> int:
        return draws.mask_seed(self.seed, self.step, self.microbatch, name)


class Dropout(nn.Module):
    """Drops each element with probability p; ``name`` and ``moment`` determine the mask."""

    def __init__(self, p: float, name: str, moment: Moment) -> None:
        super().__init__()
        self.p, self.name, self.moment = p, name, moment

    @property
    def seed(self) -> int:
        return self.moment.seed_of(self.name)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.p and self.training):
            return x
        keep = draws.mask(tuple(x.shape), self.p, seed=self.seed, device=x.device)
        return x * keep * (1 / (1 - self.p))


class Embedding(nn.Module):
    def __init__(self, spec: ModelSpec, moment: Moment) -> None:
        super().__init__()
        self.token = nn.Embedding(spec.vocab, spec.hidden)
        self.position = nn.Embedding(spec.seq_len, spec.hidden)
        self.dropout = Dropout(spec.dropout, "embedding", moment)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))  # (B, s, h)


class Attention(nn.Module):
    """Causal self-attention; "explicit" writes the (s, s) scores, "sdpa" calls torch's kernel."""

    def __init__(self, spec: ModelSpec, name: str, moment: Moment) -> None:
        super().__init__()
        self.width, self.kind = spec.hidden // spec.heads, spec.attention  # of a head, d
        self.qkv = nn.Linear(spec.hidden, 3 * spec.hidden)
        self.proj = nn.Linear(spec.hidden, spec.hidden)
        self.dropout = Dropout(spec.dropout, f"{name}.core", moment)

    def forward(self, x: Tensor) -> Tensor:
        batch, s, _ = x.shape  # the rows of qkv.weight determine how many heads there are
        q, k, v = self.qkv(x).view(batch, s, 3, -1, self.width).permute(2, 0, 3, 1, 4)
        if self.kind == "sdpa":
            p, seed = self.dropout.p * self.training, self.dropout.seed
            with draws.drawing(seed, x.device) if p else contextlib.nullcontext():
                mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            scores = (q / math.sqrt(self.width)) @ k.transpose(-2, -1)  # (B, a, s, s)
            future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
            mixed = self.dropout(F.softmax(scores, dim=-1)) @ v  # (B, a, s, d)
        return self.proj(mixed.transpose(1, 2).reshape(batch, s, -1))


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden, 4 * spec.hidden)
        self.down = nn.Linear(4 * spec.hidden, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, name: str, moment: Moment) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(spec.hidden)
        self.attention = Attention(spec, f"{name}.attention", moment)
        self.norm2 = nn.LayerNorm(spec.hidden)
        self.mlp = MLP(spec)
        self.dropout1 = Dropout(spec.dropout, f"{name}.attention.add", moment)
        self.dropout2 = Dropout(spec.dropout, f"{name}.mlp.add", moment)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))  # (B, s, h)


class Head(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(spec.hidden)
        if not spec.tied:
            self.output = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, x: Tensor, targets: Tensor, tied: Tensor | None = None) -> Tensor:
        weight = self.output.weight if tied is None else tied
        logits = F.linear(self.norm(x), weight).float()  # 16 bits are too few for a sum over V
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # mean over B*s tokens


class GPT(nn.Module):
    """The model that ``spec`` describes, with the weights that every plan of ``seed`` starts from.

    ``gpt(tokens, targets)`` is the mean cross-entropy per token, a scalar in fp32; both arguments
    are (B, s) int64. Names and shapes of the parameters are ``spec.parameter_shapes()``.

    The position in the training determines the dropout masks. The first call is micro-batch 0 of
    step 0, and each further call the next micro-batch; call `at` where a step begins.
    ``gpt.eval()`` drops nothing.
    """

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        super().__init__()
        self.spec, self.moment, self.placed = spec, Moment(seed), True
        if isinstance(spec.block, str):
            spec.parameter_shapes()  # refuses a block of which only the name was saved
        with torch.device("meta"):  # torch's own initial weights are neither stored nor drawn
            self.embedding = Embedding(spec, self.moment)
            names = [f"blocks.{i}" for i in range(spec.layers)]
            blocks = [] if spec.block else [Block(spec, name, self.moment) for name in names]
            self.blocks = nn.ModuleList(blocks)
            self.head = Head(spec)
        self.to_empty(device="cpu")
        if spec.block is not None:
            for name in names:
                with draws.drawing(draws.name_seed(seed, name)):  # its buffers may be drawn
                    self.blocks.append(spec.block(spec))
        for name, parameter in self.named_parameters():
            draws.initialize(parameter.data, name=name, spec=spec, seed=seed)

    def at(self, step: int, microbatch: int = 0) -> None:
        """Set the position of the next call: the step, and the micro-batch in its global batch.

        With m micro-batches per data-parallel rank, rank r begins with micro-batch r * m.
        """
        self.moment.step, self.moment.microbatch, self.placed = step, microbatch, True

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.moment.microbatch += not self.placed
        self.placed = False  # the next call is the next micro-batch, unless `at` sets another one
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            if self.spec.block is None:
                x = block(x)
            else:  # the block's name and the position also determine what a user's block draws
                with draws.drawing(self.moment.seed_of(f"blocks.{i}"), x.device):
                    x = block(x)
        return self.head(x, targets, self.embedding.token.weight if self.spec.tied else None)


class Stage(nn.Module):
    """Stage ``index`` of ``count`` of ``GPT(spec)``: the blocks that a plan with ``count`` stages
    assigns to it, and in the first stage the embedding, in the last the head. Parameters have the
    names of the whole model.

    The first stage takes tokens, (B, s) int64, every other stage the result of the stage before it,
    (B, s, h); the last stage also takes ``targets``, and returns the mean cross-entropy per token.

    Raises ValueError for a tied head, whose weights both ends would need, and for dropout.
    """

    def __init__(self, spec: ModelSpec, index: int, count: int, seed: int = 0) -> None:
        super().__init__()
        if spec.tied or spec.dropout:
            why = "a tied head needs the embedding, which another stage has, and a stage does not "
            why += "know for which micro-batch to draw dropout masks"
            raise illegal("spec", spec, why, "tied=False and dropout=0.0")
        whole("count", count, at_least=1, at_most=spec.layers)
        parts = partition(spec, count)
        if not 0 <= index < count:
            raise illegal("index", index, f"there are {count} stages", f"0 to {count - 1}")
        gpt = GPT(spec, seed)
        self.embedding = gpt.embedding if index == 0 else None
        blocks = gpt.blocks.named_children()
        self.blocks = nn.ModuleDict({i: b for i, b in blocks if f"blocks.{i}" in parts[index]})
        self.head = gpt.head if index == count - 1 else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x, targets)


# ---- the training -------------------------------------------------------------------------------
_default = functools.cache(Corpus)  # cached, as torch's source does not change; other texts may


def _corpus(data: object) -> Corpus:
    """``data``, if it is a `Corpus` already, or the corpus of the text file or folder ``data``."""
    if isinstance(data, Corpus):
        return data
    return _default() if data is None else Corpus(data)  # type: ignore[arg-type]


def batches(
    spec: ModelSpec,
    *,
    step: int,
    microbatches: int = 1,
    microbatch_size: int = 2,
    data: object = None,
    seed: int = 0,
    rank: int = 0,
    ranks: int = 1,
    device: str = "cpu",
) -> list[tuple[Tensor, Tensor]]:
    """A step's micro-batches as (tokens, targets), (B, s) int64 each: the same as in `pl.run`.

    microbatches  micro-batches per rank
    data          a text file or folder; None: the source of torch's layers
    rank, ranks   the data-parallel rank, and how many there are. One rank with ``ranks`` times as
                  many micro-batches gets the micro-batches of all of them, in order

    Raises ValueError for a vocabulary of fewer than 256 entries, and where there is no text.
    """
    if spec.vocab < 256:
        raise illegal("vocab", spec.vocab, "text is read as bytes", "256 or more")
    if not 0 <= rank < ranks:
        raise illegal("rank", rank, f"there is none with ranks={ranks}", f"0 to {ranks - 1}")
    for name, value in {"microbatches": microbatches, "microbatch_size": microbatch_size}.items():
        whole(name, value, at_least=1)
    corpus, pairs = _corpus(data), []
    samples = ranks * microbatches * microbatch_size
    sizes = {"size": microbatch_size, "global_batch": samples, "length": spec.seq_len}
    for k in range(rank * microbatches, (rank + 1) * microbatches):
        text = corpus.microbatch(step=step, index=k, seed=seed, **sizes)
        rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).view(microbatch_size, -1)
        rows = rows.to(device).long()  # (B, s + 1): each byte's target is the byte after it
        pairs.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return pairs


def optimizer(
    parameters: Iterable[Tensor], name: str = "adamw", lr: float | None = None
) -> torch.optim.Optimizer:
    """The optimizer of `pl.run`: AdamW with torch's defaults, or plain SGD.

    lr  default: 1e-3 for AdamW, 0.1 for SGD
    """
    choice("optimizer", name, tuple(OPTIMIZERS))
    lr = DEFAULT_LR[name] if lr is None else real("lr", lr, above=0.0)
    return OPTIMIZERS[name](parameters, lr=lr, fused=True)


_optimizer = optimizer  # `train` has an argument of that name


def train(
    spec: ModelSpec,
    *,
    steps: int = 4,
    microbatches: int = 1,
    microbatch_size: int = 2,
    lr: float | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    clip_norm: float | Sequence[float] | None = None,
    data: object = None,
    seed: int = 0,
) -> Iterator[Step]:
    """Train on this process: an iterator that runs a step when its `Step` is requested, and keeps
    none. It yields ``steps`` + 1 of them; number 0 has the initial weights.

    The arguments are those of `pl.run` and `pl.Plan`; ``clip_norm`` may also be a sequence with a
    value for each step. A plan with dp data-parallel ranks corresponds to dp * microbatches
    micro-batches here.

    In 16 bits the optimizer updates fp32 weights, and the model computes with their rounded values.
    fp16's loss is scaled so that small gradients do not underflow, and a step whose gradients
    overflow is skipped, and the scale halved (Micikevicius+ 2018, arXiv:1710.03740).
    """
    choice("precision", precision, tuple(DTYPES))
    whole("steps", steps, at_least=0)
    whole("seed", seed, at_least=0)
    clips = clip_norm if isinstance(clip_norm, Sequence) else [clip_norm]
    if clips is clip_norm and len(clips) < steps:
        why = f"{count_of(len(clips), 'number')} for {steps} steps"
        raise illegal("clip_norm", clip_norm, why, "a number above 0, or one for each step")
    for limit in clips:
        if limit is not None:
            real("clip_norm", limit, above=0.0)
    sizes = {"microbatches": microbatches, "microbatch_size": microbatch_size}
    feed = functools.partial(batches, spec, data=_corpus(data), seed=seed, **sizes)
    feed(step=0)  # so that what no step could use is refused here
    gpt = GPT(spec, seed)
    masters = {name: p.detach().clone() for name, p in gpt.named_parameters()}  # fp32
    parameters = dict(gpt.to(DTYPES[precision]).named_parameters())
    update = _optimizer(masters.values(), optimizer, lr)

    def trained() -> Iterator[Step]:
        scale = FIRST_SCALE if precision == "fp16" else 1.0
        yield Step(0.0, {}, _arrays(parameters))
        for step in range(steps):
            gpt.zero_grad()
            gpt.at(step)
            total = 0.0
            microbatches = feed(step=step)
            for tokens, targets in microbatches:
                loss = gpt(tokens, targets)
                (loss / len(microbatches) * scale).backward()
                total += loss.item()
            gradients = {
                name: (torch.zeros_like(p) if p.grad is None else p.grad).float() / scale
                for name, p in parameters.items()
            }
            norm = torch.stack([g.norm() for g in gradients.values()]).norm()
            if norm.isfinite() or precision != "fp16":
                limit = clip_norm[step] if isinstance(clip_norm, Sequence) else clip_norm
                shrink = 1.0 if limit is None else min(1.0, limit / (norm.item() + 1e-6))
                for name, master in masters.items():
                    master.grad = gradients[name] * shrink
                update.step()
                for name, p in parameters.items():
                    p.data.copy_(masters[name])
            else:
                scale = max(scale / 2, 1.0)
            yield Step(total / len(microbatches), _arrays(gradients), _arrays(parameters))

    return trained()


def _arrays(named: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """fp32 copies, which later steps do not change."""
    return {name: tensor.detach().float().numpy().copy() for name, tensor in named.items()}
