"""Sections of a DeepSpeed JSON that work beside the run, not for it."""

import json
from typing import Any

PROJECTS = {"wandb": "project", "tensorboard": "job_name", "comet": "project"}  # where each names what it belongs to
HERE = {"wandb": "wandb", "tensorboard": "tensorboard", "comet": "wandb"}


def monitors_in_use(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{name: section} of DeepSpeed's own trackers that are on."""
    sections = {name: config.get(name) for name in (*PROJECTS, "csv_monitor")}
    return {
        name: section
        for name, section in sections.items()
        if isinstance(section, dict) and str(section.get("enabled", False)).lower() == "true"
    }


def check_monitors(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(problems, notes) of a configuration: trackers of DeepSpeed's own, and what has no effect on these models.

    A tracker would open a second run, with DeepSpeed's few figures and none of metrics.jsonl
    (deepspeed/monitor/monitor.py).
    """
    problems = []
    for name, section in monitors_in_use(config).items():
        if name == "csv_monitor":
            problems.append("csv_monitor: every figure of the run is in its metrics.jsonl. Remove it")
            continue
        project = section.get(PROJECTS[name])
        named = f" --report_name {json.dumps(project)}" if isinstance(project, str) else ""
        problems.append(
            f"{name} would open a second run, without the figures of this one. Remove it, and say --with_tracking "
            f"--report_to {HERE[name]}{named}"
        )
    notes = []
    if config.get("activation_checkpointing"):
        notes.append(
            "activation_checkpointing has no effect on these models: say --gradient_checkpointing, "
            "and for cpu_checkpointing --activation_offload"
        )
    return problems, notes
