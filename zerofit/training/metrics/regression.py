"""Pearson and Spearman correlation and mean squared error, as a local metric of the evaluate library."""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr

DESCRIPTION = """pearson, spearmanr and mse of predicted numbers. Of a constant, of fewer than two examples, and of a
model that has diverged (it predicts nan) the correlations are nan."""


class Regression(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("float"), "references": datasets.Value("float")})
        return evaluate.MetricInfo(description=DESCRIPTION, citation="", features=features)

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        predicted, truth = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        mse = float(np.mean((predicted - truth) ** 2))
        if not all(np.isfinite(numbers).all() and np.ptp(numbers) > 0 for numbers in (predicted, truth)):
            return {"pearson": float("nan"), "spearmanr": float("nan"), "mse": mse}
        return {
            "pearson": float(pearsonr(truth, predicted).statistic),
            "spearmanr": float(spearmanr(truth, predicted).statistic),
            "mse": mse,
        }
