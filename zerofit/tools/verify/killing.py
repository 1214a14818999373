"""A run that is killed with SIGKILL and launched again until it ends, as on a machine that fails."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from random import Random

from zerofit.launch.runs import TRACEBACK, LaunchedRun, RunningLaunch, failure
from zerofit.recipe.parsing import counted

Moment = Callable[[RunningLaunch], bool]  # called every few milliseconds: whether the moment has come


def after_update(update: int, delay_s: float = 0.0) -> Moment:
    """This long after an update was printed; or a later one, where an earlier launch printed it."""
    printed: list[float] = []

    def come(launch: RunningLaunch) -> bool:
        if not printed and launch.newest_update >= update:
            printed.append(launch.seconds)
        return bool(printed) and launch.seconds - printed[0] >= delay_s

    return come


def while_saving(update: int) -> Moment:
    """While the next checkpoint after an update is being written."""
    return lambda launch: launch.newest_update >= update and launch.is_saving


def after_seconds(seconds: float) -> Moment:
    """This long after the launch."""
    return lambda launch: launch.seconds >= seconds


def once_saved(moment: Moment) -> Moment:
    """The moment, and a checkpoint is there: a kill before it would prove nothing, since nothing is resumed."""
    return lambda launch: moment(launch) and launch.has_saved


def spread_moments(num_kills: int, num_updates: int, update_s: float, start_s: float, random: Random) -> list[Moment]:
    """One moment in each of `num_kills` equal parts of a run, once there is a checkpoint: after an update, during a
    save, after an update, while a launch starts.

    Args:
        update_s: seconds that an update takes.
        start_s: seconds from a launch to its first update.
    """
    moments = []
    for index in range(num_kills):
        low = 1 + (num_updates - 1) * index / num_kills
        place = random.uniform(low, low + (num_updates - 1) / num_kills)
        update = min(int(place), num_updates - 1)
        if index % 4 == 3:
            moments.append(after_seconds(random.uniform(0, start_s)))
        else:
            saving = index % 4 == 1
            moments.append(while_saving(update) if saving else after_update(update, (place % 1) * update_s))
    return [once_saved(moment) for moment in moments]


@dataclass
class Killed:
    """The result of a run that was killed several times."""

    processes: list[int] = field(default_factory=list)  # of each launch
    kills: int = 0
    kills_resumed: int = 0  # those after which a launch resumed from a checkpoint
    kills_while_saving: int = 0
    kills_while_starting: int = 0  # before the launch's first update: while it loads, builds, resumes
    resumes: int = 0  # launches that resumed from a checkpoint; the others started from the beginning
    failure: str | None = None  # the failure of a launch that was not killed, or a traceback before a kill


def run_and_kill(
    trial: LaunchedRun,
    logs: Path,
    moments: Iterable[Moment],
    processes: Iterable[int],
    limit_s: float,
    *,
    say: Callable[[str], None],
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
        resumed = next((line for line in launch.text.splitlines() if line.startswith("resumed ")), None)
        killed.resumes += resumed is not None
        killed.kills_resumed += not_resumed if resumed else 0
        if resumed or launch.newest_update:  # else it was killed before it could resume
            not_resumed = 0
        if how != "until":
            killed.failure = failure(launch, how)
            say(f"{counted(num_processes, 'process')}{_from(resumed)}: {'failed' if killed.failure else 'ended'}")
            return killed
        killed.kills += 1
        not_resumed += 1
        killed.kills_while_saving += launch.is_saving
        killed.kills_while_starting += not launch.newest_update
        saving = ", while saving" if launch.is_saving else ""
        where = f"after update {launch.newest_update}" if launch.newest_update else "before its first update"
        say(f"{counted(num_processes, 'process')}{_from(resumed)}: killed {where}{saving}, {launch.seconds:.1f} s")
        if TRACEBACK.encode() in log.read_bytes()[:size]:
            killed.failure = f"printed a traceback before it was killed. Its output is {log}"
            return killed
    return killed


def _from(resumed: str | None) -> str:
    """`resumed   CHECKPOINT, after update 4, written by 2 processes: ...` -> `, resumed after update 4`."""
    return f", resumed {resumed.split(', ')[1]}" if resumed and ", " in resumed else ""


def alternating(num_processes: int, other: int) -> Iterator[int]:
    """N, N, M, N, N, M, ...: a run resumes with the same number of processes, with fewer, and with more again."""
    return (other if index % 3 == 2 else num_processes for index in count())
