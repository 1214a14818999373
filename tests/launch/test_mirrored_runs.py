"""Runs that are killed while they copy to an object store, lose their folder, and go on from the store."""

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, completed, launch, launched, metrics, updates
from ranks import free_port
from test_runs import SCRATCH

from zerofit.checkpoint.directory import find_damage
from zerofit.checkpoint.mirror import MirrorStore

RUN = [*SCRATCH, "--train_file", ROOT / "docs" / "clusters.md", "--document_separator", "line",
       "--max_train_steps", "12", "--save_steps", "2", "--save_total_limit", "2", "--sample_tokens", "0"]  # fmt: skip
MISSING = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]


def losses(lines: list[dict]) -> list[tuple]:
    return [(line["update"], line["loss"], line["grad_norm"]) for line in updates(lines)]


@pytest.fixture(scope="module")
def undisturbed(cache, tmp_path_factory) -> list[tuple]:
    lines = launch(tmp_path_factory.mktemp("undisturbed") / "run", *RUN, "--cache_dir", cache)
    assert len(updates(lines)) == 12
    return losses(lines)


def check_disturbed(address: str, seed: int, output: Path, cache: str, expected: list[tuple], **how) -> None:
    """Killed as it uploads, without its folder: the same command makes the run that was left alone."""
    run = [*RUN, "--cache_dir", cache, "--mirror", address]
    done = launched(output, *run, through=(ROOT / "tests" / "launch" / "killed_uploading.py", seed), **how)
    assert done.returncode, done.stdout[-3000:]
    shutil.rmtree(output)
    whole = any(MirrorStore(address).checkpoints().values())
    done = completed(output, *run, **how)
    assert ("is brought back from" in done.stdout) == whole, done.stdout
    assert re.search(r"^mirror      \d+ checkpoints? mirrored, \d+ not: ", done.stdout, re.MULTILINE)
    theirs = losses(metrics(output))
    assert [line[0] for line in theirs] == [line[0] for line in expected]
    for ours, others in zip(theirs, expected):
        assert ours == pytest.approx(others, rel=1e-5)
    there = MirrorStore(address).checkpoints()
    assert [*there] == [f"update_{update:08}" for update in (12, 10)]
    assert all(there.values())
    assert MirrorStore(address).read("model/model.safetensors") == (output / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("seed", "how"),
    [(1, {"strategy": "ddp", "processes": 2}), *(pytest.param(n, {}, marks=pytest.mark.long) for n in range(2, 20))],
)
def test_a_run_goes_on_from_its_mirror(seed, how, undisturbed, cache, tmp_path):
    check_disturbed(f"file://{tmp_path}/store/run", seed, tmp_path / "run", cache, undisturbed, **how)
    assert not any(map(find_damage, (tmp_path / "store" / "run" / "checkpoints").iterdir()))


@pytest.fixture(scope="module")
def bucket():
    """A bucket of a server that speaks S3, by its address."""
    if MISSING:
        pytest.skip(f"{', '.join(MISSING)} missing: pip install s3fs 'moto[server]'")
    port = free_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    server.terminate()
    server.wait()


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 20))])
def test_a_run_goes_on_from_s3(seed, bucket, undisturbed, cache, tmp_path):
    check_disturbed(f"{bucket}/{os.getpid()}/{seed}", seed, tmp_path / "run", cache, undisturbed)
