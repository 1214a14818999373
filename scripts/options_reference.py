"""Write docs/options.md: every option of the tasks and of the `zerofit` tools, from the dataclasses that declare them.

python scripts/options_reference.py            # writes the page
python scripts/options_reference.py --check    # exit code 1 if the page is not current
"""

import contextlib
import dataclasses
import io
import sys
from pathlib import Path
from unittest.mock import patch

from zerofit.cli import main as zerofit
from zerofit.recipe.parse import default_text, group_heading, option_groups, value_text
from zerofit.recipe.tasks import TASKS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
TOOLS = (
    "launch",
    *(f"submit {scheduler}" for scheduler in ("slurm", "trainjob", "jobset", "skypilot")),
    *"doctor plan compare verify prepare".split(),
    "prepare merge",
    "convert meta-to-hf",
    "convert megatron-args",
    "merge",
    "evaluate",
    "generate",
    "show",
)
WITH_RECIPE = ("launch", "submit", "doctor", "plan", "compare", "verify")
INTRO = """# Options

This page is generated: `python scripts/options_reference.py` writes it, a test keeps it current.

Each option is a flag (`--learning_rate 2e-5`) and a key of a recipe (`learning_rate: 2e-5`). A recipe is a YAML file
that `--config FILE` names; flags win over it. `python train/clm.py --help` shows the common options, here in **bold**,
and `--help_all` shows all of them. An unknown name is an error that names the nearest known one.

What an option takes: N is an integer, X is a number, `...` means one or more values. An option that takes nothing
is a switch: `--lora` is the same as `--lora true`."""
HEAD = "| option | takes | default | meaning |\n|---|---|---|---|"


def page() -> str:
    parts = [INTRO, "## Training: `train/clm.py`, `dpo.py`, `distill.py`, `cls.py`, `seq2seq.py`"]
    parts += ["An option that only some tasks have names them in its heading."]
    groups = {}  # {group: tasks that have it}, in the order of the first task that has it
    fields = {}
    for task, recipe in TASKS.items():
        for group, options in option_groups(recipe, tool=False).items():
            groups.setdefault(group, []).append(task)
            fields[group] = options
    in_order = sorted(groups, key=lambda group: len(groups[group]) < len(TASKS))  # what all tasks have comes first
    for group in in_order:
        tasks = "" if len(groups[group]) == len(TASKS) else f" ({', '.join(groups[group])})"
        parts += [f"### {group_heading(group)}{tasks}", table(fields[group])]
    parts += ["## Tools"]
    for tool in TOOLS:
        options = options_class(tool)
        parts += [f"### `zerofit {tool}`"]
        if tool.split()[0] in WITH_RECIPE:
            launch = "`zerofit launch` and of " if tool.startswith("submit") else ""
            parts += [f"It takes the options of {launch}training as well."]
        parts += [table([field for group in option_groups(options, tool=True).values() for field in group])]
    return "\n\n".join(parts) + "\n"


def options_class(tool: str) -> type:
    """The dataclass of a tool's options: the one that the tool shows with --help_all."""
    quiet = contextlib.redirect_stdout(io.StringIO())
    with patch("zerofit.recipe.parse.help_text", return_value="") as help_text, quiet, contextlib.suppress(SystemExit):
        zerofit([*tool.split(), "--help_all"])
    return help_text.call_args.args[0]


def table(fields: list[dataclasses.Field]) -> str:
    rows = [HEAD]
    for field in sorted(fields, key=lambda field: not field.metadata["common"]):
        name = f"**`--{field.name}`**" if field.metadata["common"] else f"`--{field.name}`"
        name += "".join(f" (`--{alias}`)" for alias in field.metadata["aliases"])
        takes, default = value_text(field), default_text(field)
        cells = [name, *(f"`{cell}`" if cell else "" for cell in (takes, default)), field.metadata["help"]]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def main(argv: list[str]) -> int:
    if "--check" not in argv:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print("docs/options.md is not current: run python scripts/options_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
