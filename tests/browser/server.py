"""A JupyterLab of its own: fresh folders for all it reads and writes, on loopback, with a token.

Nothing of the user's is read (settings, extensions that were switched off, a language, kernels in
their home) and nothing is written outside ``folder``; the kernel is this interpreter's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from patience import HANG_S

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = (
    *("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR"),
    *("JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR", "MPLCONFIGDIR"),
)
# A proxy that the environment names is not asked for loopback.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
INHERITED_NOT = ("PLOTLY_RENDERER", "JUPYTER_CONFIG_PATH", "JUPYTER_PATH")


class Server:
    """A running JupyterLab.

    url      http://127.0.0.1:PORT
    notebooks  the folder that it serves
    log      what it and its kernels wrote
    """

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(16)
        self.notebooks, self.log = folder / "notebooks", folder / "server.log"
        self.runtime = folder / "JUPYTER_RUNTIME_DIR"
        self.notebooks.mkdir(parents=True)
        env = {name: value for name, value in os.environ.items() if name not in INHERITED_NOT}
        for name in FOLDERS:
            (folder / name).mkdir()
            env[name] = str(folder / name)
        # The question about Jupyter news would cover the page's lower right corner.
        quiet = folder / "JUPYTERLAB_SETTINGS_DIR" / "@jupyterlab/apputils-extension"
        quiet.mkdir(parents=True)
        (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        with socket.socket() as free:  # the port is ours until the server takes it, near enough
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = self.log.open("wb")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
                "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={self.port}",
                "--ServerApp.port_retries=0", f"--ServerApp.root_dir={self.notebooks}",
                f"--IdentityProvider.token={self.token}", "--LabApp.expose_app_in_browser=True",
                "--LabApp.news_url=None", "--LabApp.extension_manager=readonly",
                "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            ],
            cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def request(self, path: str, method: str = "GET", body: object = None) -> Any:
        """What the server's REST interface answers, decoded; None where it answers nothing."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {self.token}"}
        ask = urllib.request.Request(f"{self.url}/{path}", data, headers, method=method)
        with DIRECT.open(ask, timeout=HANG_S) as got:
            said = got.read()
        return json.loads(said) if said else None

    def wait(self) -> None:
        """Return once it answers. Raises ``RuntimeError`` with its log's end if it does not."""
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self.request("api/status")
                return
            time.sleep(0.05)
        raise RuntimeError(f"JupyterLab did not start:\n{self.tail()}")

    def tail(self) -> str:
        """The end of what the server and its kernels wrote."""
        return self.log.read_text(errors="replace")[-3000:]

    def family(self) -> list[psutil.Process]:
        """The server, its kernels, and the ranks they started."""
        try:
            server = psutil.Process(self.process.pid)
            return [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> int:
        """How many ranks there are now: three generations below, after kernel and rank server."""
        found = 0
        for process in self.family():
            with contextlib.suppress(psutil.Error):  # it ended since
                found += [above.pid for above in process.parents()[2:3]] == [self.process.pid]
        return found

    def stop(self) -> None:
        """End it, its kernels and their ranks."""
        family = self.family()
        self.process.terminate()
        gone, alive = psutil.wait_procs(family, timeout=8)  # then they are killed
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._log.close()


STARTS = 3


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A JupyterLab that answers, and is gone afterwards with everything that it started.

    Another process may take its port before it does; then it is started again on another one.
    """
    for left in range(STARTS - 1, -1, -1):
        server = Server(folder)
        try:
            server.wait()
            break
        except RuntimeError as error:
            server.stop()
            if not left or "is not available" not in str(error):
                raise
            folder = folder / "again"
            folder.mkdir()
    try:
        yield server
    finally:
        server.stop()
