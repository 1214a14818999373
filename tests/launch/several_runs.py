"""Run by test_several_runs.py: runs one after another in this process, as a file of JSON says."""

import json
import os
import signal
import sys
from pathlib import Path

from helpers import main_of

from zerofit.health.shutdown import SIGNALS


def state() -> tuple:
    return dict(os.environ), [signal.getsignal(number) for number in SIGNALS]


for run in json.loads(Path(sys.argv[1]).read_text()):
    before = state()
    code = main_of(run["task"])(run["words"])
    assert code == run["code"], (run["words"], code)
    assert state() == before, run["words"]
os._exit(0)
