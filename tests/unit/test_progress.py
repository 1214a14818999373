"""What a person sees of a run: lines and tables that fit the screen."""

import os
import sys

import pytest
from helpers import on_a_terminal

from zerofit.record.terminal import columns_of, table

FIGURES = {"loss": 3.21, "learning_rate": 3e-4, "tokens_per_s": 1234567.0}
RUN = f"""
from zerofit.record.terminal import Bar
from zerofit.record.metrics import UpdateMetrics
bar = Bar(150000, 50000, True)
bar.begin(149499)
for update in range(149500, 150001):
    bar.update(UpdateMetrics(update=update, epoch=1.0, consumed_samples=update, **{FIGURES}))
bar.close()
"""


def at_a_terminal(columns: int, code: str, **variables: str) -> str:
    """What a program writes to a terminal of that width."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | variables
    returned, shown = on_a_terminal([sys.executable, "-c", code], columns, env=environment)
    assert returned == 0, shown
    return shown


@pytest.mark.parametrize(
    ("columns", "there", "not_there"),
    [
        (80, ["loss 3.2100", " left", "1,234,567 tokens/s", "lr 3.00e-04"], []),
        (60, ["loss 3.2100", " left"], ["tokens/s", "lr"]),
        (24, ["update 150000/150000"], ["loss"]),
    ],
)
def test_a_terminal_shows_whole_figures_the_worthiest_first(columns, there, not_there):
    last = at_a_terminal(columns, RUN).rstrip().split("\r")[-1]
    assert len(last) < columns, last
    assert last.startswith("update 150000/150000")
    places = [last.find(part) for part in there]
    assert -1 not in places, last
    assert places == sorted(places)
    assert not [part for part in not_there if part in last], last


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_follows_a_bar_begins_a_line(unbuffered):
    outliving = "from zerofit.record.terminal import outlive_the_terminal\noutlive_the_terminal()"
    shown = at_a_terminal(80, f"{outliving}\n{RUN}\nprint('next', flush=True)", PYTHONUNBUFFERED=unbuffered)
    assert "\r\nnext" in shown, shown[-200:]


def test_columns_are_aligned_below_wide_characters():
    lines = table([("class", "f1"), ("その他", "0.5"), ("a", "0.25"), ("長い名前", "1")]).splitlines()
    assert [columns_of(line) for line in lines] == [2 + 8 + 2 + 4] * 4, lines
