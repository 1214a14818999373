"""Checks of the files that `zerofit submit` writes: strict schemas (material/schemas), and what they cannot say."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

SCHEMAS = Path(__file__).parent / "material" / "schemas"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SBATCH = {  # option: its value; slurm.schedmd.com/sbatch.html of 25.11
    "job-name": r"[\w-]+", "nodes": r"[1-9]\d*", "ntasks-per-node": r"[1-9]\d*", "gpus-per-node": r"([\w]+:)?[1-9]\d*",
    "cpus-per-task": r"[1-9]\d*", "exclusive": "", "mem": r"\d+[KMGT]?", "time": r"(\d+-)?\d+(:\d+){0,2}",
    "signal": r"(R?B:)?(TERM|USR1)@\d+", "requeue": "", "open-mode": "append|truncate", "output": r"\S+",
    "account": r"\S+", "partition": r"\S+", "qos": r"\S+",
}  # fmt: skip
FIXED = {"ntasks-per-node": "1", "signal": "TERM@600", "requeue": "", "open-mode": "append"}
OF_A_TASK = re.compile(r"\$\{?SLURM_(NODEID|PROCID|LOCALID)")
FINAL, SAVED = [2, 86, 87], [85]


@cache
def validator(name: str) -> Draft202012Validator:
    files = {file.name: json.loads(file.read_text()) for file in SCHEMAS.glob("*.json")}
    registry = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in files.items())
    Draft202012Validator.check_schema(files[f"{name}.json"])
    return Draft202012Validator(files[f"{name}.json"], registry=registry)


def documents(text: str) -> list[dict]:
    return list(yaml.load_all(text, Loader=LOADER))


def problems(kind: str, text: str, nodes: int) -> list[str]:
    """What is wrong with a file for so many nodes."""
    if kind == "slurm":
        return [*_of_script(text, nodes)]
    try:
        found = documents(text)
    except yaml.YAMLError as error:
        return [str(error)]
    wrong = [
        f"{error.json_path}: {error.message}" for document in found for error in validator(kind).iter_errors(document)
    ]
    return wrong or [*{"trainjob": _of_trainjob, "jobset": _of_jobset, "skypilot": _of_task}[kind](found, nodes)]


def head(script: str) -> tuple[dict[str, str], list[str]]:
    """({option: value} of the #SBATCH lines that Slurm reads, those that it does not)."""
    found, late, is_over = {}, [], False
    for line in script.splitlines()[1:]:
        if line.startswith("#SBATCH"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            found |= {} if is_over else {name: value}
            late += [line] if is_over else []
        is_over |= bool(line.strip()) and not line.startswith("#")
    return found, late


def _of_script(text: str, nodes: int) -> Iterator[str]:
    parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if parsed.returncode or not text.startswith("#!/bin/bash\n"):
        yield f"no script: {parsed.stderr}"
        return
    options, late = head(text)
    yield from (f"too late: {line}" for line in late)
    for name, value in options.items():
        if not re.fullmatch(SBATCH.get(name, "(?!)"), value):
            yield f"--{name}={value}"
    for name, value in {**FIXED, "nodes": str(nodes)}.items():
        if options.get(name) != value:
            yield f"--{name}={options.get(name)}, not {value}"
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("# ")]
    yield from (f"of a task: {line}" for line in lines if OF_A_TASK.search(line))
    (step,) = [number for number, line in enumerate(lines) if line.startswith("srun ")] or [None]
    if step is None:
        yield "no step"
        return
    launch = ' "${zerofit[@]}" launch "${run[@]}"'
    if "--kill-on-bad-exit=1 --wait=60 " not in lines[step] or not lines[step].endswith(launch):
        yield lines[step]


def _of_jobset_spec(spec: dict, name: str) -> Iterator[str]:
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in container["volumeMounts"]}
    if {mount["name"] for mount in container["volumeMounts"]} != volumes.keys():
        yield "a volume without a mount, or a mount without a volume"
    if mounts.get("/dev/shm", {}).get("emptyDir", {}).get("medium") != "Memory":
        yield "no shared memory"
    if "persistentVolumeClaim" not in mounts.get(container["workingDir"], {}):
        yield "the run's folder is on no claim"
    rules = {rule["action"]: rule.get("onExitCodes", {}) for rule in job["podFailurePolicy"]["rules"]}
    for action, codes in {"FailJob": FINAL, "Ignore": SAVED}.items():
        expected = {"containerName": container["name"], "operator": "In", "values": codes}
        if rules.get(action) != expected:
            yield f"{action}: {rules.get(action)}"
    ends = {rule["action"]: rule.get("onJobFailureReasons") for rule in spec["failurePolicy"]["rules"]}
    if ends != {"FailJobSet": ["PodFailurePolicy"]}:
        yield "a final exit code does not end the JobSet"
    if (spec["network"]["subdomain"], replicated["name"], container["name"]) != (name, "node", "node"):
        yield "the pods have other names than the launchers look for"


def _of_jobset(found: list[dict], nodes: int) -> Iterator[str]:
    (jobset,) = found
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    yield from _of_jobset_spec(spec, name)
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    named = value_of("--num_machines", container["args"])
    if {job["parallelism"], job["completions"]} != {nodes} or named != str(nodes):
        yield "not so many machines"
    if nodes > 1 and value_of("--main_process_ip", container["args"]) != f"{name}-node-0-0.{name}":
        yield "no address"


def _of_trainjob(found: list[dict], nodes: int) -> Iterator[str]:
    by_kind = {document["kind"]: document for document in found}
    if by_kind.keys() != {"TrainingRuntime", "TrainJob"}:
        yield f"{[*by_kind]}"
        return
    runtime, job = by_kind["TrainingRuntime"], by_kind["TrainJob"]
    spec = runtime["spec"]["template"]["spec"]
    yield from _of_jobset_spec(spec, job["metadata"]["name"])
    labels = spec["replicatedJobs"][0]["template"].get("metadata", {}).get("labels", {})
    if labels != {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}:
        yield "the trainer's Job is not marked: it gets no PET_NODE_RANK"
    reference = job["spec"]["runtimeRef"]
    if (reference["kind"], reference["name"]) != ("TrainingRuntime", runtime["metadata"]["name"]):
        yield "another runtime"
    if job["spec"]["trainer"]["numNodes"] != nodes:
        yield "not so many machines"


def _of_task(found: list[dict], nodes: int) -> Iterator[str]:
    (task,) = found
    if task["num_nodes"] != nodes:
        yield "not so many machines"
    if task["resources"]["job_recovery"]["recover_on_exit_codes"] != SAVED:
        yield "a saved run is not started again"


def value_of(option: str, words: list[str]) -> str | None:
    return words[words.index(option) + 1] if option in words[:-1] else None


def words_of(kind: str, text: str) -> list[str]:
    """What a node gives to `zerofit launch`."""
    if kind == "slurm":  # its array `run`
        return shlex.split(re.search(r"^run=\(\n(.*?)^\)$", text, re.MULTILINE | re.DOTALL)[1])
    last = documents(text)[-1]
    if kind == "skypilot":
        return shlex.split(last["run"].replace("\\\n", " "))[2:]
    if kind == "trainjob":
        return last["spec"]["trainer"]["args"]
    return last["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["args"]


def variables(kind: str, text: str, node: int, addresses: list[str], gpus: int = 8) -> tuple[dict[str, str], str]:
    """(what the scheduler sets on a node, as it documents it and from its file; the first node's address).

    Args:
        addresses: of all nodes.
        gpus: of a node.
    """
    if kind == "slurm":  # srun(1), output environment variables
        nodes = head(text)[0]["nodes"]
        job = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": f"gpu[01-{int(nodes):02d}]"}
        step = {
            "SLURM_STEP_NUM_NODES": nodes,
            "SLURM_STEP_NUM_TASKS": nodes,
            "SLURM_STEP_NODELIST": f"gpu[01-{nodes:>02}]",
            "SLURM_NODEID": str(node),
            "SLURM_PROCID": str(node),
            "SLURM_LOCALID": "0",
            "SLURM_NTASKS": nodes,
        }
        return job | step, "gpu01"
    last = documents(text)[-1]
    name = last.get("name") or last["metadata"]["name"]
    index = {"JOB_COMPLETION_INDEX": str(node)}  # kubernetes.io/docs/concepts/workloads/controllers/job
    if kind == "jobset":
        network, (job,) = last["spec"]["network"], last["spec"]["replicatedJobs"]
        return index, f"{name}-{job['name']}-0-0.{network['subdomain']}"
    if kind == "trainjob":  # pkg/runtime/framework/plugins/torch/torch.go
        address = f"{name}-node-0-0.{name}"
        return index | {
            "PET_NNODES": str(last["spec"]["trainer"]["numNodes"]),
            "PET_NODE_RANK": str(node),
            "PET_NPROC_PER_NODE": "auto",
            "PET_MASTER_ADDR": address,
            "PET_MASTER_PORT": "29500",
        }, address
    return {  # docs.skypilot.co, distributed jobs
        "SKYPILOT_NUM_NODES": str(last["num_nodes"]),
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NODE_IPS": "\n".join(addresses),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
        "SKYPILOT_TASK_ID": "sky-managed-2026-11-24-08-00-00-000000_stdlib-gpt2_1-0",
    }, addresses[0]
