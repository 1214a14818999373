"""Where the numbers of a table come from: command, commit, hardware and versions, in a line below it."""

import sys

import torch

from zerofit.record.environment import describe_environment


def provenance(how: str, *packages: str) -> str:
    """One line.

    Args:
        how: what the command does not say: strategy, processes.
        packages: those with a version that matters.
    """
    about = describe_environment(sys.argv, torch.device("cpu"))
    hardware, commit = about["hardware"], (about["zerofit_commit"] or "unknown")[:7]
    changed = ", with changes that are not committed" if about["zerofit_changed"] else ""
    versions = ", ".join(f"{name} {about['packages'][name]}" for name in packages)
    machine = f"{hardware['cores']} cores ({hardware['cpu']}), {hardware['memory_gib']} GiB"
    return f"`python {' '.join(sys.argv)}`: {how}; commit {commit}{changed}; {machine}; {versions}."
