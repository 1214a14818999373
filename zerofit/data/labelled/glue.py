"""The GLUE tasks (Wang et al. 2019): columns, labels, metric, on the hub and in the files of the original release."""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset


@dataclass(frozen=True)
class GlueTask:
    """A task's texts and labels under the hub's names.

    Args:
        labels: names in the order of the hub's class numbers; None if the label is a number (STS-B).
        released: the names of the text columns in the original .tsv files, if they differ.
        file: the name of a submission's file, without .tsv.
        numbered: a submission has the hub's class numbers, not the names.
        header: the columns of original training and development files without a header (CoLA).
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...] | None
    metric: str
    file: str
    released: tuple[str, ...] = ()
    label_column: str = "label"
    header: tuple[str, ...] = ()
    numbered: bool = True


PAIR = ("sentence1", "sentence2")
TASKS = {
    "cola": GlueTask(("sentence",), ("unacceptable", "acceptable"), "matthews_correlation", "CoLA",
                     header=("source", "label", "mark", "sentence")),
    "mnli": GlueTask(("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), "accuracy",
                     "MNLI-m", PAIR, "gold_label", numbered=False),
    "mrpc": GlueTask(PAIR, ("not_equivalent", "equivalent"), "accuracy", "MRPC", ("#1 String", "#2 String"),
                     "Quality"),
    "qnli": GlueTask(("question", "sentence"), ("entailment", "not_entailment"), "accuracy", "QNLI", numbered=False),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate"), "accuracy", "QQP",
                    label_column="is_duplicate"),
    "rte": GlueTask(PAIR, ("entailment", "not_entailment"), "accuracy", "RTE", numbered=False),
    "sst2": GlueTask(("sentence",), ("negative", "positive"), "accuracy", "SST-2"),
    "stsb": GlueTask(PAIR, None, "pearson", "STS-B", label_column="score"),
    "wnli": GlueTask(PAIR, ("not_entailment", "entailment"), "accuracy", "WNLI"),
}  # fmt: skip
NUMBERS = ("index", "id", "idx")  # columns with the numbers of records in files without labels; `id` is for QQP
OTHERS = {"mismatched": "MNLI-mm", "diagnostic": "AX"}  # other submissions of MNLI, by a word in the file name


def numbers(table: Dataset) -> list:
    """The number of each record: that in the file, else its position."""
    column = next((name for name in NUMBERS if name in table.column_names), None)
    return table[column][:] if column else list(range(len(table)))


def submission(task_name: str, file: Path, numbers: list, answers: list) -> tuple[str, str]:
    """(name, text) of the file that gluebenchmark.com takes: `index`, `prediction`, one record per line.

    Args:
        file: the predicted file; MNLI has three.
        answers: names of labels, or the numbers of STS-B, which are clipped to 0 and 5.
    """
    task = TASKS[task_name]
    if task.labels is None:
        answers = [f"{min(max(answer, 0.0), 5.0):.3f}" for answer in answers]
    elif task.numbered:
        answers = [task.labels.index(answer) for answer in answers]
    name = next((OTHERS[word] for word in OTHERS if task_name == "mnli" and word in file.name), task.file)
    lines = [f"{number}\t{answer}\n" for number, answer in zip(numbers, answers)]
    return f"{name}.tsv", "".join(["index\tprediction\n", *lines])
