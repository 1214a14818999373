"""The commands that stand in the files of `zerofit submit`, on machines that have the variables of each system."""

import os
import re

import pytest
from helpers import BIN, launch
from job_files import documents, problems, variables

pytestmark = pytest.mark.long


def command_of(kind: str, text: str) -> list[str]:
    last = documents(text)[-1]
    if kind == "skypilot":
        return ["bash", "-c", last["run"]]
    if kind == "trainjob":
        container = last["spec"]["trainer"]
    else:
        (container,) = last["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


@pytest.mark.parametrize("kind", ["trainjob", "jobset", "skypilot"])
def test_a_jobs_own_command_trains_as_one_process_does(job, machines, tmp_path, kind):
    """Two machines of two processes, under zero2."""
    run = job("run", steps=20)
    text = run.file_of(kind, "--name", "fleet")
    assert problems(kind, text, 2) == []

    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    addresses = [machine.address for machine in run.machines]
    for number, machine in enumerate(run.machines):
        told, first = variables(kind, text, number, addresses, gpus=0)
        if not re.fullmatch(r"[\d.]+", first):
            machine.knows(first, addresses[0])
        run.running[number] = machine.start(*command_of(kind, text), log=run.log(number), PATH=path, **told)
    assert run.ends() == [0, 0], run.said()[-6000:]

    expected = launch(tmp_path / "one", *run.options)
    losses = {line["update"]: line["loss"] for line in expected if "loss" in line}
    assert sorted(losses) == sorted(run.losses()) == list(range(1, 21))
    assert max(abs(run.losses()[update] - loss) for update, loss in losses.items()) < 1e-6
