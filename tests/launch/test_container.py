"""The Dockerfile is built with Podman, and docs/container.md is followed, as a user that the image does not know.

Where no registry can be reached, the base is made from Debian's packages. Podman takes Docker's command lines: a
program of the name `docker` passes them on.
"""

import ast
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, environment, not_installed

pytestmark = pytest.mark.long
PROGRAMS = ("podman", "runc", "mmdebstrap")
BASE = re.search(r"^ARG BASE=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1]
SUITE = {"debian:12-slim": "bookworm"}[BASE.rpartition("/")[2]]
SHORT = "--max_eval_samples 8 --sample_tokens 4"
USER = 4321


def pip_sources(file: Path) -> list[str]:
    """Writes this machine's configuration of pip to a file. Returns the options that mount what it names on a disk."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    settings = {}
    for line in subprocess.run(pip, capture_output=True, text=True, check=True).stdout.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = " ".join(ast.literal_eval(value).split())
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    named = {word.removeprefix("file://") for value in settings.values() for word in value.split()}
    paths = (Path(word) for word in sorted(named) if word.startswith("/"))
    # An index has its files beside its folder `simple`.
    mounted = {path.parent if path.name == "simple" else path for path in paths if path.exists()}
    return [f"--volume={path}:{path}:ro" for path in sorted(mounted)]


class Docker:
    """`docker`, with a store of its own, limits that this machine allows, and no network of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        docker = folder / "bin" / "docker"
        docker.write_text('#!/bin/sh\nexec podman "$@"\n')
        docker.chmod(0o755)
        files, processes = (resource.getrlimit(limit)[1] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
        limits = [f"nofile={min(files, 20_000)}", f"nproc={min(processes, 30_000)}"]
        configuration, storage = folder / "containers.conf", folder / "storage.conf"
        configuration.write_text(
            f'[containers]\ndefault_ulimits = {limits}\nnetns = "host"\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
        )
        storage.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n')
        files = {"CONTAINERS_CONF": str(configuration), "CONTAINERS_STORAGE_CONF": str(storage)}
        self.environment = environment(PATH=f"{folder / 'bin'}:{os.environ['PATH']}", **files)

    def start(self, line: str, cwd: Path = ROOT) -> subprocess.Popen:
        return subprocess.Popen(["bash", "-c", line], cwd=cwd, env=self.environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)  # fmt: skip

    def sh(self, line: str, cwd: Path = ROOT) -> str:
        process = self.start(line, cwd)
        said = process.communicate(timeout=1800)[0]
        assert process.returncode == 0, said[-6000:]
        return said


@pytest.fixture(scope="module")
def docker(tmp_path_factory):
    """With the image zerofit."""
    if reason := "not root" if os.getuid() else not_installed(PROGRAMS, PROGRAMS):
        pytest.skip(reason)
    docker = Docker(tmp_path_factory.mktemp("containers"))
    base = BASE
    if docker.start(f"docker pull {BASE}").wait():
        base = "localhost/base"
        docker.sh(f"mmdebstrap --variant=minbase --include=ca-certificates {SUITE} - | docker import - {base}")
    sources = " ".join(pip_sources(docker.folder / "pip.conf"))
    docker.sh(f"make image ARGS='--build-arg BASE={base} --secret id=pip,src={docker.folder}/pip.conf {sources}'")
    yield docker
    docker.sh("docker rmi --all --force && docker volume rm --all --force")
    subprocess.run(["umount", docker.folder / "store" / "overlay"], capture_output=True)  # Podman mounts it on itself


@pytest.fixture
def work(tmp_path):
    """The current folder of a run, of a user without a name."""
    os.chown(tmp_path, USER, USER)
    return tmp_path


def test_what_is_in_the_image(docker):
    (about,) = json.loads(docker.sh("docker image inspect zerofit"))
    assert about["Config"]["User"] == "1000:1000"
    assert about["Labels"]["org.opencontainers.image.version"] in docker.sh("docker run --rm zerofit --version")
    assert "usage: zerofit COMMAND" in docker.sh("docker run --rm zerofit")
    unwanted = "-name pip.conf -o -name outputs -o -name .git -o -path /src/tests"
    assert docker.sh(f"docker run --rm --user 0 --entrypoint find zerofit / -xdev {unwanted}") == ""
    doctor = "docker run --rm --shm-size 2g zerofit doctor --strategy zero2 --num_processes 2"
    assert "this strategy can run here" in docker.sh(doctor)


def test_the_page_trains_on_the_cpu(docker, work):
    """With offload, whose operation is compiled there."""
    page = (ROOT / "docs" / "container.md").read_text().replace("\\\n", "")
    (line,) = re.findall(r"^docker run .* launch .* stdlib-gpt2$", page, re.MULTILINE)
    line = line.replace('"$(id -u):$(id -g)"', f"{USER}:{USER}").replace("launch", "launch --strategy zero2_offload")
    said = docker.sh(f"{line} --max_train_steps 3 {SHORT}", work)
    assert "cpu_adam is being compiled" in said
    assert (work / "outputs" / "stdlib-gpt2" / "model" / "model.safetensors").stat().st_uid == USER
