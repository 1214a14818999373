"""`zerofit convert megatron-args`: a Megatron command line as a recipe, a strategy and the line that starts it.

    zerofit convert megatron-args -- torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 ...

A launch script is read by the user's own shell, with `torchrun() { zerofit convert megatron-args -- "$@"; }` at its
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
from zerofit.tools.convert.megatron_args.pretrain import ConvertedScript, convert_pretraining, pair_of
from zerofit.tools.convert.megatron_args.shape import (
    PREPARATION,
    SEARCH,
    Call,
    FlagLedger,
    MegatronArgsOptions,
    call_of,
)
from zerofit.tools.machine import strategy_of_a_launch
from zerofit.tools.plan.plan_options import MEMORY_VARIABLE
from zerofit.tools.prepare.prepare import PREPARE_HINTS, JoinOptions, PrepareOptions
from zerofit.training.run_configuration import check_layout, check_strategy_for_task

TOKENIZER = ("tokenizer_type", "tokenizer_name_or_path", "tokenizer_model", "vocab_file", "merge_file", "vocab")
KINDS = ("carried over", "satisfied", "no counterpart", "unknown")
WIDTH = 46  # of the column of flags
EXAMPLE = "a100-80gb"  # where nobody names the GPU


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
    call = call_of(words)
    if call.program in PREPARATION:
        line, flags = convert_preparation(call, options.tokenizer_name)
        _show(call, flags)
        print(escape_controls(f"\n{line}\n"), flush=True)
    else:
        _convert(call, Path(options.output or "outputs/megatron-converted"), options)
    return 0


def _show(call: Call, flags: FlagLedger) -> None:
    """Print how many flags there are of each kind, and the table. Raises UserError: a flag cannot be converted."""
    if flags.problems:
        raise UserError(list(dict.fromkeys(flags.problems)))
    rows = flags.finish()
    counts = {kind: sum(row.status == kind for row in rows) for kind in KINDS}
    lines = [f"{call.program}:", ", ".join(f"{number} {kind}" for kind, number in counts.items() if number), ""]
    lines += [f"  {row.flag:<{WIDTH}} {row.status:<15} {row.words}".rstrip() for row in rows]
    print(escape_controls("\n".join(lines)), flush=True)


def _convert(call: Call, folder: Path, options: MegatronArgsOptions) -> None:
    done = convert_pretraining(call, options)
    searched = call.program == SEARCH
    done.recipe.setdefault("output_dir", "outputs/megatron")
    _show(call, done)
    if folder.is_dir() and any(folder.iterdir()) and not options.overwrite:
        raise UserError(f"output = {str(folder)!r} is not empty. Name another folder, or add --overwrite")
    values = done.recipe
    layout = done.layout
    if searched:  # the lines are the search, which writes the best strategy and its script, and the launch
        memory = os.environ.get(MEMORY_VARIABLE)
        pairs = folder / "pairs"
        gpus = ["--num_gpus", layout.world, "--gpus_per_node", layout.world // layout.machines]
        gpus += ["--gpu_memory", f"{memory}GB"] if memory else ["--gpu", EXAMPLE]
        if done.has("max_global_batch_size"):
            gpus += ["--max_global_batch_size", done.batch]
        if not memory:
            done.notes.append(f"no GPU is named: replace {EXAMPLE}, or set {MEMORY_VARIABLE}=40 before")
        words = ["zerofit", "plan", "--task", "clm", "--config", folder / "recipe.yaml", *gpus]
        words += ["--top", 1, "--write", pairs]
        rendezvous = f"MACHINE_RANK={layout.rank} MAIN_PROCESS_IP={layout.address} MAIN_PROCESS_PORT={layout.port} "
        launch = f"{rendezvous if layout.machines > 1 else ''}sh {shlex.quote(str(pairs))}/*.sh"
        lines = [shlex.join(map(str, words)), launch]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(written(done, lines), encoding="utf-8")
        parse_recipe(ClmRecipe, ["--config", str(folder / "recipe.yaml")])  # the strategy is checked by plan
    else:
        check(done)
        lines = [write(done, folder)]
    said = ["", *(f"note: {note}" for note in done.notes)]
    if done.vocabulary and "config_name" in values:
        multiple = values["make_vocab_size_divisible_by"]
        rows = -(-done.vocabulary // multiple) * multiple
        recipe = ClmRecipe(config_name=values["config_name"], config_overrides=values["config_overrides"])
        config = load_configuration(recipe)
        config.vocab_size = rows
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        count = sum(parameter.numel() for parameter in model.parameters())
        said.append(f"model        {count:,} parameters, with {done.vocabulary:,} tokens in {rows:,} rows")
    strategy = "a strategy that zerofit plan chooses" if searched else layout.strategy
    run = f"run          {values['max_train_steps']:,} updates of {done.batch:,} samples, {strategy}"
    said.append(f"{run} on {counted(layout.world, 'process')}")
    if layout.machines > 1:
        rank = "MACHINE_RANK" if searched else "--machine_rank"
        said.append(f"machines     start the last line on each of the {layout.machines}, with its own {rank}")
    print(escape_controls("\n".join([*said, f"written      {folder}", "", *lines])), flush=True)


def write(done: ConvertedScript, folder: Path) -> str:
    """Write the recipe and the pair. Returns the command line that launches them."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--config_file", str(folder / "accelerate.yaml")]
    words += ["--machine_rank", done.layout.rank] if done.layout.machines > 1 else []
    launch = shlex.join(["accelerate", "launch", *words, "train/clm.py", "--config", str(folder / "recipe.yaml")])
    for file, text in {"recipe.yaml": written(done, [launch]), **pair_of(done.layout, folder)}.items():
        (folder / file).write_text(text, encoding="utf-8")
    return launch


def check(done: ConvertedScript) -> None:
    """Resolve recipe and pair as a run does."""
    silence_libraries()
    layout = done.layout
    model = done.recipe.get("model_name_or_path")
    with tempfile.TemporaryDirectory() as folder:
        write(done, Path(folder))
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


def written(done: ConvertedScript, commands: list[str]) -> str:
    """The recipe as text."""
    lines = ["# Converted from Megatron's flags by `zerofit convert megatron-args`."]
    lines += [*(f"#   {command}" for command in commands), ""]
    lines += [f"{option}: {json.dumps(value)}" for option, value in done.recipe.items()]
    return "\n".join([*lines, ""])


def convert_preparation(call: Call, tokenizer: str | None) -> tuple[str, FlagLedger]:
    """Return (a command line of zerofit prepare, the ledger of flags)."""
    flags = FlagLedger.of(call)
    merges = call.program == "merge_datasets.py"
    options = JoinOptions if merges else PrepareOptions
    line = ["merge"] if merges else []
    name = tokenizer or flags.text("tokenizer_name_or_path") or flags.text("tokenizer_model")
    chosen = ["--tokenizer", name] if name else []
    for flag, words in flags.flags.items():
        option = "json_keys" if flag == "json_key" else flag  # an older spelling
        if flag in TOKENIZER and (chosen or flag == "tokenizer_type"):
            flags.carried(flag, shlex.join(chosen) or "vocab_file and merge_file")
        elif option in {field.name for field in dataclasses.fields(options)}:
            line += [f"--{option}", *words]
            flags.carried(flag, shlex.join([f"--{option}", *words]))
        elif flag in PREPARE_HINTS:
            flags.none(flag, PREPARE_HINTS[flag].removeprefix("remove it: "))
    line += chosen
    if flags.has("split_sentences") or (flags.text("tokenizer_type") or "").lower().startswith("bert"):
        flags.wrong("split_sentences", "corpora are for GPT only, and not for BERT")
    try:
        parse_recipe(options, line[merges:], prog="zerofit prepare", tool=True)
    except UserError as error:
        for problem in error.problems:
            flags.wrong("", problem)
    return shlex.join(["zerofit", "prepare", *line]), flags
