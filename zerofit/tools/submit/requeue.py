"""`zerofit submit requeue CODE WORDS ...`: a batch script asks whether its job is to be queued again."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from zerofit.launch.command import exit_code_of
from zerofit.launch.exit_code import ExitCode
from zerofit.launch.restart_rule import Restarts
from zerofit.recipe.errors import EXIT_INTERRUPTED
from zerofit.recipe.parsing import read_record

KILLED = 128  # above it a shell's code names a signal


def main(argv: list[str]) -> int:
    """Print the run's exit code. Returns 0 if the job is to be queued again, else 1.

    Args:
        argv: srun's exit code, and the words of `zerofit launch`.
    """
    launched, *words = argv
    record = exit_code_of(words)
    code = code_of_job(int(launched), record, os.environ)
    is_first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
    refused = reason_not_requeued(code, record.folder.path, is_first)
    print(code)
    said = f"not queued again ({refused})" if refused else "queued again"
    print(f"the job ended with exit code {code}: {said}", file=sys.stderr, flush=True)
    return 1 if refused else 0


def code_of_job(launched: int, record: ExitCode, environment: Mapping[str, str]) -> int:
    """srun ends with the highest code of all tasks. Where it has killed some, because another ended, that is theirs:
    then the run's own record holds, if it is of this start of the job."""
    recorded = record.folder.environment().get("exit_code")
    if launched <= KILLED or recorded is None:
        return launched
    written = (record.folder.path / "environment.json").stat().st_mtime
    return recorded if written >= float(environment.get("SLURM_JOB_START_TIME", 0)) else launched


def reason_not_requeued(code: int, folder: Path, is_first: bool) -> str:
    """Say why a scheduler's job is not queued again; empty where it is. The last failure is kept beside the run's
    folder: a new run refuses a folder that has files.

    Args:
        code: the exit code of the job.
        is_first: the job has been started once: failures of earlier jobs do not count.
    """
    if code == 0:
        return "it has finished"
    if code == EXIT_INTERRUPTED:
        return "it was interrupted"
    file = folder.with_name(f"{folder.name}.requeue.json")
    restarts = Restarts(folder, None if is_first else read_record(file).get("failed_after"))
    refused = restarts.record_failure({code})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"failed_after": None if refused else restarts.failed_after}) + "\n", encoding="utf-8")
    return refused
