"""From a YAML file and flags to one checked recipe; flags win. All problems are reported together."""

import dataclasses
import functools
import itertools
import re
import sys
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from zerofit.recipe.base import Recipe
from zerofit.recipe.errors import UserError, nearest
from zerofit.recipe.fields import FlagOrValue, broken_rule, checked, from_text, kind_of
from zerofit.recipe.files import read_text
from zerofit.recipe.foreign_options import foreign_option_hints
from zerofit.recipe.help import help_text, wants_help
from zerofit.recipe.parsing import BoundedLoader
from zerofit.recipe.places import nearest_recipe, recipe_file

R = TypeVar("R", bound=Recipe)


def parse_recipe(
    cls: type[R],
    argv: list[str] | None = None,
    prog: str | None = None,
    tool: bool = False,
    hints: dict[str, str] | None = None,
) -> R:
    """Read `--config FILE` and `--option value` flags into a recipe of type `cls`.

    The source of each value is recorded (`recipe.source(name)`): a flag, a line of the YAML file, or None. An option
    that is null has its default, and no source.

    Args:
        prog: the program's name in its help.
        tool: the program is a tool, which accelerate launch does not start.
        hints: {option of another program: what to type}; by default those for training (foreign_options.py).

    Raises:
        UserError: unknown names (with the nearest known one), wrong types, broken rules: all of them at once.
        SystemExit: code 0 after `--help` and `--help_all`.
    """
    recipe, problems = read_recipe(cls, argv, prog, tool, hints)
    if problems:
        raise UserError(problems)
    return recipe


def read_recipe(
    cls: type[R],
    argv: list[str] | None = None,
    prog: str | None = None,
    tool: bool = False,
    hints: dict[str, str] | None = None,
) -> tuple[R, list[str]]:
    """The same with the problems: (the recipe, in which an option that is wrong has its default; the problems).

    Raises:
        UserError: the recipe's file cannot be read.
        SystemExit: code 0 after `--help` and `--help_all`.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    kinds = {name: kind_of(annotation) for name, annotation in _annotations(cls).items()}
    aliases = {alias: field.name for field in dataclasses.fields(cls) for alias in field.metadata["aliases"]}
    if wants_help(argv):
        print(help_text(cls, kinds, argv, prog or Path(sys.argv[0]).name, tool))
        raise SystemExit(0)

    problems: list[str] = []
    if hints is None:
        hints = foreign_option_hints(cls, kinds, tool)
    flags = _read_flags(argv, kinds, aliases, hints, problems)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    config = flags.pop("config", None)
    if config is not None:
        config = recipe_file(config)
        for name, (value, line) in _read_yaml(config, aliases, problems).items():
            source = f"{config}, line {line}"
            if name not in kinds:
                problems.append(_unknown(f"{source}: {name}", name, [*kinds, *aliases], hints))
            elif value is not None:  # null: not stated, as in the recipe.yaml of a run, which has all options
                _take(name, value, source, kinds, values, problems)
                sources[name] = source
    of_file = {name: (value, sources[name]) for name, value in values.items()}
    for name, texts in flags.items():
        _take_flag(name, texts, kinds, values, problems)
        sources[name] = f"--{name}"

    fields = {field.name: field for field in dataclasses.fields(cls)}
    broken = []
    for name, value in values.items():
        rule = broken_rule(value, fields[name].metadata)
        if rule:
            problems.append(f"{name} = {_show(value)} ({sources[name]}): {rule}")
            broken.append(name)
    values = {name: value for name, value in values.items() if name not in broken}
    of_file = {name: said for name, said in of_file.items() if name not in broken}
    sources = {name: sources[name] for name in values} | ({"config": config} if config else {})
    recipe = cls(**values)
    recipe.remember_sources(sources)
    if tool and getattr(recipe, "trust_remote_code", False) and not sources["trust_remote_code"].startswith("--"):
        problems.append(
            f"trust_remote_code = true ({sources['trust_remote_code']}) would run Python code of others here. Read "
            "it, and add --trust_remote_code to the command line"
        )
    if not problems:
        recipe, found = _Overruling(cls, of_file, values, sources).resolve()
        problems.extend(found)
    return recipe, problems


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


# --------------------------------------------------------------------------------------------------------------- flags


def _read_flags(argv: list[str], kinds: dict, aliases: dict, hints: dict, problems: list[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--flag`, `--list a b c`: the texts that follow each known name."""
    flags: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--"):
            is_recipe = word.endswith((".yaml", ".yml"))
            remedy = f"Name a recipe with --config {word}" if is_recipe else "Options have the form --name value"
            problems.append(f"{word!r} is not an option. {remedy}")
            continue
        name, equals, text = word[2:].partition("=")
        written = name.replace("-", "_")
        name = aliases.get(written, written)
        if spelled.setdefault(name, written) != written:
            problems.append(f"--{written} and --{spelled[name]} are the same option, keep one of the two")
        texts = [text] if equals else []
        while not equals and position < len(argv) and not is_flag(argv[position]):
            texts.append(argv[position])
            position += 1
        if name == "config" and len(texts) == 1:
            flags["config"] = texts[0]
        elif name == "config":
            problems.append(f"--config takes one recipe file, and was given {' '.join(texts) or 'nothing'}")
        elif name in kinds:
            flags[name] = texts
        else:
            problems.append(_unknown(f"--{name}", name, [*kinds, *aliases], hints))
    return flags


def is_flag(word: str) -> bool:
    return word.startswith("--") and not re.fullmatch(r"-+[\d.]+(e[+-]?\d+)?", word)


def option_named(word: str) -> str | None:
    """--num-machines=2 -> num_machines; None: it is not an option."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else None


def flag_value(words: list[str], name: str) -> str | None:
    """The text behind `--name` in a command line that is not checked yet; None: it is not there."""
    for word, following in zip(words, [*words[1:], ""]):
        if option_named(word) == name:
            return word.partition("=")[2] if "=" in word else following
    return None


def take_words(options: type[Recipe], argv: list[str]) -> tuple[list[list[str]], list[str]]:
    """([an option of `options` and its value], the other words), each in the order of the command line."""
    kinds = _annotations(options)
    taken, rest, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        name = option_named(word)
        if name not in kinds:
            rest.append(word)
            continue
        is_switch = kinds[name] is bool and words[:1] not in (["true"], ["false"])
        stands_alone = "=" in word or is_switch or not words or is_flag(words[0])
        taken.append([word] if stands_alone else [word, words.pop(0)])
    return taken, rest


def _take_flag(name: str, texts: list[str], kinds: dict, values: dict, problems: list[str]) -> None:
    kind = kinds[name]
    if not texts and issubclass(kind.base, (bool, FlagOrValue)):
        texts = ["true"]
    if not texts or (len(texts) > 1 and not kind.many):
        given = " ".join(texts) or "nothing"
        problems.append(f"--{name} takes {kind.words}, and was given {given}")
        return
    if kind.optional and texts == ["null"]:  # whatever the file says, it is not stated
        values[name] = None
        return
    try:
        parsed = [from_text(text, kind.base) for text in texts]
    except ValueError:
        problems.append(f"--{name} {' '.join(texts)}: expected {kind.words}")
        return
    values[name] = parsed if kind.many else parsed[0]


# ---------------------------------------------------------------------------------------------------------------- YAML


class _RecipeLoader(BoundedLoader):
    """YAML 1.2 numbers: PyYAML's own rule reads 5e-4, which has no dot, as a string."""


_RecipeLoader.yaml_implicit_resolvers = {
    first: [pair for pair in resolvers if pair[0] != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
# An integer matches the float rule too; the rule added last is asked last, so integers stay integers.


def _read_yaml(path: str, aliases: dict, problems: list[str]) -> dict[str, tuple[Any, int]]:
    """The file's top-level mapping as {name: (value, line number)}."""
    entries: dict[str, tuple[Any, int]] = {}
    try:
        loader = _RecipeLoader(read_text(Path(path)))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            what = "is empty" if node is None else "holds something else"
            raise UserError(f"--config {path}: a recipe holds `option: value` lines, this file {what}")
        for key, value in node.value:
            written, line = str(key.value), key.start_mark.line + 1
            name = aliases.get(written, written)
            if name in entries:
                problems.append(f"{path}, line {line}: {written} is set twice, keep one of the two")
            entries[name] = (loader.construct_object(value, deep=True), line)
    except (OSError, UnicodeDecodeError) as error:
        close = nearest_recipe(path) if isinstance(error, FileNotFoundError) else None
        remedy = f"Did you mean {close}?" if close else "Name an existing recipe, e.g. under recipes/"
        raise UserError(f"--config {path!r} cannot be read: {error}. {remedy}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that does not exist
        raise UserError(f"--config {path} is not valid YAML: {' '.join(str(error).split())[:400]}") from None
    return entries


def _take(name: str, value: Any, source: str, kinds: dict, values: dict, problems: list[str]) -> None:
    kind = kinds[name]
    items = value if isinstance(value, list) and kind.many else [value]
    try:
        parsed = [checked(item, kind.base) for item in items]
    except ValueError:
        problems.append(
            f"{source}: {name} is {_show(value)}, {_type_name(value)}; "
            f"expected {kind.words}{_unquote_hint(value, kind)}"
        )
        return
    values[name] = parsed if kind.many else parsed[0]


# ----------------------------------------------------------------------------------------------------------- flags win


class _Overruling:
    """What a recipe's file says, and what flags say over it: a value of the file that contradicts a flag, or hangs on
    what a flag has taken out, is left out. Two flags that contradict each other, or two lines of the file, stay.

    Args:
        of_file: {option: (its value, its line)} of the file.
        values: those that hold, of the file and of flags.
        sources: who set them.
    """

    def __init__(self, cls: type[Recipe], of_file: dict, values: dict, sources: dict[str, str]):
        self.cls, self.sources = cls, sources
        self.of_file = {name: value for name, (value, _) in of_file.items()}
        self.lines = {name: line for name, (_, line) in of_file.items()}
        self.flags = {name: value for name, value in values.items() if sources[name].startswith("--")}

    def resolve(self) -> tuple[Any, list[str]]:
        """(The recipe, with notes on what is left out; its problems)."""
        left_out = self._without_contradictions({})
        unflagged = self.cls(**self.of_file)
        changed = {name for name in self.flags if self.flags[name] != getattr(unflagged, name)}
        hanging = {}
        for field in dataclasses.fields(self.cls) if self.flags else ():
            said_of = [name for name in field.metadata["said_of"] if name in left_out or name in changed]
            if said_of and field.name in self.of_file and field.name not in [*left_out, *self.flags]:
                hanging[field.name] = left_out.get(said_of[0], f"--{said_of[0]}")
        for part in (hanging, *({name: reason} for name, reason in hanging.items())):  # all of them, or what can be
            if set(self._problems({**left_out, **part})) <= set(self._problems(left_out)):
                left_out = left_out | part
        recipe, problems = self._made(left_out)
        recipe.remember_left_out(
            f"{name} = {_show(self.of_file[name])} ({self.lines[name]}) is left out: it does not go together with "
            f"{reason}"
            for name, reason in left_out.items()
            if getattr(recipe, name) != self.of_file[name]
        )
        return recipe, problems

    def _made(self, left_out: typing.Iterable[str], but: str | None = None) -> tuple[Any, list[str]]:
        """The recipe without some values of the file, and without the flag `but`; and its problems."""
        values = {name: value for name, value in self.of_file.items() if name not in left_out}
        values |= {name: value for name, value in self.flags.items() if name != but}
        recipe = self.cls(**values)
        sources = self.sources | {
            name: line for name, line in self.lines.items() if name not in self.flags or name == but
        }
        stated = {name for name, value in values.items() if value is not None}
        unset = [name for name in self.of_file if name in values.keys() - stated]
        recipe.remember_sources({name: sources[name] for name in sources if name in {*stated, "config"}}, unset)
        recipe.settle()
        return recipe, recipe.problems()

    def _problems(self, left_out: typing.Iterable[str], but: str | None = None) -> list[str]:
        return self._made(left_out, but)[1]

    def _without_contradictions(self, left_out: dict[str, str], at_first: list[str] | None = None) -> dict[str, str]:
        """{value of the file to leave out: the flags that it contradicts}, some of which are known.

        A problem is one of a flag and a value of the file where it is gone without the one, and without the other; of
        a value that has no effect beside the other, only where it is the file's.

        Args:
            at_first: the problems with all values; what is new follows from what was left out.
        """
        problems = self._problems(left_out)
        for problem in problems:
            flags = [f"--{flag}" for flag in self.flags if problem not in self._problems(left_out, but=flag)]
            reason = " and ".join(flags)
            if at_first is not None and problem not in at_first:
                reason = list(left_out.values())[-1]
            subject = re.split("no effect|not supported", problem)[0]
            named = [
                name
                for name in self.of_file
                if name not in self.flags and name not in left_out and re.search(rf"\b{name}\b", subject)
            ]
            choices = [*itertools.combinations(named, 1), *itertools.combinations(named, 2)] if reason else []
            for may_lack, names in itertools.product(((), ("no tokenizer",)), choices):
                without = left_out | dict.fromkeys(names, reason)
                if problem in self._problems(without):
                    continue
                solution = self._without_contradictions(without, at_first or problems)
                others = set(self._problems(solution)) - {each for each in problems if each != problem}
                if all(each.startswith(may_lack) for each in others):
                    return solution
        return left_out


def _unquote_hint(value: Any, kind) -> str:
    if not isinstance(value, str):
        return ""
    try:
        from_text(value, kind.base)
    except ValueError:
        return ""
    return ". Write it without the quotes"


def _type_name(value: Any) -> str:
    names = {str: "a text", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "a map"}
    return names.get(type(value), f"a {type(value).__name__}")


def _unknown(where: str, name: str, known: list[str], hints: dict) -> str:
    if name in hints:
        return f"{where} is not an option: {hints[name]}"
    close = nearest(name, known)
    remedy = f"Did you mean {close}?" if close else "--help_all lists the options"
    return f"{where} is not an option. {remedy}"


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)
