"""Metrics of evaluation, by the libraries of each field: classes, numbers, entities and generated texts.

Not evaluate.load: it copies a module to a cache, imports what is there, and calls these functions.
"""

from typing import Any

import numpy as np
import sacrebleu
from rouge_score import rouge_scorer
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, precision_score, recall_score
from sklearn.preprocessing import MultiLabelBinarizer

from zerofit.data.labelled.tags import located

ROUGE = ("rouge1", "rouge2", "rougeL")


def of_classes(predictions: list[int], references: list[int], num_labels: int) -> dict[str, float]:
    """accuracy; f1 of class 1 where there are two classes; f1_macro, the mean over classes; matthews_correlation, by
    scikit-learn. Predictions and references are class numbers."""
    averages = {"f1": "binary", "f1_macro": "macro"} if num_labels == 2 else {"f1_macro": "macro"}
    return {
        "accuracy": float(accuracy_score(references, predictions)),
        **{
            name: float(f1_score(references, predictions, average=average, zero_division=0.0))
            for name, average in averages.items()
        },
        "matthews_correlation": float(matthews_corrcoef(references, predictions)),
    }


def of_label_sets(predictions: list[list[int]], references: list[list[int]], num_labels: int) -> dict[str, float]:
    """f1_micro and f1_macro over labels, precision and recall of all labels together (micro), accuracy (examples with
    exactly the right labels), by scikit-learn. Predictions and references are lists of class numbers."""
    flags = MultiLabelBinarizer(classes=range(num_labels))
    truth, predicted = flags.fit_transform(references), flags.fit_transform(predictions)
    micro: dict[str, Any] = {"average": "micro", "zero_division": 0.0}
    return {
        "f1_micro": float(f1_score(truth, predicted, **micro)),
        "f1_macro": float(f1_score(truth, predicted, average="macro", zero_division=0.0)),
        "precision": float(precision_score(truth, predicted, **micro)),
        "recall": float(recall_score(truth, predicted, **micro)),
        "accuracy": float(accuracy_score(truth, predicted)),
    }


def of_numbers(predictions: list[float], references: list[float]) -> dict[str, float]:
    """pearson, spearmanr and mse of predicted numbers, by scipy. Of a constant, of fewer than two examples, and of a
    model that has diverged (it predicts nan) the correlations are nan."""
    # fp32, as the model's: a label is not to differ from an equal prediction by its rounding
    predicted, truth = (np.asarray(numbers, np.float32).astype(np.float64) for numbers in (predictions, references))
    correlates = all(np.isfinite(numbers).all() and np.ptp(numbers) > 0 for numbers in (predicted, truth))
    return {
        "pearson": float(pearsonr(truth, predicted).statistic) if correlates else float("nan"),
        "spearmanr": float(spearmanr(truth, predicted).statistic) if correlates else float("nan"),
        "mse": float(np.mean((predicted - truth) ** 2)),
    }


def of_tags(predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
    """precision, recall and f1 of entities (right are those with the right words and kind), accuracy of tags; as
    seqeval by default. Predictions and references are the tags of a sentence's words."""
    found, there = located(predictions), located(references)
    right, pairs = len(found & there), [pair for rows in zip(predictions, references) for pair in zip(*rows)]
    return {
        "f1": 2 * right / max(len(found) + len(there), 1),
        "precision": right / max(len(found), 1),
        "recall": right / max(len(there), 1),
        "accuracy": sum(ours == theirs for ours, theirs in pairs) / max(len(pairs), 1),
    }


def of_texts(predictions: list[str], references: list[str]) -> dict[str, float]:
    """bleu (sacrebleu's corpus BLEU, 0 to 100) and rouge1, rouge2, rougeL (rouge_score's F-measure, 0 to 100, mean
    over examples). Predictions and references are texts, one reference each."""
    bleu = sacrebleu.corpus_bleu(predictions, [references])
    scorer = rouge_scorer.RougeScorer(ROUGE, use_stemmer=True)
    scores = [scorer.score(reference, prediction) for reference, prediction in zip(references, predictions)]
    rouge = {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}
    return {"bleu": float(bleu.score), **rouge}
