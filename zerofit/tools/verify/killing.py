"""A run that is killed with SIGKILL and launched again until it ends, as on a machine that fails."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from random import Random

from zerofit.launch.runs import TRACEBACK, LaunchedRun, RunningLaunch, failure
from zerofit.recipe.parsing import counted

KillCondition = Callable[[RunningLaunch], bool]  # called every few milliseconds: whether the moment has come


def moment_of(index: int, update: int, delay_s: float, start_s: float) -> KillCondition:
    """The moment of a kill, once there is a checkpoint; before that nothing would be resumed. By the index it comes
    some time after an update was printed, while a checkpoint is written, after an update, or after the launch."""
    printed: list[float] = []

    def come(launch: RunningLaunch) -> bool:
        if not launch.has_saved:
            return False
        if index % 4 == 3:
            return launch.seconds >= start_s
        is_there = launch.newest_update >= update
        if index % 4 == 1:
            return is_there and launch.is_saving
        if is_there and not printed:
            printed.append(launch.seconds)
        return bool(printed) and launch.seconds - printed[0] >= delay_s

    return come


def spread_moments(
    num_kills: int, num_updates: int, update_s: float, start_s: float, random: Random
) -> list[KillCondition]:
    """One moment in each of `num_kills` equal parts of a run.

    Args:
        update_s: seconds that an update takes.
        start_s: seconds from a launch to its first update.
    """
    each, moments = (num_updates - 1) / num_kills, []
    for index in range(num_kills):
        place = random.uniform(1 + each * index, 1 + each * (index + 1))
        update, delay_s = min(int(place), num_updates - 1), (place % 1) * update_s
        moments.append(moment_of(index, update, delay_s, random.uniform(0, start_s)))
    return moments


@dataclass
class Killed:
    """The result of a run that was killed several times.

    Attributes:
        processes: of each launch.
        kills_resumed: kills after which a launch resumed from a checkpoint.
        resumes: launches that resumed from a checkpoint; the others started from the beginning.
        failure: of a launch that was not killed, or a traceback before a kill; None: there is none.
    """

    processes: list[int] = field(default_factory=list)
    kills: int = 0
    kills_resumed: int = 0
    resumes: int = 0
    failure: str | None = None


def run_and_kill(
    trial: LaunchedRun,
    logs: Path,
    moments: Iterable[KillCondition],
    processes: Iterable[int],
    limit_s: float,
    *,
    log_lines: Callable[[str], None],
) -> Killed:
    """Launch a trial once for each moment and kill it there, then let it run to its end; stop if it fails.

    A launch that ends before its moment is the last one.

    Args:
        processes: the number of processes of each launch; endless, or one more than the moments.
        limit_s: the longest time of a launch.
        say: called with a message for each kill and each end.
    """
    killed, numbers, not_resumed = Killed(), count(1), 0
    for moment, num_processes in zip(chain(moments, [None]), processes):
        log = logs / f"{trial.output.name}-{next(numbers)}.log"
        with RunningLaunch(trial.command(num_processes), trial.output, log) as launch:
            how = launch.wait(limit_s, moment)
            size = log.stat().st_size  # later lines may be of ranks whose peers were killed first
            launch.kill()
        killed.processes.append(num_processes)
        resumed = any(line.startswith("resumed ") for line in launch.text.splitlines())
        killed.resumes += resumed
        killed.kills_resumed += not_resumed if resumed else 0
        if resumed or launch.newest_update:  # else it was killed before it could resume
            not_resumed = 0
        about = f"{counted(num_processes, 'process')}{', resumed' if resumed else ''}"
        if how != "until":
            killed.failure = failure(launch, how)
            log_lines(f"{about}: {'failed' if killed.failure else 'ended'}")
            return killed
        killed.kills += 1
        not_resumed += 1
        where = f"after update {launch.newest_update}" if launch.newest_update else "before its first update"
        saving = ", while saving" if launch.is_saving else ""
        log_lines(f"{about}: killed {where}{saving}, {launch.seconds:.1f} s")
        if TRACEBACK.encode() in log.read_bytes()[:size]:
            killed.failure = f"printed a traceback before it was killed. Its output is {log}"
            return killed
    return killed
