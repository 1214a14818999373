"""`zerofit submit`: files that the schedulers take, launchers that find each other, and jobs that are queued again."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from helpers import ROOT, refusal
from job_files import documents, head, problems, variables, words_of

from zerofit.launch import command as start
from zerofit.tools.submit import submit

RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
FAST = (("zero2", 1), ("fsdp2", 16))
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "zero3_offload")
KINDS = tuple(submit.JOB_FORMATS)
RECIPE = "recipes/clm/stdlib-gpt2.yaml"
ADDRESSES = [f"10.0.0.{number + 4}" for number in range(16)]


@pytest.fixture(autouse=True)
def _in_the_tree(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def written(capsys):
    """written(KIND, words ...): (the file, the notes)."""

    def write(kind: str, *words: object) -> tuple[str, str]:
        assert submit.main([kind, *map(str, words)]) == 0
        return capsys.readouterr()

    return write


@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [
        pytest.param(strategy, nodes, marks=() if (strategy, nodes) in FAST else pytest.mark.long)
        for strategy in STRATEGIES
        for nodes in (1, 2, 16)
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_recipe_on_every_number_of_nodes(written, kind, strategy, nodes):
    assert len(RECIPES) >= 20
    for recipe in RECIPES:
        text, _ = written(kind, recipe.relative_to(ROOT), "--strategy", strategy, "--nodes", nodes)
        assert problems(kind, text, nodes) == [], f"{recipe} on {nodes} nodes\n{text}"
        assert text.startswith("#")
        assert f": {strategy} on {nodes} node" in text.splitlines()[kind == "slurm"]


@pytest.mark.parametrize("kind", KINDS)
def test_further_options(written, kind):
    """All of a scheduler; what looks like a number is a text to Kubernetes."""
    further = {
        "slurm": ("--cpus_per_node", 64, "--time", "1-00:00:00"),
        "skypilot": ("--accelerator", "A100-80GB", "--spot", "--mounts", "/data=s3://b/data,/runs=s3://b/runs"),
    }.get(kind, ("--image", "registry/z:1", "--claim", "lustre", "--folder", "/data", "--restarts", 0))
    odd = {
        "--global_batch_size": "32",
        "--learning_rate": "1e-4",
        "--seed": "7",
        "--weight_decay": ".1",
        "--report_name": 'it\'s a # "test"',
    }
    common = ("--nodes", 2, "--gpus_per_node", 4, "--num_processes", 4, "--name", "trial")
    text, notes = written(kind, RECIPE, *common, *further, *(word for pair in odd.items() for word in pair))
    assert problems(kind, text, 2) == []
    assert notes == ""
    words = words_of(kind, text)
    for name, value in odd.items():
        assert words[words.index(name) + 1] == value
    assert words[words.index("--num_processes") + 1] == "4"
    if kind == "skypilot":
        (task,) = documents(text)
        assert task["resources"]["accelerators"] == "A100-80GB:4"
        assert task["file_mounts"] == {"/data": "s3://b/data", "/runs": "s3://b/runs"}


@pytest.mark.parametrize("nodes", [1, 2, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_launchers_on_the_nodes_find_each_other(written, capsys, monkeypatch, kind, nodes):
    text, _ = written(kind, RECIPE, "--strategy", "zero2", "--nodes", nodes)
    monkeypatch.setattr(start, "num_devices", lambda: 8)
    ports = set()
    for node in {0, 1, nodes - 1} & {*range(nodes)}:
        told, address = variables(kind, text, node, ADDRESSES[:nodes])
        with monkeypatch.context() as context:
            for name, value in told.items():
                context.setenv(name, value)
            assert start.main([*words_of(kind, text), "--dry_run"]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("accelerate launch"))
        found = launch_command_parser().parse_args(shlex.split(line)[2:])
        assert (found.num_machines, found.machine_rank, found.num_processes) == (nodes, node, 8 * nodes)
        assert found.config_file == "accelerate_configs/zero2.yaml"
        assert found.training_script_args[:2] == ["--config", RECIPE]
        if nodes > 1:
            assert found.main_process_ip == address
            ports.add(found.main_process_port)
    assert len(ports) == (nodes > 1)


SRUN = """#!/bin/sh
printf '%s\\n' "$@" > srun.words
[ -z "$UPDATE" ] || { mkdir -p run; echo "{\\"update\\": $UPDATE}" >> run/metrics.jsonl; }
[ -z "$RECORD" ] || { mkdir -p run; echo "{\\"exit_code\\": $RECORD}" > run/environment.json; }
exit $CODE
"""
SCONTROL = '#!/bin/sh\necho "$@" >> scontrol.words\n'


@pytest.fixture
def job(written, tmp_path):
    """job(CODE, ...): runs the script with stand-ins for srun and scontrol.

    Returns (its exit code, whether the job was queued again, what it said)."""
    site = tmp_path / "site.sh"
    site.write_text("#SBATCH --account=a123\n# modules\nmodule() { echo loaded $2; }\nmodule load 'cuda/13'\n")
    program = f"{sys.executable} -m zerofit.cli"
    words = ("--nodes", 2, "--site", site, "--program", program, "--output_dir", "run")
    text, _ = written("slurm", ROOT / RECIPE, *words)
    (tmp_path / "job.sh").write_text(text)
    (tmp_path / "bin").mkdir()
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(code: int, restarts: int = 0, update: int | None = None, record: int | None = None, started: int = 0):
        told = {
            "CODE": code, "UPDATE": "" if update is None else update, "RECORD": "" if record is None else record,
            "SLURM_JOB_ID": 4711, "SLURM_RESTART_COUNT": restarts, "SLURM_JOB_START_TIME": started,
            "SLURM_NODEID": 0, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ROOT,
        }  # fmt: skip
        if not restarts:  # Slurm does not set it then
            del told["SLURM_RESTART_COUNT"]
        variables = {**os.environ, **{name: str(value) for name, value in told.items()}}
        done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert "loaded cuda/13" in done.stdout
        asked = tmp_path / "scontrol.words"
        queued = asked.read_text() if asked.exists() else ""
        asked.unlink(missing_ok=True)
        assert queued in ("", "requeue 4711\n")
        return done.returncode, bool(queued), done.stderr

    return run


def test_two_failures_at_the_same_update(job):
    assert job(137, update=7)[1]
    assert job(85, restarts=1)[1], "it saved in between"
    code, queued, said = job(1, restarts=2)
    assert (code, queued) == (1, False)
    assert "it has failed twice after update 7" in said
    assert job(137)[1], "a new job of the same run"
    assert job(137, restarts=1, update=8)[1], "it has made progress"
    assert not job(137, restarts=2)[1]


def test_the_runs_own_code_where_srun_has_killed_its_other_tasks(job):
    assert job(143, record=85)[:2] == (85, True)
    assert job(137, record=86)[:2] == (86, False)
    assert job(143, record=85, started=2**33)[:2] == (143, True), "the record is older than the job's start"
    assert job(2, record=85)[:2] == (2, False)


def test_a_sites_lines_are_kept(written, tmp_path):
    site = tmp_path / "site.sh"
    lines = "#SBATCH --partition=gpu\n\nmodule  load cuda\nexport A='$B  c'\n#SBATCH --account=x\n"
    site.write_text(f"#!/bin/bash\n{lines}")
    text, _ = written("slurm", RECIPE, "--nodes", 2, "--site", site)
    assert problems("slurm", text, 2) == []
    assert head(text)[0].items() >= {("partition", "gpu"), ("account", "x")}
    before = text[: text.index("srun --")]
    assert "\nmodule  load cuda\nexport A='$B  c'\n" in before
    site.write_text("export RANK=$SLURM_NODEID\n")
    assert "$SLURM_NODEID" in refusal(submit.main, ["slurm", RECIPE, "--nodes", "2", "--site", str(site)])


def test_mistakes():
    for words, said in (
        (("slurm", RECIPE, "--machine_rank", "1"), "--machine_rank has no place in a job's file"),
        (("slurm", RECIPE, "--num_processes", "3", "--nodes", "2"), "num_processes = 3 on 2 nodes"),
        *(
            (("slurm", RECIPE, "--time", time), "ranks save 600 s before the limit")
            for time in ("10", "10:00", "0:10:00", "00:59:00")
        ),
        (("slurm", RECIPE, "--gpus_per_node", "2", "--learnin_rate", "1", "--run"), "--learnin_rate is not an option"),
        (("jobset", RECIPE, "--name", "My_Job"), "name = 'My_Job'"),
    ):
        assert said in refusal(submit.main, [*words])


def test_what_the_launch_will_refuse_is_noted(written):
    text, notes = written("slurm", RECIPE, "--nodes", 2, "--learnin_rate", 1)
    assert "--learnin_rate 1" in text
    assert "note: the launch will refuse this: --learnin_rate is not an option. Did you mean learning_rate?" in notes
    _, notes = written("slurm", RECIPE, "--nodes", 3, "--gpus_per_node", 1, "--strategy", "tp")
    assert "note: the launch will refuse this: num_processes = 3 is not a multiple of tensor" in notes
    assert "the launch will refuse this: " in written("slurm", RECIPE, "--strategy", "single")[1]


def test_it_is_handed_to_the_scheduler(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = [str(ROOT / RECIPE), "--nodes", "2", "--gpus_per_node", "1", "--run"]
    said = refusal(submit.main, ["slurm", *words])
    assert "sbatch is not installed here. Where it is, type: sbatch stdlib-gpt2.sh" in said
    for kind, expected in {
        "slurm": ["sbatch", "stdlib-gpt2.sh"],
        "jobset": ["kubectl", "apply", "-f", "stdlib-gpt2.yaml"],
        "skypilot": ["sky", "jobs", "launch", "--yes", "stdlib-gpt2.yaml"],
    }.items():
        program = tmp_path / expected[0]
        program.write_text('#!/bin/sh\necho "told: $*"\nexit 3\n')
        program.chmod(0o755)
        assert submit.main([kind, *words]) == 3
        assert f"told: {' '.join(expected[1:])}\n" in capfd.readouterr().out
        assert Path(expected[-1]).stat().st_size > 500
