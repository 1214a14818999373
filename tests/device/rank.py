"""Run by runs.py in a forked rank, on the simulated device of its own: rank.py SCRIPT OPTIONS ..."""

import os
import runpy
import sys
from pathlib import Path

import simgpu

simgpu.set_device(int(os.environ["LOCAL_RANK"]))
os.environ["ACCELERATE_TORCH_DEVICE"] = f"simgpu:{os.environ['LOCAL_RANK']}"
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
