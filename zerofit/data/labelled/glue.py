"""The GLUE tasks (Wang et al. 2019): columns, labels, metric, on the hub and in the files of the original release."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GlueTask:
    """A task's texts and labels under the hub's names.

    Args:
        labels: names in the order of the hub's class numbers; None if the label is a number (STS-B).
        released: the names of the text columns in the original .tsv files, if they differ.
        header: the columns of original training and development files without a header (CoLA).
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...] | None
    metric: str
    released: tuple[str, ...] = ()
    label_column: str = "label"
    header: tuple[str, ...] = ()


PAIR = ("sentence1", "sentence2")
TASKS = {
    "cola": GlueTask(("sentence",), ("unacceptable", "acceptable"), "matthews_correlation",
                     header=("source", "label", "mark", "sentence")),
    "mnli": GlueTask(("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), "accuracy",
                     PAIR, "gold_label"),
    "mrpc": GlueTask(PAIR, ("not_equivalent", "equivalent"), "accuracy", ("#1 String", "#2 String"),
                     "Quality"),
    "qnli": GlueTask(("question", "sentence"), ("entailment", "not_entailment"), "accuracy"),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate"), "accuracy",
                    label_column="is_duplicate"),
    "rte": GlueTask(PAIR, ("entailment", "not_entailment"), "accuracy"),
    "sst2": GlueTask(("sentence",), ("negative", "positive"), "accuracy"),
    "stsb": GlueTask(PAIR, None, "pearson", label_column="score"),
    "wnli": GlueTask(PAIR, ("not_entailment", "entailment"), "accuracy"),
}  # fmt: skip
