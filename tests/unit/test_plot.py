"""loss.png: what is drawn of a run."""

import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from zerofit.record.plot import font_for, plot_run


@pytest.mark.parametrize("updates", [1, 5, 300])
def test_the_curves_of_a_run(monkeypatch, tmp_path, updates):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: (save(figure, file), figures.append(figure)))
    lines = [{"update": n, "loss": 3.0 / n, "learning_rate": 2e-5, "grad_norm": 10.0**n if n < 9 else 1.0,
              "eval_loss": 2.0, "eval_accuracy": 0.5} for n in range(1, updates + 1)]  # fmt: skip
    lines.append({"update": updates + 1, "anomaly": "loss is nan", "loss": float("nan")})
    plot_run(lines, tmp_path / "loss.png", "a run", "token", "accuracy")
    assert (tmp_path / "loss.png").stat().st_size > 10000
    upper, middle, lower, right = figures[-1].axes
    labels = {line.get_label(): line for line in upper.get_lines()}
    assert ("training, smoothed" in labels) == (updates == 300), "of a few updates each is a point"
    assert list(labels["training, each update"].get_ydata()) == [line["loss"] for line in lines[:-1]]
    assert list(labels["held out"].get_ydata()) == [2.0] * updates
    assert list(middle.get_lines()[0].get_ydata()) == [0.5] * updates
    assert (lower.get_ylabel(), right.get_ylabel()) == ("learning rate", "grad norm")
    assert right.get_yscale() == ("linear" if updates == 1 else "log")
    assert all(tick == int(tick) for tick in lower.get_xticks())


def test_a_name_in_any_language_has_its_letters_or_no_title(tmp_path, recwarn):
    """Else there are boxes in the picture, and a warning for each letter in the terminal."""
    lines = [{"update": 1, "loss": 1.0, "learning_rate": 1e-5, "grad_norm": 1.0}]
    for name in ("日本語の実験", "10$ or 20$ a day", "\U000e0fff"):
        plot_run(lines, tmp_path / "loss.png", name, "token", "loss")
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]
    assert font_for(["a run"]) == FontProperties().get_name()
    assert font_for(["a run \u24b6"]) not in (None, FontProperties().get_name()), "another font has it"
    assert font_for(["\U000e0fff"]) is None, "no font has a letter that is in no alphabet"
