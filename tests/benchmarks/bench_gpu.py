"""One GPU: a step next to autograd's, to its prediction and to a CUDA graph of itself, and plain
PyTorch under `pl.observe`.

    python tests/benchmarks/bench_gpu.py [WORD ...]    stored, predicted, speed, observed, graphs

    stored     h100.json: what an H100 took, and what its calibration predicts today; no GPU needed
    predicted  the same rows, measured and calibrated here; writes them to gpu.json
    speed      the program's step with its recorder on, and that of a plain loop: the reference's
               modules, autograd, torch's fused AdamW, in bf16 under autocast
    observed   steps of that loop with and without the instruments; the ledger's peak next to
               the allocator's
    graphs     the program's step without a recorder, and one captured graph of it
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pairs import row, take_turns

import paralab as pl
from paralab.instruments.calibrate import gpus
from paralab.launch import launch_program

STORED = Path(__file__).with_name("h100.json")
# (model, samples of a micro-batch, steps of a turn)
MODELS = {
    "tiny": (pl.ModelSpec(layers=8, hidden=16, heads=2, seq_len=16, vocab=256), 1, 8),
    "laptop": (pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128), 4, 8),
    "25 M": (pl.ModelSpec(layers=8, hidden=512, heads=8, seq_len=512), 8, 4),
    "gpt2": (pl.ModelSpec.preset("gpt2"), 8, 2),
    "gpt2 padded": (pl.ModelSpec.preset("gpt2").replace(vocab=50304), 8, 2),
    "300 M": (pl.ModelSpec(layers=24, hidden=1024, heads=16, seq_len=1024), 8, 2),
    "1.2 B": (pl.ModelSpec(layers=24, hidden=2048, heads=16, seq_len=1024), 4, 1),
}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"tf32": True},
    "bf16": {"precision": "bf16"},
    "recomputed": {"precision": "bf16", "recompute": "full"},
    "4 micro-batches": {"precision": "bf16", "microbatches": 4},
    "offload": {"precision": "bf16", "zero_stage": 3, "offload": "cpu"},
}
PREDICTED = {
    "tiny": "fp32, bf16",
    "laptop": "fp32, bf16",
    "25 M": "fp32, tf32, bf16, 4 micro-batches, offload",
    "gpt2": "fp32, bf16",
    "gpt2 padded": "tf32, bf16, recomputed, offload",
    "300 M": "bf16, recomputed, 4 micro-batches",
    "1.2 B": "bf16",
}
COMPARED = {"laptop": "fp32, bf16", "25 M": "tf32, bf16", "gpt2 padded": "bf16", "300 M": "bf16"}
PAIRS = 20


def cases(wanted: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, form) for name, forms in wanted.items() for form in forms.split(", ")]


def of(name: str, form: str) -> tuple[pl.ModelSpec, pl.Plan]:
    model, samples, _ = MODELS[name]
    return model.resolved(gpus=True), pl.Plan(microbatch_size=samples, **FORMS[form])


def settled() -> float:
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


# ---- predictions ---------------------------------------------------------------------------------
def judged(cluster: pl.Cluster, rows: list[dict[str, Any]]) -> list[dict]:
    """Each of the rows next to what is predicted for it on this cluster."""
    found = []
    for one in rows:
        model, plan = of(one["model"], one["form"])
        seconds = pl.predict(model, plan, cluster, steps=1).step_time
        more = (one["allocated"] - one["ledger"]) / 1e6
        note = f"the allocator had {more:.0f} MB more than the ledger's {one['ledger'] / 1e6:.0f}"
        name = f"predicted: {one['model']}, {one['form']}"
        found.append({"name": name, "peer": "measured", "paralab_s": seconds,
                      "peer_s": one["seconds"], "ratio": seconds / one["seconds"],
                      "note": note})  # fmt: skip
    return found


def stored() -> list[dict]:
    known = json.loads(STORED.read_text())
    return judged(pl.Cluster.from_dict(known["cluster"]), known["rows"])


def predicted() -> list[dict]:
    cluster, rows = pl.Cluster.local(device="cuda", refresh=True), []
    for name, form in cases(PREDICTED):
        report = pl.run(*of(name, form), steps=8, device="cuda", progress=False)
        peaks = {what: int(report.allocator[what].max()) for what in ("allocated", "reserved")}
        rows.append({"model": name, "form": form, "seconds": report.step_time,
                     "ledger": report.peak_memory, **peaks})  # fmt: skip
    known = {"measured": gpus()[0][0], "cluster": cluster.to_dict(), "rows": rows}
    Path("gpu.json").write_text(json.dumps(known, indent=1))
    return judged(cluster, rows)


# ---- autograd ------------------------------------------------------------------------------------
class Plain:
    """A training of the reference's modules as one would write it."""

    def __init__(self, name: str, form: str) -> None:
        import torch

        self.model, plan = of(name, form)
        self.samples, low = plan.microbatch_size, plan.precision == "bf16"
        self.cast = torch.autocast("cuda", torch.bfloat16, enabled=low)
        torch.backends.cuda.matmul.allow_tf32 = plan.tf32
        self.gpt = pl.reference.GPT(self.model).to("cuda")
        self.optimizer = pl.reference.optimizer(self.gpt.parameters())

    def step(self, number: int) -> None:
        import torch

        self.optimizer.zero_grad()
        [(tokens, targets)] = pl.reference.batches(
            self.model, step=number, microbatch_size=self.samples, device="cuda"
        )
        with torch.enable_grad():
            with self.cast:
                loss = self.gpt(tokens, targets)
            loss.backward()
        self.optimizer.step()
        loss.item()


def next_to_autograd(context: Any, name: str, form: str) -> dict[str, list[float]]:
    from paralab.interpret.train import Trainer

    trainer, plain = Trainer(context, *of(name, form)), Plain(name, form)
    sides = {"ours": trainer.step, "theirs": plain.step}
    return take_turns(sides, steps=MODELS[name][2], pairs=PAIRS, begin=settled, end=settled)


def against(program: Callable[..., Any], args: tuple[str, ...], what: str, peer: str) -> dict:
    [took] = launch_program(program, 1, args, timeout=120, device="cuda")
    return row(what, peer, took["ours"], took["theirs"], "one GPU")


def speed() -> list[dict]:
    return [against(next_to_autograd, one, f"step of {one[0]}, {one[1]}", "autograd")
            for one in cases(COMPARED)]  # fmt: skip


# ---- observed ------------------------------------------------------------------------------------
def trained(name: str, steps: int) -> list[float]:
    """Seconds of the steps after the second."""
    plain, times = Plain(name, "bf16"), [settled()]
    for step in range(steps):
        plain.step(step)
        times.append(settled())
    return [b - a for a, b in zip(times[2:-1], times[3:], strict=True)]


def observed() -> list[dict]:
    import torch

    found = []
    for name in COMPARED:
        trained(name, 3)  # brings what stays: libraries' workspaces
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trained(name, 3)
        peak = torch.cuda.max_memory_allocated() - before
        with pl.observe() as seen:
            trained(name, 3)
        bare, watched = [], []
        for _ in range(4):
            bare += trained(name, 8)
            with pl.observe(memory_steps=0):
                watched += trained(name, 8)
        off = seen.peak_memory / peak - 1
        found.append(row(f"{name} under pl.observe, no ledger", "the same, unobserved", watched,
                         bare, f"peak with the ledger {off:+.2%} of the allocator's"))  # fmt: skip
    return found


# ---- CUDA graphs ---------------------------------------------------------------------------------
def next_to_its_graph(context: Any, name: str) -> dict[str, list[float]]:
    import torch
    from bench_instruments import Blind

    from paralab.interpret.train import Trainer

    blind = Blind(rank=0, world_size=1, device=context.device)
    model, plan = of(name, "bf16")
    trainer = Trainer(context, model, plan, recorder=blind)
    trainer.step(0)
    size = (plan.microbatch_size, model.seq_len + 1)
    text = torch.randint(0, 255, size, dtype=torch.uint8, device=context.device)

    def step(number: int) -> None:
        trainer.rank.step(lambda k: text)

    with torch.no_grad():
        with torch.cuda.stream(torch.cuda.Stream()):  # what is captured has run on a stream
            step(0)
        settled()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(0)
        sides = {"ours": step, "theirs": lambda number: graph.replay()}
        return take_turns(sides, steps=4, pairs=PAIRS, begin=settled, end=settled)


def graphs() -> list[dict]:
    said = "step of {}, bf16, no recorder"
    return [against(next_to_its_graph, (name,), said.format(name), "one CUDA graph")
            for name in ("laptop", "25 M", "gpt2 padded", "300 M")]  # fmt: skip


def measure(words: list[str] | None = None) -> list[dict]:
    every = (stored, predicted, speed, observed, graphs) if gpus() else (stored,)
    return [one for work in every if not words or work.__name__ in words for one in work()]


if __name__ == "__main__":
    for r in measure(sys.argv[1:]):
        print(f"{r['name']:44} {1e3 * r['paralab_s']:8.2f} ms, {r['peer']} "
              f"{1e3 * r['peer_s']:8.2f} ms, ratio {r['ratio']:.3f}; {r['note']}")  # fmt: skip
