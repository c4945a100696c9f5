"""Who waits for whom: from what ranks noted and where their threads stand, one sentence.

Two sources. A rank that communicates through paralab notes each call before it blocks. A rank that
calls torch.distributed itself cannot; but faulthandler writes the Python stack of a process that is
stuck in C++ just as well, and the stack names the collective and the user's own line.
"""

from __future__ import annotations

import itertools
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from paralab.ranks.errors import RankTimeout

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # the package
_STDLIB = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_PLACE = re.compile(r'line (\d+) of "([^"\n]+)" in (\S+)')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_NOTE = re.compile(r"^(?:in )?(?P<call>\w+(?: #\w+)?)")
_NOTE_RANKS = re.compile(r"\branks ([0-9][0-9, \-]*)")
_TO_ONE = ("send", "recv", "isend", "irecv")
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
        """Whether the user wrote it: not paralab, not a library, not Python, and not the command
        that has started the process.
        """
        installed = "/site-packages/" in self.file or "/dist-packages/" in self.file
        installed = installed or (self.file, self.function) == ("<string>", "<module>")
        return not installed and not self.file.startswith((_HERE, "<frozen", *_STDLIB))


class Standing(NamedTuple):
    """Where one rank stood when no rank gave a sign of life any more.

    call    the collective it is blocked in, "all_reduce #17", or "" if it computes
    with_   the ranks that take part in that call, as far as known
    nccl    its calls run on its GPU: its host is not blocked in one, but where it needs a result
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
    """The last line of the user's that an error came through, ', line 7 of "FILE" in step', or "".
    The launching process, which knows the notebook's cells, shows it by `show_places`.
    """
    passed = traceback.walk_tb(error.__traceback__)
    frames = [Frame(at.f_code.co_filename, line, at.f_code.co_name) for at, line in passed]
    own = [f', line {f.line} of "{f.file}" in {f.function}' for f in frames if f.own]
    return own[-1] if own else ""


def show_places(text: str) -> str:
    """``text`` with each `place` in it as the user knows it, and the code that stands there."""
    return _PLACE.sub(lambda at: str(Frame(at[2], int(at[1]), at[3])), text)


def noted_place(trace: str) -> str:
    """The `place` that a rank added to its error as a note, from the error's traceback, or ""."""
    found = _PLACE.search(trace)
    return f", {found[0]}" if found else ""


def show_cells(traceback: str) -> str:
    """A traceback in which notebook cells are named as IPython names them."""

    def cell(match: re.Match) -> str:
        name = show_file(match[1])
        return f"{name}, line" if name.startswith("Cell ") else match[0]

    return re.sub(r'File "([^"\n]+)", line', cell, traceback)


def main_stack(dump: str, main_thread: int) -> list[Frame]:
    """The main thread's frames in a faulthandler dump, innermost first."""
    ends = [*(match.start() for match in _THREAD.finditer(dump)), len(dump)]
    for begin, end in itertools.pairwise(ends):
        if int(_THREAD.match(dump, begin)[1], 16) == main_thread:
            found = _FRAME.findall(dump[begin:end])
            return [Frame(file, int(line), name) for file, line, name in found if line.isdigit()]
    return []


def standing(rank: int, world_size: int, note: str, stack: Sequence[Frame]) -> Standing:
    """Read one rank's note and stack."""
    call, with_ = "", tuple(range(world_size))
    ours = [
        f for f in stack if f.file.startswith(_HERE) and not f.file.endswith("ranks/process.py")
    ]
    own = [f for f in stack if f.own]
    place = str((own or ours or list(stack))[0]) if stack else ""
    if note:
        match = _NOTE.match(note)
        call = match["call"] if match else note
        if named := _NOTE_RANKS.search(note):
            with_ = tuple(_parse_ranks(named[1]))
        if peer := _NOTE_PEER.search(note):
            with_ = (rank, int(peer[1]))
        text = note if note.startswith("in ") else f"in {note}"
        return Standing(rank, text + (f", {place}" if own else ""), call, with_)
    if not stack:
        return Standing(rank, "does not answer: stopped, or stuck inside the operating system")
    # The outermost is what the user called: all_gather_object is itself built from all_gather.
    c10d = "torch/distributed/distributed_c10d.py"
    public = [frame.function for frame in stack if frame.file.endswith(c10d)]
    if public:
        call = public[-1]
        if call.startswith(_TO_ONE):  # a stack does not tell which one
            with_ = ()
    elif own and re.search(r"\.wait\(", linecache.getline(own[0].file, own[0].line)):
        call = "wait()"
    return Standing(rank, f"in {call}, {place}" if call else place, call, with_)


def hung(found: Sequence[Standing], seconds: float) -> RankTimeout:
    """The error of a launch in which no rank gave a sign of life for so many ``seconds``."""
    lines = "\n".join(f"  rank {s.rank}: {s.text}" for s in found)
    return RankTimeout(
        f"no sign of life for {seconds:g} s: {sentence(found)}\n{lines}\n"
        "If the work is only slow, ask for a longer timeout.",
        waiting={s.rank: s.text for s in found if not s.finished},
    )


def sentence(standings: Sequence[Standing]) -> str:
    """ "ranks 0, 1, 3 wait in all_reduce for rank 2": each group that waits, and for whom."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    in_call = {s.rank: s.call for s in standings}
    finished = {s.rank for s in standings if s.finished}
    for s in standings:
        if s.call:
            missing = tuple(r for r in s.with_ if r != s.rank and in_call.get(r) != s.call)
            groups.setdefault((s.call, missing), []).append(s.rank)
    said = []
    for (call, missing), waiting in groups.items():
        whom = ranks(missing) if missing else "one another; do their calls and sizes agree?"
        if not missing and len(waiting) == 1:
            whom = "its peer"
        if gone := [r for r in missing if r in finished]:
            whom += f" ({ranks(gone)} already returned)"
        verb = "waits" if len(waiting) == 1 else "wait"
        said.append(f"{ranks(waiting)} {verb} in {call} for {whom}")
    if said:
        return "; ".join(said)
    busy = [s for s in standings if not s.call and not s.finished]
    who, one = ranks([s.rank for s in busy]), len(busy) == 1
    if any(s.nccl for s in busy):
        gpu, host = ("its GPU", "its host waits") if one else ("their GPUs", "their hosts wait")
        return f"{who} may wait for {gpu}, where a call of NCCL may hang; {host} in no call"
    return f"no rank waits for another, {who} {'is' if one else 'are'} busy"


def ranks(numbers: Sequence[int]) -> str:
    """ "rank 2", "ranks 0, 1, 3", "ranks 0-7"."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 3 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]}-{numbers[-1]}"
    return "ranks " + ", ".join(map(str, numbers))


def _parse_ranks(text: str) -> list[int]:
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [r for first, last in spans for r in range(int(first), int(last or first) + 1)]
