"""Evaluation: every held-out sample once, whatever the number of processes and the size of the last batch.

Logits are never gathered: what leaves a rank is two sums, and a few numbers or a text for each example.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from zerofit.data.collate import Batch
from zerofit.data.order import FILLER, FixedOrder, MicroBatches, loader
from zerofit.data.pack import SampleSet
from zerofit.strategy.devices import pins_memory
from zerofit.strategy.engine import Engine


def eval_batches(
    engine: Engine,
    samples: SampleSet,
    collate: Callable[[list[Any]], Batch],
    batch_size: int,
    start: int = 0,
    *,
    stop: int | None = None,
) -> Iterator[Batch]:
    """This rank's part of the held-out samples, on its device; the model is in evaluation mode meanwhile.

    All ranks get the same number of batches; what the last ones lack is filled up with rows that do not count.

    Args:
        start, stop: the places of the samples in the order of an evaluation; by default all.
    """
    count, key, layout = len(samples), samples.sort_key, engine.layout
    order = FixedOrder(count, key)
    stop = count if stop is None else stop
    micro_batches = MicroBatches(
        order, stop, start, batch_size, 1, num_replicas=layout.data_size, rank=layout.data_rank, sort_key=key
    )
    engine.model.eval()
    for batch in loader(samples, micro_batches, collate, 0, pin=pins_memory(engine.device)):
        engine.alive()
        yield batch.to(engine.device)
    engine.model.train()


def held_out_batches(
    engine: Engine, parts: Mapping[str, SampleSet], collate: Callable[[list[Any]], Batch], batch_size: int
) -> dict[str, Iterator[Batch]]:
    """`eval_batches` of each held-out part by its name."""
    return {name: eval_batches(engine, part, collate, batch_size) for name, part in parts.items()}


@torch.no_grad()
def held_out_loss(
    engine: Engine, batches: Mapping[str, Iterator[Batch]], loss_sum: Callable[[Any, Batch], torch.Tensor]
) -> dict[str, float]:
    """Loss (nats a token) and perplexity over all batches of all ranks.

    Args:
        batches: of each held-out part by its name; of several, each has a loss of its own as well.
    """
    own = {}
    for name, part in batches.items():
        loss, targets = torch.zeros((), dtype=torch.float32, device=engine.device), 0.0
        for batch, of_batch in engine.losses(part, loss_sum):
            loss += of_batch
            targets += batch.num_targets
        own[name] = loss, targets
    figures = {f"eval_{name}": mean for name, mean in mean_losses(engine, own).items()}
    mean = figures["eval_loss"]
    return figures | {"eval_perplexity": math.exp(min(mean, 700.0)) if mean == mean else mean}


def mean_losses(engine: Engine, own: Mapping[str, tuple[torch.Tensor, float]]) -> dict[str, float]:
    """Return {"loss": the mean over all replicas}, and of several parts "loss_NAME" of each. All ranks call it.

    Args:
        own: this rank's (summed loss, number of targets) of each part by its name.
    """
    sums = engine.sum_over_replicas([number for loss, targets in own.values() for number in (loss.item(), targets)])
    of_parts = list(zip(own, sums[::2], sums[1::2])) if len(own) > 1 else []
    return {"loss": sum(sums[::2]) / max(sum(sums[1::2]), 1)} | {
        f"loss_{name}": loss / max(targets, 1) for name, loss, targets in of_parts
    }


def gather_by_index(engine: Engine, rows: dict[int, Any]) -> list[Any] | None:
    """Gather what the ranks found for each example, in the order of the examples, on the main process.

    Args:
        rows: {index of an example: what this rank found}; FILLER is ignored.
    """
    rows.pop(FILLER, None)
    ranks = engine.gather_objects(rows)
    if ranks is None:
        return None
    of_example = {index: row for rank in ranks for index, row in rank.items()}
    assert sorted(of_example) == list(range(len(of_example))), "every example once"
    return [of_example[index] for index in range(len(of_example))]


def compute(name: str, predictions: list[Any], references: list[Any], **options: Any) -> dict[str, float]:
    """The figures of a metric of metrics.py, by the evaluate library."""
    from zerofit.training.metrics import METRICS  # with libraries that take seconds

    metric: Any = METRICS[name](keep_in_memory=True)
    figures: dict[str, float] = metric.compute(predictions=predictions, references=references, **options)
    return figures
