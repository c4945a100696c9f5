"""Processes that tests start, and those that they look for: what a launch has started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from paralab.launch import _shared_server
from patience import HANG_S

ROOT = Path(__file__).resolve().parent.parent


def python(
    *words: str | Path, cwd: Path | None = None, path: Sequence[Path] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds paralab, and before it what is in ``path``, at its end."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), **variables}
    return ran(sys.executable, *words, cwd=cwd, env=env)


def ran(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command at its end, and what it said."""
    how = {"capture_output": True, "text": True, "timeout": HANG_S}
    return subprocess.run([*map(str, command)], cwd=cwd, env=env, **how)


def printed(code: str, **variables: str) -> str:
    """What it prints with this code, which does not fail."""
    ran = python("-c", code, **variables)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def until(condition: Callable[[], Any]) -> Any:
    """What it says once that is true, or when it has not become true in time."""
    give_up = time.monotonic() + HANG_S
    while not (said := condition()) and time.monotonic() < give_up:
        time.sleep(0.01)
    return said


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def below_the_server() -> list[int]:
    """Ranks, and what they have started or left behind."""
    server = _shared_server._server
    if server is None or not server.alive():
        return []
    found = psutil.Process(server.pid).children(recursive=True)
    return [process.pid for process in found if is_alive(process.pid)]


def marked(mark: str) -> list[int]:
    """Processes whose environment holds ``mark``: all that a marked process has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if is_alive(process.pid) and mark in process.environ().values():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
