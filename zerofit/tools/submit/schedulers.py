"""The file of each scheduler, from a template in templates/.

slurm: one task on each node runs `zerofit launch`, which reads SLURM_NODEID and the like inside the step. The script
itself runs on the first node, where they would have that node's values. `--signal=TERM@600` without `B:` signals the
tasks of the step and not the script: the launchers pass it on to their ranks, which save, and the script waits for
srun. `scancel` ends the script itself, and so the job is not queued again. Source: slurm.schedmd.com/sbatch.html.

jobset: a JobSet (jobset.sigs.k8s.io, v1alpha2) has one indexed Job, whose pods are the machines. A pod's name in the
network is NAME-node-0-INDEX.NAME; its index, which Kubernetes sets as JOB_COMPLETION_INDEX, is the machine's rank.
trainjob: a TrainJob of the Kubeflow Trainer (v1alpha1) makes such a JobSet from a TrainingRuntime, and sets torchrun's
variables PET_*. skypilot: a task for managed jobs (docs.skypilot.co, "SkyPilot YAML").
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zerofit.launch.restart_rule import FINAL
from zerofit.recipe.addresses import PACKAGES
from zerofit.recipe.errors import EXIT_TO_BE_RESUMED, UserError
from zerofit.recipe.parse import option_named
from zerofit.tools.submit.job import VARIABLES, Job
from zerofit.tools.submit.submit_options import GRACE_S, KubernetesOptions, SkyPilotOptions, SlurmOptions

OF_A_TASK = re.compile(r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID|STEP_\w+|TASK_PID))\b")
PLAIN = re.compile(r"-{0,2}[A-Za-z_/][\w./@=+-]*")  # a text to every reader of YAML, but for:
NO_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def _text(value: str) -> str:
    """A text in YAML, in JSON's quotes where a reader may take it for something else."""
    is_plain = PLAIN.fullmatch(value) and value.lower() not in NO_TEXT
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _fill(template: str, job: Job, options: Any, **values: Any) -> str:
    places = Environment(loader=FileSystemLoader(Path(__file__).with_name("templates")), undefined=StrictUndefined)
    places.filters["text"] = _text
    values |= {"final": FINAL, "resumed": EXIT_TO_BE_RESUMED, "grace_s": GRACE_S, "variables": VARIABLES}
    return places.get_template(template).render(job=job, options=options, **values).strip() + "\n"


def slurm_script(job: Job, options: SlurmOptions) -> str:
    """A batch script.

    Raises:
        UserError: the site's file cannot be read, or expands a variable of a task in the script.
    """
    head, site = _read_site(Path(options.site)) if options.site else ([], [])
    return _fill("slurm.sh.jinja", job, options, head=head, site=site, program=shlex.join(job.program))


def _read_site(file: Path) -> tuple[list[str], list[str]]:
    """(its #SBATCH lines, the others without empty ones at both ends), as they are."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"site = {str(file)!r}: this is no text in UTF-8") from None
    except OSError as error:
        raise UserError(f"site = {str(file)!r}: {error.strerror}") from None
    head = [line for line in lines if line.startswith("#SBATCH")]
    rest = [line for line in lines if not line.startswith(("#SBATCH", "#!"))]
    found = [match[1] for line in lines if not line.lstrip().startswith("# ") for match in OF_A_TASK.finditer(line)]
    if found:
        raise UserError(
            f"site = {str(file)!r} expands ${found[0]} in the batch script, which runs on the first node only. Remove "
            "it: zerofit launch reads it on each node"
        )
    return head, "\n".join(rest).strip("\n").splitlines()


def jobset(job: Job, options: KubernetesOptions) -> str:
    """A JobSet."""
    machines = ["--num_machines", str(job.nodes)]
    if job.nodes > 1:
        machines += ["--main_process_ip", f"{job.name}-node-0-0.{job.name}"]
    return _fill("kubernetes.yaml.jinja", job, options, kind="jobset", machines=machines)


def trainjob(job: Job, options: KubernetesOptions) -> str:
    """A TrainingRuntime with the pod, and the TrainJob that uses it."""
    return _fill("kubernetes.yaml.jinja", job, options, kind="trainjob", machines=[])


def skypilot_task(job: Job, options: SkyPilotOptions) -> str:
    """A task, which installs zerofit, and the packages for addresses of object stores."""
    protocols = (word.partition("://")[0].rpartition("=")[2] for word in job.words if "://" in word)
    packages = sorted({PACKAGES[protocol] for protocol in protocols if protocol in PACKAGES})
    return _fill("skypilot.yaml.jinja", job, options, packages=packages)


def skypilot_notes(job: Job) -> list[str]:
    """What may go wrong with a task of SkyPilot's."""
    given = {option_named(word) for word in job.words}
    if "output_dir" in given or (job.nodes == 1 and "mirror" in given):
        return []
    remedy = "set --output_dir to a folder that all machines share and that stays (a volume)"
    if job.nodes == 1:
        remedy = "set --mirror s3://bucket/run, or --output_dir to a folder that stays (a volume)"
    return [f"checkpoints are lost with a machine's disk: {remedy}"]
