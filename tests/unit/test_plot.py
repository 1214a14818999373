"""loss.png: what is drawn of a run."""

import pytest
from matplotlib.figure import Figure

from zerofit.record.metrics import plot_run


@pytest.mark.parametrize("updates", [1, 5, 300])
def test_the_curves_of_a_run(monkeypatch, tmp_path, updates):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: (save(figure, file), figures.append(figure)))
    lines = [{"update": n, "loss": 3.0 / n, "learning_rate": 2e-5, "grad_norm": 10.0**n if n < 9 else 1.0,
              "eval_loss": 2.0, "eval_accuracy": 0.5} for n in range(1, updates + 1)]  # fmt: skip
    lines.append({"update": updates + 1, "anomaly": "loss is nan", "loss": float("nan")})
    resumed = [1, 4] if updates > 4 else []
    plot_run(lines, tmp_path / "loss.png", "token", "accuracy", resumed=resumed)
    assert (tmp_path / "loss.png").stat().st_size > 10000
    upper, middle, lower, right = figures[-1].axes
    labels = {line.get_label(): line for line in upper.get_lines()}
    assert list(labels["training, each update"].get_ydata()) == [line["loss"] for line in lines[:-1]]
    assert list(labels["held out"].get_ydata()) == [2.0] * updates
    for axes in (upper, middle, lower):
        marked = [next(iter(line.get_xdata())) for line in axes.get_lines() if line.get_linestyle() == "--"]
        assert marked == resumed, "each resume is marked"
    assert list(middle.get_lines()[0].get_ydata()) == [0.5] * updates
    assert right.get_yscale() == ("linear" if updates == 1 else "log")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_updates_at_which_a_run_was_resumed_are_kept(tmp_path, elsewhere):
    """Also where a copy of the run in another folder goes on, and of one that goes back."""
    from helpers import recipe_of

    from zerofit.record.run_folder import RunFolder

    here, before = RunFolder(tmp_path / "run"), None
    for place, (updates, expected) in enumerate([(0, []), (4, [4]), (9, [4, 9]), (6, [4, 6])]):
        folder = RunFolder(tmp_path / f"run{place}") if elsewhere else here
        environment = {}
        folder.start(recipe_of(), 8, {}, environment, updates, resumed_from=before)
        assert environment.get("resumed_after", []) == expected
        assert folder.environment().get("resumed_after", []) == expected
        folder.metrics.close()
        before = folder.path
