"""How a task begins and ends: its exit code on record, a look at the disk before anything heavy is imported, the
watchdog, and the session."""

import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from zerofit.health.shutdown import StartingRank, listen
from zerofit.health.watchdog import Watchdog
from zerofit.launch.exit_code import ExitCode, find_folder
from zerofit.launch.ranks import RANKS
from zerofit.recipe.errors import EXIT_FAILED, before_leaving, leave, record_codes_with, tell_others_with
from zerofit.recipe.help import wants_help
from zerofit.recipe.paths import check_paths, output_folder
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import outlive_the_terminal, say
from zerofit.record.timeline import Timeline
from zerofit.strategy.builds import check_compiled_code

if TYPE_CHECKING:
    from zerofit.training.session import Session


def run_program(task: str, main: Callable[[], int]) -> None:
    """Run a task as a program, and end this process. How it ends is in environment.json, whatever happens."""
    if not wants_help(sys.argv):
        outlive_the_terminal()
        exit_code = ExitCode(find_folder(task, sys.argv[1:]))
        exit_code.forget()
        record_codes_with(exit_code.write)
        tell_others_with(RANKS.stop)
        listen(StartingRank(exit_code.write).leave)
    try:
        code = main()
    except Exception:  # not left to the interpreter: a signal that comes as it ends would change the exit code
        traceback.print_exc()
        code = EXIT_FAILED
    leave(code)


def open_session(task: str, recipe: TaskRecipe, timeline: Timeline) -> "Session":
    """The session of a run, or of a launch that only evaluates or predicts, where the recipe says that it does.

    Raises:
        UserError: anything that can be found wrong before data is read. What is missing on the disk is told at once,
            before torch is imported.
    """
    from zerofit.recipe.addresses import fetch_inputs

    fetch_inputs(recipe)
    check_paths(recipe, output_folder(task, recipe))
    if recipe.resume == "never" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        recipe.adopt("resume", "auto", "a restart of torchrun's agent")
    check_compiled_code()
    watchdog = Watchdog(RANKS.rank, 60 * recipe.watchdog_minutes or None, machine=RANKS.machines[0])
    watchdog.start()
    before_leaving(watchdog.leave)
    from zerofit.training.session import Session

    RANKS.start(60 * recipe.rendezvous_minutes)
    stored = None
    if not recipe.trains:
        from zerofit.training.stored_model import StoredModel

        stored = StoredModel.open(task, recipe)
    mirror = None
    if recipe.mirror and recipe.trains:
        from zerofit.checkpoint.mirror_restore import open_mirror

        watchdog.phase("mirror", patience=math.inf)
        folder = RunFolder(output_folder(task, recipe))
        mirror, notes = RANKS.first_on_rank_0("mirror", lambda: open_mirror(recipe, folder)) or (None, [])
        say(*notes)
    return Session.open(task, recipe, timeline, watchdog, stored, mirror)
