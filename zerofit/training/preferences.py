"""Pairs of answers: what the model before training makes of them, and what a model makes of the held-out ones."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zerofit.data.chat.samples import PreferencePairs
from zerofit.data.collate import Batch
from zerofit.data.order import FILLER, FixedOrder
from zerofit.model.folders import weights_key
from zerofit.model.preference import BETA, PreferenceLoss, log_probabilities
from zerofit.recipe.files import atomic_file
from zerofit.recipe.places import cache_root
from zerofit.recipe.tasks import DpoRecipe
from zerofit.record.terminal import duration
from zerofit.strategy.engine import Engine
from zerofit.training.evaluation import eval_batches, held_out_loss

if TYPE_CHECKING:
    from zerofit.training.run import Run

STORED_EVERY = 1024  # pairs


def preference_loss(recipe: DpoRecipe) -> PreferenceLoss:
    """The loss that the recipe names."""
    kind = recipe.preference_loss
    beta = BETA[kind] if recipe.preference_beta is None else recipe.preference_beta
    return PreferenceLoss(kind, beta, recipe.simpo_gamma, recipe.preference_label_smoothing)


def evaluate_pairs(
    engine: Engine, batches: Mapping[str, Iterator[Batch]], loss: PreferenceLoss, pairs: int
) -> dict[str, float]:
    """Return eval_loss, eval_accuracy (pairs whose chosen answer has the higher reward) and eval_reward_margin."""
    loss.begin()
    losses = held_out_loss(engine, batches, loss)
    del losses["eval_perplexity"]
    found = loss.figures(engine.sum_over_replicas(loss.sums), pairs)
    return {**losses, "eval_accuracy": found.preference_accuracy, "eval_reward_margin": found.reward_margin}


def measure_reference(
    run: "Run", engine: Engine, parts: Mapping[str, PreferencePairs | None], collate: Callable[[list[Any]], Batch]
) -> None:
    """Let `engine`, whose model is still the one before training, give the reference's log-probabilities to all pairs.

    They are kept with the prepared data. A launch after this one finds them there, all or those that were done.
    """
    if run.measurement:
        return
    recipe: Any = run.recipe  # a DpoRecipe
    # All that the reference model depends on: its log-probabilities are stored under it.
    name, precision = recipe.model_name_or_path, "float8" if recipe.float8 else run.strategy.precision
    weights = recipe.seed if name is None else weights_key(name)
    origin = f"{weights} {precision} {recipe.quantised} {torch.__version__} {engine.whole.config.to_json_string()}"
    if run.config.adapter is not None:  # the model before training is base and adapter
        origin += f" {weights_key(str(run.config.adapter.path))}"
    held = [part for part in parts.values() if part]
    for pairs in (pairs for part in held for pairs in getattr(part, "sets", [part])):  # of a mixture
        name = hashlib.sha256(f"{pairs.key} {len(pairs)} {origin}".encode()).hexdigest()[:32]
        file = cache_root(recipe.cache_dir) / f"reference-{name}.npy"
        began = time.perf_counter()
        done = _measure(engine, pairs, collate, recipe.per_device_eval_batch_size, file, run=run)
        if done:
            seconds = duration(time.perf_counter() - began)
            run.log_lines(f"reference {done:,} pairs in {seconds}; kept in {file}")


def _measure(engine: Engine, pairs: PreferencePairs, collate: Any, batch_size: int, file: Path, *, run: "Run") -> int:
    """Returns how many pairs were not there yet."""
    found = engine.from_main(_stored(file, len(pairs)) if engine.is_main else None)
    indices = FixedOrder(len(pairs), pairs.sort_key).indices(0, len(pairs))
    missing = np.flatnonzero(np.isnan(found[indices]).any(axis=1))
    start = int(missing[0]) if len(missing) else len(pairs)
    todo = len(pairs) - start
    if todo:
        run.log_lines(f"reference of {todo:,} pairs: what the model before training makes of them")
    together = batch_size * engine.layout.data_size
    step = -(-STORED_EVERY // together) * together
    for begin in range(start, len(pairs), step):
        batches = eval_batches(engine, pairs, collate, batch_size, begin, stop=min(begin + step, len(pairs)))
        rows: dict[int, Any] = {}
        for batch, own in engine.losses(batches, log_probabilities):
            if own.dim():  # of a pipeline only the last stage has them
                rows |= zip(batch.indices, own.tolist())
        rows.pop(FILLER, None)
        ranks = engine.gather_objects(rows)
        if ranks is not None:
            for index, values in (item for rank in ranks for item in rank.items()):
                found[index] = values
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file, "wb") as written:
                np.save(written, found)
    pairs.reference = engine.from_main(found)
    return todo


def _stored(file: Path, count: int) -> np.ndarray:
    """Return (count, 2) what is in the file; NaN where nothing is."""
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        found = None
    if found is None or found.shape != (count, 2) or found.dtype != np.float32:
        found = np.full((count, 2), np.nan, dtype=np.float32)
    return found
