"""What devices can do is asked of torch; and the host's threads where the host computes."""

import subprocess
import sys

import pytest
from helpers import ROOT, environment

THREADS = """
import ctypes, os, torch
from zerofit.strategy.devices import use_threads_of_share
assert torch.get_num_threads() == 1
os.sched_getaffinity = lambda process: range(12)
use_threads_of_share()
openmp = ctypes.CDLL("libgomp.so.1")  # what DeepSpeed's CPU Adam is linked with: torch's own, where it has this name
print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], openmp.omp_get_max_threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp.so.1 is Linux's")
def test_threads_are_given_back_to_torch_and_to_what_is_parallel_through_openmp():
    ours = environment(OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="3", PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", THREADS], env=ours, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["4", "4", "4"], done.stderr
