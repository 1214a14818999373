"""The model of Megatron's flags: one of transformers' families with its sizes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.model.configuration import load_configuration
from zerofit.model.pretrained_io import read_config
from zerofit.recipe.tasks import ClmRecipe
from zerofit.tools.convert.megatron_args.ledger import FlagLedger, FlagRow

FAMILIES = {
    "llama-2-7b": "a Llama",
    "gpt2": "a GPT-2",
    "open-calm-1b": "a GPT-NeoX",
}  # by a configuration to begin with
LLAMA, GPT2, NEOX = FAMILIES
OF_EXPERTS = "a mixture of experts of Megatron's is not converted; transformers' own train (docs/experts.md)"
FIXED = {  # flags of models that do not belong to any of the families
    "num_experts": OF_EXPERTS,
    "num_experts_switch": OF_EXPERTS,
    "glu_activation": "a Llama's is swiglu: say --swiglu",
    "use_rope_scaling": "scaled rotary positions are a matter of the weights: begin with some that have them",
    "mock_data": "there is no made-up data; name a corpus with --data-path",
    "kd": "nothing is distilled from a teacher here",
    **dict.fromkeys(
        "apply_residual_connection_post_layernorm embed_layernorm qk_layernorm add_qkv_bias multi_latent_attention "
        "quick_geglu window_size spec hybrid_override_pattern".split(),
        "no family has it (GPT-2, GPT-NeoX, Llama)",
    ),
}
OPTIONS = {  # {Megatron's flag: options of transformers' configuration in a Llama, a GPT-2, a GPT-NeoX}
    "hidden_size": ("hidden_size", "hidden_size", "hidden_size"),
    "ffn_hidden_size": ("intermediate_size", "n_inner", "intermediate_size"),
    "num_layers": ("num_hidden_layers", "num_hidden_layers", "num_hidden_layers"),
    "num_attention_heads": ("num_attention_heads", "num_attention_heads", "num_attention_heads"),
    "num_query_groups": ("num_key_value_heads", "", ""),
    "kv_channels": ("head_dim", "", ""),
    "max_position_embeddings": ("max_position_embeddings", "max_position_embeddings", "max_position_embeddings"),
    "openai_gelu": ("", "activation_function", "hidden_act"),
    "untie_embeddings_and_output_weights": ("tie_word_embeddings", "tie_word_embeddings", "tie_word_embeddings"),
    "disable_bias_linear": ("attention_bias mlp_bias", "", ""),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "rotary_base": ("rope_theta", "", "rope_theta"),
    "rotary_percent": ("", "", "partial_rotary_factor"),
    "attention_dropout": ("attention_dropout", "attn_pdrop", "attention_dropout"),
    "hidden_dropout": ("", "resid_pdrop embd_pdrop", "hidden_dropout"),
    "init_method_std": ("initializer_range", "initializer_range", "initializer_range"),
}
SAME = {  # other flags that decide the same
    "ffn_hidden_coeff": "ffn_hidden_size",
    "num_key_value_heads": "num_query_groups",
    "no_bias_gelu_fusion": "openai_gelu",
    "squared_relu": "openai_gelu",
    "no_bias": "disable_bias_linear",
    "layernorm_epsilon": "norm_epsilon",
    "rotary_position_embeddings_theta": "rotary_base",
}
OF_FAMILY = (  # flags that say which family it is
    "swiglu activation_func_type normalization layernorm_type group_query_attention use_rotary_position_embeddings "
    "position_embedding_type no_position_embedding"
).split()
COMPARED = (*list(OPTIONS)[:5], "untie_embeddings_and_output_weights")  # with those of weights to begin with


@dataclass
class Shape:
    """The model: its family, and {flag of OPTIONS: the value of its options}."""

    family: str
    values: dict[str, Any]

    def changed(self) -> dict[str, dict[str, Any]]:
        """{flag: {option: value}} of all sizes, and of what the family's configuration has otherwise."""
        config, column, changed = load_configuration(ClmRecipe(config_name=self.family)), list(FAMILIES), {}
        usual = {**config.to_dict(), **(getattr(config, "rope_parameters", None) or {})}
        for flag, names in OPTIONS.items():
            value, options = self.values[flag], names[column.index(self.family)].split()
            if type(value) is int or any(usual.get(option) != value for option in options):
                changed[flag] = dict.fromkeys(options, value)
        return {flag: options for flag, options in changed.items() if options}

    def overrides(self) -> str:
        """config_overrides of the family."""
        return ",".join(map(_written, self.changed().values()))


def _written(options: dict[str, Any]) -> str:
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    return ",".join(f"{name}={value}" for name, value in values.items())


def read_shape(flags: FlagLedger, program: str) -> Shape | None:
    """The model of the flags; None, with a problem, where it is none of the families.

    Args:
        program: pretrain_llama.py has defaults of its own (extra args provider of Habana's Megatron-DeepSpeed).
    """
    for name, why in FIXED.items():
        if flags.has(name) and flags.words(name) == ["1"]:
            flags.satisfied(name, "1: no mixture of experts")
        elif flags.has(name) and flags.words(name) not in (["0"], ["swiglu"]):
            flags.wrong(name, why)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not flags.has(name):
            flags.wrong(name, f"there is no --{name.replace('_', '-')}: a complete command line is needed")
    rotary, position = _positions(flags, "rotary" if program == "pretrain_llama.py" else "")
    hidden, heads = flags.number("hidden_size", default=64), flags.number("num_attention_heads", default=1)
    llama = program == "pretrain_llama.py"
    activation = flags.text("activation_func_type", "swiglu" if llama else None)
    if activation not in (None, "swiglu", "gelu"):
        flags.wrong("activation_func_type", "neither family has that activation: swiglu (Llama) or gelu (GPT-2)")
    gated = flags.has("swiglu") or "swiglu" in (flags.text("glu_activation"), activation)
    of_ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    if activation or flags.has("ffn_hidden_coeff"):
        of_ffn = int(flags.number("ffn_hidden_coeff", float, 8 / 3 if llama else 4.0) * hidden)
    norm = flags.text("normalization") or flags.text("layernorm_type") or ("rmsnorm" if llama else "layernorm")
    if norm.lower() not in ("rmsnorm", "layernorm"):
        flags.wrong(
            flags.first("normalization", "layernorm_type") or "", "neither family has it: RMSNorm or LayerNorm"
        )
    rms, bias = norm.lower() == "rmsnorm", not (llama or flags.first("disable_bias_linear", "no_bias"))
    values = {
        "hidden_size": hidden,
        "ffn_hidden_size": flags.number("ffn_hidden_size", default=of_ffn),
        "num_layers": flags.number("num_layers", default=1),
        "num_attention_heads": heads,
        "num_query_groups": _kv_heads(flags, heads),
        "kv_channels": flags.number("kv_channels", default=hidden // heads),
        "max_position_embeddings": flags.number(
            "max_position_embeddings", default=flags.number("seq_length", default=1024)
        ),
        "openai_gelu": _activation(flags, bias),
        "untie_embeddings_and_output_weights": not (llama or flags.has("untie_embeddings_and_output_weights")),
        "disable_bias_linear": bias,
        "norm_epsilon": flags.number(flags.first("layernorm_epsilon") or "norm_epsilon", float, 1e-5),
        "rotary_base": flags.number(flags.first("rotary_position_embeddings_theta") or "rotary_base", float, 10000.0),
        "rotary_percent": flags.number("rotary_percent", float, 1.0),
        "attention_dropout": flags.number("attention_dropout", float, 0.1),
        "hidden_dropout": flags.number("hidden_dropout", float, 0.1),
        "init_method_std": flags.number("init_method_std", float, 0.02),
    }
    if position == "none":
        flags.wrong("no_position_embedding", "no family is without positions: add --use-rotary-position-embeddings")
    if flags.problems:
        return None
    grouped = values["num_query_groups"] != heads
    if gated and rms and rotary:
        family = LLAMA
    elif gated or rms or not bias or grouped:
        words = [
            "swiglu" if gated else "gelu",
            "rmsnorm" if rms else "layernorm",
            "rotary positions" if rotary else "learned positions",
            "biases" if bias else "no biases",
            *(["grouped queries"] if grouped else []),
        ]
        flags.wrong("", f"no family has {', '.join(words)}: there are GPT-2, GPT-NeoX (rotary), Llama (swiglu)")
        return None
    else:
        family = NEOX if rotary else GPT2
    shape = Shape(family, values)
    _add_rows(flags, shape)
    if llama:
        own = "its own defaults: rmsnorm, swiglu, rotary positions, no biases, an untied head"
        flags.rows["=program"] = FlagRow("(pretrain_llama.py)", "carried over", own)
    return None if flags.problems else shape


def _positions(flags: FlagLedger, default: str) -> tuple[bool, str]:
    """(rotary, kind)."""
    kind = (flags.text("position_embedding_type") or default).lower().rpartition(".")[2]
    rotary = flags.has("use_rotary_position_embeddings") or kind in ("rope", "rotary")
    if kind not in ("", "rope", "rotary", "learned_absolute", "absolute", "learnable"):
        flags.wrong("position_embedding_type", "neither family has it: learned_absolute (GPT-2) or rope (Llama)")
    return rotary, "none" if flags.has("no_position_embedding") and not rotary else kind


def _kv_heads(flags: FlagLedger, heads: int) -> int:
    if flags.has("num_key_value_heads"):
        return flags.number("num_key_value_heads", default=heads)
    return flags.number("num_query_groups", default=1) if flags.has("group_query_attention") else heads


def _activation(flags: FlagLedger, bias: bool) -> str:
    """Megatron's fused kernel and OpenAI's gelu compute the tanh approximation."""
    if flags.has("squared_relu"):
        return "relu2"
    unfused = flags.has("no_bias_gelu_fusion") and not flags.has("openai_gelu")
    return "gelu" if unfused and bias else "gelu_new"


def _add_rows(flags: FlagLedger, shape: Shape) -> None:
    """Add the rows of the flags that determine the shape, and of Megatron's defaults that are not the family's."""
    family, changed = FAMILIES[shape.family], shape.changed()
    for name in flags.flags:
        flag = SAME.get(name, name)
        if flag in changed:
            flags.carried(name, f"config_overrides {_written(changed[flag])}")
        elif flag in OPTIONS or name in OF_FAMILY:
            flags.satisfied(name, f"{family} is like that")
    given = {SAME.get(name, name) for name in flags.flags}
    for flag, options in changed.items():
        value, words = shape.values[flag], f"config_overrides {_written(options)}"
        if flag not in given and isinstance(value, (bool, float)):
            spelled = f"--{flag.replace('_', '-')}"
            flags.default(f"no {spelled}" if isinstance(value, bool) else f"{spelled} {value}", words)
    hidden, heads = shape.values["hidden_size"], shape.values["num_attention_heads"]
    always = {"kv_channels": hidden // heads, "rotary_percent": 1.0, "hidden_dropout": 0.0}  # in a family without it
    for flag, value in always.items():
        if shape.values[flag] == value or OPTIONS[flag][list(FAMILIES).index(shape.family)]:
            continue
        if flag in given:
            flags.wrong(flag, f"{family} of transformers always has {value:g}")
        else:
            words = f"Megatron's default; {family} of transformers always has {value:g}"
            flags.rows[f"={flag}"] = FlagRow(
                f"(--{flag.replace('_', '-')} {shape.values[flag]})", "no counterpart", words
            )
    if heads % shape.values["num_query_groups"]:
        flags.wrong(
            flags.first("num_key_value_heads", "num_query_groups") or "num_query_groups",
            f"it must divide the {heads} heads",
        )


def of_weights(flags: FlagLedger, shape: Shape | None, folder: str) -> None:
    """Change the rows where the run starts from weights: their sizes agree with the flags, or are an error."""
    for row in flags.rows.values():
        if row.words.startswith("config_overrides"):
            row.status, row.words = "satisfied", f"the weights of {folder} have it"
    flags.rows.pop("=hidden_dropout", None)
    if not (shape and (Path(folder) / "config.json").is_file()):
        return
    config = read_config("model_name_or_path", folder)
    for flag in COMPARED:
        option, value = OPTIONS[flag][0], shape.values[flag]
        stored = getattr(config, option, None)
        if stored is not None and stored != value:
            name = next((name for name in flags.flags if SAME.get(name, name) == flag), "")
            there = "" if name else f"there is no --{flag.replace('_', '-')}, and "
            flags.wrong(name, f"{there}{folder} has {option}: {str(stored).lower()}: make them agree")
