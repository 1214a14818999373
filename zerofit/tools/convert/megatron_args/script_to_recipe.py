"""`zerofit convert megatron-args` converts a Megatron command line to a recipe, a strategy and a launch line.

    zerofit convert megatron-args -- torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 ...

The user's own shell reads a launch script, with `torchrun() { zerofit convert megatron-args -- "$@"; }` at its
top (docs/megatron.md). A table shows the result for each flag (shape.py). A flag that contradicts the model, or
cannot be converted, is an error, and then nothing is written.
"""

import dataclasses
import json
import os
import shlex
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from zerofit.model.configuration import load_configuration
from zerofit.model.pretrained_io import silence_libraries
from zerofit.recipe.errors import UserError, escape_controls
from zerofit.recipe.files import counted
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.tasks import ClmRecipe
from zerofit.tools.convert.megatron_args.pretrain import ConvertedScript, convert_pretraining, make_pair
from zerofit.tools.convert.megatron_args.shape import (
    PREPARATION_PROGRAMS,
    SEARCH_PROGRAM,
    FlagLedger,
    MegatronArgsOptions,
    MegatronCall,
    read_call,
)
from zerofit.tools.machine import strategy_of_a_launch
from zerofit.tools.plan.plan_options import MEMORY_VARIABLE
from zerofit.tools.prepare.prepare import PREPARE_HINTS, JoinOptions, PrepareOptions
from zerofit.training.run_configuration import check_layout, check_strategy_for_task

TOKENIZER_FLAGS = ("tokenizer_type", "tokenizer_name_or_path", "tokenizer_model", "vocab_file", "merge_file", "vocab")
STATUSES = ("carried over", "satisfied", "no counterpart", "unknown")
FLAG_COLUMN_WIDTH = 46  # characters
EXAMPLE_GPU = "a100-80gb"  # if the GPU is not known


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    words = argv[at + 1 :]
    argv = argv[:at]
    if argv and not argv[0].startswith("-"):
        raise UserError(
            f"{argv[0]!r}: scripts are not run. Put this line at its top, and run it in your own shell: "
            'torchrun() { zerofit convert megatron-args -- "$@"; }'
        )
    options = parse_recipe(
        MegatronArgsOptions, argv, prog="zerofit convert megatron-args [--option value] -- WORDS", tool=True
    )
    if not words:
        raise UserError("give Megatron's command line after --: zerofit convert megatron-args -- torchrun ...")
    call = read_call(words)
    if call.program in PREPARATION_PROGRAMS:
        line, flags = convert_preparation(call, options.tokenizer_name)
        _show(call, flags)
        print(escape_controls(f"\n{line}\n"), flush=True)
    else:
        _convert(call, Path(options.output or "outputs/megatron-converted"), options)
    return 0


def _show(call: MegatronCall, flags: FlagLedger) -> None:
    """Print how many flags have each status, and the table. Raises UserError: a flag cannot be converted."""
    if flags.problems:
        raise UserError(list(dict.fromkeys(flags.problems)))
    rows = flags.finish()
    counts = {status: sum(row.status == status for row in rows) for status in STATUSES}
    lines = [f"{call.program}:", ", ".join(f"{number} {status}" for status, number in counts.items() if number), ""]
    lines += [f"  {row.flag:<{FLAG_COLUMN_WIDTH}} {row.status:<15} {row.words}".rstrip() for row in rows]
    print(escape_controls("\n".join(lines)), flush=True)


def _convert(call: MegatronCall, folder: Path, options: MegatronArgsOptions) -> None:
    script = convert_pretraining(call, options)
    searched = call.program == SEARCH_PROGRAM
    script.recipe.setdefault("output_dir", "outputs/megatron")
    _show(call, script)
    if folder.is_dir() and any(folder.iterdir()) and not options.overwrite:
        raise UserError(f"output = {str(folder)!r} is not empty. Name another folder, or add --overwrite")
    values = script.recipe
    layout = script.layout
    if searched:  # the first line searches and writes the best strategy with its script, the second launches it
        memory = os.environ.get(MEMORY_VARIABLE)
        pairs = folder / "pairs"
        gpus = ["--num_gpus", layout.world, "--gpus_per_node", layout.world // layout.machines]
        gpus += ["--gpu_memory", f"{memory}GB"] if memory else ["--gpu", EXAMPLE_GPU]
        if script.has("max_global_batch_size"):
            gpus += ["--max_global_batch_size", script.batch]
        if not memory:
            script.notes.append(f"no GPU is named: replace {EXAMPLE_GPU}, or set {MEMORY_VARIABLE}=40 before")
        words = ["zerofit", "plan", "--task", "clm", "--config", folder / "recipe.yaml", *gpus]
        words += ["--top", 1, "--write", pairs]
        rendezvous = f"MACHINE_RANK={layout.rank} MAIN_PROCESS_IP={layout.address} MAIN_PROCESS_PORT={layout.port} "
        launch = f"{rendezvous if layout.machines > 1 else ''}sh {shlex.quote(str(pairs))}/*.sh"
        lines = [shlex.join(map(str, words)), launch]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(format_recipe(script, lines), encoding="utf-8")
        parse_recipe(ClmRecipe, ["--config", str(folder / "recipe.yaml")])  # the strategy is checked by plan
    else:
        check_as_a_run(script)
        lines = [write_recipe_and_pair(script, folder)]
    summary = ["", *(f"note: {note}" for note in script.notes)]
    if script.vocabulary and "config_name" in values:
        multiple = values["make_vocab_size_divisible_by"]
        rows = -(-script.vocabulary // multiple) * multiple
        recipe = ClmRecipe(config_name=values["config_name"], config_overrides=values["config_overrides"])
        config = load_configuration(recipe)
        config.vocab_size = rows
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        count = sum(parameter.numel() for parameter in model.parameters())
        summary.append(f"model        {count:,} parameters, with {script.vocabulary:,} tokens in {rows:,} rows")
    strategy = "a strategy that zerofit plan chooses" if searched else layout.strategy
    run = f"run          {values['max_train_steps']:,} updates of {script.batch:,} samples, {strategy}"
    summary.append(f"{run} on {counted(layout.world, 'process')}")
    if layout.machines > 1:
        rank = "MACHINE_RANK" if searched else "--machine_rank"
        summary.append(f"machines     start the last line on each of the {layout.machines}, with its own {rank}")
    print(escape_controls("\n".join([*summary, f"written      {folder}", "", *lines])), flush=True)


def write_recipe_and_pair(script: ConvertedScript, folder: Path) -> str:
    """Write the recipe and the strategy's pair of files. Return the command line that launches them."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--config_file", str(folder / "accelerate.yaml")]
    words += ["--machine_rank", script.layout.rank] if script.layout.machines > 1 else []
    launch = shlex.join(["accelerate", "launch", *words, "train/clm.py", "--config", str(folder / "recipe.yaml")])
    for file, text in {"recipe.yaml": format_recipe(script, [launch]), **make_pair(script.layout, folder)}.items():
        (folder / file).write_text(text, encoding="utf-8")
    return launch


def check_as_a_run(script: ConvertedScript) -> None:
    """Check the recipe and the pair as a run does. Raises UserError: a run would refuse them."""
    silence_libraries()
    layout = script.layout
    model = script.recipe.get("model_name_or_path")
    with tempfile.TemporaryDirectory() as folder:
        write_recipe_and_pair(script, Path(folder))
        try:
            recipe = parse_recipe(ClmRecipe, ["--config", f"{folder}/recipe.yaml"]).draft()
            local = layout.world // layout.machines
            strategy = strategy_of_a_launch(recipe, f"{folder}/accelerate.yaml", "--strategy", layout.world, local)
            check_strategy_for_task("clm", strategy)
            if not model or Path(model).is_dir():
                check_layout(load_configuration(recipe), strategy, recipe)
        except UserError as error:
            problems = (problem.replace(f"{folder}/", "") for problem in error.problems)
            raise UserError(f"a run would refuse this: {problem}" for problem in problems) from None


def format_recipe(script: ConvertedScript, commands: list[str]) -> str:
    """Return the recipe as YAML, below a comment with the commands."""
    lines = ["# Converted from Megatron's flags by `zerofit convert megatron-args`."]
    lines += [*(f"#   {command}" for command in commands), ""]
    lines += [f"{option}: {json.dumps(value)}" for option, value in script.recipe.items()]
    return "\n".join([*lines, ""])


def convert_preparation(call: MegatronCall, tokenizer: str | None) -> tuple[str, FlagLedger]:
    """Convert a call of PREPARATION_PROGRAMS: return (a command line of zerofit prepare, the ledger of flags)."""
    flags = FlagLedger.from_call(call)
    merges = call.program == "merge_datasets.py"
    options = JoinOptions if merges else PrepareOptions
    line = ["merge"] if merges else []
    name = tokenizer or flags.text("tokenizer_name_or_path") or flags.text("tokenizer_model")
    chosen = ["--tokenizer", name] if name else []
    for flag, words in flags.flags.items():
        option = "json_keys" if flag == "json_key" else flag  # an older spelling
        if flag in TOKENIZER_FLAGS and (chosen or flag == "tokenizer_type"):
            flags.carried(flag, shlex.join(chosen) or "vocab_file and merge_file")
        elif option in {field.name for field in dataclasses.fields(options)}:
            line += [f"--{option}", *words]
            flags.carried(flag, shlex.join([f"--{option}", *words]))
        elif flag in PREPARE_HINTS:
            flags.unsupported(flag, PREPARE_HINTS[flag].removeprefix("remove it: "))
    line += chosen
    if flags.has("split_sentences") or (flags.text("tokenizer_type") or "").lower().startswith("bert"):
        flags.refuse("split_sentences", "corpora are for GPT only, and not for BERT")
    try:
        parse_recipe(options, line[merges:], prog="zerofit prepare", tool=True)
    except UserError as error:
        for problem in error.problems:
            flags.refuse("", problem)
    return shlex.join(["zerofit", "prepare", *line]), flags
