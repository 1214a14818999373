"""Meta's params.json and transformers' LlamaConfig: each from the other.

Source of the FFN's size and of the scaled RoPE: model.py of github.com/meta-llama/llama3 and llama-models.
"""

from typing import Any

from transformers import LlamaConfig

from zerofit.recipe.errors import UserError
from zerofit.tools.convert.meta.folder import DEFAULT_THETA, MetaFolder
from zerofit.tools.convert.meta.layout import Sizes

LLAMA_3_THETA = 500_000.0
SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
POSITIONS = {"1": 2048, "2": 4096, "3": 8192, "3.1": 131072, "code": 16384}


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


def ffn_size(dim: int, multiple_of: int = 256, ffn_dim_multiplier: float | None = None) -> int:
    """The hidden size of the FFN that Meta's code derives."""
    hidden = int(2 * (4 * dim) / 3)
    if ffn_dim_multiplier is not None:
        hidden = int(ffn_dim_multiplier * hidden)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def scaling_factor(meta: MetaFolder) -> float | None:
    """The factor that stretches RoPE; None: it is not stretched. Llama 3.1 and 3.2 have the same params.json and
    different factors."""
    if not meta.params.get("use_scaled_rope"):
        return None
    return float(meta.params.get("rope_scaling_factor") or (32.0 if meta.tied else 8.0))


def config_of(meta: MetaFolder, ends: tuple[int, int | list[int]], factor: float | None):
    """transformers' configuration for a checkpoint of Meta's.

    Args:
        ends: the ids of the beginning and of the end of a text.
        factor: of `scaling_factor`.
    """
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


def sizes_of(config) -> Sizes:
    """The sizes of a transformers configuration."""
    return Sizes(
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
    )


def check_config(config, says: str, shards: int) -> None:
    """Raises UserError, with everything that Meta's code does not support, and sizes that do not divide."""
    if config.model_type != "llama":
        raise UserError(f"{says} is not a Llama: its config.json says {config.model_type}. Meta's code has no other")
    rope = config.rope_parameters
    supported = {
        "rope_type": ("default", "llama3"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": ("silu", "swish"),
        "head_dim": (config.hidden_size // config.num_attention_heads,),
    }
    if rope.get("rope_type") == "llama3":
        supported |= {name: (value,) for name, value in SCALED.items()}
    found = {"rope_type": "default", **config.to_dict(), **rope}
    problems = [
        f"{says} has {name} = {found.get(name)}, and Meta's code supports {' or '.join(map(str, values))} only"
        for name, values in supported.items()
        if found.get(name) not in values
    ]
    sizes = sizes_of(config)
    for name, size in (
        ("num_attention_heads", sizes.heads),
        ("intermediate_size", sizes.ffn),
        ("vocab_size", sizes.vocab),
        ("hidden_size", sizes.dim),
    ):
        if size % shards:
            problems.append(f"shards = {shards}: {name} = {size} cannot be cut into that many. Choose a divisor")
    if sizes.kv_heads % shards and shards % sizes.kv_heads:
        problems.append(f"shards = {shards}: num_key_value_heads = {sizes.kv_heads} cannot be divided among that many")
    if problems:
        raise UserError(problems)


def cut_along_vocabulary(config) -> bool:
    """Whether the embeddings are cut as Llama 3's are."""
    rope = config.rope_parameters
    return rope.get("rope_type") == "llama3" or rope["rope_theta"] == LLAMA_3_THETA


def params_of(config) -> dict[str, Any]:
    """params.json of a transformers configuration."""
    rope, sizes = config.rope_parameters, sizes_of(config)
    params = {
        "dim": sizes.dim,
        "n_layers": sizes.layers,
        "n_heads": sizes.heads,
        "n_kv_heads": sizes.kv_heads,
        "vocab_size": sizes.vocab,
        **ffn_params(sizes.dim, sizes.ffn),
        "norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "max_seq_len": config.max_position_embeddings,
    }
    if rope.get("rope_type") == "llama3":
        params |= {"use_scaled_rope": True, "rope_scaling_factor": rope["factor"]}
    return params


def ffn_params(dim: int, ffn: int) -> dict[str, Any]:
    """multiple_of, and ffn_dim_multiplier where it takes one, from which Meta's code derives this size of the FFN."""
    if ffn_size(dim) == ffn:
        return {"multiple_of": 256}
    multiple = ffn & -ffn  # the largest power of two that divides it
    if ffn_size(dim, multiple) == ffn:
        return {"multiple_of": multiple}
    return {"multiple_of": multiple, "ffn_dim_multiplier": (ffn + 1 - multiple / 2) / ffn_size(dim, 1)}
