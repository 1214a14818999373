"""Accuracy, F1 and Matthews correlation by scikit-learn, as a local metric of the evaluate library."""

import datasets
import evaluate
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

DESCRIPTION = """accuracy; f1 (of class 1 where there are two classes, else the mean over classes, as f1_macro);
matthews_correlation. Predictions and references are class numbers."""


class Classification(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=DESCRIPTION, citation="", features=features)

    def _compute(self, predictions: list[int], references: list[int], num_labels: int = 2) -> dict[str, float]:
        accuracy = float(accuracy_score(references, predictions))
        matthews = float(matthews_corrcoef(references, predictions))
        if num_labels == 2:
            f1 = {"f1": float(f1_score(references, predictions, zero_division=0.0))}
        else:
            f1 = {"f1_macro": float(f1_score(references, predictions, average="macro", zero_division=0.0))}
        return {"accuracy": accuracy, **f1, "matthews_correlation": matthews}
