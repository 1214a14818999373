r"""`zerofit verify`: on a recipe of yours, shortened, the strategies agree and a killed run loses nothing.

    zerofit verify --config recipes/clm/stdlib-gpt2.yaml
    zerofit verify --config recipes/cls/sst2-small.yaml --strategies zero2,zero3 --num_processes 4 --kills 8

The reference is one process. Each strategy then runs with several, for the same losses, gradient norms, learning rates
and samples in every update. Then the run of each strategy is killed with SIGKILL, resumed, killed again, also with
another number of processes, and must end as the one that nobody disturbed. All of these are real launches.
"""

import dataclasses
from pathlib import Path

from train.recipe import ClmRecipe, ClsRecipe, Seq2SeqRecipe, UserError
from train.recipe.options import TrainingRecipe
from train.recipe.parse import parse_recipe
from train.recipe.tools import VerifyOptions
from train.run.progress import say
from train.verify.launches import ending_in_order
from train.verify.proof import Proof
from train.verify.shorten import precision_of, shorten

TASKS = {"clm": ClmRecipe, "cls": ClsRecipe, "seq2seq": Seq2SeqRecipe}
CONFIGS = Path("accelerate_configs")
RECIPE, REPORT = "recipe.yaml", "report.txt"
TOLERANCES = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 5e-2}


def main(argv: list[str] | None = None) -> int:
    options, cls = read_options(argv)
    configs = find_strategies([options.reference, *options.names])
    source = options.source("config")
    output = Path(options.output or Path("outputs") / f"verify-{Path(source).stem if source else options.task}")
    check_output(output)
    short = shorten(options, cls)
    precision = precision_of(options)
    options.tolerance = options.tolerance or TOLERANCES[precision]
    say(f"recipe    {source or 'of flags'}", *(f"changed   {change}" for change in short.changes),
        f"compared  to {options.tolerance:g}, in {precision}", f"folder    {output}")  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    (output / RECIPE).write_text(short.to_yaml(), encoding="utf-8")
    proof = Proof(options, configs, output, output / RECIPE, short.save_steps)
    with ending_in_order():
        proof.run()
    report = proof.report()
    (output / REPORT).write_text(report + "\n", encoding="utf-8")
    say("", report)
    if proof.is_well and not options.keep:
        proof.clear()
    return 0 if proof.is_well else 1


# ------------------------------------------------------------------------------------------------------------- options


def read_options(argv: list[str] | None) -> tuple[TrainingRecipe, type[TrainingRecipe]]:
    """(options of verify and of the task's recipe in one, the recipe's type).

    Raises:
        UserError: nobody says which task it is; anything that parse_recipe finds.
    """
    argv = list(argv or [])
    task = _given(argv, "task") or _task_of(_given(argv, "config"))
    if task not in TASKS:
        if {"-h", "--help"} & set(argv):
            parse_recipe(VerifyOptions, argv, prog="zerofit verify", tool=True)  # with a task, its options are shown
        raise UserError(
            "which task is it? It is known of recipes in folders called clm, cls or seq2seq; of others, and without "
            f"--config, set --task to one of {', '.join(TASKS)}"
        )
    cls = TASKS[task]
    joined = dataclasses.make_dataclass("Verify", [], bases=(VerifyOptions, cls))
    options = parse_recipe(joined, argv, prog="zerofit verify", tool=True)
    options.task = task
    return options, cls


def _given(argv: list[str], name: str) -> str | None:
    for word, following in zip(argv, [*argv[1:], ""]):
        if word == f"--{name}":
            return following
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None


def _task_of(config: str | None) -> str | None:
    names = [part.name for part in Path(config).resolve().parents] if config else []
    return next((name for name in names[:1] if name in TASKS), None)


def find_strategies(names: list[str]) -> dict[str, Path]:
    """{name: accelerate YAML}.

    Raises:
        UserError: there is no such file.
    """
    found = {name: Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / f"{name}.yaml" for name in names}
    missing = [name for name, path in found.items() if not path.is_file()]
    if missing:
        known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
        remedy = f"There are {known}" if known else f"Start it where the folder {CONFIGS}/ is, or name .yaml files"
        raise UserError([f"strategy {name!r}: there is no file {found[name]}. {remedy}" for name in missing])
    return found


def check_output(output: Path) -> None:
    """Raises UserError if the folder holds anything but an earlier proof, which is replaced."""
    if output.exists() and not output.is_dir():
        raise UserError(f"output = {str(output)!r} is a file. Name a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / RECIPE).is_file():
        raise UserError(f"output = {str(output)!r} holds something else than an earlier proof. Name another folder")
