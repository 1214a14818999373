"""Evaluation by generation: what the model writes for each held-out source, BLEU and ROUGE, and predictions.jsonl.

Every rank generates for its share; fillers make the last batches equal, so that under ZeRO-3, where every forward pass
takes all ranks, nobody waits for a rank that has nothing left to do. What leaves a rank is texts.
"""

from collections.abc import Iterator
from typing import Any

import torch

from train.data.collate import Batch
from train.data.pairs import HeldOutPairs, PairData
from train.recipe.tasks import Seq2SeqRecipe
from train.run.evaluate import one_row_each
from train.run.folder import RunFolder
from train.run.metrics import compute

FIGURES = ("bleu", "rouge1", "rouge2", "rougeL")
SHOWN = 40  # characters of a trivial answer


def generation_settings(recipe: Seq2SeqRecipe, widths: tuple[int, int]) -> dict[str, Any]:
    """What the search is told; the rest is the model's own generation configuration."""
    settings = {
        "max_new_tokens": recipe.val_max_target_length or widths[1],
        "min_new_tokens": recipe.val_min_target_length,
        "num_beams": recipe.num_beams,
        "do_sample": False,
    }
    return {name: value for name, value in settings.items() if value is not None}


@torch.no_grad()
def evaluate_generation(
    engine, batches: Iterator[Batch], data: PairData, folder: RunFolder, settings: dict[str, Any]
) -> dict[str, float]:
    """BLEU and ROUGE of the generated texts against the whole targets; the main process also writes them down."""
    found, tokenizer = {}, data.tokenizer
    for batch in batches:
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        written = engine.generate(ids, mask, **settings)
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        found |= zip(batch.indices, (text.strip() for text in texts))
    texts = one_row_each(engine, found)
    figures = {}
    if texts is not None:
        folder.write_predictions(_lines(data.validation, texts, tokenizer))
        figures = compute("generation", texts, data.validation.targets)
    figures = engine.from_main(figures)
    return {f"eval_{name}": value for name, value in figures.items()}


def trivial_answers(held_out: HeldOutPairs | None) -> list[str]:
    """For the log: what one and the same answer reaches, the target that training has most often."""
    if held_out is None:
        return []
    usual = held_out.usual if len(held_out.usual) < SHOWN else f"{held_out.usual[:SHOWN]}..."
    figures = compute("generation", [held_out.usual] * len(held_out.targets), held_out.targets)
    return [f"baseline    always {usual!r}: " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items())]


def _lines(held_out: HeldOutPairs, texts: list[str], tokenizer) -> Iterator[dict[str, str]]:
    for index, (target, text) in enumerate(zip(held_out.targets, texts)):
        source = tokenizer.decode(held_out.samples[index]["input_ids"], skip_special_tokens=True).strip()
        yield {"source": source, "target": target, "prediction": text}


def shown(folder: RunFolder, batch_size: int, num_batches: int) -> list[str]:
    """The first generated text of each of the first batches, for the log."""
    lines = []
    for row in folder.predictions()[: batch_size * num_batches : batch_size]:
        lines += ["", f"  | source      {row['source']}", f"  | target      {row['target']}",
                  f"  | prediction  {row['prediction']}"]  # fmt: skip
    return lines
