"""What stands on a screen: lines of 80 columns, small figures, whose line it is; a run's progress."""

import io
import os
import sys

import pytest
from helpers import on_a_terminal

from zerofit.data.mixture import merge_notes
from zerofit.record.terminal import columns_of, decimals, log_lines, log_to_stderr, on_screen, table

TEXT = "the adapter is loaded by peft, and outputs/a-run-with-a-name/model is what vLLM's --lora-modules takes"


@pytest.mark.parametrize(
    ("line", "indent"),
    [
        (f"export    {TEXT}", 10),
        (f"held out    {TEXT}", 12),
        (f"run folder  {TEXT}", 12),
        (f"WARNING   {TEXT}", 10),
        (f"    with --lora: {TEXT}", 8),
        (f"  {TEXT}", 6),
        (TEXT, 4),
        ("note      " + "訓練データの行が長すぎるので切りました " * 5, 10),
    ],
)
def test_a_line_is_wrapped_at_words_below_its_text(line, indent):
    lines = on_screen(line, 80).split("\n")
    assert len(lines) > 1
    assert max(map(columns_of, lines)) <= 80
    assert all(each.startswith(" " * indent) and each[indent] != " " for each in lines[1:])
    assert " ".join(each.strip() for each in lines).split() == line.split()


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError


@pytest.mark.parametrize("columns", [60, 80])
def test_say_wraps_on_a_screen_alone(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, speak in (("stdout", log_lines), ("stderr", log_to_stderr)):
        for stream, wraps in ((Screen(), True), (io.StringIO(), False)):
            monkeypatch.setattr(sys, name, stream)
            speak(f"note      {TEXT}")
            said = stream.getvalue()
            assert (said.count("\n") > 1) == wraps
            assert not wraps or max(map(len, said.splitlines())) <= columns


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2.34567, "2.3457"), (0.0, "0.0000"), (0.5, "0.5000"), (0.01234, "0.0123"), (0.0001234, "0.000123"),
     (1.234e-5, "1.23e-05"), (-1e-5, "-1e-05"), (float("nan"), "nan"), (12.0, "12.0000")],
)  # fmt: skip
def test_small_figures_keep_their_digits(value, shown):
    assert decimals(value) == shown


def test_a_line_of_one_source_says_which():
    lines = {"books": ["note      2 are empty", "same"], "web": ["note      7 are empty", "same", "  a row"]}
    assert merge_notes(lines) == ["same", "note      books: 2 are empty", "note      web: 7 are empty", "  a row"]
    assert merge_notes({"one": ["note      x"], "two": ["note      x"]}) == ["note      x"]


WIDE = [
    ("strategy", "samples/s at 1,024", "best batch", "evaluation samples/s", *(f"a column {n}" for n in range(9))),
    ("zero3_offload_optimizer:per_device_eval_batch_size=40", "1,234", "16", "12.5", *["123,456 GiB"] * 9),
]


@pytest.mark.parametrize(("columns", "width"), [(3, 60), (8, 60), (5, 80), (13, 80)])
def test_a_table_of_any_number_of_columns_fits(columns, width):
    rows = [row[:columns] for row in WIDE]
    shown = table(rows, width)
    assert max(map(len, shown.splitlines())) <= width
    for row in rows:
        assert all(word in shown for cell in row[1:] for word in cell.split())
    blocks = shown.split("\n\n")
    assert all("strategy" in block and "zero3" in block for block in blocks)
    assert table(rows, None).count("\n") == 1


@pytest.mark.parametrize(
    ("task", "head", "described"),
    [
        ("cls", "Text,Label", "texts Text, labels Label"),
        ("cls", "Sentence1,Sentence2,LABEL", "texts Sentence1 and Sentence2, labels LABEL"),
        ("seq2seq", "Source,Target", "source Source, target Target"),
    ],
)
def test_columns_have_the_names_of_the_file(task, head, described, tmp_path):
    from zerofit.data.labelled.examples import _find_reader
    from zerofit.data.options import DataOptions
    from zerofit.data.pairs import find_columns
    from zerofit.data.sources import read_source
    from zerofit.recipe import ClsRecipe, Seq2SeqRecipe

    rows = [",".join(f"{name} {number % 2}" for name in head.split(",")) for number in range(8)]
    (tmp_path / "a.csv").write_text("\n".join([head, *rows]) + "\n")
    recipe = {"cls": ClsRecipe, "seq2seq": Seq2SeqRecipe}[task](train_file=[str(tmp_path / "a.csv")])
    if task == "cls":
        found = _find_reader(recipe, DataOptions.of(recipe), None)
        assert found.source.describe(found.reader) == described
        return
    source = read_source(DataOptions.of(recipe))
    columns = find_columns(recipe, source.first)
    assert source.describe(columns) == described


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
