"""`accelerate launch train/clm.py` puts train/ first on sys.path: no name there may hide a real package."""

import sys
from importlib.metadata import packages_distributions

from helpers import ROOT


def test_nothing_in_train_hides_a_package():
    names = {path.stem for path in (ROOT / "train").iterdir()} - {"__pycache__"}
    assert names >= {"clm", "cls", "seq2seq"}, "the folder was not found"
    real = set(sys.stdlib_module_names) | {name for name in packages_distributions() if name != "train"}
    assert len(real) > 200
    assert not names & real
