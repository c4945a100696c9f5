"""A process to be killed from outside: ranks that wait for one another, and a child of a rank.

usage: launch_victim.py loading | waiting
"loading" waits for ranks while the server still loads torch; "waiting" has blocked ranks.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import paralab as pl
from paralab.launch import launch_program


def wait_for_one_another(context) -> None:
    import torch
    import torch.distributed as dist

    if context.rank == 0:
        subprocess.Popen(["sleep", "600"])
        context.progress(1, 1)
        threading.Event().wait()
    dist.all_reduce(torch.ones(1))


if sys.argv[1] == "loading":
    pl.warm_up()
    print("ready", flush=True)
launch_program(wait_for_one_another, 3, on_progress=lambda *_: print("ready", flush=True))
