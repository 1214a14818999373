"""Options of the model, its tokenizer and LoRA, for every task."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from zerofit.recipe.base import Recipe, option
from zerofit.recipe.files import read_record
from zerofit.recipe.paths import is_run

SCRATCH_OPTIONS = "config_name model_type"
# {what a user writes: the option's value}
RECOMPUTATION = {"full": True, "selective": "selective", "true": True, "false": False}
COMPILATION = {"auto": "auto", "blocks": "blocks", "model": "model", "true": "blocks", "false": False}


@dataclass
class ModelOptions(Recipe):
    """Model and tokenizer"""

    model_name_or_path: str | None = option(None, "Pretrained weights: a folder or a hub name.", common=True)
    config_name: str | None = option(
        None,
        "Architecture to train from scratch: gpt2-xl, open-calm-7b, llama-2-7b, ..., a folder or a hub name.",
        common=True,
        phase="train",
        excludes="model_name_or_path",
    )
    model_type: str | None = option(
        None,
        "Architecture family to train from scratch with its default sizes: gpt2, ...",
        phase="train",
        excludes="model_name_or_path",
    )
    config_overrides: str | None = option(
        None,
        "Changes to the model's configuration, such as n_layer=4,n_embd=256.",
        follows=SCRATCH_OPTIONS,
        form=("([^=,]+=[^=,]*,?)*", "name=value,name=value, ..., e.g. n_layer=4,n_embd=256"),
    )
    tokenizer_name: str | None = option(
        None, "Tokenizer: a folder or a hub name; by default the model's own.", common=True, follows=SCRATCH_OPTIONS
    )
    vocab_file: str | None = option(
        None,
        "Vocabulary of a byte-level BPE, such as GPT-2's vocab.json. Needs merge_file; replaces tokenizer_name.",
        follows=SCRATCH_OPTIONS,
        needs="merge_file",
        excludes="tokenizer_name train_tokenizer_vocab_size",
    )
    merge_file: str | None = option(
        None,
        "Merges of that tokenizer, such as GPT-2's merges.txt.",
        aliases=("merges_file",),
        follows=SCRATCH_OPTIONS,
        needs="vocab_file",
    )
    train_tokenizer_vocab_size: int | None = option(
        None,
        "Train a byte-level BPE tokenizer of this size on the training text (cached).",
        minimum=258,
        follows=SCRATCH_OPTIONS,
        phase="train",
        needs="!data_path !streaming",
        excludes="tokenizer_name",
    )
    resize_embeddings: bool = option(
        False,
        "Where tokens were added to the tokenizer: give the pretrained embeddings a row for each, which begins as the "
        "mean of the others.",
        phase="train",
        needs="model_name_or_path",
    )
    trust_remote_code: bool = option(False, "Run the model code of a hub repository on this machine.")
    attn_implementation: str | None = option(None, "Attention kernel: eager, sdpa, flash_attention_2, ...")
    gradient_checkpointing: Annotated[bool | str, RECOMPUTATION] = option(
        False,
        "Recompute activations: less memory, slower. full, or the flag alone: of each layer in its backward pass. "
        "selective: all but linear layers' products and fused attention.",
        common=True,
        phase="train",
        identity=False,
    )
    activation_offload: bool = option(
        False,
        "The inputs of layers that are recomputed wait in the host's memory. On a CPU: without effect.",
        phase="train",
        identity=False,
        needs="gradient_checkpointing !torch_compile=blocks|model",
    )
    torch_compile: Annotated[bool | str, COMPILATION] = option(
        "auto",
        "Compile the model with torch.compile. blocks, or the flag alone: each layer by itself; all of them run one "
        "graph. model: all of the model. auto: blocks on a GPU, where that pays (docs/strategies.md); the log says "
        "why. Nothing on a CPU.",
        identity=False,
    )
    float8: bool = option(
        False,
        "Multiply in float8 in the linear layers of the blocks, by torchao: faster from about 1B weights on. Needs "
        "bf16 and a GPU of compute capability 8.9 or more; the blocks are compiled.",
        phase="train",
    )

    @property
    def compiles(self) -> bool | str:
        """The part of the model that is compiled: "blocks", "model", or False, also while torch_compile is "auto"."""
        return self.torch_compile != "auto" and self.torch_compile

    def settle(self) -> None:
        """Take the model/ of a run whose folder is named."""
        super().settle()
        if self.model_name_or_path and is_run(Path(self.model_name_or_path).expanduser()):
            self.model_name_or_path = str(Path(self.model_name_or_path) / "model")

    def problems(self) -> list[str]:
        problems = super().problems()
        if not (self.model_name_or_path or self.config_name or self.model_type):
            problems.append(
                "no model: set model_name_or_path (pretrained weights) or config_name (from scratch), "
                "e.g. --config_name gpt2"
            )
        tokenizers = (self.tokenizer_name, self.train_tokenizer_vocab_size, self.vocab_file, self.merge_file)
        if not (self.model_name_or_path or any(tokenizers)):
            problems.append(
                "no tokenizer: a model from scratch needs tokenizer_name, or train_tokenizer_vocab_size to train one"
            )
        return problems


# {option: what adapter_config.json calls it}
PEFT_FIELDS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_bias": "bias",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
}


def merge_command(adapter: str) -> str:
    """Return the command that makes a full model of an adapter."""
    folder = Path(adapter)
    run = folder.parent if folder.name == "model" else folder
    return f"zerofit merge --adapter {shlex.quote(adapter)} --output {shlex.quote(f'{run}-merged')}"


@dataclass
class LoraOptions(ModelOptions, phase="train", needs="lora"):
    """LoRA: train an adapter instead of the model"""

    lora: bool = option(
        False, "Train a LoRA adapter instead of the model's weights.", common=True, phase="always", needs=""
    )
    lora_r: int = option(8, "Rank of the adapter.", positive=True)
    lora_alpha: int = option(
        16, "Scale of the adapter: its output is multiplied by lora_alpha / lora_r.", positive=True
    )
    lora_dropout: float = option(0.0, "Dropout on the adapter's input.", minimum=0, below=1)
    lora_bias: str = option("none", "Which biases to train as well.", choices=("none", "all", "lora_only"))
    lora_target_modules: list[str] | None = option(
        None, "Modules that get an adapter, or all-linear; by default those of the family."
    )
    lora_modules_to_save: list[str] | None = option(None, "Modules to train in full and to save with the adapter.")
    use_dora: bool = option(False, "DoRA: also train the norm of each row of a weight.")
    use_rslora: bool = option(False, "rsLoRA: scale by lora_alpha / sqrt(lora_r).")
    load_in_4bit: bool = option(
        False, "QLoRA: hold the frozen weights in 4 bits (NF4, through bitsandbytes).", phase="always"
    )

    def settle(self) -> None:
        super().settle()
        if self.trains:
            self.contradictions = self.adopt_adapter()

    def adopt_adapter(self) -> list[str]:
        """Take the settings of an adapter that is trained on (model_name_or_path is its folder) from its file. Returns
        a sentence on each that the user has set otherwise, except for the dropout."""
        folder = self.model_name_or_path or ""
        file = Path(folder).expanduser() / "adapter_config.json"
        settings = read_record(file)
        if settings.get("peft_type") != "LORA":
            return []  # there is none, or whoever opens it says what is wrong
        theirs: dict[str, Any] = {"lora": True} | {name: settings.get(key) for name, key in PEFT_FIELDS.items()}
        merge = f"Remove it, or train on base and adapter as one model: {merge_command(folder)}"
        contradictions = []
        for name, value in theirs.items():
            value = [value] if isinstance(value, str) and name == "lora_target_modules" else value
            value = int(value) if name == "lora_alpha" and isinstance(value, float) else value
            ours = getattr(self, name)
            source = self.source(name)
            if value is None and name not in ("lora_target_modules", "lora_modules_to_save"):
                value = self._default(name)
            if source is None:
                self.adopt(name, value, str(file))
            elif name == "lora_dropout" or _in_order(ours) == _in_order(value):
                continue
            elif self.is_flag("model_name_or_path") and not self.is_flag(name):
                self.remember_left_out([f"{name} ({source}) is left out: the adapter {folder} has its own {value}"])
                self.adopt(name, value, str(file))
            else:
                what = f"the adapter {folder} is trained on with its own {value}"
                contradictions.append(f"{name} = {ours} ({source}): {what}. {merge}")
        return contradictions

    def problems(self) -> list[str]:
        return [*super().problems(), *self.contradictions]

    @property
    def quantised(self) -> str | None:
        """The option that quantises the frozen weights, if one does."""
        return "load_in_4bit" if self.lora and self.load_in_4bit else None


def _in_order(value: Any) -> Any:
    """Return a setting to compare: lists of names are sorted, and empty ones are None."""
    return sorted(value) if value and isinstance(value, list) else value or None
