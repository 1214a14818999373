"""Evaluation of embeddings: the loss within groups, and for each held-out anchor where its positive stands among all
held-out positives and negatives. So recall and mrr do not depend on groups, batches or the number of processes."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from zerofit.data.collate import Batch
from zerofit.data.labelled.groups import PairGroups
from zerofit.data.labelled.samples import HeldOut
from zerofit.model.embedding import contrastive_loss, embed
from zerofit.record.run_folder import RunFolder
from zerofit.strategy.engine import Engine
from zerofit.training.evaluation import gather_by_index, mean_losses

FIGURES = ("mrr", "recall_at_1", "recall_at_10", "loss")
ROWS = 1024  # anchors that are compared with all candidates at a time


@torch.no_grad()
def evaluate_pairs(
    engine: Engine, batches: Mapping[str, Iterator[Batch]], part: HeldOut, temperature: float, folder: RunFolder
) -> dict[str, float]:
    """The figures of the held-out pairs; the main process also writes predictions.jsonl.

    Args:
        batches: of each source of the part by its name; of several, each has a loss of its own as well.
    """
    own, vectors = {}, list[torch.Tensor]()
    for name, of_source in batches.items():
        loss, anchors, found = torch.zeros((), device=engine.device), 0.0, dict[int, Any]()
        for batch in of_source:
            embeddings = embed(engine.model, batch.inputs)
            assert batch.labels is not None, "a batch of groups"
            loss += contrastive_loss(embeddings, batch.labels, temperature)
            anchors += batch.num_targets
            found |= zip(batch.indices, embeddings.cpu())
        own[name] = loss, anchors
        groups, samples = gather_by_index(engine, found), part.sources.get(name, part.samples)
        assert isinstance(samples, PairGroups)
        if groups is not None:
            vectors.append(of_records(groups, samples.groups))
    figures = mean_losses(engine, own)
    if vectors:
        texts = candidates(part)
        ranks, nearest = ranked(torch.cat(vectors, dim=1), texts)
        figures |= figures_of_ranks(ranks)
        folder.write_predictions(
            {**record, "rank": rank, "nearest": texts[first]}
            for record, rank, first in zip(part.texts, ranks.tolist(), nearest.tolist())
        )
    return {f"eval_{name}": value for name, value in engine.from_main(figures).items()}


def candidates(part: HeldOut) -> list[str]:
    """The texts that an anchor is compared with: all positives, then all negatives."""
    _, *columns = zip(*(record.values() for record in part.texts))
    return [text for column in columns for text in column]


def of_records(groups: list[torch.Tensor], places: list[np.ndarray]) -> torch.Tensor:
    """(texts of a record, records, H), of embeddings by group.

    Args:
        groups: each (texts of a record * N, H), the anchors, then the positives, ...; N is at least the group's number
            of records, and just that in the first group, which none exceeds.
        places: of the records of each group.
    """
    num_texts = len(groups[0]) // len(places[0])
    vectors = groups[0].new_empty(num_texts, sum(map(len, places)), groups[0].shape[-1])
    for embeddings, own in zip(groups, places):
        vectors[:, own] = embeddings.unflatten(0, (num_texts, -1))[:, : len(own)]
    return vectors


def ranked(vectors: torch.Tensor, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """(records,) each: the rank of an anchor's positive among all candidates, 1 the best, and the place of the
    candidate nearest to the anchor. Of candidates as near as the positive it comes last; those that read the same as
    the positive are left out.

    Args:
        vectors: (texts of a record, records, H), of length 1.
        texts: of the candidates.
    """
    anchors, others = vectors[0], vectors[1:].flatten(0, 1)
    of_text = torch.from_numpy(np.unique(texts, return_inverse=True)[1])
    ranks, nearest = [], []
    for start in range(0, len(anchors), ROWS):
        rows = torch.arange(start, min(start + ROWS, len(anchors)))
        scores = anchors[rows] @ others.T
        is_other = of_text != of_text[rows, None]
        nearest.append(scores.argmax(dim=1))
        ranks.append(1 + ((scores >= scores[rows - start, rows, None]) & is_other).sum(dim=1))
    return torch.cat(ranks), torch.cat(nearest)


def figures_of_ranks(ranks: torch.Tensor) -> dict[str, float]:
    """mrr is the mean of 1 / rank; recall_at_k the share of anchors whose positive is among the first k."""
    recalls = {f"recall_at_{k}": (ranks <= k).double().mean().item() for k in (1, 10)}
    return {"mrr": (1 / ranks.double()).mean().item(), **recalls}


def chance(held_out: list[HeldOut]) -> list[str]:
    """For the log: what candidates in a random order reach in the mean."""
    lines = []
    for part in held_out:
        count = len(candidates(part))
        figures = figures_of_ranks(torch.arange(1, count + 1))
        shown = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        lines.append(f"baseline    {count:,} candidates in a random order: {shown}")
    return lines
