"""Lab 09: an optimizer whose states are in files and pass through memory unit by unit.

The checker trains the reference GPT with the answer and with torch.optim.AdamW on the same
gradients. Before one of the steps it sets the files and torch's moments to zero: an answer that
keeps its states elsewhere gets other weights. Memory is measured in every step and between steps
(ZeRO-Infinity, Rajbhandari+ 2021, arXiv:2104.07857, sec. 5). States that are read from a file are
NumPy arrays before they are tensors, so within a step both are measured.
"""

from __future__ import annotations

import builtins
import functools
import io
import re
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paralab.exercises.diagnose import first_other_bits
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import np, reference, torch, watched
from paralab.spec import ModelSpec

MODEL = ModelSpec(layers=2, hidden=40, heads=2, seq_len=16)
UNIT = 3413  # elements: the embedding has one more than three units
STEPS, ZEROED = 4, 2  # before this step files and moments are set to zero
MOMENTS = "exp_avg", "exp_avg_sq"  # names of the states in torch.optim.AdamW
COPIES = 6  # numbers of 4 bytes per element of a unit: both moments, and temporaries
BEFORE = "; before this step the files were set to zero, so the states are not in them alone"
SCALARS = 20_000  # bytes: names, counts, paths, a file's buffer
BUFFER = 8192  # bytes of a file's buffer
REQUIRED = {
    "weights": f"after each of {STEPS} steps: torch.optim.AdamW's, bit for bit",
    "files": "8 bytes per parameter under the folder, and nothing else",
    "memory in a step": f"tensors and NumPy arrays: at most {COPIES} numbers per element of a unit "
    "(and 20 kB)",
    "memory between steps": "tensors: at most 20 kB",
}
WEIGHTS, FILES, PEAK, KEPT = REQUIRED
CAUSES = {  # {pattern of a failure: a frequent cause}
    "SIGSEGV|SIGBUS": '; a change in place of a np.memmap of mode "r" ends so: required: "r+"',
    "RuntimeError: The size of tensor.*dimension 0": "; where a file ends, a slice is shorter than "
    "asked for: 8 bytes per parameter are required",
    "ZeroDivisionError.*self.steps": "; self.steps is 0: step has to add 1 to it before",
}
Named = dict[str, Any]  # {name: value}


@exercise(
    Takes(
        "MyStreamedAdamW(parameters, folder, lr=..., betas=..., eps=..., weight_decay=..., "
        "unit=...)",
        methods=("step",),
    ),
    required=REQUIRED,
)
def streamed_optimizer(tries: Tries) -> None:
    with tempfile.TemporaryDirectory(prefix="paralab-") as base:  # outlives a rank that is stopped
        for notes, outcome in tries.run(trained, 1, base):
            result, states = outcome.results[0], 8 * MODEL.num_params
            notes.look(WEIGHTS, result["wrong"], "all equal")
            wrong = f"the files have {result['files']:,} bytes, required: {states:,}"
            notes.look(FILES, wrong if result["files"] != states else "", f"{states:,} bytes")
            held, most = result["held"], 4 * COPIES * UNIT + SCALARS  # Python's objects count too
            wrong = f"tensors or arrays have {held:,} bytes at once, required: at most {most:,}"
            notes.look(PEAK, wrong if held > most else "", "no more than that")
            how = "keeps {} bytes in memory between steps", f"; all states have {states:,}"
            notes.memory(KEPT, [result["kept"]], SCALARS, *how)
    for notes in (one.notes for one in tries.all):
        notes.said += "".join(why for sign, why in CAUSES.items() if re.search(sign, notes.said))


def trained(watch: Any, answer: tuple, seed: int, base: str) -> dict[str, Any]:
    """What the rank runs: some steps with the answer, and the same with torch's AdamW."""
    gpt, reference_gpt = reference.GPT(MODEL), reference.GPT(MODEL)
    named, settings = dict(gpt.named_parameters()), settings_of(seed)
    adam = torch.optim.AdamW(reference_gpt.parameters(), foreach=False, **settings)
    wrong, held, files, paths = "", 0, 0, list[Path]()
    tracemalloc.start()  # NumPy reports arrays to it; to stop it while gloo allocates crashes
    with tempfile.TemporaryDirectory(dir=base) as folder, watch.section() as all_of_it:
        optimizer = answer[0](list(named.values()), folder, **settings, unit=UNIT)
        for step in range(STEPS):
            # files of another size are refused for that: zeros in a header would be misread
            if zeroed := step == ZEROED and files == 8 * MODEL.num_params:
                for path in paths:
                    with path.open("r+b") as file:  # in place: the answer may have mapped them
                        file.write(bytes(path.stat().st_size))
                for state in adam.state.values():
                    for moment in MOMENTS:
                        state[moment].zero_()
            [(tokens, targets)] = reference.batches(MODEL, step=step, seed=seed % 1000)
            gpt(tokens, targets).backward()
            before_step = watched.arrays(reference_gpt)
            with watch.unseen():
                reference_gpt(tokens, targets).backward()
                adam.step()
            del tokens, targets
            gradients = {name: p.grad for name, p in named.items()}
            lent = watched.Lent(**{f"{name}.grad": grad for name, grad in gradients.items()})
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            with _small_buffers(), watch.section() as section:
                optimizer.step()
            arrays = tracemalloc.get_traced_memory()[1] - before
            held = max(held, section.peak, arrays * (step > 0))  # a first step may import a module
            yours, right = watched.arrays(gpt), watched.arrays(reference_gpt)
            if not wrong:
                with watch.unseen():
                    grads = {name: p.grad for name, p in reference_gpt.named_parameters()}
                    known = functools.partial(_mistakes, settings, before_step, grads, yours, step)
                    if said := first_other_bits(yours, right, known):
                        wrong = f"after step {step + 1} {said}{BEFORE * zeroed}"
                other = [name for name, p in named.items() if p.grad is not gradients[name]][:1]
                replaced = "".join(f"{name}.grad is another one: leave it" for name in other)
                wrong = wrong or replaced or lent.changed()
            del yours, right, lent, gradients
            gpt.zero_grad()
            reference_gpt.zero_grad()
            paths = [path for path in Path(folder).rglob("*") if path.is_file()]
            files = sum(path.stat().st_size for path in paths)
        adam.state.clear()
        return {"wrong": wrong, "held": held, "files": files, "kept": all_of_it.now()}


@contextmanager
def _small_buffers() -> Iterator[None]:
    """Within this context files are opened with a small buffer: Python 3.14's has 128 KiB, more
    than a unit's states. Bytes that are read have to be measured, since they may be states too.
    """
    original = builtins.open

    def small(file: Any, mode: str = "r", buffering: int = -1, *how: Any, **named: Any) -> Any:
        return original(file, mode, BUFFER if buffering == -1 else buffering, *how, **named)

    builtins.open = io.open = small
    try:
        yield
    finally:
        builtins.open = io.open = original


def settings_of(seed: int) -> Named:
    """Settings of AdamW, different for each answer."""
    part = seed / 2**32
    betas = 0.8 + part / 10, 0.95 + part / 50
    return {"lr": (1 + part) / 100, "betas": betas, "eps": 1e-6 + part / 1e6, "weight_decay": part}


def _mistakes(
    settings: Named, first: Named, grads: Named, yours: Named, step: int, name: str
) -> Iterator[tuple[str, Any]]:
    """(words, the parameter after the step) of known mistakes in the states of AdamW."""
    if np.isnan(yours[name]).any():
        said = "the root of a negative number is NaN, as when v is read from another number's place"
        yield said, yours[name]
        return
    yield "it is as it was before the step", first[name]

    def stepped(count: int) -> Any:
        """The parameter after step ``count``, from 0, with moments of zero before it."""
        parameter = torch.nn.Parameter(torch.from_numpy(first[name].copy()))
        adam = torch.optim.AdamW([parameter], foreach=False, **settings)
        moments = {key: torch.zeros_like(parameter) for key in MOMENTS}
        parameter.grad = grads[name]
        adam.state[parameter] = {"step": torch.tensor(float(count)), **moments}
        adam.step()
        return watched.array(parameter)

    if step:
        said = f"the states of step {step} were not written to the files, or erased since"
        yield said, stepped(step)
        return
    right = mixed = stepped(0)
    for count in range(1, sum(-(-array.size // UNIT) for array in first.values()) + 1):
        yield f"the step count is {count + 1} in the first step, not 1", (other := stepped(count))
        mixed = np.where(yours[name] == other, other, mixed)
    yield "the step count grows more than once in a step", mixed
    wrong = np.flatnonzero(yours[name] != right)[0] // UNIT * UNIT  # where its unit begins
    right_before = name != next(iter(first)) or grads[name].reshape(-1)[:wrong].any()
    moved = yours[name] - first[name] * (1 - settings["lr"] * settings["weight_decay"])
    if right_before and np.abs(moved).max() > 1.01 * settings["lr"]:  # from zero, whatever the
        # gradient is, a first step moves an element by at most lr
        said = "the moments that were read are not zero, as they are before the first step: each "
        yield f"{said}unit needs 8 bytes per element of its own in the files", yours[name]
