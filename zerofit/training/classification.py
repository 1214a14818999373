"""Evaluation of classified examples: loss, metrics, predictions.jsonl, and how each class was recognized.

Each rank sends its answers to the main process: the predicted class with all probabilities, or the predicted number.
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

MAX_CLASS_ROWS = 20  # classes that a table in the log lists


def choose_head(config: Any, labels: Labels, recipe: ClsRecipe) -> tuple[Any, list[str], list[str | None]]:
    """Choose the head of the model. The configuration gets the labels. Returns (the Auto class of transformers, the
    names of its weights that are newly initialized, notes for the log). Raises UserError: there is no such head for
    this kind of model; the pretrained head has another number of labels."""
    pretrained = recipe.model_name_or_path
    notes: list[str | None] = []
    if labels.choices:
        auto_class: Any = AutoModelForMultipleChoice
        check_task(recipe, config, auto_class)
        old_outputs = len(
            pretrained_head(config, pretrained)
        )  # a classifier's labels; choices have a head of one output
        replaced = head_weights(AutoModelForSequenceClassification, config, old_outputs + 1) if old_outputs else []
    else:
        auto_class = AutoModelForSequenceClassification
        if labels.is_token_level:
            auto_class = AutoModelForTokenClassification
            check_task(recipe, config, auto_class)
        old_outputs, renamed = configure_labels(config, labels, pretrained, recipe.ignore_mismatched_sizes)
        notes.append(renamed)
        replaced = head_weights(auto_class, config, old_outputs) if old_outputs else []
    if replaced:
        notes.append(f"note      a new, random head: {', '.join(replaced)} had {old_outputs} outputs")
    return auto_class, replaced, notes


def figures_of(labels: Labels, held_out: list[HeldOut], task_name: str | None) -> tuple[str, ...]:
    """Return the names of the figures that `evaluate_examples` gives. The first decides which evaluation is best."""
    if labels.names is None:
        of_part: tuple[str, ...] = ("pearson", "spearmanr", "mse", "loss")
    elif labels.is_multi_label:
        of_part = ("f1_micro", "f1_macro", "precision", "recall", "accuracy", "loss")
    elif labels.choices or (labels.is_token_level and not labels.entities):
        of_part = ("accuracy", "loss")
    elif labels.entities:
        of_part = ("f1", "precision", "recall", "accuracy", "loss")
    else:
        f1 = ("f1", "f1_macro") if len(labels.names) == 2 else ("f1_macro",)
        of_part = ("accuracy", *f1, "matthews_correlation", "loss")
    names = [f"{name}{part.suffix}" for part in held_out for name in of_part] or ["loss"]
    best_metric = GLUE_TASKS[task_name].metric if task_name else names[0]
    return tuple(dict.fromkeys([best_metric, *names]))


@torch.no_grad()
def evaluate_examples(
    engine: Engine, batches: Mapping[str, Iterator[Batch]], labels: Labels, part: HeldOut, folder: RunFolder
) -> dict[str, float]:
    """Return the figures of one held-out part; the main process also writes its predictions.

    Args:
        batches: {source: its batches}. If there are several sources, the loss of each is a figure as well.
    """
    loss_sums = {}
    answers: list[Any] = []
    for name, batches_of_source in batches.items():
        loss, targets, answers_of_source = _answered(engine, batches_of_source, labels)
        loss_sums[name] = loss, targets
        answers += answers_of_source or ()
    figures = mean_losses(engine, loss_sums)
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
    if labels.is_token_level:
        sentences = ([[labels.names[tag] for tag in row] for row in rows] for rows in (predictions, truth))
        figures = compute("entities", *sentences)
        return figures if labels.entities else {"accuracy": figures["accuracy"]}
    if labels.is_multi_label:
        return compute("label sets", predictions, truth, num_labels=len(labels.names))
    figures = compute("classification", predictions, truth, num_labels=len(labels.names))
    return {"accuracy": figures["accuracy"]} if labels.choices else figures


def _truth(part: HeldOut, labels: Labels) -> list[Any]:
    """Return the label of each example: a number, a list of classes (label sets), or the tags of the words read."""
    if labels.is_multi_label:
        return [np.flatnonzero(row).tolist() for row in part.samples.labels]
    if not labels.is_token_level:
        return part.samples.labels.tolist()
    samples = (part.samples[index] for index in range(len(part.samples)))
    return [sample["tags"][sample["starts"] >= 0].tolist() for sample in samples]


def _answers(logits: torch.Tensor, targets: torch.Tensor, labels: Labels) -> list[tuple[Any, list[float] | None]]:
    """Return one pair for each row: (class, probability of each class), (classes, probabilities) for label sets,
    (number, None) for regression, or (the tags of the words read, None)."""
    if labels.is_token_level:
        predicted = logits.argmax(dim=-1)  # (B, T)
        return [(row[target != IGNORE].tolist(), None) for row, target in zip(predicted, targets)]
    if labels.names is None:
        return [(value, None) for value in logits[:, 0].tolist()]
    if labels.is_multi_label:
        of_rows = logits.sigmoid().tolist()
        return [([place for place, value in enumerate(row) if value > MULTI_LABEL_THRESHOLD], row) for row in of_rows]
    probabilities = logits.softmax(dim=-1)
    return list(zip(probabilities.argmax(dim=-1).tolist(), probabilities.tolist()))


def _lines(part: HeldOut, truth: list[Any] | None, answers: list[Any], labels: Labels) -> Iterator[dict[str, Any]]:
    """Yield the lines of predictions.jsonl: the record, its label where there is one, and the prediction."""
    names = labels.names or ()
    for index, (record, (answer, probabilities)) in enumerate(zip(chain.from_iterable(part.tables), answers)):
        line = {**record}
        if labels.is_token_level:
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
            if not labels.is_multi_label:
                line["probability"] = probabilities[answer]
            line["probabilities"] = dict(zip(names, probabilities))
        yield line


def _named(answer: Any, labels: Labels) -> Any:
    """Return the name of a class, the names of a set of classes, or the number unchanged."""
    if labels.names is None:
        return answer
    return [labels.names[place] for place in answer] if labels.is_multi_label else labels.names[answer]


def report_classes(folder: RunFolder, labels: Labels, held_out: list[HeldOut]) -> list[str]:
    """Return tables for the log from the run's predictions, one for each held-out part. Numbers and choices have none,
    since their labels are not classes."""
    if labels.names is None or labels.choices:
        return []
    lines = []
    keys = ("label", "prediction")
    for part in held_out:
        rows = folder.predictions(part.suffix, keys)
        if not rows:  # the file of an earlier launch, damaged since
            continue
        names = labels.names
        nouns = ("class", "words" if labels.is_token_level else "examples")
        truth: set[Any]
        predicted: set[Any]
        if labels.entities:
            heading = "entities    of the held-out sentences, by kind"
            nouns = ("kind", "entities")
            sentences = [_words(row) for row in rows]
            truth, predicted = (find_entities([[word[key] for word in words] for words in sentences]) for key in keys)
            names = tuple(sorted({kind for _, kind, *_ in truth | predicted}))
        elif labels.is_multi_label:
            heading = "labels      of the held-out examples"
            nouns = ("label", "examples")
            truth, predicted = ({(place, name) for place, row in enumerate(rows) for name in row[key]} for key in keys)
        else:
            rows = [word for row in rows for word in _words(row)] if labels.is_token_level else rows
            heading = f"classes     of {len(rows):,} held-out {nouns[1]}{part.suffix.replace('_', ' ')}"
            truth, predicted = ({(place, row[key]) for place, row in enumerate(rows)} for key in keys)
        lines += [heading, _recognized(names, nouns, truth, predicted)]
    return lines


def _words(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return the label and the prediction of each word that was read, from a line of predictions."""
    return [
        {"label": tag, "prediction": predicted}
        for tag, predicted in zip(row["label"], row["prediction"])
        if predicted is not None
    ]


def _recognized(names: tuple[str, ...], nouns: tuple[str, str], truth: set[Any], predicted: set[Any]) -> str:
    """Return the table of precision, recall and F1 of the names with the most examples, in their order. A figure is 0
    where nothing was predicted. Entities are counted as in seqeval's classification_report.

    Args:
        nouns: what a name is ("class"), and what is counted ("examples").
        truth, predicted: (place, name, ...) of every labelled item, and of every predicted one.
    """
    right, labelled, chosen = (Counter(name for _, name, *_ in each) for each in (truth & predicted, truth, predicted))
    rows: list[tuple[str, ...]] = [(nouns[0], "precision", "recall", "f1", nouns[1], "predicted")]
    commonest = sorted(names, key=labelled.__getitem__, reverse=True)[:MAX_CLASS_ROWS]
    for name in sorted(commonest, key=names.index):
        precision = right[name] / max(chosen[name], 1)
        recall = right[name] / max(labelled[name], 1)
        f1 = 2 * right[name] / max(labelled[name] + chosen[name], 1)
        rows.append((name, *map(decimals, (precision, recall, f1)), f"{labelled[name]:,}", f"{chosen[name]:,}"))
    num_hidden = len(names) - MAX_CLASS_ROWS
    return table(rows, screen_width()) + (
        f"\n  and {num_hidden:,} more, with fewer {nouns[1]}" if num_hidden > 0 else ""
    )
