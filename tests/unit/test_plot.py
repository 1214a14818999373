"""loss.png: labels that can be read, and curves that nothing lies on."""

import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from zerofit.record.fonts import font_for
from zerofit.record.plot import plot_run


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a run of so many updates; gives its axes: the upper ones, the lower ones, and the lower right ones."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: (save(figure, file), figures.append(figure)))

    def draw(updates: int, loss=lambda update: 3.0, norm=lambda update: 1.0) -> list:
        lines = [
            {"update": n, "loss": loss(n), "learning_rate": 2e-5, "grad_norm": norm(n)} for n in range(1, updates + 1)
        ]
        plot_run(lines, tmp_path / "loss.png", "a run", "token", "loss")
        assert (tmp_path / "loss.png").stat().st_size > 10000
        return figures[-1].axes

    return draw


def shown(ticks, limits) -> list:
    """Those that lie on the axis."""
    low, high = sorted(limits)
    return [tick for tick in ticks if low <= tick <= high]


@pytest.mark.parametrize("updates", [1, 2, 5, 300])
def test_ticks_stand_at_whole_updates(drawn, updates):
    upper, lower, _ = drawn(updates)
    ticks = shown(lower.get_xticks(), lower.get_xlim())
    assert len(ticks) >= min(updates, 2)
    assert all(tick == int(tick) for tick in ticks)
    smoothed = [line for line in upper.get_lines() if "smoothed" in line.get_label()]
    assert bool(smoothed) == (updates == 300), "of a few updates each is a point"


@pytest.mark.parametrize(("lowest", "highest"), [(2.30101, 2.30141), (1.0, 1.0), (5.0, 60.0), (1e-4, 1e4), (0.0, 3.0)])
def test_few_labels_that_are_numbers(drawn, lowest, highest):
    def value(update):
        return lowest + (highest - lowest) * update / 60

    for axes, most in zip(drawn(60, value, value), (9, 5, 5)):
        axis = axes.yaxis
        ticks = shown(axes.get_yticks(), axes.get_ylim())
        labels = axis.get_major_formatter().format_ticks(ticks)
        assert 1 <= len(ticks) <= most, labels
        assert not shown(axes.get_yticks(minor=True), axes.get_ylim())
        assert [float(label.replace("\N{MINUS SIGN}", "-")) for label in labels] == pytest.approx(ticks)
        assert "e" not in "".join(labels)
        assert not axis.get_offset_text().get_text()


def test_the_last_panel_has_its_names_at_its_axes(drawn):
    _, lower, right = drawn(60)
    assert (lower.get_ylabel(), right.get_ylabel()) == ("learning rate", "gradient norm")
    assert lower.get_legend() is None
    assert right.get_legend() is None
    colours = [axes.get_lines()[0].get_color() for axes in (lower, right)]
    assert colours == [axes.yaxis.label.get_color() for axes in (lower, right)]


def test_a_name_in_any_language_has_its_letters_or_no_title(tmp_path, recwarn):
    """Else there are boxes in the picture, and a warning for each letter in the terminal."""
    lines = [{"update": 1, "loss": 1.0, "learning_rate": 1e-5, "grad_norm": 1.0}]
    for name in ("日本語の実験", "10$ or 20$ a day", "\U000e0fff"):
        plot_run(lines, tmp_path / "loss.png", name, "token", "loss")
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]
    assert font_for(["a run"]) == FontProperties().get_name()
    assert font_for(["a run \u24b6"]) not in (None, FontProperties().get_name()), "another font has it"
    assert font_for(["\U000e0fff"]) is None, "no font has a letter that is in no alphabet"
