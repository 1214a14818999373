"""`zerofit submit trainjob` and `jobset`: files for Kubernetes.

A JobSet (jobset.sigs.k8s.io, v1alpha2) has one indexed Job, whose pods are the machines. A pod's name in the network
is NAME-node-0-INDEX.NAME; its index, which Kubernetes sets as JOB_COMPLETION_INDEX, is the machine's rank. A TrainJob
of the Kubeflow Trainer (v1alpha1) makes such a JobSet from a TrainingRuntime, and sets torchrun's variables PET_*.
"""

from collections.abc import Sequence
from typing import Any

from zerofit.health.shutdown import EXIT_TO_BE_RESUMED
from zerofit.tools.launch.restart_rule import FINAL
from zerofit.tools.submit.commented import Path, commented
from zerofit.tools.submit.job import VARIABLES, Job
from zerofit.tools.submit.submit_options import GRACE_S, KubernetesOptions

NODE = "node"  # of the Job and the container; the Kubeflow Trainer looks for it
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
HEAD = """\
# {title}. Written by `zerofit submit {kind}`; change it as you like.
# Start it with: kubectl apply -f FILE
# It runs in {folder}, the claim {claim!r}: the recipe, data and outputs have to be there.
"""


def jobset(job: Job, options: KubernetesOptions) -> str:
    """A JobSet."""
    given = ["--num_machines", str(job.nodes)]
    if job.nodes > 1:
        given += ["--main_process_ip", f"{job.name}-{NODE}-0-0.{job.name}"]
    container = _command(job, given) | ({"resources": _resources(job)} if job.gpus else {})
    spec, comments = _jobset_spec(job, options, container, {"parallelism": job.nodes, "completions": job.nodes})
    content = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": spec,
    }
    pod: Path = ("spec", "replicatedJobs", 0, "template", "spec")
    comments |= {
        (*pod, "parallelism"): "The number of machines, three times: here, below, and as --num_machines",
        (*pod, "template", "spec", "containers", 0, "command"): (
            "Each pod starts one launcher; its number is in JOB_COMPLETION_INDEX, which Kubernetes sets"
        ),
    }
    return _head(job, options, "jobset") + commented(content, comments)


def trainjob(job: Job, options: KubernetesOptions) -> str:
    """A TrainingRuntime with the pod, and the TrainJob that uses it."""
    spec, comments = _jobset_spec(job, options, {}, {})
    spec["replicatedJobs"][0]["template"] = {"metadata": {"labels": ANCESTOR}} | spec["replicatedJobs"][0]["template"]
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name},
        "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": spec}},
    }
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "numNodes": job.nodes,
                **_command(job),
                **({"resourcesPerNode": _resources(job)} if job.gpus else {}),
            },
        },
    }
    placed = {("spec", "template", *path): text for path, text in comments.items()}
    placed[("spec", "mlPolicy", "torch")] = "Sets PET_NNODES, PET_NODE_RANK, ..., which zerofit launch reads"
    used = {
        ("spec", "trainer", "numNodes"): "The number of machines",
        ("spec", "trainer", "command"): "Each pod starts one launcher",
    }
    return f"{_head(job, options, 'trainjob')}{commented(runtime, placed)}---\n{commented(train, used)}"


def _head(job: Job, options: KubernetesOptions, kind: str) -> str:
    return HEAD.format(title=job.title, kind=kind, folder=options.folder, claim=options.claim)


def _command(job: Job, more: Sequence[str] = ()) -> dict[str, Any]:
    return {"command": [*job.program, "launch"], "args": [*job.words, *more]}


def _jobset_spec(
    job: Job, options: KubernetesOptions, of_container: dict[str, Any], machines: dict[str, Any]
) -> tuple[dict[str, Any], dict[Path, str]]:
    """(the spec of a JobSet, its comments).

    Args:
        of_container: its command and resources; empty where a TrainJob sets them.
        machines: of the Job: how many; empty likewise.
    """
    container = {
        "name": NODE,
        "image": options.image,
        "workingDir": options.folder,
        **of_container,
        "env": [{"name": name, "value": value} for name, value in VARIABLES.items()],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "shared", "mountPath": options.folder}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
        ],
    }
    rules = [
        {"action": "FailJob", "onExitCodes": _codes(*sorted(FINAL))},
        {"action": "Ignore", "onExitCodes": _codes(EXIT_TO_BE_RESUMED)},
    ]
    job_spec = {
        **machines,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": options.restarts,
            "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [{"name": NODE, "template": {"spec": job_spec}}],
    }
    inner: Path = ("spec", "replicatedJobs", 0, "template", "spec")
    in_pod: Path = (*inner, "template", "spec")
    comments: dict[Path, str] = {
        ("spec", "network"): "A headless service: the launchers find the first machine by its name",
        ("spec", "failurePolicy", "maxRestarts"): "All machines start again so often after a crash or a lost machine",
        ("spec", "failurePolicy", "rules"): "but not after the exit codes of FailJob below",
        (*inner, "backoffLimit"): "A failed pod fails the Job, and the JobSet starts all of them again",
        (*inner, "podFailurePolicy", "rules", 0): (
            "The same command would end in the same way: "
            + "; ".join(f"{code}: {why}" for code, why in sorted(FINAL.items()))
        ),
        (*inner, "podFailurePolicy", "rules", 1): "85: saved after SIGTERM. The pod starts again; that does not count",
        (*in_pod, "terminationGracePeriodSeconds"): "Time to save after SIGTERM",
        (*in_pod, "volumes", 0): "Processes of a machine exchange data there; the default is 64 MiB",
        (*in_pod, "volumes", 1): "All machines see the same folder (ReadWriteMany)",
        (*in_pod, "containers", 0, "env"): "torch's agent waits so long for processes that save",
    }
    return spec, comments


def _resources(job: Job) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": job.gpus}}


def _codes(*codes: int) -> dict[str, Any]:
    return {"containerName": NODE, "operator": "In", "values": list(codes)}
