"""Processes that tests look for: what a launch has started, on every system that psutil knows."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from paralab.launch import _house
from patience import HANG_S


def until(condition: Callable[[], object]) -> bool:
    """Whether it becomes true in time."""
    give_up = time.monotonic() + HANG_S
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.01)
    return bool(condition())


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def below_the_server() -> list[int]:
    """Ranks, and what they have started or left behind."""
    server = _house._server
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
