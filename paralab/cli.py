"""`paralab run`, `predict`, `program`, `dry-run`, `show`, `doctor`: a notebook's cells in a shell.

Every field of ``ModelSpec`` and ``Plan`` is an option of the same name (options.py). Under torchrun
the same command is one rank of a job that may span machines: it writes its part of the report into
a folder, which ``pl.load`` merges.

What is legal is said in one place, the descriptions themselves: options are handed on as typed, and
a refusal comes back as exit status 2. A run that failed is 1, an interrupted one 130. Neither shows
this process's traceback, only what the rank said. torch is imported by the ranks alone.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paralab import doctor
from paralab.checks import illegal, number, size
from paralab.options import (
    add_exports,
    add_model_and_plan,
    add_options,
    add_other_plan,
    comma_separated,
    model_of,
    other_plan_of,
    plan_of,
    settings_of,
)
from paralab.ranks.errors import Nested
from paralab.report import written
from paralab.spec import ModelSpec, Plan
from paralab.spec.cluster import CLUSTER_PRESETS
from paralab.theory.traffic import BOOKKEEPING

DIFF = "diff_"  # --diff-zero-stage 3: the same plan but for this
DEFAULT_OUT = "paralab-run"
SPEAKER_FIRST = 20.0  # seconds that the one rank which says why has for it


def torchrun_started_this() -> bool:
    """Whether this process is one rank of a torchrun job."""
    by_hand = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    return by_hand or "TORCHELASTIC_RUN_ID" in os.environ


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paralab",
        description="See how models too large for one device are trained, by doing it.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paralab {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        usage="%(prog)s [options]",
        help="train a GPT on real processes and print where time and bytes went",
        epilog="On several machines, on each of them: torchrun --nnodes 2 --nproc-per-node 4 "
        "--rdzv-backend c10d --rdzv-endpoint HOST:29400 -m paralab run --dp 8 --out FOLDER",
        allow_abbrev=False,
    )
    add_model_and_plan(run)
    add_options(
        run.add_argument_group("the run"),
        (
            ("--steps", number, "optimizer steps, the first of them warm-up"),
            ("--optimizer", str, "adamw or sgd"),
            ("--lr", number, "learning rate"),
            ("--clip-norm", number, "clip the gradients' global norm to this"),
            ("--data", str, "a text file or folder (default: Python's standard library)"),
            ("--seed", number, "draws weights and batches"),
            ("--memory-limit", size, "stop a rank that needs more: 64MB (10^6), 64MiB (2^20)"),
            (
                "--checkpoint",
                str,
                "a folder to save checkpoints into, the last after the last step",
            ),
            ("--save-every", number, "save a checkpoint every so many steps too"),
            ("--resume", str, "a folder of checkpoints to go on from, under any plan"),
            ("--resume-changes", comma_separated, "what may differ then: lr,global_batch,data"),
            ("--device", str, "cpu or cuda (default: the GPU where there is one)"),
            ("--timeout", number, "seconds without a sign of life before the ranks are stopped"),
        ),
    )

    result = run.add_argument_group("what to show and write")
    result.add_argument(
        "--predict", action="store_true", help="predict the run from this machine's speed; compare"
    )
    result.add_argument("--save", type=Path, metavar="FILE", help="the report: run.json")
    add_exports(result)
    where = f"under torchrun: where every rank writes its part (default {DEFAULT_OUT})"
    result.add_argument("--out", type=Path, metavar="FOLDER", help=where)
    run.set_defaults(act=_run, parser=run)

    dry = commands.add_parser(
        "dry-run",
        usage="%(prog)s [options]",
        help="one rank of a plan of any size: what it would hold and send, without training",
        allow_abbrev=False,
    )
    add_model_and_plan(dry)
    add_options(
        dry.add_argument_group("the dry run"),
        (
            ("--rank", number, "which of the plan's ranks to be (default 0)"),
            ("--steps", number, "optimizer steps (default 1); they are alike"),
            ("--optimizer", str, "adamw or sgd"),
            ("--clip-norm", number, "clip the gradients' global norm to this"),
        ),
    )
    dry.add_argument("--save", type=Path, metavar="FILE", help="the report: dry.json")
    dry.add_argument("--html", type=Path, metavar="FILE", help="one self-contained page")
    dry.set_defaults(act=_dry_run, parser=dry)

    program = commands.add_parser(
        "program",
        usage="%(prog)s [options]",
        help="what a rank does in a step, as a list of instructions; or how two plans differ",
        allow_abbrev=False,
    )
    add_model_and_plan(program)
    add_other_plan(program, DIFF)
    lines = program.add_argument_group("what to print")
    add_options(
        lines,
        (
            ("--rank", number, "which of the plan's ranks (default 0)"),
            ("--optimizer", str, "adamw or sgd"),
            ("--clip-norm", number, "clip the gradients' global norm to this"),
            ("--op", comma_separated, "only these instructions, as all_gather,wait"),
            ("--lane", comma_separated, "only what runs there: compute, or an axis, as dp"),
            ("--microbatch", number, "only this micro-batch's"),
        ),
    )
    lines.add_argument("--all", action="store_true", help="every line: repetitions not folded")
    program.set_defaults(act=_program, parser=program)

    predict = commands.add_parser(
        "predict",
        usage="%(prog)s [options]",
        help="what a run would take on this machine or a cluster, without one",
        allow_abbrev=False,
    )
    add_model_and_plan(predict)
    machine = predict.add_argument_group("the machine")
    presets = ", ".join(CLUSTER_PRESETS)
    machine.add_argument(
        "--cluster", metavar="NAME", help=f"{presets} (default: this machine, measured)"
    )
    add_options(
        machine,
        (
            ("--nodes", number, "nodes of such a cluster (default: as few as hold the plan)"),
            ("--device", str, "this machine's cpu or cuda (default: what a run would take)"),
            ("--optimizer", str, "adamw or sgd"),
        ),
    )
    predict.add_argument("--save", type=Path, metavar="FILE", help="the report: predicted.json")
    add_exports(predict)
    predict.set_defaults(act=_predict, parser=predict)

    show = commands.add_parser(
        "show", help="print a saved report, or a torchrun job's folder", allow_abbrev=False
    )
    show.add_argument("path", metavar="FILE_OR_FOLDER")
    add_exports(show)
    show.set_defaults(act=_show, parser=show)
    doctor.add_command(commands)
    return parser


def _version() -> str:
    from paralab.version import __version__

    return __version__


@contextmanager
def _refusals(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turn what the descriptions refuse into argparse's exit 2.

    Only a refusal in the one form of ``checks.illegal`` is the user's: any other ValueError is a
    defect of this package, and keeps its traceback.
    """
    try:
        yield
    except (ValueError, Nested) as error:
        if "; legal: " not in str(error):
            raise
        rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
        if not rank.isdecimal() or int(rank) == 0:
            parser.error(str(error))  # once per machine, not once per rank
        time.sleep(SPEAKER_FIRST)  # torchrun ends a machine's ranks with the first that goes
        sys.exit(2)


def _files(given: argparse.Namespace, *names: str) -> None:
    """Refuse a file that could not be written, before minutes are spent on what goes into it."""
    for name in names:
        if getattr(given, name) is not None:
            written.check(name, getattr(given, name))


def _run(given: argparse.Namespace) -> int:
    experiment = importlib.import_module("paralab.experiment")
    by_torchrun = torchrun_started_this()
    settings = settings_of(
        given,
        "steps",
        "optimizer",
        "lr",
        "clip_norm",
        "data",
        "seed",
        "memory_limit",
        "device",
        "timeout",
        "save_every",
        "resume",
        "resume_changes",
    )
    if "checkpoint" in given:  # --save is the report's here
        settings["save"] = given.checkpoint
    with _refusals(given.parser):
        model, plan = model_of(given), plan_of(given)
        plan.validate(model)
        _files(given, "save", "html", "perfetto")
        if by_torchrun:
            return _run_one_rank(given, experiment, model, plan, settings)
        if given.out is not None:
            raise illegal("out", str(given.out), "torchrun did not start this", "--save FILE")
        report = experiment.run(model, plan, **settings)
    if given.save:
        report.save(given.save)
    _print_summary(report)
    sections = []
    if given.predict:
        import paralab as pl
        from paralab.report.metrics import device_of

        print("measuring this machine, or reading what was measured before …", flush=True)
        here = pl.Cluster.local(device=device_of(report))
        expect = pl.predict(model, plan, here, optimizer=report.meta["optimizer"])
        comparison = pl.compare(expect, report)
        print(f"\n{comparison}")
        sections.append(("Predicted and measured", comparison._repr_html_()))
    _export(report, given, sections)
    if given.save:
        print(f"saved {given.save}; see it again: paralab show {given.save}")
    return 0


def _dry_run(given: argparse.Namespace) -> int:
    module = importlib.import_module("paralab.dry_run")
    settings = settings_of(given, "rank", "steps", "optimizer", "clip_norm")
    with _refusals(given.parser):
        model, plan = model_of(given), plan_of(given)
        _files(given, "save", "html")
        report = module.dry_run(model, plan, **settings)
    _print_summary(report)
    if given.save:
        report.save(given.save)
        print(f"saved {given.save}; see it again: paralab show {given.save}")
    if given.html:
        report.to_html(given.html)
        print(f"wrote {given.html}: open it in a browser")
    return 0


def _program(given: argparse.Namespace) -> int:
    module = importlib.import_module("paralab.interpret.text")
    settings = settings_of(given, "rank", "optimizer", "clip_norm")
    chosen = settings_of(given, "op", "lane", "microbatch")
    with _refusals(given.parser):
        model, plan = model_of(given), plan_of(given)
        other = other_plan_of(given, DIFF)
        shown = module.program(model, plan, **settings).filter(**chosen)
        if other is not None:
            shown = shown.diff(module.program(model, other, **settings).filter(**chosen))
    print(shown.text(folded=not given.all) if other is None else shown)
    return 0


def _predict(given: argparse.Namespace) -> int:
    import paralab as pl

    with _refusals(given.parser):
        model, plan = model_of(given), plan_of(given)
        plan.validate(model)
        _files(given, "save", "html", "perfetto")
        if given.cluster is None:
            if "nodes" in given:
                raise illegal("nodes", given.nodes, "this machine is one", "--cluster NAME too")
            print("measuring this machine, or reading what was measured before …", flush=True)
            cluster = pl.Cluster.local(device=given.device) if "device" in given else None
        elif "device" in given:
            raise illegal("device", given.device, "a preset has its own", "no --cluster")
        else:
            cluster = pl.Cluster.preset(given.cluster)
            enough = -(-plan.world_size // cluster.devices_per_node)
            cluster = pl.Cluster.preset(given.cluster, nodes=getattr(given, "nodes", enough))
        report = pl.predict(model, plan, cluster, **settings_of(given, "optimizer"))
    _print_summary(report)
    for what, sizes in _amounts(report).items():
        lines = [f"  {name:<24}{size / 1e6:>14,.2f} MB" for name, size in sizes.items() if size]
        print("\n".join([what, *(lines or ["  none"])]) + "\n")
    if given.save:
        report.save(given.save)
        print(f"saved {given.save}; see it again: paralab show {given.save}")
    _export(report, given)
    return 0


def _amounts(report: Any) -> dict[str, dict[str, float]]:
    """{what: {part: bytes}} of a prediction: messages by axis and level, the highest peak."""
    calls = report.collectives[~report.collectives["phase"].isin(BOOKKEEPING)]
    steps, ranks = report.steps["step"].nunique(), report.steps["rank"].nunique()
    where = {"intra": "inside a node", "inter": "across nodes"}
    sent = calls.groupby(["axis", "level"])["wire_bytes"].sum() / (steps * ranks)
    return {
        "sent per rank and step": {f"{axis}, {where[at]}": n for (axis, at), n in sent.items()},
        "peak memory of the rank with the highest": report.peaks()[report.clock].to_dict(),
    }


def _run_one_rank(
    given: argparse.Namespace, experiment: Any, model: ModelSpec, plan: Plan, settings: dict
) -> int:
    for name in ("save", "html", "perfetto", "predict"):
        if getattr(given, name):
            raise illegal(
                name,
                str(getattr(given, name)),
                "one rank has one part of the report",
                "--out FOLDER, then paralab show FOLDER",
            )
    folder = str(given.out or DEFAULT_OUT)
    rank = experiment.run_under_torchrun(model, plan, folder=folder, **settings)
    if rank == 0:
        print(f"every rank writes its part into {folder}; with all of them in one place:")
        print(f"  pl.load({folder!r}) in a notebook, paralab show {folder} in a shell")
    return 0


def _show(given: argparse.Namespace) -> int:
    from paralab.report.report import load

    with _refusals(given.parser):
        _files(given, "html", "perfetto")
    try:
        report = load(given.path)
    except (OSError, ValueError) as error:
        given.parser.error(str(error))
    _print_summary(report)
    with _refusals(given.parser):
        _export(report, given)
    return 0


def _print_summary(report: Any) -> None:
    table = report.summary().to_string(header=False, index_names=False)
    print(f"\n{report!r}\n{table}\n")


def _export(
    report: Any, given: argparse.Namespace, sections: Sequence[tuple[str, str]] = ()
) -> None:
    if given.html:
        report.to_html(given.html, sections=sections)
        print(f"wrote {given.html}: open it in a browser")
    if given.perfetto:
        report.to_perfetto(given.perfetto)
        print(f"wrote {given.perfetto}: open it at ui.perfetto.dev")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = make_parser().parse_args(arguments)
    try:
        done = given.act(given)
        sys.stdout.flush()
        return done
    except BrokenPipeError:  # whoever reads, as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("paralab: interrupted; the ranks are stopped", file=sys.stderr)
        return 130
    except _failures() as error:
        print(f"paralab: {error}", file=sys.stderr)
        return 1


def _failures() -> tuple[type[BaseException], ...]:
    """What a run may end with that is not this process's fault. Looked up only when needed."""
    from paralab.launch import OutOfMemory, RankError, RankTimeout

    return (RankError, RankTimeout, OutOfMemory, OSError)
