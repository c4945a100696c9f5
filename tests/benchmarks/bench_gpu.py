"""One GPU: what a step takes beside autograd's, what is predicted beside what is measured, what
`pl.observe` sees of plain PyTorch, and what CUDA graphs would win.

    python tests/benchmarks/bench_gpu.py [WORD ...]    speed, predicted, observed, graphs

Speed: the program's step with its recorder on, and that of a plain PyTorch loop: the reference's
modules, autograd, torch's fused AdamW, in bf16 under autocast. In turn, in the same process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
from pairs import median_interval

import paralab as pl
from paralab.launch import launch_program

MODELS = {
    "tiny": pl.ModelSpec(layers=8, hidden=16, heads=2, seq_len=16, vocab=256),
    "laptop": pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128),
    "25 M": pl.ModelSpec(layers=8, hidden=512, heads=8, seq_len=512),
    "gpt2": pl.ModelSpec.preset("gpt2"),
    "gpt2 padded": pl.ModelSpec.preset("gpt2").replace(vocab=50304),
    "350 M": pl.ModelSpec(layers=24, hidden=1024, heads=16, seq_len=1024),
    "1.3 B": pl.ModelSpec(layers=24, hidden=2048, heads=16, seq_len=1024),
}
SIZES = {"tiny": 1, "laptop": 4, "25 M": 8, "gpt2": 8, "gpt2 padded": 8, "350 M": 8, "1.3 B": 4}
STEPS = {"tiny": 8, "laptop": 8, "25 M": 4, "gpt2": 2, "gpt2 padded": 2, "350 M": 2, "1.3 B": 1}


DEVICE = os.environ.get("PARALAB_GPU_TESTS_ON", "cuda")


def settle() -> float:
    import torch

    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ---- speed ---------------------------------------------------------------------------------------
def turns(context: Any, name: str, precision: str, tf32: bool, pairs: int) -> dict[str, Any]:
    """In a rank: seconds per step of both sides, in turn, after two steps of each."""
    import torch

    from paralab.interpret.train import Trainer

    model, size = MODELS[name].resolved(gpus=True), SIZES[name]
    trainer = Trainer(context, model, pl.Plan(microbatch_size=size, precision=precision, tf32=tf32))
    gpt = pl.reference.GPT(model, 0).to(context.device)
    optimizer = pl.reference.optimizer(gpt.parameters())

    def theirs(number: int) -> None:
        optimizer.zero_grad()
        [(tokens, targets)] = pl.reference.batches(
            model, step=number, microbatch_size=size, device=context.device
        )
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
            loss = gpt(tokens, targets)
        loss.backward()
        optimizer.step()
        loss.item()

    sides = {"ours": trainer.step, "theirs": theirs}
    found: dict[str, Any] = {"ours": [], "theirs": []}
    for turn in range(pairs + 1):
        for side in sides if turn % 2 else reversed(sides):
            with torch.set_grad_enabled(side == "theirs"):
                began = settle()
                for i in range(STEPS[name]):
                    sides[side](turn * STEPS[name] + i)
                if turn:
                    found[side].append((settle() - began) / STEPS[name])
    return found


def speed(pairs: int = 8) -> list[dict]:
    rows = []
    for name, forms in COMPARED.items():
        for form in forms.split(", "):
            precision, tf32 = FORMS[form].get("precision", "fp32"), form == "tf32"
            args = (name, precision, tf32, pairs)
            [one] = launch_program(turns, 1, args, timeout=120, device=DEVICE)
            ratios = [a / b for a, b in zip(one["ours"], one["theirs"], strict=True)]
            middle, low, high = median_interval(ratios)
            ours, theirs = (statistics.median(one[side]) for side in ("ours", "theirs"))
            rows.append({"what": "speed", "model": name, "precision": form,
                         "paralab_s": ours, "peer_s": theirs, "ratio": middle, "low": low,
                         "high": high})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


# ---- predictions ---------------------------------------------------------------------------------
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"tf32": True},
    "bf16": {"precision": "bf16"},
    "recomputed": {"precision": "bf16", "recompute": "full"},
    "4 micro-batches": {"precision": "bf16", "microbatches": 4},
    "offload": {"precision": "bf16", "zero_stage": 3, "offload": "cpu"},
}
ROWS = {
    "tiny": "fp32, bf16",
    "laptop": "fp32, bf16",
    "25 M": "fp32, tf32, bf16, 4 micro-batches, offload",
    "gpt2": "fp32, bf16",
    "gpt2 padded": "tf32, bf16, recomputed, offload",
    "350 M": "bf16, recomputed, 4 micro-batches",
    "1.3 B": "bf16",
}


COMPARED = {"laptop": "fp32, bf16", "25 M": "tf32, bf16", "gpt2 padded": "bf16", "350 M": "bf16"}


def plans() -> list[tuple[str, str, pl.Plan]]:
    """(model, form, plan)"""
    return [(name, form, pl.Plan(microbatch_size=SIZES[name], **FORMS[form]))
            for name, forms in ROWS.items() for form in forms.split(", ")]  # fmt: skip


def predicted() -> list[dict]:
    cluster, rows = pl.Cluster.local(device=DEVICE, refresh=True), []
    print(json.dumps(cluster.to_dict()), flush=True)
    for name, form, plan in plans():
        model = MODELS[name]
        report = pl.run(model, plan, steps=8, device=DEVICE, progress=False)
        guess = pl.predict(model, plan, cluster)
        found = (
            report.allocator
            if DEVICE == "cuda"
            else {"allocated": pd.Series([0]), "reserved": pd.Series([0])}
        )
        rows.append({
            "what": "predicted", "plan": f"{name}, {form}", "measured_s": report.step_time,
            "replayed_s": report.replay(cluster).step_time, "predicted_s": guess.step_time,
            "ledger": report.peak_memory, "predicted_peak": guess.peak_memory,
            "allocated": int(found["allocated"].iloc[0]),
            "later": int(found["allocated"].max()), "reserved": int(found["reserved"].max()),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


# ---- observed ------------------------------------------------------------------------------------
def plain_training(name: str, steps: int, times: list[float] | None = None) -> None:
    import torch

    model = MODELS[name].resolved(gpus=True)
    gpt = pl.reference.GPT(model, 0).to(DEVICE)
    optimizer = pl.reference.optimizer(gpt.parameters())
    for step in range(steps):
        began = settle()
        optimizer.zero_grad()
        [(tokens, targets)] = pl.reference.batches(
            model, step=step, microbatch_size=SIZES[name], device=DEVICE
        )
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = gpt(tokens, targets)
        loss.backward()
        optimizer.step()
        if times is not None:
            times.append(settle() - began)


def observed() -> list[dict]:
    import torch

    rows = []
    for name in ("laptop", "25 M", "gpt2 padded", "350 M"):
        plain_training(name, 3)
        truth = 0
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            plain_training(name, 3)
            truth = torch.cuda.max_memory_allocated() - before
        with pl.observe() as seen:
            plain_training(name, 3)
        bare: list[float] = []
        watched: list[float] = []
        for _ in range(4):
            plain_training(name, 8, bare)
            with pl.observe(memory_steps=0):
                plain_training(name, 8, watched)
        rows.append({"what": "observed", "model": name, "allocator": truth,
                     "ledger": seen.peak_memory,
                     "ratio": statistics.median(watched) / statistics.median(bare)})  # fmt: skip
        print(rows[-1], flush=True)
        print(seen.explain(), seen.summary(), flush=True)
    return rows


# ---- CUDA graphs ---------------------------------------------------------------------------------
def graphed(context: Any, name: str, pairs: int) -> dict[str, Any]:
    """A step as it is, and its forward, backward and update as one captured graph."""
    import torch
    from bench_instruments import Blind

    from paralab.interpret.train import Trainer

    model, size = MODELS[name].resolved(gpus=True), SIZES[name]
    blind = Blind(rank=0, world_size=1, device=context.device)
    plan = pl.Plan(microbatch_size=size, precision="bf16")
    trainer = Trainer(context, model, plan, recorder=blind)
    for step in range(3):
        trainer.step(step)
    [text] = [
        torch.randint(0, 255, (size, model.seq_len + 1), dtype=torch.uint8, device=context.device)
    ]
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                trainer.rank.step(lambda k: text)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            trainer.rank.step(lambda k: text)
        sides = {"eager": lambda: trainer.rank.step(lambda k: text), "graph": graph.replay}
        found: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(pairs + 1):
            for which, work in sides.items():
                began = settle()
                for _ in range(4):
                    work()
                if turn:
                    found[which].append((settle() - began) / 4)
    return found


def graphs(pairs: int = 24) -> list[dict]:
    rows = []
    for name in ("laptop", "25 M", "gpt2 padded"):
        try:
            [one] = launch_program(graphed, 1, (name, pairs), timeout=120, device=DEVICE)
        except pl.RankError as error:
            print(str(error)[:3000], flush=True)
            continue
        ratios = [a / b for a, b in zip(one["graph"], one["eager"], strict=True)]
        rows.append({"what": "graphs", "model": name, "ratio": median_interval(ratios),
                     "eager_s": statistics.median(one["eager"])})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def measure(words: list[str] | None = None) -> list[dict]:
    every = {"predicted": predicted, "speed": speed, "observed": observed, "graphs": graphs}
    return [row for name, work in every.items() if not words or name in words for row in work()]


if __name__ == "__main__":
    with open("bench_gpu.json", "w") as file:
        json.dump(measure(sys.argv[1:]), file, indent=1)
