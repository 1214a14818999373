"""Going on: which run it is that goes on, and whether a checkpoint's place in the data is a place in this data."""

from pathlib import Path
from typing import Any

import numpy as np

from train.data.pack import SampleSet
from train.recipe.errors import UserError
from train.recipe.options import BatchOptions, RunOptions
from train.run.checkpoints import STATE
from train.run.folder import RunFolder, differences
from train.run.saving import named_checkpoint_problem
from train.run.state_files import read_progress

SAMPLES_LOOKED_AT = 64


def recorded_run(recipe: RunOptions, folder: RunFolder) -> dict[str, Any] | None:
    """The options (and `num_processes`) of the run that this one may go on with; None if there is none.

    Raises:
        UserError: `resume` names a folder that is no checkpoint.
    """
    if recipe.resume not in ("auto", "never"):
        named = Path(recipe.resume).expanduser()
        problem = named_checkpoint_problem(named)
        if problem:
            raise UserError(
                f"resume = {recipe.resume!r}: {problem}. Name a folder checkpoints/update_NNNNNNNN, or auto"
            )
        try:
            return read_progress(named / STATE)["run"]
        except (OSError, ValueError, KeyError):
            raise UserError(f"resume = {recipe.resume!r}: its state/progress.json cannot be read") from None
    recorded = folder.recorded()
    if recorded is None or not recipe.overwrite_output_dir:
        return recorded
    left_open = {name for name, value in recipe.to_dict().items() if value is None}  # a strategy may yet fill them in
    differing = differences(recipe, recorded.get("global_batch_size"), recorded)
    return None if any(text.split()[0] not in left_open for text in differing) else recorded


def keep_global_batch(recipe: BatchOptions, recorded: dict[str, Any], world_size: int) -> str | None:
    """Let the accumulation follow where a run goes on with another number of processes. Returns what was done."""
    size, before = recorded.get("global_batch_size"), recorded.get("num_processes")
    if size is None or before in (None, world_size) or recipe.source("global_batch_size"):
        return None
    recipe.adopt("global_batch_size", size, f"the run that goes on, of {before} processes")
    recipe.adopt("gradient_accumulation_steps", None, "")
    return (
        f"{world_size} processes, before it were {before}: the global batch stays {size}, and the accumulation follows"
    )


def differences_from(recipe, global_batch: int, recorded: dict[str, Any]) -> list[str]:
    """The options in which a run differs from the one of the checkpoint that was named.

    Raises:
        UserError: another seed or global batch, with which the checkpoint's place in the data is another place.
    """
    differing = differences(recipe, global_batch, recorded)
    displaced = [text for text in differing if text.startswith(("seed ", "global_batch_size "))]
    if displaced:
        raise UserError(
            f"resume = {recipe.resume!r}: {'; '.join(displaced)}: its place in the data would be another. Set it as "
            "it was"
        )
    return differing


def fingerprint(samples: SampleSet, grouping: str) -> dict[str, Any]:
    """What tells a training set from another: its size, a checksum over some of its samples, and how it is grouped."""
    import xxhash

    digest = xxhash.xxh3_64()
    for index in np.linspace(0, len(samples) - 1, min(len(samples), SAMPLES_LOOKED_AT)).astype(int):
        digest.update(np.ascontiguousarray(samples[int(index)]["input_ids"], dtype=np.int64).tobytes())
    return {"samples": len(samples), "checksum": digest.hexdigest(), "grouping": grouping}


def check_data(now: dict[str, Any], found: dict[str, Any], folder: Path) -> None:
    """Raises UserError where the training data is not what the checkpoint was made with."""
    if now == found:
        return
    changed = next(name for name in now if now[name] != found.get(name))
    what = {
        "samples": f"had {found['samples']:,} samples, and has {now['samples']:,} now,",
        "checksum": "had other samples",
        "grouping": f"was grouped by {found['grouping']!r}, and is now by {now['grouping']!r},",
    }
    raise UserError(
        f"the training data {what[changed]} when {folder} was written: its place in the data would be another. "
        "Restore the data, or start over with --resume never"
    )
