"""What --help and --help_all print: options in groups, the common ones first.

A group is the dataclass that declares its options, and its heading that class' docstring. Which options --help shows
is said where they are declared: `option(..., common=True)`; where none is, it shows all.
"""

import dataclasses
import inspect
import re
import shutil
import textwrap

from train.recipe.data_options import SourceOptions
from train.recipe.fields import Kind
from train.recipe.options import TrainingRecipe

SHORT, LONG = {"-h", "--help"}, {"--help_all", "--help-all"}
INDENT, COLUMN, WIDEST = 2, 36, 100  # where an option begins, where its text begins, and where the text ends at most


def wants_help(argv: list[str]) -> bool:
    return bool((SHORT | LONG) & set(argv))


def help_text(cls: type, kinds: dict[str, Kind], argv: list[str], prog: str, tool: bool) -> str:
    """The common options of a recipe, or all where `argv` asks for them."""
    groups = {group: [field for field in fields if not field.metadata["hidden"]]
              for group, fields in _groups(cls, tool).items()}  # fmt: skip
    count = sum(map(len, groups.values()))
    short = not (LONG & set(argv)) and any(map(_has_common, groups.values()))
    width = min(WIDEST, shutil.get_terminal_size((80, 24)).columns)
    lines = [
        f"usage: {prog} [--config RECIPE] [--option value]" if tool else
        f"usage: accelerate launch [--config_file accelerate_configs/NAME.yaml] \\\n"
        f"         {prog} [--config RECIPE] [--option value]",
        "",
        *textwrap.wrap("A recipe (YAML) and flags set the same options; flags win. "
                       + ("The common options, and [defaults]:" if short else "All options, and [defaults]:"), width),
    ]  # fmt: skip
    for group, fields in groups.items():
        shown = [field for field in fields if field.metadata["common"] or not short]
        if shown:
            lines += ["", *textwrap.wrap((group.__doc__ or group.__name__).strip().splitlines()[0], width)]
        for field in sorted(shown, key=lambda field: not field.metadata["common"]):
            lines += _describe(field, kinds[field.name], short, width)
    return "\n".join([*lines, *(["", f"--help_all shows all {count} options."] if short else [])])


def _groups(cls: type, tool: bool) -> dict[type, list[dataclasses.Field]]:
    """Options by the class that declares them: a tool's, the model, the data, what is the task's own (groups with
    common options first), and the rest of what all tasks have."""
    groups = {}
    for group in reversed(cls.__mro__):
        own = inspect.get_annotations(group)
        if dataclasses.is_dataclass(group) and own:
            groups[group] = [field for field in dataclasses.fields(group) if field.name in own]
    if issubclass(cls, TrainingRecipe):
        of_all = [group for group in groups if issubclass(TrainingRecipe, group)]
        of_tool = [group for group in groups if tool and issubclass(cls.__bases__[0], group)]
        of_task = [group for group in groups if group not in of_all + of_tool]
        of_task.sort(key=lambda group: not _has_common(groups[group]))
        place = of_all.index(SourceOptions) + 1
        groups = {group: groups[group] for group in [*of_tool, *of_all[:place], *of_task, *of_all[place:]]}
    return groups


def _has_common(fields: list[dataclasses.Field]) -> bool:
    return any(field.metadata["common"] for field in fields)


def _describe(field: dataclasses.Field, kind: Kind, short: bool, width: int) -> list[str]:
    """An option's lines; the short help has the first sentence of its text."""
    choices, text = field.metadata["choices"], field.metadata["help"]
    takes = "|".join(map(str, choices)) if choices else {str: "TEXT", int: "N", float: "X", bool: ""}[kind.base]
    name = f"--{field.name} {takes}{' ...' * kind.many}".rstrip()
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if short:
        text = re.split(r"(?<!e\.g)\. ", text)[0].removesuffix(".") + "."
    else:
        text += "".join(f" (also --{alias})" for alias in field.metadata["aliases"])
    if default not in (None, "", []) and (default is not False or not short):
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        text += f" [{shown if not isinstance(shown, bool) else str(shown).lower()}]"
    lines = textwrap.wrap(text, width - COLUMN, break_long_words=False, break_on_hyphens=False)
    head = " " * INDENT + name
    if len(head) + 2 > COLUMN:
        return [head, *(" " * COLUMN + line for line in lines)]
    return [head.ljust(COLUMN) + lines[0], *(" " * COLUMN + line for line in lines[1:])]
