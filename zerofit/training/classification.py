"""Evaluation of classified examples: loss, metrics, predictions.jsonl, and how each class was recognized.

What leaves a rank is the answer to each example and the probability of each class, or the predicted number.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from zerofit.data.collate import Batch
from zerofit.data.labelled.examples import GLUE_TASKS, find_entities
from zerofit.data.labelled.labels import MULTI_LABEL_THRESHOLD, HeldOut, Labels, configure_labels, pretrained_head
from zerofit.model.configuration import check_task
from zerofit.model.load import head_weights
from zerofit.model.loss import IGNORE, logits_of_examples, loss_of_examples
from zerofit.recipe.tasks import ClsRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import decimals, screen_width, table
from zerofit.strategy.engine import Engine
from zerofit.training.evaluation import compute, gather_by_index, mean_losses

MAX_ROWS = 20  # classes of a table


def choose_head(config: Any, labels: Labels, recipe: ClsRecipe) -> tuple[Any, list[str], list[str | None]]:
    """Choose the head of the model. The configuration gets the labels. Returns (the Auto class of transformers, the
    names of its weights that are drawn anew, notes for the log). Raises UserError: there is no such head for this kind
    of model; the pretrained head has another number of labels."""
    pretrained = recipe.model_name_or_path
    notes: list[str | None] = []
    if labels.choices:
        auto_class: Any = AutoModelForMultipleChoice
        check_task(recipe, config, auto_class)
        had = len(pretrained_head(config, pretrained))  # of a classifier; choices have a head of one output
        replaced = head_weights(AutoModelForSequenceClassification, config, had + 1) if had else []
    else:
        auto_class = AutoModelForSequenceClassification
        if labels.of_words:
            auto_class = AutoModelForTokenClassification
            check_task(recipe, config, auto_class)
        had, renamed = configure_labels(config, labels, pretrained, recipe.ignore_mismatched_sizes)
        notes.append(renamed)
        replaced = head_weights(auto_class, config, had) if had else []
    if replaced:
        notes.append(f"note      a new, random head: {', '.join(replaced)} had {had} outputs")
    return auto_class, replaced, notes


def figures_of(labels: Labels, held_out: list[HeldOut], task_name: str | None) -> tuple[str, ...]:
    """The names of the figures that `evaluate_examples` gives, the one that tells the best evaluation in front."""
    if labels.names is None:
        of_part: tuple[str, ...] = ("pearson", "spearmanr", "mse", "loss")
    elif labels.of_sets:
        of_part = ("f1_micro", "f1_macro", "precision", "recall", "accuracy", "loss")
    elif labels.choices or (labels.of_words and not labels.entities):
        of_part = ("accuracy", "loss")
    elif labels.entities:
        of_part = ("f1", "precision", "recall", "accuracy", "loss")
    else:
        f1 = ("f1", "f1_macro") if len(labels.names) == 2 else ("f1_macro",)
        of_part = ("accuracy", *f1, "matthews_correlation", "loss")
    names = [f"{name}{part.suffix}" for part in held_out for name in of_part] or ["loss"]
    first = GLUE_TASKS[task_name].metric if task_name else names[0]
    return tuple(dict.fromkeys([first, *names]))


@torch.no_grad()
def evaluate_examples(
    engine: Engine, batches: Mapping[str, Iterator[Batch]], labels: Labels, part: HeldOut, folder: RunFolder
) -> dict[str, float]:
    """The figures of one held-out part; the main process also writes its predictions.

    Args:
        batches: of each source of the part by its name; of several, each has a loss of its own as well.
    """
    own = {}
    answers: list[Any] = []
    for name, of_source in batches.items():
        loss, targets, of_examples = _answered(engine, of_source, labels)
        own[name] = loss, targets
        answers += of_examples or ()
    figures = mean_losses(engine, own)
    if answers:
        truth = _truth(part, labels)
        folder.write_predictions(_lines(part, truth, answers, labels), part.suffix)
        predictions = [answer for answer, _ in answers]
        figures |= _measured(predictions, truth, labels)
    figures = engine.from_main(figures)
    return {f"eval_{name}{part.suffix}": value for name, value in figures.items()}


@torch.no_grad()
def predict_examples(
    engine: Engine, batches: Iterator[Batch], labels: Labels, part: HeldOut, folder: RunFolder
) -> list[str]:
    """Write predictions.jsonl of examples without labels. Returns the files."""
    answers = _answered(engine, batches, labels)[2]
    if answers is None:
        return []
    folder.write_predictions(_lines(part, None, answers, labels))
    return ["predictions.jsonl"]


def _answered(
    engine: Engine, batches: Iterator[Batch], labels: Labels
) -> tuple[torch.Tensor, float, list[Any] | None]:
    """Return (summed loss and number of targets of this rank, the answer to each example on the main process)."""
    loss = torch.zeros((), device=engine.device)
    targets = 0.0
    answers: dict[int, Any] = {}
    for batch in batches:
        logits = logits_of_examples(engine.model, batch).float()  # (B, classes)
        assert batch.labels is not None, "a batch of examples"
        loss += loss_of_examples(logits, batch.labels)
        targets += batch.num_targets
        answers |= zip(batch.indices, _answers(logits, batch.labels, labels))
    return loss, targets, gather_by_index(engine, answers)


def _measured(predictions: list[Any], truth: list[Any], labels: Labels) -> dict[str, float]:
    if labels.names is None:
        return compute("regression", predictions, truth)
    if labels.of_words:
        sentences = ([[labels.names[tag] for tag in row] for row in rows] for rows in (predictions, truth))
        figures = compute("entities", *sentences)
        return figures if labels.entities else {"accuracy": figures["accuracy"]}
    if labels.of_sets:
        return compute("label sets", predictions, truth, num_labels=len(labels.names))
    figures = compute("classification", predictions, truth, num_labels=len(labels.names))
    return {"accuracy": figures["accuracy"]} if labels.choices else figures


def _truth(part: HeldOut, labels: Labels) -> list[Any]:
    """The label of each example; of words, the tags of those that are read; of sets, the classes."""
    if labels.of_sets:
        return [np.flatnonzero(row).tolist() for row in part.samples.labels]
    if not labels.of_words:
        return part.samples.labels.tolist()
    samples = (part.samples[index] for index in range(len(part.samples)))
    return [sample["tags"][sample["starts"] >= 0].tolist() for sample in samples]


def _answers(logits: torch.Tensor, targets: torch.Tensor, labels: Labels) -> list[tuple[Any, list[float] | None]]:
    """Return (class, probability of each class) or (number, None) of each row; of sets the classes; of words (the tag
    of each that is read, None)."""
    if labels.of_words:
        predicted = logits.argmax(dim=-1)  # (B, T)
        return [(row[target != IGNORE].tolist(), None) for row, target in zip(predicted, targets)]
    if labels.names is None:
        return [(value, None) for value in logits[:, 0].tolist()]
    if labels.of_sets:
        of_rows = logits.sigmoid().tolist()
        return [([place for place, value in enumerate(row) if value > MULTI_LABEL_THRESHOLD], row) for row in of_rows]
    probabilities = logits.softmax(dim=-1)
    return list(zip(probabilities.argmax(dim=-1).tolist(), probabilities.tolist()))


def _lines(part: HeldOut, truth: list[Any] | None, answers: list[Any], labels: Labels) -> Iterator[dict[str, Any]]:
    """The lines of predictions.jsonl: the record, its label where there is one, what was predicted."""
    names = labels.names or ()
    for index, (record, (answer, probabilities)) in enumerate(zip(chain.from_iterable(part.tables), answers)):
        line = {**record}
        if labels.of_words:
            sample = part.samples[index]
            predicted = iter(answer)
            if truth is not None:
                line["label"] = [names[tag] for tag in sample["tags"]]
            line["prediction"] = [names[next(predicted)] if start >= 0 else None for start in sample["starts"]]
        else:
            if truth is not None:
                line["label"] = _named(truth[index], labels)
            line["prediction"] = _named(answer, labels)
        if probabilities is not None:
            if not labels.of_sets:
                line["probability"] = probabilities[answer]
            line["probabilities"] = dict(zip(names, probabilities))
        yield line


def _named(answer: Any, labels: Labels) -> Any:
    """The name of a class, the names of several, or a number."""
    if labels.names is None:
        return answer
    return [labels.names[place] for place in answer] if labels.of_sets else labels.names[answer]


def report_classes(folder: RunFolder, labels: Labels, held_out: list[HeldOut]) -> list[str]:
    """Tables for the log from the run's predictions, one for each held-out part; nothing of numbers and choices,
    whose labels are not classes."""
    if labels.names is None or labels.choices:
        return []
    lines = []
    keys = ("label", "prediction")
    for part in held_out:
        rows = folder.predictions(part.suffix, keys)
        if not rows:  # of an earlier launch, and damaged since
            continue
        names = labels.names
        what = ("class", "words" if labels.of_words else "examples")
        truth: set[Any]
        predicted: set[Any]
        if labels.entities:
            heading = "entities    of the held-out sentences, by kind"
            what = ("kind", "entities")
            sentences = [_words(row) for row in rows]
            truth, predicted = (find_entities([[word[key] for word in words] for words in sentences]) for key in keys)
            names = tuple(sorted({kind for _, kind, *_ in truth | predicted}))
        elif labels.of_sets:
            heading = "labels      of the held-out examples"
            what = ("label", "examples")
            truth, predicted = ({(place, name) for place, row in enumerate(rows) for name in row[key]} for key in keys)
        else:
            rows = [word for row in rows for word in _words(row)] if labels.of_words else rows
            heading = f"classes     of {len(rows):,} held-out {what[1]}{part.suffix.replace('_', ' ')}"
            truth, predicted = ({(place, row[key]) for place, row in enumerate(rows)} for key in keys)
        lines += [heading, _recognized(names, what, truth, predicted)]
    return lines


def _words(row: dict[str, Any]) -> list[dict[str, str]]:
    """The words of a line of predictions that were read."""
    return [
        {"label": tag, "prediction": predicted}
        for tag, predicted in zip(row["label"], row["prediction"])
        if predicted is not None
    ]


def _recognized(names: tuple[str, ...], what: tuple[str, str], truth: set[Any], predicted: set[Any]) -> str:
    """The table of precision, recall and F1: the names with the most examples, in their order. 0 where nothing was
    predicted. Of entities as seqeval's classification_report.

    Args:
        what: what the names are, and what is counted.
        truth, predicted: (the place, the name, ...) of everything that is there, and that was found.
    """
    right, examples, found = (Counter(name for _, name, *_ in each) for each in (truth & predicted, truth, predicted))
    rows: list[tuple[str, ...]] = [(what[0], "precision", "recall", "f1", what[1], "predicted")]
    commonest = sorted(names, key=examples.__getitem__, reverse=True)[:MAX_ROWS]
    for name in sorted(commonest, key=names.index):
        precision = right[name] / max(found[name], 1)
        recall = right[name] / max(examples[name], 1)
        f1 = 2 * right[name] / max(examples[name] + found[name], 1)
        rows.append((name, *map(decimals, (precision, recall, f1)), f"{examples[name]:,}", f"{found[name]:,}"))
    more = len(names) - MAX_ROWS
    return table(rows, screen_width()) + (f"\n  and {more:,} more, with fewer {what[1]}" if more > 0 else "")
