"""`zerofit convert megatron-args`: a Megatron command line as a recipe, a strategy and the line that starts it.

    zerofit convert megatron-args -- torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 ...

A launch script is read by the user's own shell, with `torchrun() { zerofit convert megatron-args -- "$@"; }` at its
top (docs/megatron.md). A table shows the result for each flag (ledger.py). A flag that contradicts the model, or
cannot be converted, is an error, and then nothing is written.
"""

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from zerofit.model.configuration import load_configuration
from zerofit.model.pretrained_io import silence_libraries
from zerofit.recipe.errors import UserError, printable
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.parsing import counted
from zerofit.recipe.tasks import ClmRecipe
from zerofit.tools.convert.megatron_args.corpora import convert_preparation
from zerofit.tools.convert.megatron_args.ledger import (
    PREPARATION,
    SEARCH,
    Call,
    FlagLedger,
    MegatronArgsOptions,
    call_of,
    table,
)
from zerofit.tools.convert.megatron_args.pair import pair_of
from zerofit.tools.convert.megatron_args.pretrain import convert_pretraining
from zerofit.tools.convert.megatron_args.script_schedule import ConvertedScript
from zerofit.tools.convert.megatron_args.searched import plan_lines
from zerofit.tools.rank_environment import strategy_of_a_launch
from zerofit.training.configuration import check_layout, check_task


def main(argv: list[str]) -> int:
    argv, words = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
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
        print(printable(f"\n{line}\n"), flush=True)
    else:
        _convert(call, Path(options.output or "outputs/megatron-converted"), options)
    return 0


def _show(call: Call, flags: FlagLedger) -> None:
    """Print the table. Raises UserError: a flag cannot be converted."""
    print(printable("\n".join([f"{call.program}:", *table(flags.finish())])), flush=True)
    if flags.problems:
        raise UserError(list(dict.fromkeys(flags.problems)))


def _convert(call: Call, folder: Path, options: MegatronArgsOptions) -> None:
    done, searched = convert_pretraining(call, options), call.program == SEARCH
    done.recipe.setdefault("output_dir", "outputs/megatron")
    _show(call, done.flags)
    if folder.is_dir() and any(folder.iterdir()) and not options.overwrite:
        raise UserError(f"output = {str(folder)!r} is not empty. Name another folder, or add --overwrite")
    if searched:
        lines = plan_lines(done, folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(written(done, lines), encoding="utf-8")
        parse_recipe(ClmRecipe, ["--config", str(folder / "recipe.yaml")])  # the strategy is checked by plan
    else:
        check(done)
        lines = [write(done, folder)]
    print(printable("\n".join(["", *closing(done, searched), f"written      {folder}", "", *lines])), flush=True)


def write(done: ConvertedScript, folder: Path) -> str:
    """Write the recipe and the pair. Returns the command line that launches them."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = ["--machine_rank", done.layout.rank] if done.layout.machines > 1 else []
    words = ["--config_file", str(folder / "accelerate.yaml"), *rank]
    launch = shlex.join(["accelerate", "launch", *words, "train/clm.py", "--config", str(folder / "recipe.yaml")])
    for file, text in {"recipe.yaml": written(done, [launch]), **pair_of(done.layout, folder)}.items():
        (folder / file).write_text(text, encoding="utf-8")
    return launch


def check(done: ConvertedScript) -> None:
    """Resolve recipe and pair as a run does.

    Raises:
        UserError: a run would refuse them.
    """
    silence_libraries()
    layout, model = done.layout, done.recipe.get("model_name_or_path")
    with tempfile.TemporaryDirectory() as folder:
        write(done, Path(folder))
        try:
            recipe = parse_recipe(ClmRecipe, ["--config", f"{folder}/recipe.yaml"]).draft()
            local = layout.world // layout.machines
            strategy = strategy_of_a_launch(recipe, f"{folder}/accelerate.yaml", "--strategy", layout.world, local)
            check_task("clm", strategy)
            if not model or Path(model).is_dir():
                check_layout(load_configuration(recipe), strategy, recipe)
        except UserError as error:
            json_file = done.flags.text("deepspeed_config") or "deepspeed.json"
            problems = (problem.replace(f"{folder}/deepspeed.json", json_file) for problem in error.problems)
            raise UserError(
                f"a run would refuse this: {problem.replace(f'{folder}/', '')}" for problem in problems
            ) from None


def written(done: ConvertedScript, commands: list[str]) -> str:
    """The recipe as text."""
    lines = ["# Converted from Megatron's flags by `zerofit convert megatron-args`."]
    lines += [*(f"#   {command}" for command in commands), ""]
    for option, value in done.recipe.items():
        lines.append(f"{option}: {json.dumps(value) if not isinstance(value, float) else repr(value)}")
    return "\n".join([*lines, ""])


def closing(done: ConvertedScript, searched: bool) -> list[str]:
    """The model and the run in numbers.

    Args:
        searched: the strategy is not chosen yet.
    """
    values, layout, lines = done.recipe, done.layout, [f"note: {note}" for note in done.notes]
    if done.vocabulary and "config_name" in values:
        multiple = values["make_vocab_size_divisible_by"]
        rows = -(-done.vocabulary // multiple) * multiple
        count = parameters_of(values, rows)
        lines.append(f"model        {count:,} parameters, with {done.vocabulary:,} tokens in {rows:,} rows")
    strategy = "a strategy that zerofit plan chooses" if searched else layout.strategy
    batch = f"{'' if 'global_batch_size' in values else 'at most '}{done.batch:,} samples"
    run = f"run          {values['max_train_steps']:,} updates of {batch}, {strategy}"
    lines.append(f"{run} on {counted(layout.world, 'process')}")
    if layout.machines > 1:
        rank = "MACHINE_RANK" if searched else "--machine_rank"
        lines.append(f"machines     start the last line on each of the {layout.machines}, with its own {rank}")
    return lines


def parameters_of(values: dict[str, Any], vocabulary: int) -> int:
    """The number of weights of the recipe's model, which is built on the meta device."""
    recipe = ClmRecipe(config_name=values["config_name"], config_overrides=values["config_overrides"])
    config = load_configuration(recipe)
    config.vocab_size = vocabulary
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
