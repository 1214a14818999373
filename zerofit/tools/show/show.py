r"""`zerofit show`: runs side by side, live.

    zerofit show                                       # the runs in outputs/, in a browser
    zerofit show --watch outputs/small outputs/large   # one table in the terminal

It reads the folders of the runs, and writes nothing there.
"""

from dataclasses import dataclass

from zerofit.recipe.fields import option
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import parse_recipe
from zerofit.record.terminal import say
from zerofit.record.trackers import is_installed
from zerofit.tools.launch.launch_options import take_words
from zerofit.tools.show.board import show_board
from zerofit.tools.show.table import watch
from zerofit.tools.show.watched_run import WatchedRuns

DEFAULT = ["outputs"]


@dataclass
class ShowOptions(Recipe):
    """Folders of runs, or folders with runs in them (by default outputs), and how they are shown"""

    watch: bool = option(False, "One table in the terminal, until every run has ended; no server is started.")
    port: int | None = option(
        None, "Port of the dashboard on 127.0.0.1; by default the first free one from 7860.", minimum=1
    )
    no_browser: bool = option(False, "Print the address, and open no browser.")

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.watch and self.port is not None:
            problems.append(f"port = {self.port}: --watch starts no server. Leave out one of the two")
        return problems


def read_options(argv: list[str]) -> tuple[ShowOptions, list[str]]:
    """(options, folders)."""
    taken, rest = take_words(ShowOptions, argv)
    words = [word for words in taken for word in words] + [word for word in rest if word.startswith("-")]
    options = parse_recipe(ShowOptions, words, prog="zerofit show [FOLDER ...]", tool=True, hints={})
    return options, [word for word in rest if not word.startswith("-")] or DEFAULT


def main(argv: list[str] | None = None) -> int:
    options, places = read_options(list(argv or []))
    runs = WatchedRuns(places)
    if not options.watch and not is_installed("trackio"):
        say("note      the browser needs trackio (pip install trackio); this is the table of --watch")
        options.watch = True
    if options.watch:
        watch(runs)
    else:
        show_board(runs, options.port, not options.no_browser)
    return 0
