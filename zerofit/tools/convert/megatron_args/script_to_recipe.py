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

import torch
from transformers import AutoModelForCausalLM

from zerofit.model.configuration import load_configuration
from zerofit.model.pretrained_io import silence_libraries
from zerofit.recipe.errors import UserError, printable
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.tasks import ClmRecipe
from zerofit.tools.convert.convert_options import MegatronArgsOptions
from zerofit.tools.convert.megatron_args.calls import PREPARATION, SEARCH, Call, call_of
from zerofit.tools.convert.megatron_args.corpora import convert_preparation
from zerofit.tools.convert.megatron_args.ledger import summary, table
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


def _show(call: Call, flags) -> None:
    rows = flags.finish()
    print(f"{call.program}: {summary(rows)}\n\n{table(rows)}", flush=True)
    if flags.problems:
        raise UserError(list(dict.fromkeys(flags.problems)))


def _convert(call: Call, folder: Path, options: MegatronArgsOptions) -> None:
    done = convert_pretraining(call, options)
    done.recipe.setdefault("output_dir", "outputs/megatron")
    _show(call, done.flags)
    if folder.is_dir() and any(folder.iterdir()) and not options.overwrite:
        raise UserError(f"output = {str(folder)!r} is not empty. Name another folder, or add --overwrite")
    if call.program == SEARCH:
        lines = plan_lines(done, folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(written(done, lines), encoding="utf-8")
        parse_recipe(ClmRecipe, ["--config", str(folder / "recipe.yaml")])  # the strategy is checked by plan
    else:
        check(done)
        lines = [write(done, folder)]
    shown = ["", *closing(done, folder / "recipe.yaml", call.program == SEARCH), "", *lines]
    print(printable("\n".join(shown)), flush=True)


def write(done: ConvertedScript, folder: Path) -> str:
    """Write the recipe and the pair. Returns the command line that launches them."""
    folder.mkdir(parents=True, exist_ok=True)
    launch = " ".join(
        [
            "accelerate launch --config_file",
            shlex.quote(str(folder / "accelerate.yaml")),
            *done.layout.launch_options,
            "train/clm.py --config",
            shlex.quote(str(folder / "recipe.yaml")),
        ]
    )
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
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(done, folder)
        try:
            recipe = parse_recipe(ClmRecipe, ["--config", str(folder / "recipe.yaml")]).draft()
            local = layout.world // layout.machines
            strategy = strategy_of_a_launch(recipe, str(folder / "accelerate.yaml"), "--strategy", layout.world, local)
            check_task("clm", strategy)
            if not model or Path(model).is_dir():
                check_layout(load_configuration(recipe), strategy, recipe)
        except UserError as error:
            of_script = done.flags.text("deepspeed_config") or "deepspeed.json"
            problems = (problem.replace(str(folder / "deepspeed.json"), of_script) for problem in error.problems)
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


def closing(done: ConvertedScript, recipe: Path, searched: bool) -> list[str]:
    """What was written, in numbers.

    Args:
        searched: the strategy is not chosen yet.
    """
    values, layout = done.recipe, done.layout
    lines = [f"note: {note}" for note in done.notes]
    if done.shape and done.vocabulary and "config_name" in values:
        multiple = values["make_vocab_size_divisible_by"]
        vocabulary = -(-done.vocabulary // multiple) * multiple
        lines.append(
            f"model        {parameters_of(values, vocabulary):,} parameters, with {done.vocabulary:,} tokens in "
            f"{vocabulary:,} rows"
        )
    strategy = "a strategy that zerofit plan chooses" if searched else layout.strategy
    at_most = "at most " * ("global_batch_size" not in values)
    lines.append(
        f"run          {values['max_train_steps']:,} updates of {at_most}{done.batch:,} samples, "
        f"{strategy} on {layout.world} process{'es' * (layout.world > 1)}"
    )
    if layout.machines > 1:
        own = "MACHINE_RANK" if searched else "--machine_rank"
        lines.append(
            f"machines     the last line below on each of the {layout.machines}, with its own {own} "
            f"(0 to {layout.machines - 1})"
        )
    return [*lines, f"written      {recipe}{'' if searched else ' and the pair'}"]


def parameters_of(values: dict, vocabulary: int) -> int:
    """The number of weights of the recipe's model, which is built on the meta device."""
    config = load_configuration(
        ClmRecipe(config_name=values["config_name"], config_overrides=values["config_overrides"])
    )
    config.vocab_size = vocabulary
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
