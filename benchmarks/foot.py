"""What stands below the table of a measurement: command, commit, hardware and versions."""

import sys

import torch

from train.record.run_folder import describe_environment


def foot(how: str, *packages: str) -> str:
    """One line.

    Args:
        how: what the command does not tell: strategy, processes.
        packages: whose versions matter.
    """
    about = describe_environment(sys.argv, torch.device("cpu"))
    hardware, commit = about["hardware"], (about["zerofit_commit"] or "unknown")[:7]
    changed = ", with changes that are not committed" if about["zerofit_changed"] else ""
    versions = ", ".join(f"{name} {about['packages'][name]}" for name in packages)
    machine = f"{hardware['cores']} cores ({hardware['cpu']}), {hardware['memory_gib']} GiB"
    return f"`python {' '.join(sys.argv)}`: {how}; commit {commit}{changed}; {machine}; {versions}."
