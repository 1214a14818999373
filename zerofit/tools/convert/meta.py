"""The conversion of Meta's checkpoints to transformers' format; the result is checked before the folder gets its name.

Meta's folder has params.json and the shards of tensor-parallel processes, consolidated.00.pth and so on. The shards
are memory-mapped: a weight is read from the disk when it is needed. Nothing in them is executed.

Sources: names and splits of Meta's model.py, and the scaled RoPE (github.com/meta-llama: llama, llama3, llama-models);
the permutation of transformers' convert_llama_weights_to_hf.py, up to 4.x. Meta rotates the rows 2i and 2i + 1 of a
head together, transformers i and i + head_dim / 2, so the rows of wq and wk have another order.
"""

import json
import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from zerofit.model.configuration import read_json
from zerofit.model.pretrained_io import atomic_folder
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import counted
from zerofit.tools.meta_tokenizer import ConvertedTokenizer, convert_tokenizer, find_tokenizer


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes that determine all shapes of a Llama."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


@dataclass(frozen=True)
class MetaWeight:
    """The names of one weight in both formats, and its unsharded shape.

    Args:
        heads: the number of heads of a matrix that RoPE rotates; 0 for others, which are equal in both formats.
        copied: True if several processes may have the same shard, such as with fewer key and value heads than shards.
    """

    meta: str
    hf: str
    shape: tuple[int, ...]
    heads: int = 0
    copied: bool = False


def list_weights(sizes: LlamaSizes) -> list[MetaWeight]:
    """Return all weights in transformers' order, the embeddings first and the head last."""
    s = sizes
    queries = sizes.heads * sizes.head_dim
    keys = sizes.kv_heads * sizes.head_dim
    weights = [MetaWeight("tok_embeddings.weight", "model.embed_tokens.weight", (s.vocab, s.dim), copied=True)]
    for number in range(s.layers):
        meta = f"layers.{number}."
        hf = f"model.layers.{number}."
        attention = f"{hf}self_attn."
        mlp = f"{hf}mlp."
        weights += [
            MetaWeight(f"{meta}attention.wq.weight", f"{attention}q_proj.weight", (queries, s.dim), s.heads),
            MetaWeight(f"{meta}attention.wk.weight", f"{attention}k_proj.weight", (keys, s.dim), s.kv_heads, True),
            MetaWeight(f"{meta}attention.wv.weight", f"{attention}v_proj.weight", (keys, s.dim), copied=True),
            MetaWeight(f"{meta}attention.wo.weight", f"{attention}o_proj.weight", (s.dim, queries)),
            MetaWeight(f"{meta}feed_forward.w1.weight", f"{mlp}gate_proj.weight", (s.ffn, s.dim)),
            MetaWeight(f"{meta}feed_forward.w2.weight", f"{mlp}down_proj.weight", (s.dim, s.ffn)),
            MetaWeight(f"{meta}feed_forward.w3.weight", f"{mlp}up_proj.weight", (s.ffn, s.dim)),
            MetaWeight(f"{meta}attention_norm.weight", f"{hf}input_layernorm.weight", (s.dim,)),
            MetaWeight(f"{meta}ffn_norm.weight", f"{hf}post_attention_layernorm.weight", (s.dim,)),
        ]
    weights.append(MetaWeight("norm.weight", "model.norm.weight", (s.dim,)))
    weights.append(MetaWeight("output.weight", "lm_head.weight", (s.vocab, s.dim), copied=True))
    return weights


def permute_to_hf(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a weight of Meta's with transformers' order of rows: in each head first the even, then the odd ones."""
    if not heads:
        return tensor
    rows, columns = tensor.shape
    return tensor.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def equal_bits(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True if two tensors are equal bit for bit, NaN included."""
    same = tensor.shape == expected.shape and tensor.dtype == expected.dtype
    return same and torch.equal(tensor.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


IGNORED_WEIGHTS = re.compile(r"(.*\.)?rope\.freqs")  # in files of Llama 1 and 2; they follow from head_dim
# Keys of params.json that mean another architecture.
FOREIGN_PARAMS = ("moe", "moe_args", "sliding_window", "vision_chunk_size", "quantization", "lora_args")
DEFAULT_THETA = 10000.0


class MetaFolder:
    """A checkpoint of Meta's in a folder. Every shard of every weight exists and has its shape, else UserError.

    Attributes:
        params: the content of params.json.
        sizes: the sizes that params.json and the weights' shapes give.
        weights: the weights to convert, without a tied head.
        cuts: {Meta's name: (the axis along which shards are cut; None: they are copies; how many are the same)}.
        tied: True if the head equals the embeddings, or is missing.
    """

    def __init__(self, path: Path):
        self.path = path
        self.given = f"input = {str(path)!r}"
        self.files = self._find_files()
        self.params = self._read_params()
        self.shards = [self._load(file) for file in self.files]  # memory-mapped
        self._check_names()
        self.sizes = self._sizes()
        weights = list_weights(self.sizes)
        self.cuts = {weight.meta: self._cut(weight) for weight in weights if weight.meta in self.shards[0]}
        embeddings = weights[0]
        head = weights[-1]
        self.tied = head.meta not in self.shards[0] or equal_bits(self.read(embeddings), self.read(head))
        self.weights = weights[:-1] if self.tied else weights

    def _find_files(self) -> list[Path]:
        if not self.path.is_dir():
            raise UserError(f"{self.given} is not a folder. Name the one with consolidated.00.pth and params.json")
        files = {
            int(match[1]): file
            for file in self.path.iterdir()
            if (match := re.fullmatch(r"consolidated\.(\d+)\.pth", file.name))
        }
        if not files:
            note = " (it is transformers' already)" if (self.path / "config.json").is_file() else ""
            raise UserError(f"{self.given} has no consolidated.00.pth{note}. Name the folder of Meta's weights")
        missing = sorted(set(range(max(files) + 1)) - files.keys())
        if missing:
            names = ", ".join(f"consolidated.{number:02}.pth" for number in missing)
            raise UserError(f"{self.given} lacks {names}. Copy all of the checkpoint's files into it")
        return [files[number] for number in sorted(files)]

    def _read_params(self) -> dict[str, Any]:
        file = self.path / "params.json"
        if not file.is_file():
            raise UserError(f"{self.given} has no params.json. Copy it from the original checkpoint")
        params = read_json(file)
        params = params.get("model", params)
        sizes = {name: params.get(name) for name in ("dim", "n_layers", "n_heads", "n_kv_heads")}
        sizes["n_kv_heads"] = sizes["n_kv_heads"] or sizes["n_heads"]
        problems = [
            f"{file}: {name} = {value!r}, and a number above 0 was expected"
            for name, value in sizes.items()
            if type(value) is not int or value < 1
        ]
        foreign = [name for name in FOREIGN_PARAMS if params.get(name)]
        if foreign:
            problems.append(f"{self.given} is not a Llama: params.json has {foreign[0]}")
        if problems:
            raise UserError(problems)
        return params

    def _load(self, file: Path) -> dict[str, Any]:
        is_zip = zipfile.is_zipfile(file)  # torch before 1.6 wrote another format, which cannot be mapped
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
        except pickle.UnpicklingError as error:
            match = re.search(r"(?:GLOBAL|[Uu]nsupported (?:class|global)) ([\w.]+)", str(error))
            why = f"would execute {match[1]}" if match else "is not a file of torch.save"
            raise UserError(f"{file} {why}. It was not read. Take the weights from their publisher") from None
        except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
            raise UserError(f"{file} is broken: {first_line(error)}. Copy it again") from None
        tensors = content.values() if isinstance(content, dict) else [None]
        if not all(isinstance(tensor, torch.Tensor) and tensor.dim() in (1, 2) for tensor in tensors):
            raise UserError(f"{file} is not a Llama: it has something else than named vectors and matrices")
        return {name: tensor for name, tensor in content.items() if not IGNORED_WEIGHTS.fullmatch(name)}

    def _check_names(self) -> None:
        layers = self.params["n_layers"]
        expected = {weight.meta for weight in list_weights(LlamaSizes(1, layers, 1, 1, 1, 1, 1))}
        for file, shard in zip(self.files, self.shards):
            unknown = sorted(shard.keys() - expected)
            missing = sorted(expected - shard.keys() - {"output.weight"})
            problems = [*(f"has {name}" for name in unknown), *(f"lacks {name}" for name in missing)]
            if problems:
                raise UserError(
                    f"{file} is not a Llama (1, 2 or 3) of {layers} layers, as params.json says: it {problems[0]} "
                    f"({len(problems)} such)"
                )
            if shard.keys() != self.shards[0].keys():
                raise UserError(f"{file} has other weights than {self.files[0].name}: they are of two checkpoints")

    def _sizes(self) -> LlamaSizes:
        """Return the sizes in params.json; the vocabulary, if it is missing there, is that of the weights. Shards of
        the embeddings that are as wide as the model are cut along the vocabulary (Llama 3), or are all the same."""
        params = self.params
        heads = params["n_heads"]
        given = params.get("vocab_size", -1)
        first, *others = (shard["tok_embeddings.weight"] for shard in self.shards)
        vocab = first.shape[0]
        if others and first.shape[-1] == params["dim"] and not equal_bits(first, others[0]):
            vocab *= len(self.shards)
        if given not in (None, -1, vocab):
            raise UserError(f"{self.given}: vocab_size = {given} is not {vocab}. Correct it, or write -1")
        return LlamaSizes(
            dim=params["dim"],
            layers=params["n_layers"],
            heads=heads,
            kv_heads=params.get("n_kv_heads") or heads,
            head_dim=params.get("head_dim") or params["dim"] // heads,
            ffn=self.shards[0]["layers.0.feed_forward.w1.weight"].shape[0] * len(self.files),
            vocab=vocab,
        )

    def _cut(self, weight: MetaWeight) -> tuple[int | None, int]:
        """Return (axis, copies): how a weight was cut for tensor parallelism, by the shape of its shards (Llama 1 and
        2 cut embeddings along the hidden dimension, Llama 3 along the vocabulary). Shard i is part i // copies; axis
        None: all shards are the full weight. Raises UserError: the shapes fit no known way."""
        shapes = {tuple(shard[weight.meta].shape) for shard in self.shards}
        shard = next(iter(shapes))
        full = weight.shape
        num_shards = len(self.files)
        if shapes == {full} and (num_shards == 1 or weight.copied or len(full) == 1):
            return None, 1
        for axis in (0, 1) if len(shapes) == 1 and len(shard) == len(full) == 2 else ():
            parts, remainder = divmod(full[axis], shard[axis])
            fits = parts and not remainder and shard[1 - axis] == full[1 - axis]
            if fits and num_shards % parts == 0 and (parts == num_shards or weight.copied):
                return axis, num_shards // parts
        raise UserError(
            f"{self.given}: {weight.meta} has {' and '.join(map(str, sorted(shapes)))} in {num_shards} files, "
            f"and params.json gives {full}. A file is missing, or they are of two checkpoints"
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0]["tok_embeddings.weight"].dtype

    def read(self, weight: MetaWeight) -> torch.Tensor:
        """Return a weight, concatenated from its shards, with Meta's order of rows."""
        axis, copies = self.cuts[weight.meta]
        shards = [shard[weight.meta] for shard in self.shards]
        if axis is None or len(shards) == 1:
            return shards[0]
        return torch.cat(shards[::copies], axis)


MAX_META_FILE_BYTES = 4 * 2**30  # of a written file, which is in memory while it is written
INDEX_FILE = "model.safetensors.index.json"
LLAMA_3_THETA = 500_000.0
LLAMA_3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
VERSION_POSITIONS = {"1": 2048, "2": 4096, "3": 8192, "3.1": 131072, "code": 16384}


def from_meta(folder: str, output: Path, tokenizer_file: str | None) -> list[str]:
    """Convert a checkpoint of Meta's to a transformers folder. Returns lines for the terminal.

    Args:
        tokenizer_file: tokenizer.model; None: it is in the folder, or in the folder above; "none": there is none.
    """
    source = Path(folder).expanduser()
    meta = MetaFolder(source)
    version = llama_version(meta.params)
    factor = None
    if meta.params.get("use_scaled_rope"):  # params.json of Llama 3.1 and 3.2 do not differ
        factor = float(meta.params.get("rope_scaling_factor") or (32.0 if meta.tied else 8.0))
    tokenizer = convert_tokenizer(find_tokenizer(source, tokenizer_file), meta.sizes.vocab, version)
    config = make_config(meta, tokenizer.ends, factor)
    sizes = ", ".join(f"{name} {size}" for name, size in vars(meta.sizes).items())
    positions = f"{config.max_position_embeddings} positions{', head tied' if meta.tied else ''}"
    notes = [f"read         {counted(len(meta.files), 'file')}: {sizes}, {positions}"]
    if factor and not meta.params.get("rope_scaling_factor"):
        notes.append(f"note: use_scaled_rope by a factor of {factor:g}; its factor in config.json may be another")
    notes += tokenizer.notes
    with atomic_folder(output) as partial:
        files = _write_hf(meta, config, tokenizer, partial)
        notes.append(f"written      {len(meta.weights)} weights in {counted(len({*files.values()}), 'file')}")
        notes.append(check_weights(meta, partial, files))
    return notes


def rope_theta(params: dict[str, Any]) -> float:
    return float(params.get("rope_theta") or DEFAULT_THETA)


def llama_version(params: dict[str, Any]) -> str:
    """Return 1, 2, 3, 3.1 (and later) or code, derived from the values in params.json, which has no version.

    Llama 1 has an epsilon of 1e-6, Llama 2 of 1e-5; Code Llama and Llama 3 have a larger rope_theta.
    """
    if params.get("use_scaled_rope"):
        return "3.1"
    theta = rope_theta(params)
    if theta == LLAMA_3_THETA:
        return "3"
    if theta > DEFAULT_THETA:
        return "code"
    return "1" if params.get("norm_eps", 1e-5) == 1e-6 else "2"


def make_config(meta: MetaFolder, ends: tuple[int, int | list[int]], factor: float | None) -> LlamaConfig:
    """Return transformers' configuration of a checkpoint. `ends`: the ids of the begin and end tokens of a text."""
    sizes = meta.sizes
    params = meta.params
    rope = {"rope_type": "default", "rope_theta": rope_theta(params)}
    if factor:
        rope |= {"rope_type": "llama3", "factor": factor, **LLAMA_3_SCALING}
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
        max_position_embeddings=params.get("max_seq_len") or VERSION_POSITIONS[llama_version(params)],
        rope_parameters=rope,
        tie_word_embeddings=meta.tied,
        bos_token_id=ends[0],
        eos_token_id=ends[1],
    )


def _write_hf(meta: MetaFolder, config: LlamaConfig, tokenizer: ConvertedTokenizer, folder: Path) -> dict[str, str]:
    """Write the folder, with the weights of one file in memory. Returns {name of a weight: file}. Raises RuntimeError:
    the shapes differ from those of transformers' model with this configuration."""
    weights = {weight.hf: weight for weight in meta.weights}
    config.dtype = meta.dtype
    with torch.device("meta"):
        expected = {name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()}
    differing = sorted(expected.items() ^ {(name, weight.shape) for name, weight in weights.items()})
    if differing:
        name, shape = differing[0]
        raise RuntimeError(f"{name} of {shape} is not in both models ({len(differing)} such)")
    empty = {name: torch.empty(weight.shape, dtype=meta.dtype, device="meta") for name, weight in weights.items()}
    files = split_torch_state_dict_into_shards(empty, max_shard_size=MAX_META_FILE_BYTES)
    for file, names in tqdm(files.filename_to_tensors.items(), "convert", leave=False, disable=None):
        tensors = {name: permute_to_hf(meta.read(weights[name]), weights[name].heads).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save(folder, config.max_position_embeddings)
    return files.tensor_to_filename


def check_weights(meta: MetaFolder, folder: Path, files: dict[str, str]) -> str:
    """Read every written weight back, and compare it with Meta's, bit for bit. Returns a line for the terminal.
    `files`: {name of a weight: file}. Raises RuntimeError: a weight differs."""
    opened = {file: safe_open(folder / file, "pt") for file in set(files.values())}
    for weight in tqdm(meta.weights, "check", leave=False, disable=None):
        written = opened[files[weight.hf]].get_tensor(weight.hf)
        if not equal_bits(permute_to_hf(meta.read(weight), weight.heads), written):
            raise RuntimeError(f"{weight.hf} is not {weight.meta}. Nothing is written")
    return f"proven       shapes, and {len(meta.weights)} weights, bit for bit"
