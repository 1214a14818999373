"""Nouns of numbers in messages."""

from zerofit.recipe.words import counted


def test_nouns_agree_with_their_number():
    shown = [counted(number, noun) for number, noun in ((0, "file"), (1, "process"), (2, "process"), (1234, "entry"))]
    assert shown == ["0 files", "1 process", "2 processes", "1,234 entries"]
    assert [counted(text, "epoch") for text in ("1", "0.105")] == ["1 epoch", "0.105 epochs"]
