"""Write docs/recipes.md: every recipe with its model, data, strategy, needs and command, from the recipes themselves.

python scripts/recipes_index.py            # writes the page
python scripts/recipes_index.py --check    # exit code 1 if the page is not current
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
TASKS = {
    "clm": "Text",
    "dpo": "Preferences",
    "distill": "Distillation",
    "cls": "Classification and regression",
    "seq2seq": "Source to target",
}
NEEDS = re.compile(r"(?P<about>.*?) Needs \((?P<source>[^)]+)\): (?P<needs>.*)")
STRATEGY = re.compile(r"accelerate_configs/(\w+)\.yaml(?:.*?--num_processes (\d+))?")
INTRO = """# Recipes

This page is generated: `python scripts/recipes_index.py` writes it from the recipes' headers, a test keeps it current.

The strategy is that of the command below; any other works too, where it fits. A number after x is that of processes
(GPUs). What a recipe needs comes from runs on two CPU cores, from arithmetic, from `zerofit plan`, or from what others
have published; the last column says which. [plan](plan.md) predicts memory and time for your GPUs."""
HEAD = "| recipe | model | data | strategy | needs are |\n|---|---|---|---|---|"


@dataclass
class Entry:
    """What the index says of a recipe."""

    path: str
    about: str
    model: str
    data: str
    strategy: str
    source: str
    needs: str
    commands: list[str]

    @property
    def name(self) -> str:
        return Path(self.path).stem


def _in_words(value: str | list[str | float]) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def entry(file: Path) -> Entry:
    text = file.read_text(encoding="utf-8")
    recipe = yaml.safe_load(text)
    header = [line[1:] for line in re.match(r"(?:#.*\n)+", text)[0].splitlines()]
    begin = next(index for index, line in enumerate(header) if line.startswith("   "))
    prose = NEEDS.fullmatch(" ".join(line.strip() for line in header[:begin]))
    if prose is None:
        raise SystemExit(f"{file}: before its commands the header says 'Needs (source of the figures): ...'")
    commands = first_run(header[begin:])
    return Entry(
        path=str(file.relative_to(ROOT)),
        about=prose["about"],
        model=model_of(recipe),
        data=_in_words(
            next(recipe[key] for key in ("train_file", "data_path", "dataset_name", "task_name") if key in recipe)
        ),
        strategy=strategy_of(" ".join(commands)),
        source=prose["source"],
        needs=prose["needs"][0].upper() + prose["needs"][1:],
        commands=commands,
    )


def first_run(lines: list[str]) -> list[str]:
    """The header's commands up to its first `accelerate launch`, that one included."""
    commands: list[str] = []
    for line in lines:
        if commands and "accelerate launch" in " ".join(commands) and not commands[-1].endswith("\\"):
            break
        if line.startswith("   "):
            commands.append(line[3:])
    return commands


def model_of(recipe: dict) -> str:
    if "model_name_or_path" in recipe:
        return f"`{recipe['model_name_or_path']}`" + (", LoRA" if recipe.get("lora") else "")
    return f"`{recipe.get('config_name') or recipe['model_type']}`, from scratch"


def strategy_of(commands: str) -> str:
    found = STRATEGY.search(commands)
    if found is None:
        return "`single`, `ddp`"
    return f"`{found[1]}`" + (f" x {found[2]}" if found[2] else "")


def row(recipe: Entry) -> str:
    link = f"[{recipe.name}](#{recipe.name})"
    return f"| {link} | {recipe.model} | `{recipe.data}` | {recipe.strategy} | {recipe.source} |"


def page() -> str:
    parts = [INTRO]
    entries = {task: [entry(file) for file in sorted((ROOT / "recipes" / task).glob("*.yaml"))] for task in TASKS}
    for task, title in TASKS.items():
        rows = [row(recipe) for recipe in entries[task]]
        parts += [f"## {title}: `train/{task}.py`", "\n".join([HEAD, *rows])]
    parts += ["## What each one does and needs"]
    for recipe in (recipe for task in TASKS for recipe in entries[task]):
        parts += [
            f"### {recipe.name}",
            recipe.about,
            f"*Needs* ({recipe.source}): {recipe.needs} [All of it](../{recipe.path}).",
        ]
        parts += ["```\n" + "\n".join(recipe.commands) + "\n```"]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> int:
    if "--check" not in argv:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print("docs/recipes.md is not current: run python scripts/recipes_index.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
