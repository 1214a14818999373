"""Every command in README, docs, recipes and docstrings is one that the programs take: options, recipes, targets."""

import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from helpers import ROOT
from torch.distributed.run import get_args_parser

from zerofit.cli import COMMANDS
from zerofit.launch.command import read_options
from zerofit.recipe import parse_recipe
from zerofit.recipe.tasks import TASKS
from zerofit.strategy.launch import find_strategies
from zerofit.tools.compare.compare import CompareOptions
from zerofit.tools.convert.convert import FromMetaOptions
from zerofit.tools.doctor.doctor import read_doctor_options as read_doctor
from zerofit.tools.evaluate.evaluate import EvaluateOptions
from zerofit.tools.generate.generate import GenerateOptions
from zerofit.tools.merge import MergeOptions
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.prepare.prepare import JoinOptions, PrepareOptions
from zerofit.tools.show import read_show_options as read_show
from zerofit.tools.submit import submit
from zerofit.tools.tool_recipe import read_with_recipe
from zerofit.tools.verify import VerifyOptions

TOOLS = {
    ("prepare", "merge"): JoinOptions,
    ("prepare",): PrepareOptions,
    ("convert", "meta-to-hf"): FromMetaOptions,
    ("merge",): MergeOptions,
    ("evaluate",): EvaluateOptions,
    ("generate",): GenerateOptions,
    ("compare",): CompareOptions,
    ("plan",): PlanOptions,
    ("verify",): VerifyOptions,
}
START = re.compile(r"accelerate launch|torchrun --|zerofit [a-z]|make [a-z]|python benchmarks/")
COLUMNS = ("full", "chunked")  # `zerofit full` is the heading of a column in docs/measurements/loop-speed.md
ENDS = {"&", "&&", "||", "|", ";", ">", "2>"}


def texts() -> dict[str, str]:
    """{place: text with commands}: code blocks and `code` of documents, headers of recipes, docstrings of programs."""
    found = {}
    for file in (*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        text = file.read_text(encoding="utf-8")
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
        found[file.relative_to(ROOT)] = "\n".join([*blocks, *inline])
    for file in sorted((ROOT / "recipes").rglob("*.yaml")):
        lines = (line for line in file.read_text().splitlines() if line.startswith("#"))
        found[file.relative_to(ROOT)] = "\n".join(line.lstrip("# ") for line in lines)
    for folder in ("train", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            docstring = re.match(r'r?"""(.*?)"""', file.read_text(), re.DOTALL)
            found[file.relative_to(ROOT)] = docstring[1].replace("\\\\\n", "\\\n") if docstring else ""
    found[Path("benchmarks/on_gpu.sh")] = re.sub(
        r"^(compare )(\S+)", r"zerofit \1", (ROOT / "benchmarks/on_gpu.sh").read_text(), flags=re.MULTILINE
    )
    return found


def commands() -> list[tuple[str, list[str]]]:
    """(place, words) of each command."""
    found = []
    for place, text in texts().items():
        for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
            start = START.match(re.sub(r"^(?:\$ |srun |.*&& )", "", line.strip()))
            if not start or "<" in line or (place.suffix == ".py" and not line.startswith("    ")):
                continue
            try:
                words = shlex.split(start.string, comments=True)
            except ValueError:  # prose: it's
                continue
            end = next((number for number, word in enumerate(words) if word in ENDS), len(words))
            omitted = [number for number in range(end) if words[number] == "..." and words[number - 1] != "--prompt"]
            if words[1] not in COLUMNS:
                found.append((str(place), [words[number] for number in range(end) if number not in omitted]))
    return found


def check_launch(words: list[str]) -> None:
    launcher = launch_command_parser().parse_args(words)
    assert launcher.config_file is None or (ROOT / launcher.config_file).is_file(), launcher.config_file
    check_program([launcher.training_script, *launcher.training_script_args])


def check_program(words: list[str]) -> None:
    script, *options = words
    task = Path(script).stem
    assert (ROOT / "train" / f"{task}.py").is_file(), script
    recipe = next(iter(sorted((ROOT / "recipes" / task).glob("*.yaml"))))
    arguments = [str(recipe) if re.fullmatch("RECIPE|outputs/.*/recipe.yaml", word) else word for word in options]
    parse_recipe(TASKS[task], arguments)


def check_tool(words: list[str]) -> None:
    assert words[0] in COMMANDS, words[0]
    if words in (["launch"], ["convert"]):  # a command that is only named
        return
    if words[0] == "launch":
        options, program = read_options(words[1:])
        find_strategies([options.strategy or "ddp"])
        check_program(program)
        return
    if words[0] == "submit":
        if words[2:]:  # else it is only named
            given = ["recipes/clm/llama2-7b-continual.yaml" if word == "RECIPE" else word for word in words[2:]]
            options, others = submit.read_submit_options(words[1], given)
            _, notes = submit.make_job(options, others)
            assert not notes
        return
    if words[0] == "show":
        read_show(words[1:])
        return
    if words[0] == "doctor":
        assert not read_doctor(words[1:])[-1]
        return
    name = next((name for name in TOOLS if tuple(words[: len(name)]) == name), None)
    if name is None:  # it takes a script, not options
        assert words[:2] == ["convert", "megatron-args"], words
        return
    a_recipe = str(ROOT / "recipes" / "clm" / "gpt-22b-pretrain.yaml")
    arguments = [a_recipe if re.fullmatch("outputs/.*/recipe.yaml", word) else word for word in words[len(name) :]]
    if TOOLS[name] in (CompareOptions, PlanOptions, VerifyOptions) and arguments:
        read_with_recipe(TOOLS[name], arguments, prog="zerofit")
    elif arguments:
        parse_recipe(TOOLS[name], arguments, tool=True)


def check(words: list[str]) -> None:
    """Raises whatever the program would raise."""
    words = [re.sub(r"^\$[A-Z_]+$|^\$\{[A-Z_]+\}$", "1", word) for word in words]  # of a job's own environment: $RANK
    if words[0] == "accelerate":
        if any(word.endswith(".py") for word in words):  # else the command is only named
            check_launch(words[2:])
    elif words[0] == "torchrun":
        launcher = get_args_parser().parse_args(words[1:])
        if launcher.training_script.startswith("train/"):  # docs/megatron.md has one of Megatron's
            check_program([launcher.training_script, *launcher.training_script_args])
    elif words[0] == "zerofit":
        check_tool(words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets, words[1]
    elif words[0] == "python":
        source = (ROOT / words[1]).read_text()
        for word in words[2:]:
            if word.startswith("--"):
                assert f'"{word}"' in source or f'"{word[2:]}": ' in source, word


FOUND = commands()


def test_there_are_commands():
    assert len(FOUND) >= 80
    kinds = [" ".join(words[:2]) for _, words in FOUND]
    assert {"accelerate launch", "zerofit compare", "zerofit prepare", "zerofit verify", "make train"} <= set(kinds)
    assert sum(kind == "accelerate launch" for kind in kinds) >= 30
    assert len({place for place, _ in FOUND}) >= 30


@pytest.mark.parametrize("place", sorted({place for place, _ in FOUND}))
def test_the_commands_of(place, monkeypatch):
    monkeypatch.chdir(ROOT)
    for _, words in (command for command in FOUND if command[0] == place):
        try:
            check(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{place}: {shlex.join(words)}\n{error}") from error
