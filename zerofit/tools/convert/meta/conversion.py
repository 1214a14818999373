"""A checkpoint of Meta's as a transformers folder, proven before the folder gets its name.

Source of the scaled RoPE: model.py of github.com/meta-llama/llama3 and llama-models.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from zerofit.model.pretrained_io import atomic_folder
from zerofit.recipe.parsing import counted
from zerofit.tools.convert.meta.folder import DEFAULT_THETA, MetaFolder
from zerofit.tools.convert.meta.weight_names import same_bits, to_hf
from zerofit.tools.meta_tokenizer import ConvertedTokenizer, convert_tokenizer, find_tokenizer

LARGEST_FILE = 4 * 2**30  # bytes, about: what is in memory
INDEX = "model.safetensors.index.json"
LLAMA_3_THETA = 500_000.0
SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
POSITIONS = {"1": 2048, "2": 4096, "3": 8192, "3.1": 131072, "code": 16384}


def from_meta(folder: str, output: Path, tokenizer_file: str | None) -> list[str]:
    """Write a checkpoint of Meta's as a transformers folder. Returns lines for the terminal.

    Args:
        tokenizer_file: None: in the folder, or in that above it; "none": there is none.
    """
    source = Path(folder).expanduser()
    meta = MetaFolder(source)
    version, factor = version_of(meta.params), scaling_factor(meta)
    tokenizer = convert_tokenizer(find_tokenizer(source, tokenizer_file), meta.sizes.vocab, version)
    config = config_of(meta, tokenizer.ends, factor)
    notes = [*_describe(meta, config, factor), *tokenizer.notes]
    with atomic_folder(output) as partial:
        files = _write_hf(meta, config, tokenizer, partial)
        notes.append(f"written      {len(meta.weights)} weights in {counted(len({*files.values()}), 'file')}")
        notes.append(prove(meta, partial, files))
    return notes


def theta_of(params: dict[str, Any]) -> float:
    return float(params.get("rope_theta") or DEFAULT_THETA)


def version_of(params: dict[str, Any]) -> str:
    """1, 2, 3, 3.1 (and later) or code, derived from params.json, which has no version.

    Llama 1 has an epsilon of 1e-6, Llama 2 of 1e-5; Code Llama and Llama 3 turn more slowly.
    """
    if params.get("use_scaled_rope"):
        return "3.1"
    theta = theta_of(params)
    if theta == LLAMA_3_THETA:
        return "3"
    if theta > DEFAULT_THETA:
        return "code"
    return "1" if params.get("norm_eps", 1e-5) == 1e-6 else "2"


def scaling_factor(meta: MetaFolder) -> float | None:
    """The factor that stretches RoPE; None: it is not stretched. params.json of Llama 3.1 and 3.2 do not differ."""
    factor = float(meta.params.get("rope_scaling_factor") or (32.0 if meta.tied else 8.0))
    return factor if meta.params.get("use_scaled_rope") else None


def config_of(meta: MetaFolder, ends: tuple[int, int | list[int]], factor: float | None) -> LlamaConfig:
    """transformers' configuration for a checkpoint of Meta's; `ends`: ids of the beginning and the end of a text."""
    sizes, params = meta.sizes, meta.params
    rope = {"rope_type": "default", "rope_theta": theta_of(params)}
    if factor:
        rope |= {"rope_type": "llama3", "factor": factor, **SCALED}
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=sizes.vocab,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=params.get("norm_eps", 1e-5),
        max_position_embeddings=params.get("max_seq_len") or POSITIONS[version_of(params)],
        rope_parameters=rope,
        tie_word_embeddings=meta.tied,
        bos_token_id=ends[0],
        eos_token_id=ends[1],
    )


def _describe(meta: MetaFolder, config: LlamaConfig, factor: float | None) -> list[str]:
    about = ", ".join(f"{name} {size}" for name, size in vars(meta.sizes).items())
    tied = ", head tied" if meta.tied else ""
    positions = f"{config.max_position_embeddings} positions{tied}"
    lines = [f"read         {counted(len(meta.files), 'file')}: {about}, {positions}"]
    if factor and not meta.params.get("rope_scaling_factor"):
        lines.append(f"note: use_scaled_rope by a factor of {factor:g}; its factor in config.json may be another")
    return lines


def _write_hf(meta: MetaFolder, config: LlamaConfig, tokenizer: ConvertedTokenizer, folder: Path) -> dict[str, str]:
    """Write the folder; the weights of one file are in memory. Returns {name of a weight: file}. Raises RuntimeError:
    the shapes are not those of transformers' model of the configuration."""
    found = {weight.hf: weight for weight in meta.weights}
    config.dtype = meta.dtype
    with torch.device("meta"):
        expected = {name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()}
    wrong = sorted(expected.items() ^ {(name, weight.shape) for name, weight in found.items()})
    if wrong:
        raise RuntimeError(f"{wrong[0][0]} of {wrong[0][1]} is not in both models ({len(wrong)} such)")
    empty = {name: torch.empty(weight.shape, dtype=meta.dtype, device="meta") for name, weight in found.items()}
    files = split_torch_state_dict_into_shards(empty, max_shard_size=LARGEST_FILE)
    for file, names in tqdm(files.filename_to_tensors.items(), "convert", leave=False, disable=None):
        tensors = {name: to_hf(meta.read(found[name]), found[name].heads).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save(folder, config.max_position_embeddings)
    return files.tensor_to_filename


def prove(meta: MetaFolder, folder: Path, files: dict[str, str]) -> str:
    """Read every written weight back, and compare it with Meta's, bit for bit. Returns a line for the terminal, or
    raises RuntimeError. `files`: {name of a weight: file}."""
    opened = {file: safe_open(folder / file, "pt") for file in set(files.values())}
    for weight in tqdm(meta.weights, "check", leave=False, disable=None):
        written = opened[files[weight.hf]].get_tensor(weight.hf)
        if not same_bits(to_hf(meta.read(weight), weight.heads), written):
            raise RuntimeError(f"{weight.hf} is not {weight.meta}. Nothing is written")
    return f"proven       shapes, and {len(meta.weights)} weights, bit for bit"
