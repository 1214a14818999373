"""`zerofit submit`: write the job file with which a scheduler runs a recipe on several machines and restarts it.

    zerofit submit slurm recipes/clm/llama2-7b-continual.yaml --strategy zero3 --nodes 2 --site site.sh > job.sh
    zerofit submit jobset recipes/clm/llama2-7b-continual.yaml --strategy zero3 --nodes 2 --claim data > job.yaml

The file is a filled-in template of templates/, complete and commented, and may be changed. Nothing is started without
--run. docs/clusters.md explains each scheduler. Sources: slurm.schedmd.com/sbatch.html; jobset.sigs.k8s.io (v1alpha2);
the Kubeflow Trainer (v1alpha1), which makes a JobSet of a TrainJob; docs.skypilot.co, "SkyPilot YAML".
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zerofit.launch.command import exit_code_of
from zerofit.launch.command import read_options as read_launch
from zerofit.launch.exit_code import FINAL_CODES, Restarts
from zerofit.recipe.base import Recipe, option
from zerofit.recipe.errors import EXIT_INTERRUPTED, EXIT_TO_BE_RESUMED, EXIT_USER_ERROR, UserError
from zerofit.recipe.files import counted, display_path, read_record
from zerofit.recipe.parse import option_named, parse_recipe, take_words, wants_help
from zerofit.recipe.paths import STORE_PACKAGES, name_of_recipe
from zerofit.recipe.tasks import TASKS
from zerofit.strategy.launch import find_strategies

SIGNAL_EXIT_CODE = 128  # a larger exit code is 128 plus the number of a signal


def requeue(argv: list[str]) -> int:
    """Print the run's exit code. Returns 0 if the job is to be queued again, else 1.

    srun ends with the highest code of all tasks. If it killed some because another ended, that is the code of a
    signal: then the exit code in the run's environment.json is used, if this start of the job wrote it.

    Args:
        argv: srun's exit code, then the arguments of `zerofit launch`.
    """
    code = int(argv[0])
    record = exit_code_of(argv[1:])
    recorded = record.folder.environment().get("exit_code")
    if code > SIGNAL_EXIT_CODE and recorded is not None:
        written = (record.folder.path / "environment.json").stat().st_mtime
        code = recorded if written >= float(os.environ.get("SLURM_JOB_START_TIME", 0)) else code
    is_first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
    refused = reason_not_requeued(code, record.folder.path, is_first)
    print(code)
    decision = f"not queued again ({refused})" if refused else "queued again"
    print(f"the job ended with exit code {code}: {decision}", file=sys.stderr, flush=True)
    return 1 if refused else 0


def reason_not_requeued(code: int, folder: Path, is_first: bool) -> str:
    """Return why a scheduler's job is not queued again; empty: it is. The last failure is kept next to the run's
    folder, since a new run refuses a folder that has files.

    Args:
        code: the exit code of the job.
        is_first: this is the first start of the job, so that failures of earlier jobs do not count.
    """
    if code == 0:
        return "it has finished"
    if code == EXIT_INTERRUPTED:
        return "it was interrupted"
    file = folder.with_name(f"{folder.name}.requeue.json")
    restarts = Restarts(folder, None if is_first else read_record(file).get("failed_after"))
    refused = restarts.record_failure({code})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"failed_after": None if refused else restarts.failed_after}) + "\n", encoding="utf-8")
    return refused


SAVE_GRACE_S = 600  # from SIGTERM to the end of the job: the time to write a checkpoint


@dataclass
class SubmitOptions(Recipe, common=True):
    """A job's file"""

    nodes: int = option(1, "Machines.", positive=True)
    gpus_per_node: int = option(8, "GPUs of one machine; 0: none.", minimum=0)
    name: str | None = option(
        None,
        "The job's name; by default the recipe's.",
        form=("[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "up to 40 letters a-z, digits and -, a letter first"),
    )
    program: str | None = option(None, "How zerofit is started there, for example `.venv/bin/zerofit`.")
    output: str | None = option(None, "Write to this file, not to standard output.")
    run: bool = option(False, "Hand the file, which is written, to the scheduler.")


@dataclass
class SlurmOptions(SubmitOptions, common=True):
    """A batch script for Slurm: sbatch FILE"""

    site: str | None = option(
        None,
        "A file with your cluster's lines: #SBATCH lines (account, partition, ...) go to the head, all others "
        "(modules, variables) before the run, as they are.",
    )
    cpus_per_node: int | None = option(
        None, "CPUs of one machine; by default the whole machine (--exclusive).", positive=True
    )
    time: str | None = option(
        None,
        "Limit of one run of the job, for example 24:00:00.",
        form=(
            r"(?!0+:)(\d+-)?\d+:\d\d:\d\d",
            f"HH:MM:SS or D-HH:MM:SS, an hour at least: ranks save {SAVE_GRACE_S} s before the limit",
        ),
    )


@dataclass
class RestartedOptions(SubmitOptions, common=True):
    """A job that a controller starts again"""

    restarts: int = option(3, "Restarts after failures; those after a saved stop do not count.", minimum=0)


@dataclass
class KubernetesOptions(RestartedOptions, common=True):
    """A file for Kubernetes: kubectl apply -f FILE"""

    image: str = option(
        "zerofit:latest",
        "The container's image, with zerofit and its libraries.",
        form=(r"\S+", "a container's image, e.g. --image registry/zerofit:1"),
    )
    claim: str = option(
        "zerofit",
        "The PersistentVolumeClaim of the folder that all machines share (ReadWriteMany).",
        form=("[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "the name of a PersistentVolumeClaim: a-z, digits, - and ."),
    )
    folder: str = option(
        "/mnt/zerofit",
        "Where it is mounted: the current folder of the run, with its recipe.",
        form=("/.*", "a path that begins with /"),
    )


@dataclass
class SkyPilotOptions(RestartedOptions, common=True):
    """A task for SkyPilot: sky jobs launch FILE"""

    accelerator: str = option(
        "H100",
        "The GPU by SkyPilot's name, without its number.",
        form=(r"[\w.-]+", "a name, e.g. H100; --gpus_per_node counts it"),
    )
    spot: bool = option(False, "Use spot machines.")
    mounts: str | None = option(
        None,
        "Buckets and folders: /data=s3://bucket/data,/runs=s3://bucket/runs.",
        form=(r"([/~][^=,]*=[^,]+,?)*", "PATH=SOURCE, e.g. /data=s3://bucket/data"),
    )

    @property
    def file_mounts(self) -> dict[str, str]:
        """{path on the machine: its source}."""
        return dict(text.partition("=")[::2] for text in (self.mounts or "").split(",") if text)


JOB_FORMATS = {  # {scheduler: (its options, its template, the command that takes the file)}
    "slurm": (SlurmOptions, "slurm.sh", ["sbatch"]),
    "trainjob": (KubernetesOptions, "kubernetes.yaml", ["kubectl", "apply", "-f"]),
    "jobset": (KubernetesOptions, "kubernetes.yaml", ["kubectl", "apply", "-f"]),
    "skypilot": (SkyPilotOptions, "skypilot.yaml", ["sky", "jobs", "launch", "--yes"]),
}
# torch's agent kills processes that are still running this long after the first one has ended
JOB_VARIABLES = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_GRACE_S - 30)}
# options of `zerofit launch` that a job file may not have
LAUNCH_ONLY_OPTIONS = ("num_machines", "machine_rank", "main_process_ip", "dry_run")
MAX_NAME_LENGTH = 40  # DNS allows 63 characters, and Kubernetes appends some
TASK_VARIABLE = re.compile(r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID|STEP_\w+|TASK_PID))\b")


def main(argv: list[str]) -> int:
    """Print the job file, or write it and hand it to the scheduler. Returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: zerofit submit SCHEDULER RECIPE --strategy NAME --nodes N [options]\n")
        print("\n".join(f"  {name:<10}{options.__doc__}" for name, (options, _, _) in JOB_FORMATS.items()))
        print("\n`zerofit submit SCHEDULER --help` lists its options. Others are those of the launch and the recipe.")
        if not argv:
            return EXIT_USER_ERROR
        raise SystemExit(0)
    kind, *words = argv
    if kind == "requeue":
        return requeue(words)
    if kind not in JOB_FORMATS:
        raise UserError(f"{kind!r}: there is no such scheduler. Use zerofit submit {', '.join(JOB_FORMATS)}")
    options, words = read_submit_options(kind, words)
    job, notes = make_job(options, words)
    text = _render_job(kind, options, **job)
    if options.run and notes:
        raise UserError(notes)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if not (options.output or options.run):
        print(text, end="")
        return 0
    _, template, command = JOB_FORMATS[kind]
    file = Path(options.output or f"{job['name']}{Path(template).suffix}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"output = {str(file)!r}: {error.strerror}") from None
    print(f"written   {file}", file=sys.stderr, flush=True)
    command = [*command, str(file)]
    if options.run and not shutil.which(command[0]):
        raise UserError(f"{command[0]} is not installed here. Where it is, type: {' '.join(command)}")
    return subprocess.run(command).returncode if options.run else 0


def read_submit_options(kind: str, words: list[str]) -> tuple[SubmitOptions, list[str]]:
    """Return (the options of the job file, the remaining words: the recipe and the options of its launch)."""
    cls = JOB_FORMATS[kind][0]
    job_words, launch_words = take_words(cls, words)
    if wants_help(words):
        job_words += [word for word in words if word.startswith("--help")] or ["--help"]
    return parse_recipe(cls, job_words, prog=f"zerofit submit {kind} RECIPE", tool=True), launch_words


def make_job(options: SubmitOptions, words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return ({name, title, words} of a job, notes on what its launch will refuse). `words`: the recipe, options of
    `zerofit launch`, and options of the recipe. Raises UserError: there is no recipe; the processes do not divide by
    the nodes; an option belongs to the scheduler."""
    for name in map(option_named, words):
        if name in LAUNCH_ONLY_OPTIONS:
            raise UserError(f"--{name} has no place in a job's file. Remove it; the number of machines is --nodes")
    launch, (script, *flags) = read_launch(words)
    processes = launch.num_processes or options.nodes * max(1, options.gpus_per_node)
    if processes % options.nodes:
        raise UserError(f"num_processes = {processes} on {options.nodes} nodes: each has the same number")
    strategy = launch.strategy or ("ddp" if processes > 1 else "single")
    task = Path(script).stem
    notes = []
    find_strategies([strategy])
    if task in TASKS:
        from zerofit.tools.machine import strategy_of_a_launch  # it loads torch

        try:
            recipe = parse_recipe(TASKS[task], flags)
            strategy_of_a_launch(recipe, strategy, "--strategy", processes, processes // options.nodes)
        except UserError as error:
            notes = [f"the launch will refuse this: {problem}" for problem in error.problems]
    config = flags[flags.index("--config") + 1] if "--config" in flags[:-1] else None
    name = re.sub(r"[^a-z0-9]+", "-", name_of_recipe(config, task).lower())[:MAX_NAME_LENGTH].strip("-")
    name = options.name or (name if name[:1].isalpha() else f"run-{name}")
    pair = Path(launch.strategy).stem if launch.strategy else "the default strategy"
    title = f"{name}: {pair} on {counted(options.nodes, 'node')}"
    return {"name": name, "title": title, "words": words}, notes


def _render_job(kind: str, options: SubmitOptions, words: list[str], **values: Any) -> str:
    """Fill in the scheduler's template. Raises UserError: the site file cannot be read, or expands a variable of a
    Slurm task in the batch script."""
    installed = display_path(Path(sys.executable).with_name("zerofit"))  # from the current folder, where a job starts
    program = options.program or {"slurm": installed, "skypilot": ".venv/bin/zerofit"}.get(kind, "zerofit")
    lines: list[list[str]] = []  # each has an option and its values
    for word in words:
        if not lines or word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    machines = ["--num_machines", str(options.nodes)] if kind == "jobset" else []
    if machines and options.nodes > 1:
        machines += ["--main_process_ip", f"{values['name']}-node-0-0.{values['name']}"]
    site: list[str] = []
    if isinstance(options, SlurmOptions) and options.site:
        try:
            site = Path(options.site).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"site = {options.site!r} cannot be read: {error}") from None
        code = [line for line in site if not line.lstrip().startswith("# ")]
        names = [match[1] for line in code for match in TASK_VARIABLE.finditer(line)]
        if names:
            raise UserError(
                f"site = {options.site!r} expands ${names[0]} in the batch script, which runs on the first node only. "
                "Remove it: zerofit launch reads it on each node"
            )
    values["head"] = [line for line in site if line.startswith("#SBATCH")]
    before_the_run = "\n".join(line for line in site if not line.startswith(("#SBATCH", "#!")))
    values["site"] = before_the_run.strip("\n").splitlines()  # without empty lines at the ends
    protocols = {word.partition("://")[0].rpartition("=")[2] for word in words if "://" in word}
    values |= {"packages": sorted({STORE_PACKAGES[protocol] for protocol in protocols & STORE_PACKAGES.keys()})}
    templates = Environment(loader=FileSystemLoader(Path(__file__).with_name("templates")), undefined=StrictUndefined)
    templates.filters["shell"] = shlex.join
    templates.filters["text"] = lambda value: json.dumps(value, ensure_ascii=False)  # JSON is YAML
    values |= {"kind": kind, "options": options, "program": shlex.split(program), "words": [*words, *machines]}
    values |= {"lines": [shlex.join(line) for line in lines], "final": FINAL_CODES, "resumed": EXIT_TO_BE_RESUMED}
    template = templates.get_template(f"{JOB_FORMATS[kind][1]}.jinja")
    return template.render(**values, grace_s=SAVE_GRACE_S, variables=JOB_VARIABLES).strip() + "\n"
