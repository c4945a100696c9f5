"""Where the kit is set up by others: Binder, a dev container, and the hosted tests. Colab:
tests/test_packaging.py.

binder/ is read by repo2docker, which prints the Dockerfile without Docker. Memory is the sum of
proportional set sizes (a page shared by n processes counts 1/n in each), sampled during a run: a
server, a kernel with figures drawn, and four ranks that train.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from jupyter_client import BlockingKernelClient

from browser.server import Server, serving
from patience import HANG_S
from processes import ROOT, ran

BINDER = ROOT / "binder"
MAKEFILE = (ROOT / "Makefile").read_text()
LIMIT_BYTES = 1e9  # mybinder.org promises 1 GB and allows 2


def test_the_image_has_a_python_that_paralab_accepts_and_installs_what_binder_names():
    """The folder hides pyproject.toml; the clone must be there before its ``-e .`` is installed."""
    pytest.importorskip("repo2docker", reason="the dev extra brings jupyter-repo2docker")
    done = ran(sys.executable, "-m", "repo2docker", "--no-build", "--debug", ".", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    # It writes the Dockerfile to one stream and remarks to the other; which is its own business.
    said = done.stdout + done.stderr
    assert "Building conda environment for python=3.11" in said
    assert "unspecified" not in said  # "Python version unspecified, using …": not by luck
    install = said.index('pip install --no-cache-dir -r "binder/requirements.txt"')
    assert re.search(r"^COPY --chown=\S+ src/ \$\{REPO_DIR\}/$", said[:install], re.MULTILINE)
    assert "environment.yml" not in said and not (BINDER / "environment.yml").exists()


def test_what_is_installed_is_the_torch_of_the_makefile_without_cuda_packages():
    lines = (BINDER / "requirements.txt").read_text().splitlines()
    told = [line for line in lines if line and not line.startswith("#")]
    index, *packages = told
    assert index.startswith("--extra-index-url ") and index.endswith("/cpu")
    assert packages == [f"{torch_of_the_makefile()}+cpu", "-e ."]


def torch_of_the_makefile() -> str:
    return re.search(r"^TORCH \?= (torch==\S+)$", MAKEFILE, re.MULTILINE)[1]


# ---- dev container, hosted tests -----------------------------------------------------------------
def test_the_dev_container_makes_the_makefiles_environment():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    # Binder's index, so that no CUDA packages come; and what `make lab` needs.
    index = (BINDER / "requirements.txt").read_text().split("--extra-index-url ")[1].split()[0]
    assert container["containerEnv"]["PIP_EXTRA_INDEX_URL"] == index
    command = container["onCreateCommand"]
    assert command == f"make .venv/.ready TORCH={torch_of_the_makefile()}+cpu"
    python = re.search(r"python:3\.(\d+)-", container["image"])
    assert 11 <= int(python[1]) <= 14
    done = ran(*command.split(), "--dry-run", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [opened] = container["customizations"]["codespaces"]["openFiles"]
    assert (ROOT / opened).exists()


def test_hosted_tests_cover_two_systems_and_every_python():
    job = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    targets = {one["os"]: one["target"] for one in matrix["include"]}
    assert targets.items() >= {"ubuntu-latest": "test", "macos-latest": "test-spawn"}.items()
    assert set(matrix["os"]) <= set(targets)
    assert any(step.get("run") == "make ${{ matrix.target }}" for step in job["steps"])
    for target in targets.values():
        assert re.search(rf"^{target}: \$\(READY_DEV\)$", MAKEFILE, re.MULTILINE)


# ---- memory --------------------------------------------------------------------------------------
# What a lab leaves in its kernel (tables, figures, a calibration), and then a run on top of it.
TRAINING = """\
import paralab as pl
model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)
plan = pl.Plan(dp=4, microbatch_size=4)
report = pl.run(model, plan, steps=2, progress=False)
report.replay().timeline()._repr_mimebundle_()
report.traffic_chart()._repr_mimebundle_()
pl.compare(pl.predict(model, plan), report)
pl.run(model, plan, steps=8, progress=False)
"""


def pss(server: Server) -> int:
    """Proportional set size of the server and all below it, in bytes."""
    total = 0
    for process in server.family():
        with contextlib.suppress(psutil.Error):  # it ended since
            total += process.memory_full_info().pss
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's PSS")
def test_server_kernel_and_four_training_ranks_fit_into_one_gigabyte(tmp_path):
    peak = ranks = 0
    with serving(tmp_path / "jupyter") as server:
        kernel = server.request("api/kernels", "POST", {"name": "python3"})["id"]
        client = BlockingKernelClient()
        client.load_connection_file(str(server.runtime / f"kernel-{kernel}.json"))
        client.start_channels()
        try:
            asked, deadline = client.execute(TRAINING), time.monotonic() + HANG_S
            while time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    reply = client.get_shell_msg(timeout=0.2)
                    if reply["parent_header"].get("msg_id") == asked:
                        break
                ranks, peak = max(ranks, server.ranks()), max(peak, pss(server))
            else:
                pytest.fail(f"no answer from the kernel\n{server.tail()}")
            assert reply["content"]["status"] == "ok", reply["content"]
        finally:
            client.stop_channels()
    assert ranks == 4, "no sample was taken while the ranks were there"
    assert 200e6 < peak < LIMIT_BYTES, f"{peak / 1e6:.0f} MB"
