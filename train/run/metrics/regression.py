"""Pearson and Spearman correlation and mean squared error, as a local metric of the evaluate library."""

import datasets
import evaluate
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import mean_squared_error

DESCRIPTION = "pearson, spearmanr and mse of predicted numbers. A correlation with a constant is nan."


class Regression(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("float"), "references": datasets.Value("float")})
        return evaluate.MetricInfo(description=DESCRIPTION, citation="", features=features)

    def _compute(self, predictions, references):
        return {
            "pearson": float(pearsonr(references, predictions).statistic),
            "spearmanr": float(spearmanr(references, predictions).statistic),
            "mse": float(mean_squared_error(references, predictions)),
        }
