"""Which browser is used, and what happens where there is none: never by luck, never silently."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from browser import chromium

WORKS = 'echo "Chromium 140.0"'
UBUNTU_TEXT = 'echo "Command requires the chromium snap to be installed." >&2; exit 1'
INSTALLS = 'case "$*" in *install*) /bin/cp {shelf} {target};; esac'


@pytest.fixture
def machine(tmp_path, monkeypatch, capfd) -> SimpleNamespace:
    """A PATH that holds only what a test puts there, and a list of what was called."""
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    log.touch()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "playwright"))
    monkeypatch.delenv("BROWSER_PATH", raising=False)

    def put(name: str, script: str, folder: Path = programs) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n{script}\n')
        path.chmod(0o755)
        return path

    def user(number: int) -> None:
        monkeypatch.setattr(chromium.os, "geteuid", lambda: number)

    def make() -> tuple[int, str, list[str]]:
        """(exit status, what was said on stderr, what was called)."""
        status = chromium.main()
        return status, capfd.readouterr().err, log.read_text().splitlines()

    shelf = put("chromium-in-store", WORKS, tmp_path / "store")
    installs = INSTALLS.format(shelf=shelf, target=programs / "chromium")
    return SimpleNamespace(
        put=put, user=user, make=make, installs=installs, folder=tmp_path, env=monkeypatch.setenv
    )


def advised(said: str) -> bool:
    commands = ("sudo apt install chromium", "-m playwright install chromium", "BROWSER_PATH=")
    return all(command in said for command in commands)


def test_a_browser_that_is_there_is_used_and_nothing_installed(machine):
    machine.put("google-chrome", 'echo "Google Chrome 140.0"')
    machine.put("apt-get", machine.installs)
    machine.user(0)
    assert machine.make() == (0, "", ["google-chrome --version"])


def test_a_text_that_only_looks_like_a_browser_is_not_one(machine):
    machine.put("chromium-browser", UBUNTU_TEXT)
    own = machine.put("chrome", WORKS, machine.folder / "playwright/chromium-1200/chrome-linux")
    assert chromium.find() == str(own)


def test_a_browser_that_was_named_and_does_not_start_is_not_replaced_by_another(machine):
    machine.put("chromium", WORKS)
    machine.put("apt-get", machine.installs)
    machine.env("BROWSER_PATH", "/nowhere/chrome")
    status, said, called = machine.make()
    assert status == 1 and "BROWSER_PATH=/nowhere/chrome does not start" in said
    assert called == [] and advised(said)


SUDO = 'shift; [ "$1" = true ] || { shift 2; exec "$@"; }'


@pytest.mark.parametrize(("user", "first"), [(0, "apt-get -qq update"), (1000, "sudo -n true")])
def test_it_is_installed_by_root_or_through_a_sudo_that_asks_nothing(machine, user, first):
    machine.put("apt-get", machine.installs)
    machine.put("sudo", SUDO)
    machine.user(user)
    status, said, called = machine.make()
    assert (status, said, called[0]) == (0, "", first)
    own = [line for line in called if not line.startswith("sudo")]
    assert own == [
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
    ids=["no apt-get", "no sudo", "sudo asks", "apt-get fails", "nothing installed"],
)
def test_where_it_cannot_be_installed_a_message_says_why_and_what_to_do(machine, programs, why):
    for name, script in programs.items():
        machine.put(name, script)
    machine.user(1000)
    status, said, called = machine.make()
    assert status == 1 and why in said and advised(said)
    if "password" in why:
        assert not any(line.startswith("apt-get") for line in called)
