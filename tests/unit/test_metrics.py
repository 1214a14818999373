"""The metrics are those of the libraries behind them, without a network; and which evaluation was the best."""

from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
from rouge_score import rouge_scorer
from scipy import stats
from sklearn import metrics as sk

from zerofit.checkpoint.writer import BestEvaluation
from zerofit.data.labelled.labels import HeldOut, Labels
from zerofit.recipe import ClsRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.training.classification import report_classes
from zerofit.training.evaluation import BestMetricTracker, compute, make_best_tracker
from zerofit.training.generation import GENERATION_FIGURES

RNG = np.random.default_rng(0)
NAN = float("nan")


@pytest.mark.parametrize("classes", [2, 5])
def test_classification(classes):
    truth = RNG.integers(0, classes, 200)
    predictions = np.where(RNG.random(200) < 0.6, truth, RNG.integers(0, classes, 200))
    found = compute("classification", predictions.tolist(), truth.tolist(), num_labels=classes)
    f1 = {"f1_macro": sk.f1_score(truth, predictions, average="macro")}
    f1 |= {"f1": sk.f1_score(truth, predictions)} if classes == 2 else {}
    matthews = sk.matthews_corrcoef(truth, predictions)
    assert found == pytest.approx({"accuracy": (predictions == truth).mean(), **f1, "matthews_correlation": matthews})
    assert len(set(found.values())) == 2 + len(f1)


def test_regression():
    truth, noise = RNG.normal(size=100), RNG.normal(size=100)
    predictions = truth**3 + noise
    found = compute("regression", predictions.tolist(), truth.tolist())
    assert found == pytest.approx(
        {
            "pearson": stats.pearsonr(truth, predictions).statistic,
            "spearmanr": stats.spearmanr(truth, predictions).statistic,
            "mse": sk.mean_squared_error(truth, predictions),
        },
        rel=1e-5,
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("predictions", "mse"), [([1.0, 1.0, 1.0], 5 / 3), ([1.0, NAN, 3.0], NAN)])
def test_regression_where_nothing_correlates(predictions, mse):
    """A constant model, and a run that has diverged: nan, and the run goes on."""
    found = compute("regression", predictions, [1.0, 2.0, 3.0])
    assert found == pytest.approx({"pearson": NAN, "spearmanr": NAN, "mse": mse}, nan_ok=True)


def test_generation():
    truth = ["The cat sat on the mat today.", "I like music a lot.", "Hello, how are you doing?"]
    predictions = ["The cats sat on a mat today.", "I like music a lot.", ""]
    found = compute("generation", predictions, truth)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(predictions, [truth]).score)
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    scores = [scorer.score(reference, written) for reference, written in zip(truth, predictions)]
    for name in ("rouge1", "rouge2", "rougeL"):
        assert found[name] == pytest.approx(100 * np.mean([score[name].fmeasure for score in scores]))
    assert set(found) == set(GENERATION_FIGURES)
    assert 20 < found["bleu"] < 100
    assert compute("generation", truth, truth) == pytest.approx(dict.fromkeys(GENERATION_FIGURES, 100.0))


def judged(best: BestMetricTracker, values: list[float]) -> list[bool]:
    return [best.record_evaluation(10 * n, {f"eval_{best.metric}": value}) for n, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("metric", "values", "better"),
    [
        ("accuracy", [NAN, 0.5, 0.4, 0.5, NAN, 0.6], [False, True, False, False, False, True]),
        ("loss", [2.0, 3.0, 2.0, 1.0], [True, False, False, True]),
        ("loss_mismatched", [2.0, 1.0], [True, True]),
        ("mse", [2.0, 1.0, 1.5], [True, True, False]),
    ],
)
def test_what_is_better(metric, values, better):
    best = BestMetricTracker(metric)
    assert judged(best, values) == better
    last = max((n for n, is_best in enumerate(better, 1) if is_best), default=None)
    assert best.best.update == (last and 10 * last)
    assert best.best.value == pytest.approx(values[last - 1] if last else NAN, nan_ok=True)
    assert not best.is_exhausted  # without patience there is no end


@pytest.mark.parametrize(
    ("patience", "values", "exhausted"),
    [
        (2, [0.5, 0.4, 0.6, 0.5, 0.5], [False, False, False, False, True]),
        (1, [0.5, 0.5], [False, True]),  # as good is not better
        (2, [NAN, NAN], [False, True]),
    ],
)
def test_patience(patience, values, exhausted):
    best, seen = BestMetricTracker("accuracy", patience), []
    for value in values:
        judged(best, [value])
        seen.append(best.is_exhausted)
    assert seen == exhausted


def test_the_recipes_choice():
    figures = ("accuracy", "f1", "loss")
    state = BestEvaluation()
    assert make_best_tracker(ClsRecipe(), figures, True, state) == BestMetricTracker("accuracy", keeps=True)
    assert make_best_tracker(ClsRecipe(), ("loss", "perplexity"), True, state) == BestMetricTracker("loss")
    recipe = ClsRecipe(metric_for_best_model="eval_f1", early_stopping_patience=3)
    assert make_best_tracker(recipe, figures, True, state) == BestMetricTracker("f1", 3, True, True)


def test_figures_of_each_class(tmp_path):
    names, draw = ("良い", "so so", "$bad$"), np.random.default_rng(0)
    truth, answers = draw.integers(0, 2, 200), draw.integers(0, 3, 200)  # nothing is of the last class
    folder, part = RunFolder(tmp_path / "run"), HeldOut(SimpleNamespace(labels=truth), [], "")
    folder.path.mkdir()
    rows = ({"label": names[label], "prediction": names[answer]} for label, answer in zip(truth, answers))
    folder.write_predictions(rows)
    heading, table = report_classes(folder, Labels(names), [part])
    assert "200 held-out examples" in heading
    expected = sk.precision_recall_fscore_support(truth, answers, labels=range(3), zero_division=0)
    shown = [line.split()[-5:-1] for line in table.splitlines()[1:]]
    assert shown == [[*(f"{value:.4f}" for value in row[:3]), str(row[3])] for row in zip(*expected)]
    assert report_classes(folder, Labels(None), [part]) == report_classes(folder, Labels(names, True), [part]) == []
    many = tuple(map(str, range(30)))
    folder.write_predictions({"label": name, "prediction": name} for name in many)
    assert "and 10 more" in report_classes(folder, Labels(many), [part])[1]
