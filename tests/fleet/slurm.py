"""A real Slurm on the test's machines: slurmctld on the first, slurmd on the others, without munge."""

import os
import re
import subprocess
from pathlib import Path

from machines import Machine, wait_for

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PACKAGES = ("slurmctld", "slurmd", "slurm-client")

CONFIGURATION = """
ClusterName=zerofit
SlurmctldHost={control.name}({control.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
# how long a job that was requeued waits
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,sched_min_interval=100000
MpiDefault=none
ReturnToService=2
JobRequeue=1
SlurmdTimeout=10
SlurmctldTimeout=30
KillWait=60
UnkillableStepTimeout=120
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The cluster. Its commands run on the first machine."""

    def __init__(self, folder: Path, machines: list[Machine]):
        self.folder, self.control, self.nodes = folder, machines[0], machines[1:]
        for name in ("state", *(node.name for node in self.nodes)):
            (folder / name).mkdir(parents=True)
        nodes = "\n".join(
            f"NodeName={node.name} NodeAddr={node.address} CPUs={os.cpu_count()} State=UNKNOWN" for node in self.nodes
        )
        text = CONFIGURATION.format(control=self.control, folder=folder, nodes=nodes)
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # which is not used
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Slurm":
        self.control.start("slurmctld", "-D", "-c", log=self.folder / "control.out", **self.variables)
        for node in self.nodes:
            self.start_node(node)
        wait_for(self._is_up, 60, "all nodes idle")
        return self

    def __exit__(self, *_) -> None:
        for machine in (self.control, *self.nodes):
            for process in machine.processes():
                process.kill()

    def start_node(self, node: Machine) -> None:
        """slurmd looks for control groups, which a namespace's /sys does not have."""
        started = "mount -t tmpfs none /sys/fs/cgroup && exec slurmd -D"
        node.start("sh", "-c", started, log=self.folder / f"{node.name}.out", **self.variables)

    def kill_node(self, node: Machine) -> None:
        """As if the machine was lost: slurmd and all that it has started."""
        for process in node.processes():
            process.kill()

    def run(self, *command: object) -> str:
        """What a command prints."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.control.namespace, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"',
             self.control.name, *map(str, command)],
            capture_output=True, text=True, env={**os.environ, **self.variables},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: Path) -> int:
        """The number of the job."""
        return int(re.search(r"\d+", self.run("sbatch", script))[0])

    def job(self, number: int) -> dict[str, str]:
        """What scontrol shows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def _is_up(self) -> bool:
        try:
            return self.run("sinfo", "-h", "-o", "%t %D").split() == ["idle", str(len(self.nodes))]
        except AssertionError:
            return False
