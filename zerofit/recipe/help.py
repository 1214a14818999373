"""Makes the text of --help (the common options, on one screen) and of --help_all (all, in groups).

A group is the dataclass that declares its options, and its heading is the docstring of that class. An option is in
--help if it is declared with `option(..., common=True)`; a command without common options shows all of them.
"""

import dataclasses
import inspect
import re
import shutil
import textwrap
from typing import Any

from zerofit.recipe.fields import OptionType, default_of
from zerofit.recipe.options import TrainingRecipe

SHORT, LONG = {"-h", "--help"}, {"--help_all", "--help-all"}
INDENT, COLUMN, MAX_WIDTH = 2, 36, 100  # columns: where an option begins, where its text begins, where the text ends
LONGEST_CHOICES = 18  # characters of choices that --help shows
METAVARS = {"_file": "FILE", "_dir": "FOLDER", "_column": "COLUMN", "_columns": "COLUMN", "_name": "NAME"}


def wants_help(argv: list[str]) -> bool:
    return bool((SHORT | LONG) & set(argv))


def help_text(cls: type, kinds: dict[str, OptionType], argv: list[str], prog: str, tool: bool) -> str:
    """The common options of a recipe on one screen, or all of them in groups if `argv` has --help_all."""
    groups = option_groups(cls, tool)
    common = [field for fields in groups.values() for field in fields if field.metadata["common"]]
    short = not (LONG & set(argv)) and bool(common)
    width = min(MAX_WIDTH, shutil.get_terminal_size((80, 24)).columns)
    if tool:
        usage = f"usage: {prog} [--config RECIPE] [--option value]"
    else:
        usage = (
            "usage: accelerate launch [--config_file accelerate_configs/NAME.yaml] \\\n"
            f"         {prog} [--config RECIPE] [--option value]"
        )
    what = "common options" if short else "options, with [defaults]"
    intro = f"A recipe (YAML) and flags set the same options; flags win. The {what}:"
    lines = [usage, "", *textwrap.wrap(intro, width)]
    if short:
        lines += ["", *(_line(field, kinds[field.name], width) for field in common)]
        return "\n".join([*lines, "", f"--help_all explains all {sum(map(len, groups.values()))} options."])
    for group, fields in groups.items():
        lines += ["", *textwrap.wrap(heading(group), width)] if fields else []
        for field in sorted(fields, key=lambda field: not field.metadata["common"]):
            lines += _describe(field, kinds[field.name], width)
    return "\n".join(lines)


def heading(group: type) -> str:
    return (group.__doc__ or group.__name__).strip().splitlines()[0]


def option_groups(cls: type, tool: bool) -> dict[type, list[dataclasses.Field[Any]]]:
    """The options of a recipe by the class that declares them: the tool's own first, then those of all tasks, then the
    task's own."""
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
    """The default of an option as a user would type it; empty if it has none."""
    default = default_of(field)
    if default in (None, "", []):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return " ".join(map(str, default)) if isinstance(default, list) else str(default)


def value_text(field: dataclasses.Field[Any], kind: OptionType) -> str:
    """Return what an option takes: its choices, or a word as FILE, N (an integer), X (a number). Empty: a flag."""
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


def _line(field: dataclasses.Field[Any], kind: OptionType, width: int) -> str:
    """An option on one line, with the beginning of its text."""
    takes = value_text(field, kind)
    head = f"  --{field.name} {takes if len(takes) < LONGEST_CHOICES else 'NAME'}".rstrip() + " "
    text = re.split(r"(?<!e\.g)\. ", field.metadata["help"])[0].removesuffix(".")
    default = default_text(field)
    text += f" [{default}]" if default not in ("", "false") else ""
    return f"{head:<{COLUMN}}{textwrap.shorten(text, width - max(COLUMN, len(head)), placeholder=' ...')}"


def _describe(field: dataclasses.Field[Any], kind: OptionType, width: int) -> list[str]:
    """The lines of an option with all of its text."""
    text = field.metadata["help"] + "".join(f" (also --{alias})" for alias in field.metadata["aliases"])
    if default := default_text(field):
        text += f" [{default}]"
    lines = textwrap.wrap(text, width - COLUMN, break_long_words=False, break_on_hyphens=False)
    head = " " * INDENT + f"--{field.name} {value_text(field, kind)}".rstrip()
    if len(head) + 2 > COLUMN:
        heads = textwrap.wrap(head.replace("|", "| "), width, subsequent_indent=" " * 8)  # of many choices, several
        return [*(each.replace("| ", "|") for each in heads), *(" " * COLUMN + line for line in lines)]
    return [head.ljust(COLUMN) + lines[0], *(" " * COLUMN + line for line in lines[1:])]
