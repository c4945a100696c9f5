"""Lab 09: an optimizer whose states are in files and pass through memory unit by unit.

The checker trains the reference GPT with the answer and with torch.optim.AdamW on the same
gradients. Before one of the steps it sets the files to zero and torch's moments too: an answer that
keeps its states elsewhere arrives at other weights. Memory is counted in every step and between
steps (ZeRO-Infinity, Rajbhandari+ 2021, arXiv:2104.07857, sec. 5). States that are read from a file
are NumPy arrays before they are tensors, so in a step both count.
"""

from __future__ import annotations

import builtins
import functools
import io
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paralab.exercises.diagnose import first_other_bits
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.late import np, reference, torch, watched
from paralab.spec import ModelSpec

MODEL = ModelSpec(layers=2, hidden=40, heads=2, seq_len=16)
UNIT = 3413  # elements: the embedding has three times as many, and one more
STEPS, ZEROED = 4, 2  # before this step files and moments are set to zero
COPIES = 6  # times 4 bytes per element of a unit: both moments, and temporaries of the update
BEFORE = "; before this step the files were set to zero, so the states are not in them alone"
SCALARS = 20_000  # bytes: names, counts, paths, a file's buffer
BUFFER = 8192  # bytes of it
REQUIRED = {
    "weights": f"after each of {STEPS} steps: torch.optim.AdamW's, bit for bit",
    "files": "8 bytes per parameter under the folder, and nothing else",
    "memory in a step": f"tensors, and arrays: at most {COPIES} numbers per element of a unit "
    "(and 20 kB)",
    "memory between steps": "tensors: at most 20 kB",
}
WEIGHTS, FILES, PEAK, KEPT = REQUIRED
Named = dict[str, Any]


@exercise(
    Takes(
        "MyStreamedAdamW(parameters, folder, lr=..., betas=..., eps=..., weight_decay=..., "
        "unit=...)",
        methods=("step",),
    ),
    required=REQUIRED,
)
def streamed_optimizer(tries: Tries) -> None:
    for notes, found in tries.run(trained, 1):
        result, states = found.results[0], 8 * MODEL.num_params
        notes.look(WEIGHTS, result["wrong"], "all equal")
        wrong = f"{result['files']:,} bytes, required: {states:,}"
        notes.look(FILES, wrong if result["files"] != states else "", f"{states:,} bytes")
        held = max(*result["peaks"], *result["arrays"][1:])  # a first step may import a module
        most = 4 * COPIES * UNIT + SCALARS  # Python's own objects are in it: a few bytes
        wrong = f"it has {held:,} bytes at once, required: at most {most:,}"
        notes.look(PEAK, wrong if held > most else "", "no more than that")
        words = f"keeps {{held}} bytes in memory, all states have {states:,}"
        notes.memory(KEPT, [result["kept"]], SCALARS, words)


def trained(watch: Any, answer: tuple, seed: int) -> dict[str, Any]:
    """What the rank runs: some steps with the answer, and the same with torch's AdamW."""
    gpt, alike = reference.GPT(MODEL), reference.GPT(MODEL)
    named = dict(gpt.named_parameters())
    settings = settings_of(seed)
    adam = torch.optim.AdamW(alike.parameters(), foreach=False, **settings)
    result: dict[str, Any] = {"wrong": "", "peaks": [], "arrays": [], "files": 0}
    tracemalloc.start()  # NumPy tells it of every array; to stop while gloo allocates is a crash
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder, watch.section() as all_of_it:
        mine = answer[0](list(named.values()), folder, **settings, unit=UNIT)
        for step in range(STEPS):
            if step == ZEROED:
                _zero(folder)
                for state in adam.state.values():
                    state["exp_avg"].zero_()
                    state["exp_avg_sq"].zero_()
            [(tokens, targets)] = reference.batches(MODEL, step=step, seed=seed % 1000)
            gpt(tokens, targets).backward()
            first = watched.arrays(alike)
            with watch.unseen():
                alike(tokens, targets).backward()
                adam.step()
            del tokens, targets
            lent = watched.Lent(**{f"{name}.grad": p.grad for name, p in named.items()})
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            with _small_buffers(), watch.section() as section:
                mine.step()
            result["peaks"].append(section.peak)
            result["arrays"].append(tracemalloc.get_traced_memory()[1] - before)
            yours, right = watched.arrays(gpt), watched.arrays(alike)
            if not result["wrong"]:
                with watch.unseen():
                    grads = {name: p.grad for name, p in alike.named_parameters()}
                    known = functools.partial(_mistakes, settings, first, grads, yours, step)
                    if wrong := first_other_bits(yours, right, known):
                        wrong += BEFORE * (step == ZEROED)
                        result["wrong"] = f"after step {step + 1} {wrong}"
                result["wrong"] = result["wrong"] or lent.changed()
            del yours, right, lent
            gpt.zero_grad()
            alike.zero_grad()
        result["files"] = sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())
        adam.state.clear()
        result["kept"] = all_of_it.now()
    return result


@contextmanager
def _small_buffers() -> Iterator[None]:
    """A file that is opened within the block has a small buffer: that of Python 3.14 has 128 KiB,
    more than a unit's states. Arrays alone cannot be counted, as read bytes may be states too.
    """
    real = builtins.open

    def small(file: Any, mode: str = "r", buffering: int = -1, *how: Any, **named: Any) -> Any:
        return real(file, mode, BUFFER if buffering == -1 else buffering, *how, **named)

    builtins.open = io.open = small
    try:
        yield
    finally:
        builtins.open = io.open = real


def settings_of(seed: int) -> Named:
    """AdamW's, for each answer its own."""
    part = seed / 2**32
    betas = 0.8 + part / 10, 0.95 + part / 50
    return {"lr": (1 + part) / 100, "betas": betas, "eps": 1e-6 + part / 1e6, "weight_decay": part}


def _mistakes(
    settings: Named, first: Named, grads: Named, yours: Named, step: int, name: str
) -> Iterator[tuple[str, Any]]:
    """(words, what the parameter would be) after mistakes in the states of torch's AdamW."""

    def stepped(count: int) -> Any:
        """After a step that begins with moments of zero, and that is number ``count``, from 0."""
        part = torch.nn.Parameter(torch.from_numpy(first[name].copy()))
        part.grad, adam = grads[name], torch.optim.AdamW([part], foreach=False, **settings)
        moments = {one: torch.zeros_like(part) for one in ("exp_avg", "exp_avg_sq")}
        adam.state[part] = {"step": torch.tensor(float(count)), **moments}
        adam.step()
        return watched.array(part)

    if step:
        yield f"the states that step {step} has made are not in the files", stepped(step)
        return
    often = stepped(0)
    for count in range(1, sum(-(-one.size // UNIT) for one in first.values()) + 1):
        yield f"the step count is {count + 1} in the first step, not 1", (other := stepped(count))
        often = np.where(yours[name] == other, other, often)
    yield "the step count grows more than once in a step", often


def _zero(folder: str) -> None:
    """Every byte of the files is 0; the files stay where they are, for they may be mapped."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.write(bytes(size))
