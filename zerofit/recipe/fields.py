"""Declare an option, and convert the text of a flag, or of a line of a recipe, to the option's type."""

import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

WRITTEN_OUT = (r"[^$]+", "a folder; variables such as $HOME are not replaced here")
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


# What is said of an option that does not say otherwise; for the meaning see `option`.
DEFAULTS: dict[str, Any] = {
    "choices": (),
    "positive": False,
    "minimum": None,
    "below": None,
    "at_most": None,
    "form": None,
    "required": "",
    "aliases": (),
    "common": False,
    "zero": "",
    "why": "",
    "excludes": "",
    "follows": "",
    "phase": "always",
    "identity": True,
    "shapes_input": False,
    "needs": "",
    "noted": "",
}


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field for an option: its default, its help text, the values it allows, and what it goes with.

    Args:
        choices: the values that are allowed.
        positive: the value must be above zero.
        minimum, at_most: the smallest and the largest value allowed, inclusive.
        below: the value must be smaller.
        form: (a regular expression, or what reads the text: a false result or a ValueError refuses it; what is
            expected, in words).
        required: what is missing without a value, and what to type: a sentence.
        aliases: other names of the option, which other programs use.
        common: --help shows it. --help_all shows all options.
        zero: for an option whose value must be above zero: what to type instead of 0.
        why: why options that need its absence have no effect beside it.
        excludes: conditions (see `needs`) that must not hold beside it; a flag among the two takes out the other's
            line of the recipe's file.
        follows: options that it is said of: a recipe's value is left out with theirs, or where a flag changes theirs.
        phase: train (only training uses it: evaluating or predicting resets it), data (predict_file replaces it), or
            always. This and what follows may also be said of a group, as `class SomeOptions(Recipe, phase="train")`.
        identity: whether a run with another value is another run, which does not resume.
        shapes_input: it shapes what the model reads, and is stored with the model.
        needs: conditions without which it has no effect: `lora` (it is set), `save_strategy|save_steps` (one of them
            is), `optim=muon|adamw` (it has one of these values), `!streaming` (it is not set).
        noted: the same, which are noted and not refused.
    """
    assert metadata.keys() <= DEFAULTS.keys(), metadata
    factory = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**factory, metadata={"help": help, **metadata})


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The value of an option that nothing sets."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


@dataclasses.dataclass(frozen=True)
class OptionType:
    """The type of an option in parts: `list[float] | None` is base float, many. An option is optional that has no
    value by default; one that is required has one after the check, and no None in its annotation."""

    base: type[int | float | str]
    many: bool
    optional: bool
    values: dict[str, str | bool] | None = None  # of a flag that also takes words: {what a user writes: the value}

    @property
    def words(self) -> str:
        if self.values:
            return f"{', '.join(self.choices)}, true or false"
        name = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[self.base]
        return f"a list, each {name}" if self.many else name

    @property
    def choices(self) -> list[str]:
        """The words that a flag takes beside true and false."""
        return [word for word in self.values or () if word not in ("true", "false")]


def option_type_of(annotation: Any, optional: bool) -> OptionType:
    """The parts of a dataclass annotation: int, float, bool, str, lists of them, and `| None` of any; or a type that
    is annotated with the values of a flag that also takes words."""
    if typing.get_origin(annotation) is Annotated:
        return OptionType(bool, many=False, optional=optional, values=annotation.__metadata__[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (member for member in typing.get_args(annotation) if member is not type(None))
    many = typing.get_origin(annotation) is list
    if many:
        (annotation,) = typing.get_args(annotation)
    assert issubclass(annotation, (int, float, str)), f"no such kind of option: {annotation}"
    return OptionType(annotation, many, optional)


def kinds_of(options: type) -> dict[str, OptionType]:
    """{option: its kind} of a dataclass of options."""
    hints = typing.get_type_hints(options, include_extras=True)
    return {each.name: option_type_of(hints[each.name], each.default is None) for each in dataclasses.fields(options)}


def from_text(text: str, kind: OptionType) -> Any:
    """Convert the text of a flag, or of a line of a recipe, to its type. Raises ValueError: it is none."""
    word = text.lower()
    if kind.values and word in kind.values:
        return kind.values[word]
    if kind.base is bool:
        if word not in (*TRUE, *FALSE):
            raise ValueError(text)
        is_on = word in TRUE
        return kind.values[str(is_on).lower()] if kind.values else is_on
    if kind.base is int:
        return int(text, 0)  # 1_000 and 0x1f; no 010, which is 8 in YAML 1.1
    # A shell has done so, but not in a file, nor behind --name=
    return kind.base(os.path.expanduser(text) if text.startswith("~/") else text)


def broken_rule(value: Any, metadata: typing.Mapping[str, Any]) -> str | None:
    """Say why `value` breaks a rule of its option (choices, bounds, form), as a sentence; None if it breaks none."""
    for item in value if isinstance(value, list) else [value]:
        if item is None:
            continue
        if isinstance(item, float) and not math.isfinite(item):
            return "it must be a finite number"
        if metadata["choices"] and item not in metadata["choices"]:
            return "it must be one of " + ", ".join(str(choice) for choice in metadata["choices"])
        if metadata["positive"] and not item > 0:
            return "it must be above 0" + (f". {metadata['zero']}" if metadata["zero"] and not item else "")
        if metadata["minimum"] is not None and not item >= metadata["minimum"]:
            return f"it must be {metadata['minimum']:g} or more"
        if metadata["below"] is not None and not item < metadata["below"]:
            return f"it must be below {metadata['below']:.10g}"
        if metadata["at_most"] is not None and not item <= metadata["at_most"]:
            return f"it must be at most {metadata['at_most']:g}"
        if metadata["form"] and not _is_of_form(item, metadata["form"][0]):
            return f"expected {metadata['form'][1]}"
    return None


def _is_of_form(text: str, form: str | Callable[[str], Any]) -> bool:
    try:
        return bool(re.fullmatch(form, text) if isinstance(form, str) else form(text))
    except ValueError:
        return False
