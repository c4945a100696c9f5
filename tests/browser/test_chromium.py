"""Which browser is used, and what happens where there is none: never by luck, never silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser import chromium

WORKS = 'echo "Chromium 140.0"'
UBUNTU_TEXT = 'echo "Command requires the chromium snap to be installed." >&2; exit 1'
INSTALLS = 'case "$*" in *install*) /bin/cp {shelf} {target};; esac'


class Machine:
    """A PATH that holds only what a test puts there, and a list of what was called."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.programs, self.log = folder, folder / "bin", folder / "log"
        self.log.touch()
        self.patch = patch
        patch.setenv("PATH", str(self.programs))
        patch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(folder / "playwright"))
        patch.delenv("BROWSER_PATH", raising=False)
        shelf = self.put("chromium-in-store", WORKS, "store")
        self.installs = INSTALLS.format(shelf=shelf, target=self.programs / "chromium")

    def put(self, name: str, script: str, sub: str = "bin") -> Path:
        path = self.folder / sub / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.log}\n{script}\n')
        path.chmod(0o755)
        return path

    def make(self, user: int = 1000) -> tuple[int, list[str]]:
        """(exit status, what was called)."""
        self.patch.setattr(chromium.os, "geteuid", lambda: user)
        return chromium.main(), self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def advised(said: str) -> bool:
    commands = ("sudo apt install chromium", "-m playwright install chromium", "BROWSER_PATH=")
    return all(command in said for command in commands)


def test_a_browser_that_is_there_is_used_and_nothing_installed(machine):
    machine.put("google-chrome", 'echo "Google Chrome 140.0"')
    machine.put("apt-get", machine.installs)
    assert machine.make(user=0) == (0, ["google-chrome --version"])


def test_a_text_that_only_looks_like_a_browser_is_not_one(machine):
    machine.put("chromium-browser", UBUNTU_TEXT)
    own = machine.put("chrome", WORKS, "playwright/chromium-1200/chrome-linux")
    assert chromium.find() == str(own)


def test_a_browser_that_was_named_and_does_not_start_is_not_replaced_by_another(machine, capsys):
    machine.put("chromium", WORKS)
    machine.put("apt-get", machine.installs)
    machine.patch.setenv("BROWSER_PATH", "/nowhere/chrome")
    assert machine.make() == (1, [])
    said = capsys.readouterr().err
    assert "BROWSER_PATH=/nowhere/chrome does not start" in said and advised(said)


SUDO = 'shift; [ "$1" = true ] || { shift 2; exec "$@"; }'


@pytest.mark.parametrize(("user", "first"), [(0, "apt-get -qq update"), (1000, "sudo -n true")])
def test_it_is_installed_by_root_or_through_a_sudo_that_asks_nothing(machine, user, first):
    machine.put("apt-get", machine.installs)
    machine.put("sudo", SUDO)
    status, called = machine.make(user)
    assert status == 0 and called[0] == first
    assert [line for line in called if not line.startswith("sudo")] == [
        "apt-get -qq update",
        "apt-get -qq install --yes --no-install-recommends chromium",
        "chromium-in-store --version",
    ]


@pytest.mark.parametrize(
    ("programs", "why"),
    [
        ({}, "there is no apt-get"),
        ({"apt-get": INSTALLS}, "sudo is missing or asks for a password"),
        ({"apt-get": INSTALLS, "sudo": "exit 1"}, "sudo is missing or asks for a password"),
        ({"apt-get": "echo E: no network; exit 100", "sudo": SUDO}, "failed: E: no network"),
        ({"apt-get": "exit 0", "sudo": SUDO}, "does not start"),
    ],
)
def test_where_it_cannot_be_installed_a_message_says_why(machine, capsys, programs, why):
    for name, script in programs.items():
        machine.put(name, script)
    status, called = machine.make()
    said = capsys.readouterr().err
    assert status == 1 and why in said and advised(said)
    if "password" in why:
        assert not any(line.startswith("apt-get") for line in called)
