r"""`zerofit show`: runs side by side, in one table.

    zerofit show                                       # the runs in outputs/, once
    zerofit show --watch outputs/small outputs/large   # again and again, until every run has ended

It reads the folders of the runs, and writes nothing there.
"""

from dataclasses import dataclass

from zerofit.recipe.fields import option
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import parse_recipe, take_words
from zerofit.tools.show.table import show
from zerofit.tools.show.watched_run import WatchedRuns

DEFAULT = ["outputs"]


@dataclass
class ShowOptions(Recipe):
    """Folders of runs, or folders with runs in them (by default outputs)"""

    watch: bool = option(False, "Show the table again every 2 s, until every run has ended.")


def read_options(argv: list[str]) -> tuple[ShowOptions, list[str]]:
    """(options, folders)."""
    taken, rest = take_words(ShowOptions, argv)
    words = [word for words in taken for word in words] + [word for word in rest if word.startswith("-")]
    options = parse_recipe(ShowOptions, words, prog="zerofit show [FOLDER ...]", tool=True)
    return options, [word for word in rest if not word.startswith("-")] or DEFAULT


def main(argv: list[str] | None = None) -> int:
    options, places = read_options(list(argv or []))
    show(WatchedRuns(places), options.watch)
    return 0
