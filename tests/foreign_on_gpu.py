"""A script that knows of paralab only where a step ends: programs of foreign_programs.py, two steps
each, on this rank's GPU over NCCL.

    torchrun ... -m paralab observe --steps marked --out FOLDER foreign_on_gpu.py NAME ...
"""

import sys

import torch
import torch.distributed as dist

import paralab
from foreign_programs import PROGRAMS

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
for name in sys.argv[1:]:
    step = PROGRAMS[name](dist.get_world_size())
    for _ in range(2):
        step()
        paralab.step()
    print("done", name, flush=True)
dist.destroy_process_group()
