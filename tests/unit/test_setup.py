"""scripts/setup.sh, driven by a Python that writes down what it is asked to do."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT

# As `python -m venv FOLDER` it puts itself there. It has no torch, and the GPUs that FAKE_GPUS names.
FAKE = """#!/usr/bin/env bash
echo "$@" >>"$FAKE_LOG"
case "$*" in
  *version_info*) [ "$FAKE_VERSION" != 3.10.9 ] ;;
  --version) echo "Python $FAKE_VERSION" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *zerofit/strategy/gpus.py) echo "$FAKE_GPUS" ;;
  "-c import sys, torch"*) [ -e "$(dirname "$0")/../torch" ] ;;
  -) cat >/dev/null && [ -z "$FAKE_UNSEEN" ] || exit 2 ;;
  *" torch"*) touch "$(dirname "$0")/../torch" ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """Run setup.sh. Returns (exit code, what it printed, the arguments of each `pip install`)."""
    fake = tmp_path / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)

    def run(torch: str = "", gpus: str = "", version: str = "3.11.9", unseen: str = "") -> tuple[int, str, list[str]]:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHON": str(fake), "TORCH": torch, "FAKE_LOG": str(log), "FAKE_GPUS": gpus,
                       "FAKE_VERSION": version, "FAKE_UNSEEN": unseen}  # fmt: skip
        done = subprocess.run(["bash", "scripts/setup.sh", str(tmp_path / "venv")], cwd=ROOT, env=environment,
                              text=True, capture_output=True, timeout=60)  # fmt: skip
        lines = log.read_text().splitlines()
        installs = [line.partition("--disable-pip-version-check ")[2] for line in lines if " install " in line]
        return done.returncode, done.stdout + done.stderr, [line for line in installs if "--dry-run" not in line]

    return run


def pinned() -> str:
    lines = Path(ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch==")).removesuffix(" \\")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"version": "3.10.9"}, ["needs Python 3.11 or newer", "is Python 3.10.9", "make PYTHON="]),
        ({"gpus": "AMD"}, ["ROCm", "TORCH='torch --index-url URL' make setup"]),
    ],
)
def test_what_is_missing_is_told_before_anything_is_installed(setup, machine, words):
    code, said, installs = setup(**machine)
    assert (code, installs) == (2, [])
    assert not [word for word in words if word not in said]


@pytest.mark.parametrize(
    ("torch", "gpus", "words"),
    [
        ("", "", "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"),
        ("", "NVIDIA", "--require-hashes --no-deps --requirement VENV/torch.txt"),
        ("cpu", "NVIDIA", "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"),
        ("cuda", "", "--require-hashes --no-deps --requirement VENV/torch.txt"),
        ("torch --index-url https://example.org/rocm", "AMD", "torch --index-url https://example.org/rocm"),
    ],
)
def test_which_torch(setup, tmp_path, torch, gpus, words):
    code, said, installs = setup(torch, gpus)
    assert code == 0, said
    assert installs[0] == words.replace("torch==2.13.0", pinned()).replace("VENV", str(tmp_path / "venv"))
    assert installs[1] == f"--require-hashes --no-deps --requirement {tmp_path / 'venv' / 'others.txt'}"
    assert installs[2] == "--no-deps --no-build-isolation --editable ."
    assert installs[3:] == [
        "--require-hashes --no-deps --upgrade --target {0}/optional --requirement {0}/optional.txt".format(
            tmp_path / "venv"
        )
    ]


def test_a_gpu_that_torch_does_not_see_fails_the_setup(setup):
    assert setup(gpus="NVIDIA", unseen="1")[0] == 2
    assert setup("cpu", gpus="NVIDIA", unseen="1")[0] == 0
