"""Pearson and Spearman correlation and mean squared error, as a local metric of the evaluate library."""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr

DESCRIPTION = """pearson, spearmanr and mse of predicted numbers. Of a constant, of fewer than two examples, and of a
model that has diverged (it predicts nan) the correlations are nan."""


class Regression(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("float"), "references": datasets.Value("float")})
        return evaluate.MetricInfo(description=DESCRIPTION, citation="", features=features)

    def _compute(self, predictions, references):
        predictions, references = np.float64(predictions), np.float64(references)
        mse = float(np.mean((predictions - references) ** 2))
        if not all(np.isfinite(numbers).all() and np.ptp(numbers) > 0 for numbers in (predictions, references)):
            return {"pearson": float("nan"), "spearmanr": float("nan"), "mse": mse}
        return {
            "pearson": float(pearsonr(references, predictions).statistic),
            "spearmanr": float(spearmanr(references, predictions).statistic),
            "mse": mse,
        }
