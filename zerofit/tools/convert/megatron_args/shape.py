"""The model of Megatron's flags: one of transformers' families with its sizes, and its number of parameters."""

from dataclasses import dataclass
from pathlib import Path

from zerofit.recipe.parsing import parse_json
from zerofit.tools.convert.megatron_args.ledger import FlagLedger, FlagRow

LLAMA, GPT2, NEOX = "llama-2-7b", "gpt2", "open-calm-1b"  # configurations whose sizes are all overridden
OF_EXPERTS = "a mixture of experts of Megatron's is not converted; transformers' own train (docs/experts.md)"
FIXED = {  # flags of models that do not belong to any of the families
    "num_experts": OF_EXPERTS,
    "apply_residual_connection_post_layernorm": "no family has that order",
    "embed_layernorm": "no family normalises its embeddings",
    "qk_layernorm": "neither family normalises queries and keys",
    "add_qkv_bias": "a Llama has biases in all of its projections or in none",
    "multi_latent_attention": "neither family has it",
    "num_experts_switch": OF_EXPERTS,
    "quick_geglu": "neither family has that activation",
    "glu_activation": "a Llama's is swiglu: say --swiglu",
    "window_size": "neither family attends within a window",
    "use_rope_scaling": "scaled rotary positions are a matter of the weights: begin with some that have them",
    "kd": "nothing is distilled from a teacher here",
    "mock_data": "there is no made-up data; name a corpus with --data-path",
    "spec": "the model is built of layers that only Megatron has",
    "hybrid_override_pattern": "neither family is a hybrid",
}


@dataclass
class Shape:
    """Sizes with Megatron's names. `learned`: learned positions, else rotary ones."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    channels: int
    ffn: int
    positions: int
    gated: bool
    rms: bool
    learned: bool
    tied: bool
    bias: bool
    activation: str
    epsilon: float
    attention_dropout: float
    hidden_dropout: float
    init_std: float
    rope_theta: float
    rotary_percent: float

    @property
    def family(self) -> str | None:
        """The configuration to start from; None where no family has this shape."""
        if self.gated and self.rms and not self.learned:
            return LLAMA
        if self.gated or self.rms or not self.bias or self.kv_heads != self.heads:
            return None
        return GPT2 if self.learned else NEOX

    def parameters(self, vocabulary: int) -> int:
        """Megatron's weights: (embeddings + positions) + layers + last norm (+ head)."""
        inner, around = self.heads * self.channels, self.kv_heads * self.channels
        norm = self.hidden if self.rms else 2 * self.hidden
        wide = 2 * self.ffn if self.gated else self.ffn
        weights = (
            self.hidden * (inner + 2 * around) + inner * self.hidden + self.hidden * wide + self.ffn * self.hidden
        )
        biases = inner + 2 * around + self.hidden + wide + self.hidden if self.bias else 0
        tables = vocabulary * self.hidden * (1 if self.tied else 2) + self.learned * self.positions * self.hidden
        return tables + self.layers * (weights + biases + 2 * norm) + norm

    def overrides(self) -> str:
        """config_overrides of the family."""
        values = {LLAMA: self._llama, GPT2: self._gpt2, NEOX: self._neox}[self.family]()
        return ",".join(f"{name}={_written(value)}" for name, value in values.items() if value is not None)

    def _llama(self) -> dict:
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.channels,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": True if self.tied else None,
            "attention_bias": True if self.bias else None,
            "mlp_bias": True if self.bias else None,
            "rms_norm_eps": _unless(self.epsilon, 1e-5),
            "rope_theta": _unless(self.rope_theta, 10000.0),
            "attention_dropout": _unless(self.attention_dropout, 0.0),
            "initializer_range": _unless(self.init_std, 0.02),
        }

    def _gpt2(self) -> dict:
        return {
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_positions": self.positions,
            "n_inner": _unless(self.ffn, 4 * self.hidden),
            "tie_word_embeddings": None if self.tied else False,
            "activation_function": _unless(self.activation, "gelu_new"),
            "attn_pdrop": _unless(self.attention_dropout, 0.1),
            "resid_pdrop": _unless(self.hidden_dropout, 0.1),
            "embd_pdrop": _unless(self.hidden_dropout, 0.1),
            "layer_norm_epsilon": _unless(self.epsilon, 1e-5),
            "initializer_range": _unless(self.init_std, 0.02),
        }

    def _neox(self) -> dict:
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.positions,
            "hidden_act": self.activation,
            "tie_word_embeddings": True if self.tied else None,
            "attention_dropout": _unless(self.attention_dropout, 0.0),
            "hidden_dropout": _unless(self.hidden_dropout, 0.0),
            "layer_norm_eps": _unless(self.epsilon, 1e-5),
            "rope_theta": _unless(self.rope_theta, 10000.0),
            "partial_rotary_factor": _unless(self.rotary_percent, 1.0),
            "initializer_range": _unless(self.init_std, 0.02),
        }


def _unless(value, usual):
    return None if value == usual else value


def _written(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
            flags.problems.append(f"there is no --{name.replace('_', '-')}: a complete command line is needed")
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
        flags.wrong(flags.first("normalization", "layernorm_type"), "neither family has it: RMSNorm or LayerNorm")
    epsilon = flags.first("norm_epsilon", "layernorm_epsilon") or "norm_epsilon"
    theta = flags.first("rotary_base", "rotary_position_embeddings_theta") or "rotary_base"
    shape = Shape(
        layers=flags.number("num_layers", default=1),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(flags, heads),
        channels=flags.number("kv_channels", default=hidden // heads),
        ffn=flags.number("ffn_hidden_size", default=of_ffn),
        positions=flags.number("max_position_embeddings", default=flags.number("seq_length", default=1024)),
        gated=gated,
        rms=norm.lower() == "rmsnorm",
        learned=not rotary,
        tied=not (llama or flags.has("untie_embeddings_and_output_weights")),
        bias=not (llama or flags.first("disable_bias_linear", "no_bias")),
        activation=_activation(flags),
        epsilon=flags.number(epsilon, float, 1e-5),
        attention_dropout=flags.number("attention_dropout", float, 0.1),
        hidden_dropout=flags.number("hidden_dropout", float, 0.1),
        init_std=flags.number("init_method_std", float, 0.02),
        rope_theta=flags.number(theta, float, 10000.0),
        rotary_percent=flags.number("rotary_percent", float, 1.0),
    )
    if flags.problems:
        return None
    if position == "none":
        flags.wrong("no_position_embedding", "no family is without positions: add --use-rotary-position-embeddings")
    elif not shape.family:
        flags.problems.append(_no_family(shape))
    else:
        _add_rows(flags, shape, epsilon, theta)
        if llama:
            words = "its own defaults: rmsnorm, swiglu, rotary positions, no biases, an untied head"
            flags.rows["=program"] = FlagRow("(pretrain_llama.py)", "carried over", words)
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


def _activation(flags: FlagLedger) -> str:
    """Megatron's fused kernel and OpenAI's gelu compute the tanh approximation."""
    if flags.has("squared_relu"):
        return "relu2"
    unfused = flags.has("no_bias_gelu_fusion") and not flags.has("openai_gelu")
    return "gelu" if unfused and not flags.first("disable_bias_linear", "no_bias") else "gelu_new"


def _no_family(shape: Shape) -> str:
    words = [
        "swiglu" if shape.gated else "gelu",
        "rmsnorm" if shape.rms else "layernorm",
        "learned positions" if shape.learned else "rotary positions",
        "biases" if shape.bias else "no biases",
        *(["grouped queries"] if shape.kv_heads != shape.heads else []),
    ]
    return (
        f"there is no family with {', '.join(words)}. There are GPT-2 (gelu, layernorm, learned positions, biases), "
        "GPT-NeoX (the same with rotary positions) and Llama (swiglu, rmsnorm, rotary positions)"
    )


def _add_rows(flags: FlagLedger, shape: Shape, epsilon: str, theta: str) -> None:
    """Add the rows of the flags that determine the shape."""
    llama, family = shape.family == LLAMA, {LLAMA: "a Llama", GPT2: "a GPT-2", NEOX: "a GPT-NeoX"}[shape.family]
    written = dict(part.split("=") for part in shape.overrides().split(","))
    places = {
        "num_layers": ("num_hidden_layers", "n_layer"),
        "hidden_size": ("hidden_size", "n_embd"),
        "num_attention_heads": ("num_attention_heads", "n_head"),
        "ffn_hidden_size": ("intermediate_size", "n_inner"),
        "ffn_hidden_coeff": ("intermediate_size", "n_inner"),
        "num_key_value_heads": ("num_key_value_heads",),
        "num_query_groups": ("num_key_value_heads",),
        "kv_channels": ("head_dim",),
        "max_position_embeddings": ("max_position_embeddings", "n_positions"),
        epsilon: ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
        theta: ("rope_theta",),
        "rotary_percent": ("partial_rotary_factor",),
        "init_method_std": ("initializer_range",),
        "attention_dropout": ("attention_dropout", "attn_pdrop"),
        "hidden_dropout": ("resid_pdrop", "hidden_dropout"),
        "no_bias_gelu_fusion": ("activation_function", "hidden_act"),
        "openai_gelu": ("activation_function", "hidden_act"),
        "squared_relu": ("activation_function", "hidden_act"),
        "untie_embeddings_and_output_weights": ("tie_word_embeddings",),
    }
    for name, targets in places.items():
        target = next((one for one in targets if one in written), None)
        if flags.has(name) and target:
            flags.carried(name, f"config_overrides {target}={written[target]}")
        elif flags.has(name):
            flags.satisfied(name, f"{family} is like that")
    for name in (
        "swiglu",
        "activation_func_type",
        "normalization",
        "layernorm_type",
        "group_query_attention",
        "use_rotary_position_embeddings",
        "position_embedding_type",
        "no_position_embedding",
        "disable_bias_linear",
        "no_bias",
    ):
        if flags.has(name):
            flags.satisfied(name, f"{family} is like that")
    if llama and flags.has("hidden_dropout") and shape.hidden_dropout:
        flags.wrong("hidden_dropout", "a Llama of transformers has no such dropout. Say --hidden-dropout 0")
    elif llama and shape.hidden_dropout:
        words = "Megatron's default; a Llama of transformers has no such dropout"
        flags.rows["=hidden"] = FlagRow("(--hidden-dropout 0.1)", "no counterpart", words)
    if llama and shape.bias:
        flags.default("no --disable-bias-linear", "config_overrides attention_bias=true, mlp_bias=true")
    if not llama and shape.channels != shape.hidden // shape.heads:
        flags.wrong("kv_channels", f"in {family} it is hidden size / heads, {shape.hidden // shape.heads}")
    if llama and shape.rotary_percent != 1:
        flags.wrong("rotary_percent", "a Llama turns all of each head")
    if shape.heads % shape.kv_heads:
        flags.wrong(
            flags.first("num_key_value_heads", "num_query_groups") or "num_query_groups",
            f"it must divide the {shape.heads} heads",
        )
    if not flags.has("attention_dropout") and llama:
        flags.default("--attention-dropout 0.1", "config_overrides attention_dropout=0.1")


def of_weights(flags: FlagLedger, shape: Shape | None, folder: str) -> None:
    """Change the rows where the run starts from weights: their sizes agree with the flags, or are an error."""
    for row in flags.rows.values():
        if row.words.startswith("config_overrides"):
            row.fate, row.words = "satisfied", f"the weights of {folder} have it"
    flags.rows.pop("=hidden", None)
    file = Path(folder) / "config.json"
    if not (shape and file.is_file()):
        return
    stored = parse_json(file.read_text(encoding="utf-8"))
    sizes = {
        "num_layers": (shape.layers, "num_hidden_layers", "n_layer"),
        "hidden_size": (shape.hidden, "hidden_size", "n_embd"),
        "num_attention_heads": (shape.heads, "num_attention_heads", "n_head"),
        "ffn_hidden_size": (shape.ffn, "intermediate_size"),
        flags.first("num_key_value_heads", "num_query_groups") or "num_key_value_heads": (
            shape.kv_heads,
            "num_key_value_heads",
            "num_attention_heads",
            "n_head",
        ),
    }
    tied = stored.get("tie_word_embeddings", "n_embd" in stored)  # transformers' default: a GPT-2's are tied
    if tied != shape.tied:
        there = "there is no --untie-embeddings-and-output-weights, and " if not tied else ""
        words = f"{there}{file} says tie_word_embeddings: {str(tied).lower()}: make them agree"
        flags.wrong("" if there else "untie_embeddings_and_output_weights", words)
    for name, (size, *keys) in sizes.items():
        in_weights = next((stored[key] for key in keys if stored.get(key) is not None), size)
        if in_weights != size:
            flags.wrong(name, f"{file} says {in_weights}: make them agree")
