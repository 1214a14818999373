"""`zerofit submit skypilot`: a task for SkyPilot's managed jobs (docs.skypilot.co, "SkyPilot YAML")."""

import shlex
from typing import Any

from zerofit.health.shutdown import EXIT_TO_BE_RESUMED
from zerofit.recipe.addresses import PACKAGES
from zerofit.tools.launch.launch_options import option_named
from zerofit.tools.launch.restart_rule import FINAL
from zerofit.tools.submit.commented import Path, commented
from zerofit.tools.submit.job import VARIABLES, Job
from zerofit.tools.submit.submit_options import SkyPilotOptions

HEAD = """\
# {title}. Written by `zerofit submit skypilot`; change it as you like.
# Start it with: sky jobs launch FILE
"""


def skypilot_task(job: Job, options: SkyPilotOptions) -> str:
    """A task."""
    resources: dict[str, Any] = {"accelerators": f"{options.accelerator}:{job.gpus}"} if job.gpus else {}
    if options.spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {
        "max_restarts_on_errors": options.restarts,
        "recover_on_exit_codes": [EXIT_TO_BE_RESUMED],
    }
    content: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "workdir": ".",
        **({"file_mounts": options.file_mounts} if options.mounts else {}),
        "envs": dict(VARIABLES),
        "setup": _setup(job),
        "run": " \\\n  ".join([shlex.join([*job.program, "launch"]), *job.lines()]) + "\n",
    }
    comments: dict[Path, str] = {
        ("resources", "job_recovery"): (
            f"{EXIT_TO_BE_RESUMED}: saved, to be resumed; it does not count, nor does a lost machine. After other\n"
            f"errors it is tried again so often, also after {', '.join(map(str, sorted(FINAL)))}, which end in the\n"
            "same way: SkyPilot has no rule for them"
        ),
        ("workdir",): "This folder is copied to each machine: the recipe has to be in it",
        ("envs",): "torch's agent waits so long for processes that save",
        ("run",): "On each machine; SKYPILOT_NODE_RANK and the like say which one it is",
    }
    return HEAD.format(title=job.title) + commented(content, comments)


def notes(job: Job) -> list[str]:
    """What may go wrong with this task."""
    given = {option_named(word) for word in job.words}
    if "output_dir" in given or (job.nodes == 1 and "mirror" in given):
        return []
    remedy = "set --output_dir to a folder that all machines share and that stays (a volume)"
    if job.nodes == 1:
        remedy = "set --mirror s3://bucket/run, or --output_dir to a folder that stays (a volume)"
    return [f"checkpoints are lost with a machine's disk: {remedy}"]


def _setup(job: Job) -> str:
    """What installs zerofit, and the packages for addresses of object stores."""
    protocols = (word.partition("://")[0].rpartition("=")[2] for word in job.words if "://" in word)
    packages = sorted({PACKAGES[protocol] for protocol in protocols if protocol in PACKAGES})
    return "\n".join(["make setup", *(f".venv/bin/pip install {package}" for package in packages)])
