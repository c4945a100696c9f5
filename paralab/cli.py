"""The shell commands of paralab: run, predict, dry-run, program, observe, check, show and doctor.

options.py has the options of a model and a plan. Under torchrun `run` and `observe` are one rank of
a job that may span machines: each rank writes its part of the report into a folder, and ``pl.load``
merges the parts.

Options are not checked here: `ModelSpec`, `Plan` and the functions that take them decide what is
legal, and a refusal of theirs becomes exit status 2. A failed run has exit status 1, an interrupted
one 130. Such an end shows what the rank said, without a traceback of this process. torch is
imported by the ranks alone.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paralab import doctor, experiment, observing
from paralab.checks import LEGAL, choice, current_folder, illegal, number, size
from paralab.dry_run import dry_run
from paralab.interpret.predict import predict
from paralab.options import (
    Option,
    add_model_and_plan,
    add_options,
    comma_separated,
    model_of,
    plan_of,
    settings_of,
)
from paralab.ranks.errors import Nested, OutOfMemory, RankError, RankTimeout
from paralab.report import amounts, facts, output_files
from paralab.report.checkpoints import CHANGES
from paralab.report.report import load
from paralab.report.summary import readable
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.spec.cluster import CLUSTER_PRESETS
from paralab.theory.compare import compare
from paralab.version import __version__

OTHERS_WAIT = 20.0  # seconds that a machine's other ranks live on, while its first says why
MEASURING = "measuring this machine, or reading what was measured before …"
OTHER_PATHS = ("script", "path", "data", "resume", "checkpoint")  # that are read, or a folder
# {option of an output file: (help, method of the report, message when it is written)}
FILES = {
    "save": ("write the report as JSON", "save", "saved {0}; see it again: paralab show {0}"),
    "html": ("write one self-contained page", "to_html", "wrote {0}: open it in a browser"),
    "perfetto": (
        "write a trace for ui.perfetto.dev",
        "to_perfetto",
        "wrote {0}: open it at ui.perfetto.dev",
    ),
}
TIMEOUT = Option(
    "timeout", number, "end a run after this many seconds without progress (default 120)"
)
OPTIMIZER = Option("optimizer", str, "adamw or sgd (default adamw)")
CLIP_NORM = Option("clip_norm", number, "clip the global norm of the gradients to this value")
RANK = Option("rank", number, "which of the plan's ranks to show (default 0)")
RUN_OPTIONS = (
    Option("steps", number, "number of optimizer steps; the first is warm-up (default 4)"),
    OPTIMIZER,
    Option("lr", number, "learning rate (default 1e-3 for adamw, 0.1 for sgd)"),
    CLIP_NORM,
    Option("data", str, "a text file or folder (default: the source of torch's layers)"),
    Option("seed", number, "seed of weights and batches (default 0)"),
    Option("memory_limit", size, "stop a rank that needs more memory: 64MB (10^6) or 64MiB (2^20)"),
    Option("checkpoint", str, "a folder for checkpoints; one is saved after the last step"),
    Option("save_every", number, "also save a checkpoint every this many steps"),
    Option("resume", str, "a folder of checkpoints to continue from, under any plan"),
    Option(
        "resume_changes",
        comma_separated,
        "what may differ from the run that is continued: " + ",".join(CHANGES),
    ),
    Option("device", str, "cpu or cuda (default: cuda if there is a GPU for every rank)"),
    TIMEOUT,
)
DRY_OPTIONS = (
    RANK,
    OPTIMIZER,
    CLIP_NORM,
)
PROGRAM_OPTIONS = (
    RANK,
    OPTIMIZER,
    CLIP_NORM,
    Option("op", comma_separated, "show only these instructions, such as all_gather,wait"),
    Option(
        "lane",
        comma_separated,
        "show only what runs on these lanes: compute, or an axis such as dp",
    ),
    Option("microbatch", number, "show only the instructions of this micro-batch"),
)
PREDICT_OPTIONS = (
    Option("device", str, "cpu or cuda of this machine (default: what a run would use)"),
    OPTIMIZER,
)
OBSERVE_OPTIONS = (
    Option("ranks", number, "number of processes (default 4)"),
    Option("nodes", number, "place the processes on this many virtual nodes (default 1)"),
    Option(
        "steps",
        str,
        "what ends a step: optimizer (its step(), the default), or marked (a call of "
        "paralab.step())",
    ),
    Option("memory_steps", number, "count memory in this many steps, from the first (default 2)"),
    TIMEOUT,
)


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
    parser.add_argument("--version", action="version", version=f"paralab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str,
        act: Callable[[argparse.Namespace], Any],
        does: str,
        options: Sequence[Option] = (),
        *,
        plan: bool = True,
        **how: Any,
    ) -> argparse.ArgumentParser:
        """Add a command with these options of its own, and with ``plan`` those of a model and a
        plan. ``act`` runs it and returns the exit status, None for 0; or a function that runs it,
        whose errors are not refusals of the command: those of a script in a rank of torchrun.
        """
        how = {"description": does[0].upper() + does[1:] + ".", **how}
        if plan:
            how["usage"] = "%(prog)s [options]"
        added = commands.add_parser(name, help=does, allow_abbrev=False, **how)
        added.set_defaults(act=act, parser=added, own=[option.name for option in options])
        if plan:
            add_model_and_plan(added)
        if options:
            add_options(added.add_argument_group("this command"), options)
        return added

    run = add(
        "run",
        _run,
        "train a GPT on real processes and print where time and bytes went",
        RUN_OPTIONS,
        epilog="On several machines, call on each of them: torchrun --nnodes 2 --nproc-per-node 4 "
        "--rdzv-backend c10d --rdzv-endpoint HOST:29400 -m paralab run --dp 8 --out FOLDER",
    )
    text = "also predict the run from this machine's speed, and compare"
    run.add_argument("--predict", action="store_true", help=text)
    _add_out(run, "paralab-run")
    _add_files(run, *FILES)
    dry = add(
        "dry-run",
        _dry_run,
        "show what one rank of a plan of any size would hold and send, without training",
        DRY_OPTIONS,
    )
    _add_cluster(dry, "one node of processors")
    _add_files(dry, "save", "html")
    program = add(
        "program",
        _program,
        "print what a rank does in a step, as a list of instructions",
        PROGRAM_OPTIONS,
    )
    program.add_argument("--all", action="store_true", help="print every line, without folding")
    predicted = add(
        "predict",
        _predict,
        "predict the time and memory of a run on this machine or a cluster, without running",
        PREDICT_OPTIONS,
    )
    _add_cluster(predicted, "this machine, measured")
    _add_files(predicted, *FILES)
    observe = add(
        "observe",
        _observe,
        "run your own PyTorch script and see its time, bytes and memory",
        OBSERVE_OPTIONS,
        plan=False,
        usage="%(prog)s [options] [-m] SCRIPT [its arguments]",
        epilog="Under torchrun every rank writes its part of the report: "
        "torchrun --nproc-per-node 2 -m paralab observe [--out FOLDER] SCRIPT",
    )
    _add_out(observe, "parts")
    observe.add_argument("-m", action="store_true", help="SCRIPT names a module, as in python -m")
    observe.add_argument("script", metavar="SCRIPT")
    own = observe.add_argument("arguments", nargs="...", help="arguments of the script")
    own.required = False  # a script may have no arguments
    _add_files(observe, *FILES)
    show = add("show", _show, "print a saved report, or a torchrun job's folder", plan=False)
    show.add_argument("path", metavar="FILE_OR_FOLDER")
    _add_files(show, "html", "perfetto")
    check = add(
        "check",
        _check,
        "grade the answers in notebooks of labs; print the points as JSON",
        plan=False,
        epilog="Exit status: 0 if all points are reached, 1 if not, and 2 if a file is not a "
        "notebook of a lab (then none is judged) or the folder for temporary files is full (then "
        "those judged before are printed). For several notebooks a JSON list is printed. What the "
        "answers print goes to stderr.",
    )
    check.add_argument("notebooks", metavar="NOTEBOOK", nargs="+")
    doctors = add(
        "doctor",
        _doctor,
        "show what this machine can do, and which labs run here",
        plan=False,
        description="Show what this machine can do, and which labs run here. Exit status: 0 if "
        "labs run, 1 if none does (the reason is printed).",
    )
    text = "first measure this machine's speed and links, which takes ten to fifteen seconds; "
    text += "under torchrun on several machines the link between them too"
    doctors.add_argument("--calibrate", action="store_true", help=text)
    text = "whose speed and links to show: cpu (processors) or cuda (GPUs) (default cpu)"
    doctors.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    return parser


def _add_files(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=FILES[name][0])


def _add_out(parser: argparse.ArgumentParser, folder: str) -> None:
    text = f"under torchrun: the folder for every rank's part of the report (default {folder})"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    parser.set_defaults(folder=folder)


def _add_cluster(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"{', '.join(CLUSTER_PRESETS)} (default: {default})"
    parser.add_argument("--cluster", metavar="NAME", help=text)


@contextmanager
def _refusals(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turn refusals of illegal settings into argparse's message and exit status 2.

    Only an error in the form of ``checks.illegal`` is the user's mistake. Any other ValueError is a
    defect of this package, and keeps its traceback.
    """
    try:
        yield
    except (ValueError, Nested) as error:
        if LEGAL not in str(error):
            raise
        rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
        if not rank.isdecimal() or int(rank) == 0:
            parser.error(str(error))  # once per machine, not once per rank
        time.sleep(OTHERS_WAIT)  # torchrun kills all ranks of a machine when the first one ends
        sys.exit(2)


def _model_and_plan(given: argparse.Namespace) -> tuple[ModelSpec, Plan]:
    """The model and the plan, legal together. Output files that cannot be written are refused here
    too, before the command spends minutes on their contents.
    """
    model, plan = model_of(given), plan_of(given)
    plan.validate(model)
    _check_files(given)
    return model, plan


def _check_files(given: argparse.Namespace) -> None:
    """Refuse an output file that cannot be written, is an input too, or is named twice."""
    taken: dict[str, str] = {}
    for name in (*OTHER_PATHS, *FILES):
        if (file := getattr(given, name, None)) is not None:
            other = taken.setdefault(os.path.realpath(file), name)
            if name in FILES:  # --checkpoint may be the folder that --resume reads
                output_files.check(name, file)
                if other != name:
                    raise illegal(name, str(file), f"{other} is this path already", "another file")


def _print_summary(report: Any) -> None:
    style = {"header": False, "index_names": False, "formatters": {"value": readable}}
    table = report.summary().to_string(**style)
    print(f"\n{report!r}\n{table}\n")


def _write(
    report: Any,
    given: argparse.Namespace,
    names: Sequence[str] = tuple(FILES),
    sections: Sequence[tuple[str, str]] = (),
) -> None:
    for name in names:
        _, method, message = FILES[name]
        if file := getattr(given, name, None):
            getattr(report, method)(file, **({"sections": sections} if name == "html" else {}))
            print(message.format(file))


# ---- the commands -------------------------------------------------------------------------------
def _run(given: argparse.Namespace) -> None:
    settings = settings_of(given, *given.own)
    if "checkpoint" in settings:  # on the command line --save is for the report
        settings["save"] = settings.pop("checkpoint")
    model, plan = _model_and_plan(given)
    folder = _part_folder(given, "under torchrun a rank has only its part of the report", "predict")
    try:
        if folder is not None:
            if experiment.run_under_torchrun(model, plan, folder=folder, **settings) == 0:
                how = "with all parts in one folder, read it by"
                print(f"every rank writes its part into {folder}; {how}")
                print(f"  pl.load({folder!r}) in a notebook, or paralab show {folder} in a shell")
            return
        report = experiment.run(model, plan, **settings)
    except (ValueError, RankError) as error:  # what `pl.run` calls save is --checkpoint here
        error.args = (str(error).replace("save=", "checkpoint="),)
        raise
    _write(report, given, ("save",))  # first, as what follows may be interrupted
    _print_summary(report)
    sections = []
    if given.predict:
        print(MEASURING, flush=True)
        machine = Cluster.local(device=facts.device_of(report))
        expect = predict(model, plan, machine, optimizer=report.meta["optimizer"])
        comparison = compare(expect, report)
        print(f"\n{comparison}")
        sections.append(("Predicted and measured", comparison._repr_html_()))
    _write(report, given, ("html", "perfetto"), sections)


def _part_folder(given: argparse.Namespace, why: str, *illegal_options: str) -> str | None:
    """The folder for this rank's part of the report; None if torchrun did not start this process.
    Refuses files and ``illegal_options`` on a rank (``why``), and --out on any other process.
    """
    if not torchrun_started_this():
        if given.out is not None:
            raise illegal(
                "out", str(given.out), "torchrun did not start this process", "--save FILE"
            )
        return None
    for name in (*FILES, *illegal_options):
        if value := getattr(given, name, None):
            raise illegal(name, str(value), why, "--out FOLDER, then paralab show FOLDER")
    return str(given.out or given.folder)


def _observe(given: argparse.Namespace) -> Callable[[], None] | None:
    settings = settings_of(given, *given.own)
    why = "this process is one rank, and torchrun decides this"
    program = given.script
    if given.m:
        program, given.script = observing.Module(program), program.replace(".", "/") + ".py"
    _check_files(given)
    folder = _part_folder(given, why, "ranks", "nodes", "timeout")
    if folder is not None:
        return observing.observe_under_torchrun(program, given.arguments, folder=folder, **settings)
    report = observing.observe(program, args=given.arguments, live=True, **settings)
    _write(report, given, ("save",))
    _print_summary(report)
    print(report.explain())
    _write(report, given, ("html", "perfetto"))
    return None


def _check(given: argparse.Namespace) -> int:
    from paralab.exercises.graded import grade
    from paralab.exercises.notebook import read

    books, grades = [read(path) for path in given.notebooks], []
    try:
        for book in books:
            doctor.need_room()
            grades.append(grade(book))
    except OSError as error:  # of what judges, not of an answer
        given.parser.error(str(error))
    finally:  # also of a class whose last notebooks cannot be judged
        if grades:
            printed = grades if len(books) > 1 else grades[0]
            print(json.dumps(printed, indent=2, ensure_ascii=False))
    return 0 if all(each["points"] == each["of"] for each in grades) else 1


def _dry_run(given: argparse.Namespace) -> None:
    model, plan = _model_and_plan(given)
    report = dry_run(model, plan, cluster=_preset(given, plan), **settings_of(given, *given.own))
    _print_summary(report)
    _write(report, given)


def _preset(given: argparse.Namespace, plan: Plan) -> Cluster | None:
    """The preset that --cluster names, with as many nodes as the plan needs; or None."""
    if given.cluster is None:
        return None
    choice("cluster", given.cluster, tuple(CLUSTER_PRESETS))
    node = Cluster.preset(given.cluster)
    return node.replace(nodes=-(-plan.world_size // node.devices_per_node))


def _program(given: argparse.Namespace) -> None:
    from paralab.interpret.text import program  # here, as it imports the ops of a model

    settings = settings_of(given, "rank", "optimizer", "clip_norm")
    chosen = settings_of(given, "op", "lane", "microbatch")
    shown = program(model_of(given), plan_of(given), **settings).filter(**chosen)
    print(shown.text(folded=not given.all))


def _predict(given: argparse.Namespace) -> None:
    model, plan = _model_and_plan(given)
    cluster = _preset(given, plan)
    if cluster is not None and "device" in given:
        why = "the cluster that --cluster names has its own device"
        raise illegal("device", given.device, why, "--device without --cluster")
    if cluster is None:
        print(MEASURING, flush=True)
        cluster = Cluster.local(device=given.device) if "device" in given else None
    report = predict(model, plan, cluster, **settings_of(given, "optimizer"))
    from paralab.view.memory_chart import fits

    _print_summary(report)
    if refusal := fits(report):
        print(refusal + ".\n")
    for title, sizes in _amounts(report).items():
        lines = [f"  {name:<24}{size / 1e6:>14,.2f} MB" for name, size in sizes.items() if size]
        print("\n".join([title, *(lines or ["  none"])]) + "\n")
    _write(report, given)


def _amounts(report: Any) -> dict[str, dict[str, float]]:
    """{title: {part: bytes}} of a prediction: messages by axis and level, the highest peak."""
    words = {"intra": "inside a node", "inter": "across nodes"}
    ranks = len(facts.reported_ranks(report))
    sent = amounts.traffic(report, ["axis", "level"]).itertuples(index=False)
    return {
        "sent per rank and step": {f"{axis}, {words[level]}": n / ranks for axis, level, n in sent},
        "memory of the rank with the highest peak": report.peaks()[report.clock].to_dict(),
    }


def _show(given: argparse.Namespace) -> None:
    _check_files(given)
    try:
        report = load(given.path)
    except (OSError, ValueError) as error:
        given.parser.error(str(error))
    _print_summary(report)
    _write(report, given)


def _doctor(given: argparse.Namespace) -> int:
    if given.calibrate:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("measuring this machine …", file=sys.stderr, flush=True)
        if torchrun_started_this():
            from paralab.instruments.between import calibrate_nodes

            if (nodes := calibrate_nodes(given.device)) == 0:
                return 0
            if nodes == 1:
                print("there is one node, so no link between nodes to measure", file=sys.stderr)
        else:
            Cluster.local(device=given.device, refresh=True)
    found = doctor.diagnose(doctor.examine(given.device))
    print(found.text())
    return 1 if found.problems else 0


class _Output(io.FileIO):
    """A standard output that may fail before the end, because its reader leaves, as `head` does, or
    its disk is full. The rest is dropped, and the command goes on to write its files.
    """

    failed: OSError | None = None  # the error, unless the reader left

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.failed = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


@contextmanager
def _signals() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP (a terminal that closes) end the command as Ctrl-C
    does. Not under torchrun, which handles them for the job.
    """
    ends = () if torchrun_started_this() else (signal.SIGTERM, signal.SIGHUP)
    caught = [each for each in ends if signal.getsignal(each) is signal.SIG_DFL]
    for each in caught:
        signal.signal(each, signal.default_int_handler)
    try:
        yield
    finally:
        for each in caught:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def _warnings() -> Iterator[None]:
    """While the block runs, a warning is one line, said once, though several checks find it."""
    said = set()

    def show(warning: Warning, *place: Any) -> None:
        if str(warning) not in said:
            said.add(str(warning))
            print(f"paralab: warning: {warning}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    raw = None
    if type(out := sys.stdout) is io.TextIOWrapper:
        raw = _Output(out.fileno(), "wb", closefd=False)
        binary = io.BufferedWriter(raw)
        sys.stdout = io.TextIOWrapper(binary, out.encoding, line_buffering=out.line_buffering)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print "?" for what a terminal cannot show
            stream.reconfigure(errors="replace")
    given = make_parser().parse_args(arguments)
    try:
        with _signals():
            current_folder()
            with _warnings(), _refusals(given.parser):
                status = given.act(given)
            if callable(status):
                status = status()
            print(end="", flush=True)  # to a closed output as to an open one
        if raw is not None and raw.failed:
            raise raw.failed
        return status or 0
    except KeyboardInterrupt as error:
        where = str(error).removeprefix("interrupted").removeprefix("; ")
        said = f"interrupted; {where}" + "; " * bool(where) + "the ranks are stopped"
        print(f"paralab: {said}", file=sys.stderr)
        return 128 + signal.SIGINT
    except (RankError, RankTimeout, OutOfMemory, OSError) as error:
        print(f"paralab: {error}", file=sys.stderr)
        return getattr(error, "status", 1)  # the exit status of a script
