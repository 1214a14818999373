"""From a YAML file and flags to one checked recipe, and the text of --help (the common options, on one screen) and
--help_all (all, in groups). For options of other programs that users type here (the Trainer and examples of
transformers, LLaMA-Factory, axolotl, Megatron-LM) a message names the option to type instead.

A group is the dataclass that declares its options, and its heading is the docstring of that class. An option is in
--help if it is declared with `option(..., common=True)`; a command without common options shows all of them.
"""

import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from zerofit.recipe.base import Recipe, default_of, find_broken_rule, parse_value, quote, to_text
from zerofit.recipe.errors import UserError, did_you_mean
from zerofit.recipe.files import BoundedLoader, nearest_recipe, read_text, recipe_file
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.tasks import TASKS

HELP_FLAGS = {"-h", "--help"}
HELP_ALL_FLAGS = {"--help_all", "--help-all"}
# columns: where the text of an option begins, and where it ends
HELP_COLUMN = 36
HELP_MAX_WIDTH = 100
MAX_CHOICES_WIDTH = 18  # characters of choices that --help shows
METAVARS = {"_file": "FILE", "_dir": "FOLDER", "_column": "COLUMN", "_columns": "COLUMN", "_name": "NAME"}


def wants_help(argv: list[str]) -> bool:
    return bool((HELP_FLAGS | HELP_ALL_FLAGS) & set(argv))


def help_text(cls: type, argv: list[str], prog: str, tool: bool) -> str:
    """Return the common options of a recipe on one screen, or all of them in groups if `argv` has --help_all."""
    groups = option_groups(cls, tool)
    common = [field for fields in groups.values() for field in fields if field.metadata["common"]]
    short = not (HELP_ALL_FLAGS & set(argv)) and bool(common)
    width = min(HELP_MAX_WIDTH, shutil.get_terminal_size((80, 24)).columns)
    if tool:
        usage = f"usage: {prog} [--config RECIPE] [--option value]"
    else:
        usage = (
            "usage: accelerate launch [--config_file accelerate_configs/NAME.yaml] \\\n"
            f"         {prog} [--config RECIPE] [--option value]"
        )
    noun = "common options" if short else "options, with [defaults]"
    intro = f"A recipe (YAML) and flags set the same options; flags win. The {noun}:"
    lines = [usage, "", *textwrap.wrap(intro, width)]
    if short:
        lines.append("")
        for field in common:  # each on one line, with the beginning of its text
            placeholder = value_text(field)
            default = default_text(field)
            head = f"  --{field.name} {placeholder if len(placeholder) < MAX_CHOICES_WIDTH else 'NAME'}".rstrip() + " "
            text = re.split(r"(?<!e\.g)\. ", field.metadata["help"])[0].removesuffix(".")
            text += f" [{default}]" if default not in ("", "false") else ""
            text = textwrap.shorten(text, width - max(HELP_COLUMN, len(head)), placeholder=" ...")
            lines.append(f"{head:<{HELP_COLUMN}}{text}")
        return "\n".join([*lines, "", f"--help_all explains all {sum(map(len, groups.values()))} options."])
    for group, fields in groups.items():
        lines += ["", *textwrap.wrap(group_heading(group), width)] if fields else []
        for field in sorted(fields, key=lambda field: not field.metadata["common"]):
            text = field.metadata["help"] + "".join(f" (also --{alias})" for alias in field.metadata["aliases"])
            if default := default_text(field):
                text += f" [{default}]"
            head = f"  --{field.name} {value_text(field)}".rstrip()
            if len(head) + 2 > HELP_COLUMN:  # many choices take several lines
                heads = textwrap.wrap(head.replace("|", "| "), width, subsequent_indent=" " * 8)
                lines += [each.replace("| ", "|") for each in heads]
                head = ""
            begin = head.ljust(HELP_COLUMN)
            indent = " " * HELP_COLUMN
            wrapper = textwrap.TextWrapper(width, begin, indent, break_long_words=False, break_on_hyphens=False)
            lines += wrapper.wrap(text)
    return "\n".join(lines)


def group_heading(group: type) -> str:
    return (group.__doc__ or group.__name__).strip().splitlines()[0]


def option_groups(cls: type, tool: bool) -> dict[type, list[dataclasses.Field[Any]]]:
    """Return the options of a recipe by the class that declares them: the tool's own first, then those of all tasks,
    then the task's own."""
    classes = [group for group in reversed(cls.__mro__) if dataclasses.is_dataclass(group)]
    declared_in = {name: group for group in classes for name in inspect.get_annotations(group)}  # the last one counts
    groups = {
        group: [field for field in dataclasses.fields(group) if declared_in[field.name] is group]
        for group in classes
        if group in declared_in.values()
    }
    if not issubclass(cls, TrainingRecipe):
        return groups
    of_tool = [group for group in groups if tool and issubclass(cls.__bases__[0], group)]
    of_all = [group for group in groups if issubclass(TrainingRecipe, group)]
    return {group: groups[group] for group in dict.fromkeys([*of_tool, *of_all, *groups])}


def default_text(field: dataclasses.Field[Any]) -> str:
    """Return the default of an option as a user would type it; empty if it has none."""
    default = default_of(field)
    return "" if default in (None, "", []) else to_text(default)


def value_text(field: dataclasses.Field[Any]) -> str:
    """Return what an option takes: its choices, or a word as FILE, N (an integer), X (a number). Empty: a flag."""
    kind = field.metadata["kind"]
    if field.metadata["choices"]:
        words = "|".join(map(str, field.metadata["choices"]))
    elif kind.base is str:
        words = next((word for ending, word in METAVARS.items() if field.name.endswith(ending)), "TEXT")
    elif kind.values:
        words = "|".join(kind.choices)
    elif kind.base is bool:
        words = "" if field.default is False else "true|false"
    else:
        words = {int: "N", float: "X"}[kind.base]
    return f"{words} ..." if kind.many else words


R = TypeVar("R", bound=Recipe)
YAML_NULL = "tag:yaml.org,2002:null"
YAML_BOOL = "tag:yaml.org,2002:bool"


def parse_recipe(cls: type[R], argv: list[str] | None = None, **of_program: Any) -> R:
    """Read `--config FILE` and `--option value` flags into a recipe of type `cls`. Raises UserError: unknown names
    (with the nearest known one), wrong types, broken rules: all of them at once. Raises SystemExit: code 0 after
    `--help` and `--help_all`. `of_program`: as in `read_recipe`."""
    recipe, problems = read_recipe(cls, argv, **of_program)
    if problems:
        raise UserError(problems)
    return recipe


def read_recipe(
    cls: type[R],
    argv: list[str] | None = None,
    prog: str | None = None,  # the program's name in its help
    tool: bool = False,  # the program is a tool, which accelerate launch does not start
    hints: dict[str, str] | None = None,
) -> tuple[R, list[str]]:
    """Read flags and a recipe's file: (the recipe, in which an option that is wrong has its default; the problems).

    The source of each value is recorded (`recipe.source(name)`): a flag, a line of the YAML file, or None. An option
    that is null has its default, and no source. Raises UserError: the recipe's file cannot be read. Raises SystemExit:
    code 0 after `--help` and `--help_all`. `hints`: {option of another program: what to type}; by default those for
    training (`FOREIGN_NAMES`).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if wants_help(argv):
        print(help_text(cls, argv, prog or Path(sys.argv[0]).name, tool))
        raise SystemExit(0)
    reader = _Reader(cls, hints if hints is not None else foreign_option_hints(cls, tool))
    config = reader.read_flags(argv)
    if config is not None:
        config = recipe_file(config)
        reader.read_file(config)
    recipe = reader.recipe(config)
    problems = reader.problems
    if tool and getattr(recipe, "trust_remote_code", False) and not recipe.is_flag("trust_remote_code"):
        problems.append(
            f"trust_remote_code = true ({recipe.source('trust_remote_code')}) would run Python code of others here. "
            "Read it, and add --trust_remote_code to the command line"
        )
    return recipe, problems or recipe.problems()


class _Reader(Generic[R]):
    """The reader of flags and of a recipe's file: their values, and their problems.

    Attributes:
        of_flags, of_file: {option: its value}; of one that is wrong there is none.
        lines: {option: the line of the file that sets it}.
    """

    def __init__(self, cls: type[R], hints: dict[str, str]) -> None:
        self.cls = cls
        self.hints = hints
        self.fields = {field.name: field for field in dataclasses.fields(cls)}
        aliases = {alias: name for name, field in self.fields.items() for alias in field.metadata["aliases"]}
        self.names = {name: name for name in self.fields} | aliases  # {what is written: the option}
        self.of_flags: dict[str, Any] = {}
        self.of_file: dict[str, Any] = {}
        self.lines: dict[str, str] = {}
        self.problems: list[str] = []

    def read_flags(self, argv: list[str]) -> str | None:
        """Read `--name value`, `--name=value`, `--flag`, `--list a b c`. Returns the value of --config."""
        config = None
        spellings: dict[str, str] = {}
        words = list(argv)
        while words:
            word = words.pop(0)
            if not word.startswith("--"):
                is_recipe = word.endswith((".yaml", ".yml"))
                remedy = f"Name a recipe with --config {word}" if is_recipe else "Options have the form --name value"
                self.problems.append(f"{word!r} is not an option. {remedy}")
                continue
            written, equals, text = word[2:].partition("=")
            written = written.replace("-", "_")
            name = self.names.get(written, written)
            if spellings.setdefault(name, written) != written:
                self.problems.append(f"--{written} and --{spellings[name]} are the same option, keep one of the two")
            texts = [text] if equals else []
            while not equals and words and not is_flag(words[0]):
                texts.append(words.pop(0))
            if name == "config" and len(texts) == 1:
                config = texts[0]
            elif name == "config":
                self.problems.append(f"--config takes one recipe file, and was given {' '.join(texts) or 'nothing'}")
            elif name not in self.fields:
                self._unknown(f"--{name}", name)
            else:
                kind = self.fields[name].metadata["kind"]
                if not texts and kind.base is bool:
                    texts = ["true"]
                if kind.optional and texts == ["null"]:  # whatever the file says, it is not stated
                    self.of_flags[name] = None
                elif texts:
                    self._take(name, texts, f"--{name}", f"--{name} {' '.join(texts)}", self.of_flags)
                else:
                    self.problems.append(f"--{name} without a value: expected {kind.words}")
        return config

    def read_file(self, path: str) -> None:
        """Read the lines of a recipe's file as the texts of flags are read. Raises UserError: it is none."""
        for key, node in _lines_of(path):
            written = str(key.value)
            line = f"{path}, line {key.start_mark.line + 1}"
            name = self.names.get(written, written)
            if name in self.lines:
                self.problems.append(f"{line}: {written} is set twice, keep one of the two")
            self.lines[name] = line
            if node.tag == YAML_NULL and (name in self.fields or name in self.hints):
                continue  # null: not stated, as in the recipe.yaml of a run, which has all options that there were
            if name not in self.fields:
                self._unknown(f"{line}: {name}", name)
                continue
            metadata = self.fields[name].metadata
            beginning = f"{line}: {name} is"
            kind = metadata["kind"]
            items = node.value if kind.many and isinstance(node, yaml.SequenceNode) else [node]
            flags = [item.value for item in items if item.tag == YAML_BOOL and item.value not in metadata["choices"]]
            if kind.base is str and flags:
                hint = 'Leave the line out; or, for a text such as no or on, put it in quotes: "no"'
                self.problems.append(f"{beginning} {flags[0]}; expected {kind.words}. {hint}")
            elif all(isinstance(item, yaml.ScalarNode) and item.tag != YAML_NULL for item in items):
                texts = [item.value for item in items]
                self._take(name, texts, line, f"{beginning} {' '.join(map(repr, texts))[:400]}", self.of_file)
            else:
                written = "a list" if isinstance(node, yaml.SequenceNode) else "a map"
                self.problems.append(f"{beginning} {written}: expected {kind.words}")

    def _take(self, name: str, texts: list[str], source: str, setting: str, values: dict[str, Any]) -> None:
        """Put the value of an option into `values`, if it has the right type and breaks no rule. `source`: what sets
        it. `setting`: the same with the texts."""
        metadata = self.fields[name].metadata
        kind = metadata["kind"]
        try:
            if len(texts) != 1 and not kind.many:
                raise ValueError("several values")
            parsed = [parse_value(text, kind) for text in texts]
        except ValueError:
            self.problems.append(f"{setting}: expected {kind.words}")
            return
        value = parsed if kind.many else parsed[0]
        if rule := find_broken_rule(value, metadata):
            self.problems.append(f"{name} = {quote(value)} ({source}): {rule}")
        else:
            values[name] = value

    def _unknown(self, where: str, name: str) -> None:
        if name in self.hints:
            self.problems.append(f"{where} is not an option: {self.hints[name]}")
            return
        remedy = did_you_mean(name, self.names, "--help_all lists the options")
        self.problems.append(f"{where} is not an option. {remedy}")

    def recipe(self, config: str | None) -> R:
        """Make the recipe of a file and flags. A line of the file is left out if it contradicts a flag, or depends on
        an option that is left out. Where two flags contradict each other, or two lines, both stay, and are reported
        later."""
        left_out: dict[str, str] = {}  # {option: the flag because of which it is}
        recipe = self._made(config, left_out)
        while clash := self._next_left_out(recipe, left_out) if self.of_flags else None:
            left_out[clash[0]] = clash[1]
            recipe = self._made(config, left_out)
        unflagged = self.cls(**self.of_file)
        changed = {name for name, value in self.of_flags.items() if value != getattr(unflagged, name)}
        for name, field in self.fields.items():
            leaders = [each for each in field.metadata["follows"].split() if each in left_out or each in changed]
            if leaders and name in self.of_file and name not in {*left_out, *self.of_flags}:
                without = self._made(config, {*left_out, name})
                if set(without.problems()) <= set(recipe.problems()):
                    left_out[name] = left_out.get(leaders[0], f"--{leaders[0]}")
                    recipe = without
        recipe.remember_left_out(
            f"{name} = {quote(self.of_file[name])} ({self.lines[name]}) is left out: it does not go together with "
            f"{reason}"
            for name, reason in left_out.items()
            if getattr(recipe, name) != self.of_file[name]
        )
        return recipe

    def _made(self, config: str | None, without: Collection[str]) -> R:
        values = {name: value for name, value in self.of_file.items() if name not in without} | self.of_flags
        sources = self.lines | {name: f"--{name}" for name in self.of_flags}
        stated_sources = {name: sources[name] for name, value in values.items() if value is not None}
        unset = [name for name in self.of_file if name in self.of_flags and self.of_flags[name] is None]
        recipe = self.cls(**values)
        recipe.remember_sources(stated_sources | ({"config": config} if config else {}), unset)
        recipe.settle()
        return recipe

    def _next_left_out(self, recipe: R, left_out: dict[str, str]) -> tuple[str, str] | None:
        """Return a line of the file that clashes with a flag, and that flag; None: no line does."""
        for name, others, _, excludes, is_noted in recipe.clashes():
            reasons = [left_out.get(each, f"--{each}") for each in others if each in {*self.of_flags, *left_out}]
            if name in self.of_file and name not in self.of_flags and reasons and not is_noted:
                return name, reasons[0]
            if excludes and name in self.of_flags and others[0] in self.of_file and others[0] not in self.of_flags:
                return others[0], f"--{name}"
        return None


def _lines_of(path: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """Return (key, value) of the lines of a recipe's file. They are nodes, whose text is as it is written: PyYAML,
    which follows YAML 1.1, would make 5e-4 a text, 010 the number 8 and 1:30 the number 90."""
    try:
        node = BoundedLoader(read_text(Path(path))).get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        close = nearest_recipe(path) if isinstance(error, FileNotFoundError) else None
        remedy = f"Did you mean {close}?" if close else "Name an existing recipe, e.g. under recipes/"
        raise UserError(f"--config {path!r} cannot be read: {error}. {remedy}") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config {path} is not valid YAML: {' '.join(str(error).split())[:400]}") from None
    if not isinstance(node, yaml.MappingNode):
        problem = "is empty" if node is None else "holds something else"
        raise UserError(f"--config {path}: a recipe holds `option: value` lines, this file {problem}")
    return node.value


def is_flag(word: str) -> bool:
    return word.startswith("--") and not re.fullmatch(r"-+[\d.]+(e[+-]?\d+)?", word)


def option_named(word: str) -> str | None:
    """Return the name of the option in a word, --num-machines=2 -> num_machines; None: it is not an option."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else None


def flag_value(words: list[str], name: str) -> str | None:
    """Return the text after the last `--name` in a command line that is not checked yet; None: there is none."""
    value = None
    for word, following in zip(words, [*words[1:], ""]):
        if option_named(word) == name:
            value = word.partition("=")[2] if "=" in word else following
    return value


def take_words(options: type[Recipe], argv: list[str]) -> tuple[list[str], list[str]]:
    """Return (options of `options` with their values, the other words), each in the order of the command line."""
    kinds = {field.name: field.metadata["kind"] for field in dataclasses.fields(options)}
    option_words: list[str] = []
    remaining: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name = option_named(word)
        if name is None or name not in kinds:
            remaining.append(word)
            continue
        is_switch = kinds[name].base is bool and words[:1] not in (["true"], ["false"])
        stands_alone = "=" in word or is_switch or not words or is_flag(words[0])
        option_words += [word] if stands_alone else [word, words.pop(0)]
    return option_words, remaining


# {options of a recipe: names of them in other programs that are not similar}; a message names those that the task has.
FOREIGN_NAMES = {
    "num_train_epochs": "epochs",
    "max_train_steps": "total_steps",
    "per_device_train_batch_size": "batch_size train_batch_size train_micro_batch_size_per_gpu",
    "per_device_eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "grad_accum",
    "block_size max_length max_source_length max_target_length": "cutoff_len sequence_len max_length max_seq_length "
    "max_seq_len model_max_length seq_len",
    "length_grouping packing": "group_by_length",
    "packing": "sample_packing",
    "pad_to_max_length packing": "pad_to_sequence_len",
    "warmup_ratio num_warmup_steps": "warmup_steps",
    "ema_decay": "use_ema model_ema",
    "max_grad_norm": "gradient_clipping grad_clip",
    "precision": "fp32 torch_dtype dtype half_precision_backend",
    "attn_implementation": "flash_attn flash_attention use_flash_attn sdp_attention xformers_attention",
    "loss": "enable_liger_kernel use_liger_kernel",
    "model_name_or_path": "base_model model model_id",
    "config_overrides": "rope_scaling rope_theta num_layers hidden_size num_attention_heads",
    "train_file dataset_name": "dataset datasets data_files dataset_dir train_data",
    "validation_file": "eval_dataset val_file eval_file test_datasets",
    "max_train_samples": "max_samples",
    "cache_dir": "dataset_prepared_path",
    "text_columns source_column text_column": "dataset_text_field field_text",
    "target_lang": "forced_bos_token",
    "system_prompt": "default_system",
    "preference_loss": "dpo rl rlhf loss_type",
    "preference_beta": "beta dpo_beta rl_beta",
    "resize_embeddings": "resize_vocab",
    "lora": "use_peft use_lora adapter peft finetuning_type",
    "lora_r": "r",
    "lora_modules_to_save": "additional_target",
    "load_in_4bit": "quantization_bit",
    "evaluate_only": "do_eval",
    "eval_steps": "evaluation_strategy eval_strategy evals_per_epoch",
    "report_name": "wandb_project",
    "output_dir": "save run_name wandb_name experiment_name",
    "with_tracking report_to": "use_wandb logging_dir tensorboard_dir",
    "val_max_target_length": "generation_max_length max_new_tokens",
    "seed": "random_seed data_seed",
}
LAUNCHER_HINT = "it belongs to accelerate launch, before the script's name; `zerofit plan --num_gpus N` says what fits"
STRATEGY_HINT = (
    "the strategy is the launcher's: accelerate launch --config_file accelerate_configs/NAME.yaml, which names the "
    "DeepSpeed JSON; under torchrun say --strategy NAME, or --strategy FILE.json"
)
MEGATRON_HINT = "it is Megatron's: zerofit convert megatron-args -- COMMAND"
TOKENIZER_HINT = "the tokenizer uses all cores by its own threads (RAYON_NUM_THREADS sets their number); remove it"
# {hint: names in other programs}, where naming one option is not enough.
FOREIGN_HINTS = {
    LAUNCHER_HINT: (
        "num_processes num_machines config_file local_rank nproc_per_node nnodes master_port use_cpu no_cuda "
        "world_size"
    ),
    STRATEGY_HINT: "deepspeed zero_stage fsdp fsdp_config",
    "there is no option for it: `ddp` in zerofit/strategy/processes.py takes find_unused_parameters=True": (
        "ddp_find_unused_parameters"
    ),
    MEGATRON_HINT: (
        "tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel tokenizer_type "
        "use_distributed_optimizer ffn_hidden_size max_position_embeddings swiglu min_lr eval_iters load "
        "tokenizer_model"
    ),
    "say --save_strategy epoch, or --save_steps N": "checkpointing_steps saves_per_epoch",
    "say --validation_split_percentage 10 for 0.1": "val_size val_set_size test_size",
    "say --precision bf16": "bf16 pure_bf16 bf16_full_eval",
    "say --precision fp16": "fp16",
    "`zerofit compare` finds the largest batch": "auto_find_batch_size",
    "say --model_name_or_path with the adapter's folder to train it further; it names its base": (
        "adapter_name_or_path lora_model_dir"
    ),
    "`zerofit merge` folds an adapter into its base": "export_dir",
    TOKENIZER_HINT: "dataset_num_proc num_proc",
    "line breaks are kept; --document_separator line takes each line for itself": "no_keep_linebreaks keep_linebreaks",
    "log in once with `hf auth login`": "token hub_token use_auth_token",
    "--push_to_hub owner/name": "hub_model_id",
    "remove it: the script, the model or the data decide it, or it is always so": (
        "do_train plot_loss streaming logging_nan_inf_filter ignore_data_skip save_safetensors low_cpu_mem_usage "
        "ignore_pad_token_for_loss use_slow_tokenizer use_fast_tokenizer greater_is_better task_type stage"
    ),
    "the number of classes follows from the labels of the data; remove it": "num_labels num_classes",
}
# {option of an earlier commit: what to use instead} (CHANGELOG.md).
REMOVED_OPTIONS = {
    "difficulty_warmup": "it is gone; block_size_warmup and global_batch_warmup let rows and batches grow",
    **dict.fromkeys(
        ("contrastive_group", "contrastive_temperature", "num_texts"),
        "embeddings are gone; sentence-transformers trains them",
    ),
    "logprobs": "it is gone; train/distill.py reads a teacher next to the student with --teacher FOLDER",
    "data_format": "it is gone: the names of the columns say it. For running text name its column with --text_column",
    "preprocessing_num_workers": TOKENIZER_HINT,
    "data_cache_path": "the index of a corpus lies in --cache_dir",
    "profile_ranks": "--profile records rank 0",
    "profile_memory": "--profile records memory, too",
    "on_save_failure": "it is gone: a run goes on, and says so, where a checkpoint cannot be written",
    "peak_tflops": "it belongs to zerofit plan; MFU is reported for GPUs of the table",
    "calibrate": "it is gone: tell a GPU by --peak_tflops, --memory_bandwidth, --link_bandwidth, --network_bandwidth",
    "hub_strategy": "--push_to_hub pushes once, at the end; --mirror copies each checkpoint",
    "save_keep_every": "it is gone: --save_total_limit keeps the newest ones; without it all stay",
    "save_best": "the best weights are kept if metric_for_best_model is set, or a task has more metrics than the loss",
    "early_stopping_threshold": "it is gone: whatever is better counts as an improvement",
    "rendezvous_minutes": "it belongs to zerofit launch",
    "save_only_model": "it is gone: a checkpoint can always be resumed from; --save_total_limit keeps few of them",
    "mixture_temperature": "it is gone: write the weights before the files of train_file",
    "stop_source": "it is gone: an epoch of a mixture ends when its first source has been read in full",
    "messages_column": "it is gone: call the column of the turns messages",
    "lengths": "`zerofit plan --lengths 8k,16k,32k` finds the longest rows",
    "shards": "conversion to Meta's format is gone; outputs/RUN/model is a transformers folder",
}


def foreign_option_hints(cls: type, tool: bool) -> dict[str, str]:
    """Return {name of an option in another program: what to type instead}. `tool`: the recipe is a tool's, which
    accelerate launch does not start."""
    if not issubclass(cls, TrainingRecipe):
        return REMOVED_OPTIONS
    names = {field.name for field in dataclasses.fields(cls)}
    hints: dict[str, str] = {}
    for task, kind in reversed(TASKS.items()):
        hints |= {
            field.name: f"it is one of train/{task}.py"
            for field in dataclasses.fields(kind)
            if field.name not in names
        }
    hints |= REMOVED_OPTIONS
    for options, foreign_names in FOREIGN_NAMES.items():
        if flags := [f"--{option}" for option in options.split() if option in names]:
            hints |= dict.fromkeys(foreign_names.split(), f"say {' or '.join(flags)}")
    for hint, foreign_names in FOREIGN_HINTS.items():
        if not (tool and hint in (LAUNCHER_HINT, STRATEGY_HINT, MEGATRON_HINT)):
            hints |= dict.fromkeys(foreign_names.split(), hint)
    return hints
