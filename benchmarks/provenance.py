"""Where the numbers of a table come from: command, commit, hardware and versions, in a line below it."""

import argparse
import dataclasses
import sys
from typing import Any

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


def rotated(names: list[str], round_: int) -> list[str]:
    """The order of candidates in a round, counted from 0: it rotates, and turns around in every other one."""
    first = round_ % len(names)
    turned = names[first:] + names[:first]
    return turned[::-1] if round_ % 2 else turned


def parse_options(cls: type, doc: str) -> Any:
    """An object of a dataclass whose fields are the flags of a script."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for each in dataclasses.fields(cls):
        required = each.default is dataclasses.MISSING
        default = {"required": True} if required else {"default": each.default, "help": f"[{each.default}]"}
        parser.add_argument(f"--{each.name}", type=each.type, **default)
    options = cls(**vars(parser.parse_args()))
    if options.rounds < 1 or options.warmup < 1:
        parser.error("--rounds and --warmup: at least 1")
    return options
