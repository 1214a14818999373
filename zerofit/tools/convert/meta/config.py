"""transformers' LlamaConfig from Meta's params.json.

Source of the scaled RoPE: model.py of github.com/meta-llama/llama3 and llama-models.
"""

from typing import Any

from transformers import LlamaConfig

from zerofit.tools.convert.meta.folder import DEFAULT_THETA, MetaFolder

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
