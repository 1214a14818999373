"""The beginning and the end of a script: read its options, record its exit code, check that the files exist before
slow imports, start the watchdog. Nothing here imports torch.
"""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerofit.compat import UNTIL_THE_RUN_ENDS
from zerofit.health.shutdown import end_with_parent, leave_at_start, listen, listening_within
from zerofit.health.watchdog import Watchdog
from zerofit.launch.exit_code import ExitCode, find_folder
from zerofit.launch.rendezvous import RankRendezvous
from zerofit.recipe import parse_recipe
from zerofit.recipe.errors import EXIT, EXIT_FAILED, LAUNCHER_VARIABLE, exit_within, leave, reports_user_errors
from zerofit.recipe.parse import wants_help
from zerofit.recipe.paths import check_paths, output_folder
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.environment import Timeline, untried_versions
from zerofit.record.terminal import log_lines, outlive_the_terminal
from zerofit.strategy.builds import check_compiled_code


@dataclass(frozen=True)
class Start:
    """A launch of a script whose options are read, and whose files are there."""

    task: str
    recipe: TaskRecipe
    output_folder: Path
    timeline: Timeline
    watchdog: Watchdog
    ranks: RankRendezvous


def begin(task: str, kind: type[TaskRecipe]) -> Start:
    """Read the options of the script that this process runs, before its slow imports.

    A mistake ends the process here, with a message and exit code 2. From here on the exit code of the process is
    written to environment.json of the output folder, whatever happens.
    """
    if "CROSS_RANK" in os.environ:  # DeepSpeed's launcher
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))
        if sys.argv[1:2] == [f"--local_rank={os.environ.get('LOCAL_RANK')}"]:
            del sys.argv[1]  # LOCAL_RANK has it as well
    if LAUNCHER_VARIABLE in os.environ:
        end_with_parent()
    write_exit_code_at_end(task)
    starts: list[Start] = []

    def read() -> int:
        starts.append(read_start(task, kind, sys.argv[1:]))
        return 0

    code = reports_user_errors(read)()
    if not starts:
        leave(code)
    return starts[0]


def write_exit_code_at_end(task: str) -> None:
    """Record the exit code of this process in environment.json from here on, also after a signal or failed import."""
    if not wants_help(sys.argv):
        outlive_the_terminal()
        exit_code = ExitCode(find_folder(task, sys.argv[1:]))
        exit_code.forget()
        EXIT.record = exit_code.write
        listen(leave_at_start)
    sys.excepthook = _leave_after


def read_start(task: str, kind: type[TaskRecipe], argv: Sequence[str]) -> Start:
    """Read these options of a script, check that the files that they name exist, and start the rendezvous of the
    ranks. Raises UserError: an option, a path or a variable of the launcher is wrong."""
    ranks = RankRendezvous()
    EXIT.tell = ranks.stop
    timeline = Timeline()
    timeline.mark("interpreter")
    recipe = parse_recipe(kind, list(argv), prog=f"train/{task}.py")
    folder = output_folder(task, recipe)
    check_paths(recipe, folder)
    # This is logged before an untried version makes an import fail.
    log_lines(*(f"warning   {line}" for line in untried_versions()), main=ranks.rank == 0)
    if recipe.resume == "never" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        recipe.adopt("resume", "auto", "a restart of torchrun's agent")
    check_compiled_code()
    watchdog = Watchdog(ranks.rank, 60 * recipe.watchdog_minutes or None, machine=ranks.machines[0])
    watchdog.start()
    EXIT.cleanup = watchdog.leave
    ranks.start()
    return Start(task, recipe, folder, timeline, watchdog, ranks)


def end(main: Callable[[Start], int], start: Start) -> None:
    """Run the script's `main`, and end this process with its exit code; a UserError becomes a message and code 2."""
    try:
        code = reports_user_errors(main)(start)
    except Exception:  # not left to the interpreter: a signal that comes as it ends would change the exit code
        traceback.print_exc()
        code = EXIT_FAILED
    leave(code)


def run_once(task: str, kind: type[TaskRecipe], argv: Sequence[str], main: Callable[[Start], int]) -> int:
    """Run a script's `main` with these options, and return its exit code. Afterwards the process can run another
    script: the environment, signal handlers, exit handlers and the global state of libraries are restored."""
    environment = dict(os.environ)
    with exit_within(), listening_within(), warnings.catch_warnings():
        try:
            return reports_user_errors(lambda: main(read_start(task, kind, argv)))()
        finally:
            _forget_run()
            os.environ.clear()
            os.environ.update(environment)


def _forget_run() -> None:
    """Reset the global state that imported libraries keep of the run that has ended."""
    UNTIL_THE_RUN_ENDS.close()
    if "accelerate.state" in sys.modules:
        from zerofit.compat.accelerate import forget_state

        forget_state()
    if "transformers.integrations.deepspeed" in sys.modules:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
    logger = logging.getLogger("transformers.modeling_utils")
    for log_filter in list(logger.filters):  # training/setup.py adds them
        logger.removeFilter(log_filter)


def _leave_after(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """End a process in which an import has failed; its exit code is recorded."""
    traceback.print_exception(error)
    leave(EXIT_FAILED)
