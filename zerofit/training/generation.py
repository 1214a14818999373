"""Evaluation by generation: the texts that the model generates for the held-out sources, BLEU and ROUGE, and
predictions.jsonl.

Every rank generates for its part of the sources. Fillers give all ranks the same number of batches: under ZeRO-3 every
forward pass is a collective, and would hang if a rank had no batch left. The ranks gather texts.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from zerofit.data.collate import Batch, PromptCollator, multiple_for
from zerofit.data.pack import TextData
from zerofit.data.pairs import PairData
from zerofit.data.prompts import Renderer, longest_answer
from zerofit.model.tokenizer import padding_token
from zerofit.recipe.tasks import ClmRecipe, Seq2SeqRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import log_lines
from zerofit.strategy.engine import Engine
from zerofit.training.evaluation import compute, eval_batches, gather_by_index

GENERATION_FIGURES = ("bleu", "rouge1", "rouge2", "rougeL")


def generation_settings(recipe: Seq2SeqRecipe, widths: tuple[int, int], stored: GenerationConfig) -> dict[str, Any]:
    """Return the settings of generation that the recipe gives; others come from the model's generation configuration.

    Args:
        stored: that configuration. A launch without training takes the length from it, unless the recipe sets one.
    """
    max_new_tokens = recipe.val_max_target_length or widths[1]
    if not (recipe.trains or recipe.source("val_max_target_length") or recipe.source("max_target_length")):
        max_new_tokens = stored.max_new_tokens or max_new_tokens
    settings = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": recipe.val_min_target_length,
        "num_beams": recipe.num_beams,
        "do_sample": False,
    }
    return {name: value for name, value in settings.items() if value is not None}


@torch.no_grad()
def evaluate_generation(
    engine: Engine, batches: Iterator[Batch], data: PairData, folder: RunFolder, settings: dict[str, Any]
) -> dict[str, float]:
    """Return BLEU and ROUGE of the generated texts against the full targets; the main process also writes the texts to
    predictions.jsonl."""
    written = _written(engine, batches, data.tokenizer, settings)
    figures: dict[str, float] = {}
    if written is not None:
        texts = [text.strip() for text, _ in written]
        data.cut = sum(is_cut for _, is_cut in written)
        folder.write_predictions(_lines(data, texts))
        figures = compute("generation", texts, data.targets)
    figures = engine.from_main(figures)
    return {f"eval_{name}": value for name, value in figures.items()}


def sample_text(run: Any, data: TextData) -> list[str]:
    """Return lines for the log: the text that the model generates after `sample_prompt` (in a chat: its answer), as
    long as its positions allow. All ranks call it together. Without `sample_tokens`, or after a stop: none."""
    recipe = run.recipe
    engine = run.engine
    tokenizer = data.tokenizer
    if not recipe.sample_tokens or run.stopped:
        return []
    if engine.layout.pipeline > 1:
        command = f"zerofit generate --model {run.folder.model} --prompt TEXT"
        return [f"note      no sample: no rank of a pipeline has all layers. Use {command}"]
    if data.is_chat and recipe.sample_prompt:
        renderer = Renderer(tokenizer, engine.module.config, system=recipe.system_prompt)
        ids = torch.tensor([renderer.ids(recipe.sample_prompt)])
    else:
        prompt = recipe.sample_prompt or tokenizer.bos_token or tokenizer.eos_token or "\n"
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    max_tokens = getattr(engine.module.config, "max_position_embeddings", 10**6) - ids.shape[1]
    torch.manual_seed(recipe.seed)  # all ranks draw the same tokens
    written = engine.generate(
        ids,
        max_new_tokens=max(1, min(recipe.sample_tokens, max_tokens)),
        do_sample=True,
        temperature=0.8,
        top_k=50,
        pad_token_id=tokenizer.eos_token_id,
    )
    text = str(tokenizer.decode(written[0], skip_special_tokens=True))
    return [
        f"a sample of what it writes after update {run.state.updates:,}:",
        *("  | " + line for line in text.splitlines()),
    ]


def continue_prompts(engine: Engine, data: TextData, recipe: ClmRecipe, folder: RunFolder) -> list[str]:
    """Write predictions.jsonl: the continuation (in a chat: the answer) of each prompt of predict_file. Returns the
    files."""
    prompts: Any = data.prompts
    config = engine.module.config
    tokenizer = data.tokenizer
    model_ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = sorted({token for token in [*model_ends, tokenizer.eos_token_id, *prompts.ends] if token is not None})
    settings = {  # greedy: the most likely token each time
        "max_new_tokens": longest_answer(recipe.max_new_tokens, bool(recipe.source("max_new_tokens")), config),
        "do_sample": False,
        "num_beams": 1,
        "eos_token_id": ends or None,
        "pad_token_id": padding_token(tokenizer),
    }
    return predict_texts(engine, data, recipe.per_device_eval_batch_size, folder, settings)


@torch.no_grad()
def predict_texts(
    engine: Engine, data: TextData | PairData, batch_size: int, folder: RunFolder, settings: dict[str, Any]
) -> list[str]:
    """Write predictions.jsonl: the text generated for each prompt or source of predict_file. Returns the files."""
    prompts: Any = data.prompts
    config = engine.module.config
    in_pairs = engine.module.config.is_encoder_decoder
    pad = padding_token(data.tokenizer)
    multiple = multiple_for(engine.device, config)
    batches = eval_batches(engine, prompts, PromptCollator(pad, left=not in_pairs, multiple=multiple), batch_size)
    written = _written(engine, batches, data.tokenizer, settings)
    if written is None:
        return []
    texts = [text.strip() if prompts.is_chat else text for text, _ in written]
    option = "val_max_target_length" if in_pairs else "max_new_tokens"
    log_lines(*cut_texts(sum(is_cut for _, is_cut in written), len(written), option, settings))
    folder.write_predictions({**record, "prediction": text} for record, text in zip(prompts.records, texts))
    return ["predictions.jsonl"]


def _written(
    engine: Engine, batches: Iterator[Batch], tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> list[tuple[str, bool]] | None:
    """Return (the generated text, True if it was cut at the maximum length) for each row, on the main process (None
    elsewhere)."""
    texts: dict[int, tuple[str, bool]] = {}
    stored = engine.module.generation_config or GenerationConfig()
    stops = settings.get("eos_token_id") or stored.eos_token_id
    ends = set(stops if isinstance(stops, list) else [stops])
    ends -= {None}
    for batch in batches:
        ids = batch.tensor("input_ids")
        mask = batch.tensor("attention_mask")
        written = engine.generate(ids, mask, **settings)
        first = 1 if engine.module.config.is_encoder_decoder else ids.shape[1]
        max_length = settings["max_new_tokens"] - (stored.forced_eos_token_id is not None)  # always the last one
        cut = [not ends.intersection(row[first : first + max_length]) and bool(ends) for row in written.tolist()]
        if not engine.module.config.is_encoder_decoder:
            written = written[:, first:]
        texts |= zip(batch.indices, zip(tokenizer.batch_decode(written, skip_special_tokens=True), cut))
    return gather_by_index(engine, texts)


def cut_texts(cut: int, count: int, option: str, settings: dict[str, Any]) -> list[str]:
    """Return a line for the log on how many generated texts were cut at the maximum length."""
    if not cut:
        return []
    return [f"note      {cut:,} of {count:,} generated texts are cut at {option} = {settings['max_new_tokens']}"]


def _lines(data: PairData, texts: list[str]) -> Iterator[dict[str, str]]:
    assert data.validation is not None, "something is held out"
    for index, (target, text) in enumerate(zip(data.targets, texts)):
        source = str(data.tokenizer.decode(data.validation[index]["input_ids"], skip_special_tokens=True)).strip()
        yield {"source": source, "target": target, "prediction": text}


def prediction_lines(run: Any, recipe: Seq2SeqRecipe) -> list[str]:
    """Return lines for the log with the first generated text of each of the first batches; none if the run stopped."""
    batch_size = recipe.per_device_eval_batch_size
    num_batches = recipe.n_val_batch_generations
    if run.stopped or not run.data.num_held_out or not recipe.predict_with_generate or not run.is_main:
        return []
    lines = []
    fields = ("source", "target", "prediction")
    for row in run.folder.predictions(fields=fields)[: batch_size * num_batches : batch_size]:
        lines += [
            "",
            f"  | source      {row['source']}",
            f"  | target      {row['target']}",
            f"  | prediction  {row['prediction']}",
        ]
    return lines
