"""The options of `zerofit submit`: for each scheduler what its file needs. All others are those of `zerofit launch`
and of the recipe."""

from dataclasses import dataclass

from zerofit.recipe.base import Recipe
from zerofit.recipe.fields import option

GRACE_S = 600  # between SIGTERM and the end: a checkpoint is written


@dataclass
class SubmitOptions(Recipe):
    """A job's file"""

    nodes: int = option(1, "Machines.", positive=True, common=True)
    gpus_per_node: int = option(8, "GPUs of one machine; 0: none.", minimum=0, common=True)
    processes_per_node: int | None = option(
        None, "Processes of one machine; by default one for each GPU.", positive=True, common=True
    )
    name: str | None = option(
        None,
        "The job's name; by default the recipe's.",
        common=True,
        form=("[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "up to 40 letters a-z, digits and -, a letter first"),
    )
    program: str | None = option(None, "How zerofit is started there, for example `.venv/bin/zerofit`.", common=True)
    output: str | None = option(None, "Write to this file, not to standard output.", common=True)
    run: bool = option(False, "Hand the file, which is written, to the scheduler.", common=True)


@dataclass
class SlurmOptions(SubmitOptions):
    """A batch script for Slurm: sbatch FILE"""

    site: str | None = option(
        None,
        "A file with your cluster's lines: #SBATCH lines (account, partition, ...) go to the head, all others "
        "(modules, variables) before the run, as they are.",
        common=True,
    )
    cpus_per_node: int | None = option(
        None, "CPUs of one machine; by default the whole machine (--exclusive).", positive=True, common=True
    )
    time: str | None = option(
        None,
        "Limit of one run of the job, for example 24:00:00.",
        common=True,
        form=(r"(\d+-)?\d+(:\d+){0,2}", "minutes, or D-HH:MM:SS, e.g. --time 24:00:00"),
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.time and (limit_s := seconds_of_slurm(self.time)) <= GRACE_S:
            found.append(
                f"time = {self.time} is {limit_s} s, and ranks save {GRACE_S} s before the limit "
                f"(--signal=TERM@{GRACE_S}). Use a longer one, e.g. --time 1:00:00"
            )
        return found


def seconds_of_slurm(time: str) -> int:
    """MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS in seconds (slurm.schedmd.com/sbatch.html)."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass
class KubernetesOptions(SubmitOptions):
    """A file for Kubernetes: kubectl apply -f FILE"""

    image: str = option(
        "zerofit:latest",
        "The container's image, with zerofit and its libraries.",
        common=True,
        form=(r"\S+", "a container's image, e.g. --image registry/zerofit:1"),
    )
    claim: str = option(
        "zerofit",
        "The PersistentVolumeClaim of the folder that all machines share (ReadWriteMany).",
        common=True,
        form=("[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "the name of a PersistentVolumeClaim: a-z, digits, - and ."),
    )
    folder: str = option(
        "/mnt/zerofit",
        "Where it is mounted: the current folder of the run, with its recipe.",
        common=True,
        form=("/.*", "a path that begins with /"),
    )
    restarts: int = option(
        3, "Restarts after failures; those after a saved stop do not count.", minimum=0, common=True
    )


@dataclass
class SkyPilotOptions(SubmitOptions):
    """A task for SkyPilot: sky jobs launch FILE"""

    accelerator: str = option(
        "H100",
        "The GPU by SkyPilot's name, without its number.",
        common=True,
        form=(r"[\w.-]+", "a name, e.g. H100; --gpus_per_node counts it"),
    )
    spot: bool = option(False, "Use spot machines.", common=True)
    mounts: str | None = option(
        None,
        "Buckets and folders: /data=s3://bucket/data,/runs=s3://bucket/runs.",
        common=True,
        form=(r"([/~][^=,]*=[^,]+,?)*", "PATH=SOURCE, e.g. /data=s3://bucket/data"),
    )
    restarts: int = option(
        3, "Restarts after failures; those after a saved stop do not count.", minimum=0, common=True
    )

    @property
    def file_mounts(self) -> dict[str, str]:
        """{path: source}."""
        return dict(text.partition("=")[::2] for text in (self.mounts or "").split(",") if text)
