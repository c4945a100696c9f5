"""Which ranks wait for which others: one sentence from the ranks' notes and Python stacks.

A rank that communicates through paralab notes each call before it blocks. A rank that calls
torch.distributed itself writes no note, but faulthandler can write the Python stack even of a
process that is blocked in C++, and the stack names the collective and the user's own line.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from paralab.ranks.errors import RankTimeout

DOES_NOT_ANSWER = """does not answer: it is stopped, or blocked inside the operating system, or \
has more than 100 Python threads"""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_PLACE = re.compile(r'line (\d+) of "([^"\n]+)" in (\S+)')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_NOTE = re.compile(r"\w*(?: #\w+)?")
_NOTE_RANKS = re.compile(r"\branks ([0-9][0-9, \-]*)")
_POINT_TO_POINT = ("send", "recv", "isend", "irecv")
_NOTE_PEER = re.compile(r"\b(?:from|to|with) rank (\d+)")


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        name = "" if self.function == "<module>" else f" in {self.function}"
        source = linecache.getline(self.file, self.line).strip()
        return f"line {self.line} of {show_file(self.file)}{name}" + (f": {source}" * bool(source))

    @property
    def own(self) -> bool:
        """Whether the line is of the user's code: not of paralab, a library or Python itself, and
        not of the command that started the process.
        """
        if self.file == "<string>":  # a command, or a method that dataclass has made
            return self.function not in ("<module>", "__init__")
        installed = "/site-packages/" in self.file or "/dist-packages/" in self.file
        return not installed and not self.file.startswith((_PACKAGE, "<frozen", *_STDLIB))


class Standing(NamedTuple):
    """What one rank was doing when no rank gave a sign of life any more.

    text    its state in words, for the error
    call    the call in which it is blocked, such as "all_reduce #17", or "" if it computes
    with_   the ranks that take part in that call, as far as known
    nccl    its calls run on its GPU, so its host blocks only where it needs a result
    """

    rank: int
    text: str
    call: str = ""
    with_: tuple[int, ...] = ()
    finished: bool = False
    nccl: bool = False


def show_file(file: str) -> str:
    """A file as the user knows it: "Cell In[3]" for a notebook cell, else its name."""
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        label = shell and shell.compile.format_code_name(file)
        if label:
            return " ".join(label)
    return os.path.basename(file)


def place(error: BaseException) -> str:
    """The innermost line of the user's in an error's traceback, ', line 7 of "FILE" in step', or
    "". The launching process, which knows the notebook's cells, shows it by `show_places`.
    """
    walked = traceback.walk_tb(error.__traceback__)
    frames = [Frame(at.f_code.co_filename, line, at.f_code.co_name) for at, line in walked]
    own = [f', line {f.line} of "{f.file}" in {f.function}' for f in frames if f.own]
    return own[-1] if own else ""


def show_places(text: str) -> str:
    """``text`` in which each `place` has the file's name as the user knows it, and its code."""
    return _PLACE.sub(lambda at: str(Frame(at[2], int(at[1]), at[3])), text)


def noted_place(trace: str) -> str:
    """The `place` in the text of a traceback, which a rank added to its error as a note, or ""."""
    match = _PLACE.search(trace)
    return f", {match[0]}" if match else ""


def show_cells(traceback: str) -> str:
    """A traceback in which notebook cells are named as IPython names them."""

    def cell(match: re.Match) -> str:
        name = show_file(match[1])
        return f"{name}, line" if name.startswith("Cell ") else match[0]

    return re.sub(r'File "([^"\n]+)", line', cell, traceback)


def main_stack(dump: str) -> list[Frame]:
    """The main thread's frames, innermost first, in a dump of faulthandler, which writes the oldest
    thread last. Of more than 100 threads it leaves the oldest out, so there are none.
    """
    main = "" if dump.endswith("\n...\n") else _THREAD.split(dump)[-1]
    frames = _FRAME.findall(main)
    return [Frame(file, int(line), name) for file, line, name in frames if line.isdigit()]


def standing(rank: int, world_size: int, note: str, stack: Sequence[Frame]) -> Standing:
    """The `Standing` of a rank, from its note or, without one, from its stack."""
    call, with_ = "", tuple(range(world_size))
    paralabs = [
        f for f in stack if f.file.startswith(_PACKAGE) and not f.file.endswith("ranks/process.py")
    ]
    own = [f for f in stack if f.own]
    place = str((own or paralabs or list(stack))[0]) if stack else ""
    if note:
        call = _NOTE.match(note)[0]
        if named := _NOTE_RANKS.search(note):
            with_ = tuple(_parse_ranks(named[1]))
        if peer := _NOTE_PEER.search(note):
            with_ = (rank, int(peer[1]))
        return Standing(rank, f"in {note}" + (f", {place}" if own else ""), call, with_)
    if not stack:
        return Standing(rank, DOES_NOT_ANSWER)
    # The outermost frame of torch's is the call of the user's: all_gather_object calls all_gather.
    c10d = "torch/distributed/distributed_c10d.py"
    functions = [frame.function for frame in stack if frame.file.endswith(c10d)]
    if functions:
        call = functions[-1]
        if call.startswith(_POINT_TO_POINT):  # a stack does not show the peer
            with_ = ()
    elif own and re.search(r"\.wait\(", linecache.getline(own[0].file, own[0].line)):
        call = "wait()"
    return Standing(rank, f"in {call}, {place}" if call else place, call, with_)


def hang_error(standings: Sequence[Standing], seconds: float) -> RankTimeout:
    """The error of a launch in which no rank gave a sign of life for ``seconds``."""
    lines = "\n".join(f"  rank {s.rank}: {s.text}" for s in standings)
    return RankTimeout(
        f"no sign of life for {seconds:g} s: {sentence(standings)}\n{lines}\n"
        "If the work is only slow, ask for a longer timeout.",
        waiting={s.rank: s.text for s in standings},
    )


def sentence(standings: Sequence[Standing]) -> str:
    """Which ranks wait for which: "ranks 0, 1, 3 wait in all_reduce for rank 2; ..."."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    in_call = {s.rank: s.call for s in standings}
    finished = {s.rank for s in standings if s.finished}
    for s in standings:
        if s.call:
            missing = tuple(r for r in s.with_ if r != s.rank and in_call.get(r) != s.call)
            groups.setdefault((s.call, missing), []).append(s.rank)
    clauses = []
    for (call, missing), waiting in groups.items():
        others = rank_names(missing) if missing else "one another; do their calls and sizes agree?"
        if not missing and len(waiting) == 1:
            others = "its peer"
        if returned := [r for r in missing if r in finished]:
            others += f" ({rank_names(returned)} already returned)"
        verb = "waits" if len(waiting) == 1 else "wait"
        clauses.append(f"{rank_names(waiting)} {verb} in {call} for {others}")
    if clauses:
        return "; ".join(clauses)
    busy = [s for s in standings if not s.call and not s.finished]
    who, single = rank_names([s.rank for s in busy]), len(busy) == 1
    if any(s.nccl for s in busy):
        gpu, host = ("its GPU", "its host waits") if single else ("their GPUs", "their hosts wait")
        return f"{who} may wait for {gpu}, where a call of NCCL may hang; {host} in no call"
    if all(s.text == DOES_NOT_ANSWER for s in busy):
        return f"{who} {'does' if single else 'do'} not answer"
    return f"no rank waits for another; {who} {'is' if single else 'are'} busy"


def rank_names(numbers: Sequence[int]) -> str:
    """Ranks in words: "rank 2", "ranks 0, 1, 3", "ranks 0-7"."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 3 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]}-{numbers[-1]}"
    return "ranks " + ", ".join(map(str, numbers))


def _parse_ranks(text: str) -> list[int]:
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [r for first, last in spans for r in range(int(first), int(last or first) + 1)]
