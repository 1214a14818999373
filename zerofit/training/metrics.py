"""Metrics of the evaluate library that need no network: classes, numbers and generated texts.

Not evaluate.load: it copies a module to a cache, and imports what is there.
"""

import datasets
import evaluate
import numpy as np
import sacrebleu
from rouge_score import rouge_scorer
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, precision_score, recall_score
from sklearn.preprocessing import MultiLabelBinarizer

from zerofit.data.labelled.examples import find_entities

ROUGE = ("rouge1", "rouge2", "rougeL")


class _Metric(evaluate.Metric):
    """The base of the metrics whose predictions and references are values of one type."""

    dtype = ""
    feature = None

    def _info(self) -> evaluate.MetricInfo:
        features = {name: self.feature or datasets.Value(self.dtype) for name in ("predictions", "references")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(features))


class Classification(_Metric):
    """The figures of classes, by scikit-learn: accuracy; f1 of class 1 if there are two classes; f1_macro, the mean
    over classes; matthews_correlation. Predictions and references are class numbers."""

    dtype = "int64"

    def _compute(self, predictions: list[int], references: list[int], num_labels: int = 2) -> dict[str, float]:
        averages = {"f1": "binary", "f1_macro": "macro"} if num_labels == 2 else {"f1_macro": "macro"}
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            **{
                name: float(f1_score(references, predictions, average=average, zero_division=0.0))
                for name, average in averages.items()
            },
            "matthews_correlation": float(matthews_corrcoef(references, predictions)),
        }


class LabelSets(_Metric):
    """The figures of label sets, by scikit-learn: f1_micro and f1_macro over labels, precision and recall (micro), and
    accuracy (examples with exactly the right labels). Predictions and references are lists of class numbers."""

    feature = datasets.List(datasets.Value("int64"))

    def _compute(
        self, predictions: list[list[int]], references: list[list[int]], num_labels: int = 2
    ) -> dict[str, float]:
        flags = MultiLabelBinarizer(classes=range(num_labels))
        truth = flags.fit_transform(references)
        predicted = flags.fit_transform(predictions)
        micro = {"average": "micro", "zero_division": 0.0}
        return {
            "f1_micro": float(f1_score(truth, predicted, **micro)),
            "f1_macro": float(f1_score(truth, predicted, average="macro", zero_division=0.0)),
            "precision": float(precision_score(truth, predicted, **micro)),
            "recall": float(recall_score(truth, predicted, **micro)),
            "accuracy": float(accuracy_score(truth, predicted)),
        }


class Regression(_Metric):
    """The figures of predicted numbers: pearson and spearmanr, by scipy, and mse. The correlations are nan for a
    constant, for fewer than two examples, and for a model that has diverged (it predicts nan)."""

    dtype = "float"

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        predicted = np.asarray(predictions, np.float64)
        truth = np.asarray(references, np.float64)
        correlates = all(np.isfinite(numbers).all() and np.ptp(numbers) > 0 for numbers in (predicted, truth))
        return {
            "pearson": float(pearsonr(truth, predicted).statistic) if correlates else float("nan"),
            "spearmanr": float(spearmanr(truth, predicted).statistic) if correlates else float("nan"),
            "mse": float(np.mean((predicted - truth) ** 2)),
        }


class Entities(_Metric):
    """The figures of entities, as seqeval by default: precision, recall and f1 (an entity is right if its words
    and its kind are), and accuracy of tags. Predictions and references are the tags of a sentence's words."""

    feature = datasets.List(datasets.Value("string"))

    def _compute(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
        predicted = find_entities(predictions)
        labelled = find_entities(references)
        right = len(predicted & labelled)
        pairs = [pair for rows in zip(predictions, references) for pair in zip(*rows)]
        return {
            "f1": 2 * right / max(len(predicted) + len(labelled), 1),
            "precision": right / max(len(predicted), 1),
            "recall": right / max(len(labelled), 1),
            "accuracy": sum(prediction == reference for prediction, reference in pairs) / max(len(pairs), 1),
        }


class Generation(_Metric):
    """The figures of generated texts: bleu (sacrebleu's corpus BLEU, 0 to 100) and rouge1, rouge2, rougeL
    (rouge_score's F-measure, 0 to 100, mean over examples). Predictions and references are texts."""

    dtype = "string"

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        bleu = sacrebleu.corpus_bleu(predictions, [references])
        scorer = rouge_scorer.RougeScorer(ROUGE, use_stemmer=True)
        scores = [scorer.score(reference, prediction) for reference, prediction in zip(references, predictions)]
        rouge = {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}
        return {"bleu": float(bleu.score), **rouge}


METRICS: dict[str, type[evaluate.Metric]] = {
    "classification": Classification,
    "label sets": LabelSets,
    "regression": Regression,
    "generation": Generation,
    "entities": Entities,
}
