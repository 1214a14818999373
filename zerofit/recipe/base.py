"""Declare an option, and the base of all recipes: the value of each option, its source and its default."""

import copy
import dataclasses
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Self

from zerofit.recipe.files import strip_folders

FOLDER_FORM = (r"[^$]+", "a folder; variables such as $HOME are not replaced here")
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


# What may be said of an option, and what holds where nothing is said. `phase` and what follows it may also be said of
# a group, as `class SomeOptions(Recipe, phase="train")`.
METADATA_DEFAULTS: dict[str, Any] = {
    "choices": (),  # the values that are allowed
    "positive": False,  # the value must be above zero
    "minimum": None,  # the smallest value allowed
    "at_most": None,  # the largest value allowed
    "below": None,  # the value must be smaller
    # (a regular expression, or what reads the text: a false result, ValueError or LookupError refuses it; what is
    # expected)
    "form": None,
    "required": "",  # a sentence: what is missing without a value, and what to type
    "aliases": (),  # other names of the option, which other programs use
    "zero": "",  # for an option whose value must be above zero: what to type instead of 0
    # conditions (see `needs`) that must not hold with it; if one of the two is a flag, the other's line is dropped
    "excludes": "",
    # options that it belongs to: a recipe's line is dropped together with theirs, or where a flag changes theirs
    "follows": "",
    "common": False,  # --help shows it, --help_all shows all options
    # train (only training uses it: evaluating or predicting resets it), data (predict_file replaces it), or always
    "phase": "always",
    "identity": True,  # a run with another value is another run, which does not resume
    "shapes_input": False,  # it shapes what the model reads, and is stored with the model
    # conditions without which it has no effect: `lora` (it is set), `save_strategy|save_steps` (one of them is),
    # `optim=muon|adamw` (it has one of these values), `!streaming` (it is not set)
    "needs": "",
    "noted": "",  # the same, which are noted and not refused
}


def option(default: Any, help: str, **metadata: Any) -> Any:
    """Return a dataclass field for an option: its default, its help text, and the metadata that METADATA_DEFAULTS
    explains."""
    assert metadata.keys() <= METADATA_DEFAULTS.keys(), metadata
    factory = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**factory, metadata={"help": help, **metadata})


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the value of an option that nothing sets."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


@dataclasses.dataclass(frozen=True)
class OptionType:
    """The type of an option in parts: `list[float] | None` is base float, many. An option is optional if its default
    is None; a required one has a value after the check, and no None in its annotation."""

    base: type[int | float | str]
    many: bool
    optional: bool
    values: dict[str, str | bool] | None = None  # for a flag that also takes words: {word: value}

    @property
    def words(self) -> str:
        if self.values:
            return f"{', '.join(self.choices)}, true or false"
        name = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[self.base]
        return f"a list, each {name}" if self.many else name

    @property
    def choices(self) -> list[str]:
        """The words that a flag takes in addition to true and false."""
        return [word for word in self.values or () if word not in ("true", "false")]


def option_type_of(annotation: Any, optional: bool) -> OptionType:
    """Return the parts of a dataclass annotation: int, float, bool, str, lists of them, and `| None` of any; or a type
    that is annotated with the values of a flag that also takes words."""
    if typing.get_origin(annotation) is Annotated:
        return OptionType(bool, many=False, optional=optional, values=annotation.__metadata__[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (member for member in typing.get_args(annotation) if member is not type(None))
    many = typing.get_origin(annotation) is list
    if many:
        (annotation,) = typing.get_args(annotation)
    assert issubclass(annotation, (int, float, str)), f"no such kind of option: {annotation}"
    return OptionType(annotation, many, optional)


def parse_value(text: str, kind: OptionType) -> Any:
    """Convert the text of a flag, or of a line of a recipe, to its type. Raises ValueError: it has another type."""
    word = text.lower()
    if kind.values and word in kind.values:
        return kind.values[word]
    if kind.base is bool:
        if word not in (*TRUE_WORDS, *FALSE_WORDS):
            raise ValueError(text)
        is_on = word in TRUE_WORDS
        return kind.values[str(is_on).lower()] if kind.values else is_on
    if kind.base is int:
        return int(text, 0)  # 1_000 and 0x1f; no 010, which is 8 in YAML 1.1
    # A shell has done so, but not in a file, nor after --name=
    return kind.base(os.path.expanduser(text) if text.startswith("~/") else text)


def find_broken_rule(value: Any, metadata: typing.Mapping[str, Any]) -> str | None:
    """Return the rule of its option (choices, bounds, form) that `value` breaks, as a sentence; None if it breaks
    none."""
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
    except (ValueError, LookupError):
        return False


USER_TEXTS = ("sample_prompt", "system_prompt", "source_prefix")  # options that hold text which a user wrote


class Clash(NamedTuple):
    """An option that has no effect because of others."""

    name: str
    others: list[str]  # the options because of which it has none
    text: str
    excludes: bool = False  # each of the two takes the other's place; else the option depends on the others
    is_noted: bool = False  # it is not a mistake


class Findings:
    """The values, sources and notes of a recipe's options. It is not a dataclass: none of this is an option itself."""

    unset: frozenset[str] = frozenset()  # options of the recipe's file that a flag has set to null
    left_out: Sequence[str] = ()  # notes on values of the recipe's or strategy's file without effect because of a flag
    without_effect: Sequence[str] = ()  # the flags that have no effect on a launch without training
    contradictions: Sequence[str] = ()  # a sentence on each setting that is not that of the adapter trained on
    _sources: Mapping[str, str] = MappingProxyType({})  # {option: what has set it}
    _given: Mapping[str, Any] = MappingProxyType({})  # {option that another value stands in for: its own}


@dataclass
class Recipe(Findings):
    """Base of all recipes: the source of each value, and checks that concern several options."""

    def __init_subclass__(cls, **of_group: str | bool) -> None:
        """Complete what is said of each option; `kind` is its OptionType. `of_group`: said once of all of a group."""
        super().__init_subclass__()
        for name, annotation in inspect.get_annotations(cls).items():
            field = vars(cls).get(name)
            if isinstance(field, dataclasses.Field):
                kind = option_type_of(annotation, field.default is None)
                field.metadata = MappingProxyType({**METADATA_DEFAULTS, **of_group, **field.metadata, "kind": kind})

    @classmethod
    def names_with(cls, **metadata: str | bool) -> list[str]:
        """Return the names of the options that were declared with this metadata."""
        fields = dataclasses.fields(cls)
        return [each.name for each in fields if all(each.metadata[key] == value for key, value in metadata.items())]

    def remember_sources(self, sources: dict[str, str], unset: Iterable[str] = ()) -> None:
        """Record what set each option, and which options of the recipe's file a flag has set to null."""
        self._sources = dict(sources)
        self.unset = frozenset(unset)

    def source(self, name: str) -> str | None:
        """Return the source of this option: `--flag`, `file.yaml, line 3`, a file of the strategy; None: nothing set
        it."""
        return self._sources.get(name)

    def remember_left_out(self, notes: Iterable[str]) -> None:
        self.left_out = [*self.left_out, *notes]

    def is_flag(self, name: str) -> bool:
        """Return whether the command line has set this option."""
        return (self.source(name) or "").startswith("--")

    def _default(self, name: str) -> Any:
        return default_of(next(field for field in dataclasses.fields(self) if field.name == name))

    def adopt(self, name: str, value: Any, source: str) -> None:
        """Set an option that the user has not set to a value from another source, such as a DeepSpeed JSON."""
        setattr(self, name, value)
        self._sources = {**self._sources, name: source}

    def draft(self) -> Self:
        """Return a copy, to be changed."""
        return copy.copy(self)

    @property
    def trains(self) -> bool:
        """Return whether the launch trains. Without training it evaluates or predicts."""
        return True

    def reset_option(self, name: str) -> str | None:
        """Reset an option to its default, if the task has it. Returns what had set it."""
        if not hasattr(self, name):
            return None
        setattr(self, name, self._default(name))
        source = self.source(name)
        self._sources = {option: each for option, each in self._sources.items() if option != name}
        return source

    def settle(self) -> None:
        """Derive options from others. Called once, after parsing."""

    def stand_in(self, name: str, value: Any) -> None:
        """Override an option's value, e.g. an adapter's folder by its base; `to_dict` keeps the user's value."""
        self._given = {name: getattr(self, name), **self._given}
        setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | dict(self._given)

    def to_publish(self) -> dict[str, Any]:
        """Return all options for model cards and trackers, without the folders of this machine."""
        return {name: value if name in USER_TEXTS else strip_folders(value) for name, value in self.to_dict().items()}

    def flags_given(self, kind: type | None = None, without: Sequence[str] = ()) -> list[str]:
        """Return `--config FILE` and the flags that were given, except those in `without`. `kind`: the class that
        declares the options; None: this recipe's."""
        words = ["--config", config] if (config := self.source("config")) else []
        for field in dataclasses.fields(kind or self):
            if field.name in self.unset and field.name not in without:
                words += [f"--{field.name}", "null"]
            if self.source(field.name) == f"--{field.name}" and field.name not in without:
                value = getattr(self, field.name)
                words += [f"--{field.name}", *map(to_text, value if isinstance(value, list) else [value])]
        return words

    def problems(self) -> list[str]:
        """Return the problems of this combination of options; empty if there are none."""
        missing = [each.metadata["required"] for each in dataclasses.fields(self) if not getattr(self, each.name)]
        return [*filter(None, missing), *(clash.text for clash in self.clashes() if not clash.is_noted)]

    def idle_options(self) -> list[str]:
        """Return a sentence for each option that is set and has no effect, and is not a mistake."""
        return [f"{clash.text} ({self.source(clash.name)})" for clash in self.clashes() if clash.is_noted]

    def clashes(self) -> list[Clash]:
        """Return the options that are set and do not go together with others, as their `needs` and `excludes` say."""
        clashes = []
        for field in dataclasses.fields(self):
            needs, noted = (field.metadata[kind].split() for kind in ("needs", "noted"))
            # A run's recipe.yaml sets all options: what is set to its default clashes with nothing.
            if not self.source(field.name) or getattr(self, field.name) == default_of(field):
                continue
            for need in (*needs, *noted):
                others, text = self._broken(need)
                if text:
                    setting = f"{field.name} = {to_text(getattr(self, field.name))}" if need[0] == "!" else field.name
                    problem = f"{setting} has no effect {text}"
                    clashes.append(Clash(field.name, others, problem, is_noted=need in noted))
            for excluded in field.metadata["excludes"].split() if is_set(getattr(self, field.name)) else ():
                others, text = self._broken(f"!{excluded}")
                if text:
                    pair = " and ".join(f"{name} = {to_text(getattr(self, name))}" for name in (field.name, *others))
                    clashes.append(Clash(field.name, others, f"{pair}: keep one of them", excludes=True))
        return clashes

    def _broken(self, condition: str) -> tuple[list[str], str]:
        """Return (the options of a condition that does not hold, `without those`); ([], "") if it holds."""
        is_negated = condition.startswith("!")
        names, _, values = condition.removeprefix("!").partition("=")
        others = [name for name in names.split("|") if hasattr(self, name)]
        if not others:
            return [], ""
        allowed = values.split("|") if values else None
        current = {name: getattr(self, name) for name in others}
        holds = [name for name, value in current.items() if (to_text(value) in allowed if allowed else is_set(value))]
        if bool(holds) != is_negated:
            return [], ""
        if not is_negated:
            values = f" = {' or '.join(allowed)}" if allowed else ""
            return others, f"without {' or '.join(others)}{values}"
        return others, f"with {others[0]} = {to_text(current[others[0]])}. Remove one of them"


def is_set(value: Any) -> bool:
    """Return whether an option is set to anything but false, nothing or "no"."""
    return bool(value) and value not in ("no", "none")


def quote(value: Any) -> str:
    """Return the value of an option for a message, with quotes around a text."""
    return repr(value) if isinstance(value, str) else to_text(value)


def to_text(value: Any) -> str:
    """Return the value of an option for a message."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
