"""`zerofit generate --logprobs K`: the K likeliest next tokens of a teacher at each position that is trained on.

Texts and conversations become samples as in train/clm.py (packing: documents), and each sample a record of
zerofit/data/distilled.py. They are written in parquet files of SHARD samples, so that processes share them, and a
launch after one that was killed writes only those that are missing.
"""

import os
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset

from zerofit.checkpoint.resume import fingerprint
from zerofit.data.causal import prepare_causal_data
from zerofit.data.collate import CausalCollator
from zerofit.data.distilled import TABLE, targets_of, vocabulary_key
from zerofit.data.pack import Sample, TextData
from zerofit.model.attention import packed_rows
from zerofit.model.folders import weights_key
from zerofit.model.preflight import DOCUMENT_TOKENS, choose_packed_attention, documents_leak
from zerofit.model.pretrained_io import silence_libraries
from zerofit.model.tokenizer import padding_token
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file
from zerofit.recipe.tasks import ClmRecipe
from zerofit.record.terminal import say_aside
from zerofit.tools.generate.generate_options import GenerateOptions
from zerofit.tools.generate.generation_model import ModelSource, find_model, load

SHARD = 256  # samples of a file


def write_logprobs(options: GenerateOptions) -> int:
    """Write what is missing of this process's files. Returns the exit code.

    Raises:
        UserError: the model or the data cannot be used, or the folder has files of other options.
    """
    silence_libraries()
    rank, processes = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    source = find_model(options)
    recipe = ClmRecipe(
        model_name_or_path=source.name,
        tokenizer_name=None if source.adapter is None else source.tokenizer.name_or_path,
        train_file=[options.prompt_file],
        validation_split_percentage=0,
        block_size=options.block_size,
        chat_template=options.chat_template,
        system_prompt=options.system_prompt,
        trust_remote_code=options.trust_remote_code,
    )
    data = prepare_causal_data(recipe, source.config)
    shards, folder = -(-len(data.train) // SHARD), Path(options.output).expanduser()
    stem = _digest(options, source, data)
    paths = [folder / f"{stem}-{shard:05}-of-{shards:05}.parquet" for shard in range(shards)]
    if others := {*folder.glob("*.parquet")} - {*paths}:
        raise UserError(f"output = {options.output!r} has files of other data or options: {min(others)}. Name another")
    missing = [path for path in paths[rank::processes] if not path.exists()]
    if not missing:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    model = load(source, options).eval()
    model.config.use_cache = False  # with a cache, transformers sees no documents
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(model.dtype, "fp32")
    choose_packed_attention(model, recipe, precision)
    collate = CausalCollator(padding_token(data.tokenizer))
    with torch.no_grad():
        if documents_leak(model, collate, len(data.tokenizer), model.device, DOCUMENT_TOKENS):
            raise UserError(f"model = {options.model!r}: a {source.config.model_type} mixes documents of a packed row")
        for path in missing:
            first = paths.index(path) * SHARD
            say_aside(f"{path.name}: samples {first:,} to {min(first + SHARD, len(data.train)) - 1:,}")
            samples = range(first, min(first + SHARD, len(data.train)))
            rows = [_record(model, data, data.train[index], collate, options.logprobs) for index in samples]
            with atomic_file(path, "wb") as file:
                Dataset.from_list(rows, features=TABLE).to_parquet(file)
    return 0


def _digest(options: GenerateOptions, source: ModelSource, data: TextData) -> str:
    """What the files depend on."""
    adapter = source.adapter and weights_key(str(source.adapter.path))
    weights, samples = (weights_key(source.name, source.config), adapter), fingerprint(data.train, "none")
    what = weights, options.precision, options.logprobs, data.train.stats, samples
    return sha256(repr(what).encode()).hexdigest()[:8]


def _record(model, data: TextData, sample: Sample, collate: CausalCollator, top_k: int) -> dict:
    """One sample of TABLE."""
    batch = collate([(sample, 0)]).to(model.device)
    inputs = {name: batch.inputs[name] for name in ("input_ids", "position_ids")}
    with packed_rows(batch.packed):
        logits = model(**inputs).logits[0]  # (T, V)
    has_target = torch.from_numpy(targets_of(sample["labels"])).to(logits.device)
    logits = logits[has_target, : len(data.tokenizer)].float()  # without what only fills a vocabulary up
    found, ids = logits.log_softmax(-1).topk(min(top_k, logits.shape[1]), dim=-1)
    return {
        "input_ids": sample["input_ids"],
        "labels": sample["labels"],
        "position_ids": sample["position_ids"],
        "teacher_ids": ids.flatten().cpu().numpy(),
        "teacher_log_probabilities": found.flatten().cpu().numpy(),
        "num_tokens": int(sample.get("num_tokens", np.array(len(sample["input_ids"])))),
        "top_k": len(ids[0]),
        "vocabulary": vocabulary_key(data.tokenizer),
    }
