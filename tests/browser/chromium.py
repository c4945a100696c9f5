"""Which browser the browser tests drive; installs Debian's chromium where there is none.

    python tests/browser/chromium.py       `make test` does this before its tests

A browser counts when it can say its version: Ubuntu's ``chromium-browser`` is a text that tells
how to install another package. One that is there is always used, in this order: ``$BROWSER_PATH``
(kaleido reads the same), chromium, Chrome, the one of ``playwright install chromium``. Only where
there is none, apt-get installs chromium: as root, or through sudo where that asks no password.
Everywhere else the exit status is 1 and a message says which commands help. Standard library only,
but for playwright's own browser.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
INSTALL_TIMEOUT_S = 600
ADVICE = """\
The labs are tested in a real browser, and there is no chromium or Chrome here. One of these helps:
  sudo apt install chromium                            Debian and its kin
  {python} -m playwright install chromium      without root, into your home folder
  export BROWSER_PATH=/path/to/chrome                  one that you have
Tests that need no browser run without: {python} -m pytest tests"""


def find() -> str | None:
    """The path of a chromium or Chrome that starts, or None."""
    return next((path for path in _candidates() if starts(path)), None)


def _candidates() -> Iterator[str]:
    if chosen := os.environ.get("BROWSER_PATH"):
        yield chosen
        return  # a browser that was named is not replaced by another
    yield from filter(None, map(shutil.which, NAMES))
    cache = os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright"
    yield from map(str, sorted(Path(cache).glob("chromium-*/chrome-linux*/chrome"), reverse=True))


def starts(path: str) -> bool:
    """Whether it can say which version it is."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.returncode == 0 and any(name in said.stdout for name in ("Chrom", "chrom"))


def as_root() -> list[str] | None:
    """What to put before a command that needs root; None where that cannot be had unattended."""
    if os.geteuid() == 0:
        return []
    try:
        asked = subprocess.run(["sudo", "-n", "true"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ["sudo", "-n"] if asked.returncode == 0 else None


def install() -> str | None:
    """Install chromium by apt-get. None when that went well, otherwise why it did not."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    if (root := as_root()) is None:
        return "apt-get needs root, and sudo is missing or asks for a password"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if root:  # sudo drops the environment
        root = [*root, "env", "DEBIAN_FRONTEND=noninteractive"]
    for words in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
        command = [*root, "apt-get", "-qq", *words]
        print("   " + " ".join(command), flush=True)
        try:
            ran = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=INSTALL_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"apt-get {words[0]} took more than {INSTALL_TIMEOUT_S} s"
        # An index that cannot be refreshed may still know the package: only the install decides.
        if ran.returncode != 0 and words[0] == "install":
            last = ran.stdout.strip().splitlines()[-1:] or ["it said nothing"]
            return f"apt-get install chromium failed: {last[0]}"
    return None


def main() -> int:
    if found := find():
        print(f"   {found}")
        return 0
    if chosen := os.environ.get("BROWSER_PATH"):
        trouble: str | None = f"BROWSER_PATH={chosen} does not start"
    else:
        trouble = install()
        if trouble is None and find():
            return 0
        trouble = trouble or "apt-get installed a chromium that does not start"
    print(f"{trouble}.\n{ADVICE.format(python=sys.executable)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
