"""The parser of a Megatron command line, the ledger of its flags, and the shape of the model that they describe. Each
flag gets a status (carried over, satisfied, no counterpart, unknown) or a problem; none is dropped silently."""

import re
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any, Self

from zerofit.model.configuration import load_configuration, read_config
from zerofit.recipe.base import option
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import is_flag
from zerofit.recipe.tasks import ClmRecipe
from zerofit.tools.convert.megatron_args.flags import flag_status

PREPARATION_PROGRAMS = ("preprocess_data.py", "merge_datasets.py")
SEARCH_PROGRAM = "llmacc.pretrain"  # this module chooses the degrees itself, and then starts pretrain_gpt.py
PROGRAM_PATTERN = re.compile(
    rf"(pretrain_\w+\.py|finetune_\w+\.py|{'|'.join(map(re.escape, (*PREPARATION_PROGRAMS, SEARCH_PROGRAM)))})(?=\s|$)"
)
PROCESS_OPTIONS = ("nproc_per_node", "num_gpus", "gpus_per_node", "ntasks_per_node")
MACHINE_OPTIONS = ("nnodes", "num_nodes", "nodes")


@dataclass
class MegatronArgsOptions(Recipe):
    """A Megatron command line (pretrain_gpt.py, preprocess_data.py, merge_datasets.py) to a recipe and a strategy"""

    output: str | None = option(None, "The folder to write; by default outputs/megatron-converted.")
    overwrite: bool = option(False, "Replace files of an earlier conversion.")
    tokenizer_name: str | None = option(None, "The tokenizer's folder or hub name, instead of Megatron's files.")
    model_name_or_path: str | None = option(None, "Weights to begin with, instead of Megatron's --load.")
    num_processes: int | None = option(None, "Processes; by default as many as the launcher starts.", positive=True)


@dataclass
class MegatronCall:
    """A command line that starts one of Megatron's programs.

    Args:
        launcher: the words before the program's name.
    """

    program: str
    arguments: list[str]
    launcher: list[str] = field(default_factory=list)

    def launcher_option(self, names: tuple[str, ...]) -> str | None:
        """Return the value of the launcher's option with one of these names; "": no value, None: it is not given."""
        for word, following in zip(self.launcher, [*self.launcher[1:], ""]):
            name, equals, value = word.lstrip("-").partition("=")
            if word.startswith("-") and name.replace("-", "_") in names:
                return value if equals else "" if following.startswith("-") else following
        return None

    @property
    def processes(self) -> int | None:
        """The number of processes on one machine; None if the launcher does not say it."""
        number = self.launcher_option(PROCESS_OPTIONS)
        if number is None and self.launcher and re.match(r"(.*/)?(python|torchrun)", self.launcher[0]):
            return 1
        return positive_number(number)

    @property
    def machines(self) -> int:
        return positive_number(self.launcher_option(MACHINE_OPTIONS)) or 1


def positive_number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) > 0 else None


def read_call(words: list[str]) -> MegatronCall:
    """Read a command line: a launcher and a program, or arguments of pretrain_gpt.py alone."""
    at = next((index for index, word in enumerate(words) if PROGRAM_PATTERN.search(word)), None)
    if at is None:
        return MegatronCall("pretrain_gpt.py", list(words))
    program = PROGRAM_PATTERN.search(words[at])
    return MegatronCall(program[1] if program else "", words[at + 1 :], words[:at])


@dataclass
class FlagRow:
    flag: str
    status: str
    words: str


@dataclass
class FlagLedger:
    """The flags of one command line, with the status of each.

    Attributes:
        flags: {name with underscores: the words that follow it}; the last of several counts, as in argparse.
        problems: messages; if there are any, nothing is written.
    """

    flags: dict[str, list[str]] = field(default_factory=dict)
    rows: dict[str, FlagRow] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def from_call(cls, call: MegatronCall) -> Self:
        ledger = cls()
        name = None
        for word in call.arguments:
            if is_flag(word):
                written, equals, value = word[2:].partition("=")
                name = written.replace("-", "_")
                ledger.flags[name] = [value] if equals else []
            elif name:
                ledger.flags[name].append(word)
            else:
                ledger.refuse("", f"{word!r} is where a flag was expected")
        return ledger

    def has(self, name: str) -> bool:
        return name in self.flags

    def first_of(self, *names: str) -> str:
        """Return the first of these flags that was given; if none was given, the first one."""
        return next((name for name in names if name in self.flags), names[0])

    def as_written(self, name: str) -> str:
        """Return the flag with its value, as in the command line."""
        return " ".join([f"--{name.replace('_', '-')}", *self.flags[name]])

    def text(self, name: str) -> str | None:
        """Return the value of a flag; None if it is not given or has no value."""
        words = self.flags.get(name, [])
        if len(words) > 1:
            self.refuse(name, "one value was expected")
        return words[0] if words else None

    def number(self, name: str, kind: type[int | float] = int, default: Any = None) -> Any:
        """Return the value of a flag as a number; `default` if it is not given or is not a number."""
        if not self.has(name):
            return default
        try:
            (text,) = self.flags[name]
            return kind(text)
        except ValueError:
            self.refuse(name, f"{'an integer' if kind is int else 'a number'} was expected")
            return default

    def _row(self, status: str, name: str, words: str) -> None:
        """Add the row of a flag, if it was given."""
        if self.has(name):
            self.rows[name] = FlagRow(self.as_written(name), status, words)

    carried = partialmethod(_row, "carried over")
    satisfied = partialmethod(_row, "satisfied")
    unsupported = partialmethod(_row, "no counterpart")

    def default(self, flag: str, words: str) -> None:
        """Add a row for Megatron's default of a flag that was not given, if ours differs."""
        self.rows[f"={flag}"] = FlagRow(f"({flag})", "carried over", f"{words}  (Megatron's default)")

    def refuse(self, name: str, words: str) -> None:
        """Add a problem, which begins with the flag of that name, if it was given."""
        self.problems.append(f"{self.as_written(name)}: {words}" if self.has(name) else words)

    def finish(self) -> list[FlagRow]:
        """Return all rows: first those of the flags, in the order of the command line, then the others."""
        for name in self.flags:
            if name not in self.rows:
                self.rows[name] = FlagRow(self.as_written(name), *flag_status(name))
        given = [self.rows[name] for name in self.flags]
        return given + [row for name, row in self.rows.items() if name not in self.flags]


MODEL_FAMILIES = {"llama-2-7b": "a Llama", "gpt2": "a GPT-2", "open-calm-1b": "a GPT-NeoX"}  # {configuration: noun}
LLAMA, GPT2, NEOX = MODEL_FAMILIES
EXPERTS_MESSAGE = "a mixture of experts of Megatron's is not converted; transformers' own train (docs/experts.md)"
OTHER_FAMILY_FLAGS = {  # {flag of a model that is not in these families: problem}
    "num_experts": EXPERTS_MESSAGE,
    "num_experts_switch": EXPERTS_MESSAGE,
    "glu_activation": "a Llama's is swiglu: say --swiglu",
}
CONFIG_OPTIONS = {  # {Megatron's flag: options of transformers' configuration in MODEL_FAMILIES, one text per family}
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
FLAG_SYNONYMS = {  # {flag: the flag of CONFIG_OPTIONS that decides the same}
    "ffn_hidden_coeff": "ffn_hidden_size",
    "num_key_value_heads": "num_query_groups",
    "no_bias_gelu_fusion": "openai_gelu",
    "squared_relu": "openai_gelu",
    "no_bias": "disable_bias_linear",
    "layernorm_epsilon": "norm_epsilon",
    "rotary_position_embeddings_theta": "rotary_base",
}
FAMILY_FLAGS = (  # flags that determine the family
    "swiglu activation_func_type normalization layernorm_type group_query_attention use_rotary_position_embeddings "
    "position_embedding_type no_position_embedding"
).split()
CHECKED_WITH_WEIGHTS = (*list(CONFIG_OPTIONS)[:5], "untie_embeddings_and_output_weights")


@dataclass
class MegatronShape:
    """The model that the flags describe: its family, and {flag of CONFIG_OPTIONS: the value of its options}."""

    family: str
    values: dict[str, Any]

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return {flag: {option: value}}: all sizes, and other values that differ from the family's configuration."""
        config = load_configuration(ClmRecipe(config_name=self.family))
        family_index = list(MODEL_FAMILIES).index(self.family)
        changed = {}
        defaults = {**config.to_dict(), **(getattr(config, "rope_parameters", None) or {})}
        for flag, names in CONFIG_OPTIONS.items():
            value = self.values[flag]
            options = names[family_index].split()
            if options and (type(value) is int or any(defaults.get(option) != value for option in options)):
                changed[flag] = dict.fromkeys(options, value)
        return changed

    def overrides(self) -> str:
        """Return the text of --config_overrides that makes this model from the family's configuration."""
        return ",".join(map(_format_overrides, self.changed().values()))


def _format_overrides(options: dict[str, Any]) -> str:
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    return ",".join(f"{name}={value}" for name, value in values.items())


def read_shape(flags: FlagLedger, program: str) -> MegatronShape | None:
    """Return the model that the flags describe; None, with a problem, if no family is like it. pretrain_llama.py has
    other defaults (extra args provider of Habana's Megatron-DeepSpeed)."""
    for name, why in OTHER_FAMILY_FLAGS.items():
        words = flags.flags.get(name, ["0"])
        if words == ["1"]:
            flags.satisfied(name, "1: no mixture of experts")
        elif words not in (["0"], ["swiglu"]):
            flags.refuse(name, why)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not flags.has(name):
            flags.refuse(name, f"there is no --{name.replace('_', '-')}: a complete command line is needed")
    llama = program == "pretrain_llama.py"
    position = (flags.text("position_embedding_type") or ("rope" if llama else "")).lower().rpartition(".")[2]
    rotary = flags.has("use_rotary_position_embeddings") or position in ("rope", "rotary")
    if position not in ("", "rope", "rotary", "learned_absolute", "absolute", "learnable"):
        flags.refuse("position_embedding_type", "neither family has it: learned_absolute (GPT-2) or rope (Llama)")
    if flags.has("no_position_embedding") and not rotary:
        flags.refuse("no_position_embedding", "no family is without positions: add --use-rotary-position-embeddings")
    hidden = flags.number("hidden_size", default=64)
    heads = flags.number("num_attention_heads", default=1)
    length = flags.number("seq_length", default=1024)
    activation = flags.text("activation_func_type") or ("swiglu" if llama else None)
    if activation not in (None, "swiglu", "gelu"):
        flags.refuse("activation_func_type", "neither family has that activation: swiglu (Llama) or gelu (GPT-2)")
    gated = flags.has("swiglu") or "swiglu" in (flags.text("glu_activation"), activation)
    ffn_size = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    if activation or flags.has("ffn_hidden_coeff"):
        ffn_size = int(flags.number("ffn_hidden_coeff", float, 8 / 3 if llama else 4.0) * hidden)
    norm = flags.text("normalization") or flags.text("layernorm_type") or ("rmsnorm" if llama else "layernorm")
    if norm.lower() not in ("rmsnorm", "layernorm"):
        flags.refuse(flags.first_of("normalization", "layernorm_type"), "neither family has it: RMSNorm or LayerNorm")
    rms = norm.lower() == "rmsnorm"
    bias = not (llama or flags.has("disable_bias_linear") or flags.has("no_bias"))
    groups = flags.first_of("num_key_value_heads", "num_query_groups")
    grouped = flags.has("num_key_value_heads") or flags.has("group_query_attention")
    # Megatron's fused kernel and OpenAI's gelu compute the tanh approximation.
    unfused = flags.has("no_bias_gelu_fusion") and not flags.has("openai_gelu")
    values = {
        "hidden_size": hidden,
        "ffn_hidden_size": flags.number("ffn_hidden_size", default=ffn_size),
        "num_layers": flags.number("num_layers", default=1),
        "num_attention_heads": heads,
        "num_query_groups": flags.number(groups, default=1) if grouped else heads,
        "kv_channels": flags.number("kv_channels", default=hidden // heads),
        "max_position_embeddings": flags.number("max_position_embeddings", default=length),
        "openai_gelu": "relu2" if flags.has("squared_relu") else "gelu" if unfused and bias else "gelu_new",
        "untie_embeddings_and_output_weights": not (llama or flags.has("untie_embeddings_and_output_weights")),
        "disable_bias_linear": bias,
        "norm_epsilon": flags.number(flags.first_of("norm_epsilon", "layernorm_epsilon"), float, 1e-5),
        "rotary_base": flags.number(flags.first_of("rotary_base", "rotary_position_embeddings_theta"), float, 10000.0),
        "rotary_percent": flags.number("rotary_percent", float, 1.0),
        "attention_dropout": flags.number("attention_dropout", float, 0.1),
        "hidden_dropout": flags.number("hidden_dropout", float, 0.1),
        "init_method_std": flags.number("init_method_std", float, 0.02),
    }
    if flags.problems:
        return None
    if gated and rms and rotary:
        family = LLAMA
    elif gated or rms or not bias or values["num_query_groups"] != heads:
        flags.refuse(
            "",
            f"no family has {'swiglu' if gated else 'gelu'}, {norm.lower()}, {'rotary' if rotary else 'learned'} "
            f"positions, {'biases' if bias else 'no biases'}: there are GPT-2, GPT-NeoX (rotary), Llama (swiglu)",
        )
        return None
    else:
        family = NEOX if rotary else GPT2
    shape = MegatronShape(family, values)
    _add_rows(flags, shape)
    return None if flags.problems else shape


def _add_rows(flags: FlagLedger, shape: MegatronShape) -> None:
    """Add rows: of the flags that determine the shape, and of Megatron's defaults that differ from the family's."""
    family = MODEL_FAMILIES[shape.family]
    changed = shape.changed()
    for name in flags.flags:
        flag = FLAG_SYNONYMS.get(name, name)
        if flag in changed:
            flags.carried(name, f"config_overrides {_format_overrides(changed[flag])}")
        elif flag in CONFIG_OPTIONS or name in FAMILY_FLAGS:
            flags.satisfied(name, f"{family} is like that")
    given = {FLAG_SYNONYMS.get(name, name) for name in flags.flags}
    for flag, options in changed.items():
        value = shape.values[flag]
        written = f"--{flag.replace('_', '-')}"
        if flag not in given and isinstance(value, (bool, float)):
            words = f"no {written}" if isinstance(value, bool) else f"{written} {value}"
            flags.default(words, f"config_overrides {_format_overrides(options)}")
    hidden = shape.values["hidden_size"]
    heads = shape.values["num_attention_heads"]
    fixed = {"kv_channels": hidden // heads, "rotary_percent": 1.0, "hidden_dropout": 0.0}  # if there is no option
    for flag, value in fixed.items():
        if shape.values[flag] == value or CONFIG_OPTIONS[flag][list(MODEL_FAMILIES).index(shape.family)]:
            continue
        words = f"{family} of transformers always has {value:g}"
        if flag in given:
            flags.refuse(flag, words)
        else:
            written = f"(--{flag.replace('_', '-')} {shape.values[flag]})"
            flags.rows[f"={flag}"] = FlagRow(written, "no counterpart", f"Megatron's default; {words}")
    if heads % shape.values["num_query_groups"]:
        flags.refuse(flags.first_of("num_query_groups", "num_key_value_heads"), f"it must divide the {heads} heads")


def compare_with_weights(flags: FlagLedger, shape: MegatronShape | None, folder: str) -> None:
    """Compare the flags with the weights that the run starts from: they are satisfied, or a size is a problem."""
    for row in flags.rows.values():
        if row.words.startswith("config_overrides"):
            row.status = "satisfied"
            row.words = f"the weights of {folder} have it"
    flags.rows.pop("=hidden_dropout", None)
    if not (shape and (Path(folder) / "config.json").is_file()):
        return
    config = read_config("model_name_or_path", folder)
    for flag in CHECKED_WITH_WEIGHTS:
        option = CONFIG_OPTIONS[flag][0]
        stored = getattr(config, option, None)
        if stored is not None and stored != shape.values[flag]:
            name = next((name for name in flags.flags if FLAG_SYNONYMS.get(name, name) == flag), "")
            missing = "" if name else f"there is no --{flag.replace('_', '-')}, and "
            flags.refuse(name, f"{missing}{folder} has {option}: {str(stored).lower()}: make them agree")
