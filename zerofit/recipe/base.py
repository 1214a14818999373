"""The base of all recipes: the value of each option, its source and its default."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from zerofit.recipe.fields import DEFAULTS, default_of
from zerofit.recipe.files import without_folders

TEXTS = ("sample_prompt", "system_prompt", "source_prefix")  # options that hold text which a user wrote


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
    left_out: Sequence[str] = ()  # notes on values of the recipe's or strategy's file without effect beside a flag
    without_effect: Sequence[str] = ()  # the flags that have no effect on a launch without training
    contradictions: Sequence[str] = ()  # a sentence on each setting that is not that of the adapter trained on
    _sources: Mapping[str, str] = MappingProxyType({})  # {option: what has set it}
    _stands_for: Mapping[str, tuple[Any, Any]] = MappingProxyType({})  # {option: (its value now, the one given)}


@dataclass
class Recipe(Findings):
    """Base of all recipes: the source of each value, and checks that concern several options."""

    def __init_subclass__(cls, **of_group: str | bool) -> None:
        """Say `phase`, `needs`, ... (see `option`) once of a group: of all options that do not say otherwise."""
        super().__init_subclass__()
        for field in vars(cls).values():
            if isinstance(field, dataclasses.Field):
                field.metadata = MappingProxyType({**DEFAULTS, **of_group, **field.metadata})

    @classmethod
    def names_with(cls, **metadata: str | bool) -> list[str]:
        """The options that were declared with this metadata."""
        fields = dataclasses.fields(cls)
        return [each.name for each in fields if all(each.metadata[key] == value for key, value in metadata.items())]

    def remember_sources(self, sources: dict[str, str], unset: Iterable[str] = ()) -> None:
        """Record what set each option, and which options of the recipe's file a flag has set to null."""
        self._sources, self.unset = dict(sources), frozenset(unset)

    def source(self, name: str) -> str | None:
        """Return what set this option: `--flag`, `file.yaml, line 3`, a file of the strategy; None: nothing did."""
        return self._sources.get(name)

    def remember_left_out(self, notes: Iterable[str]) -> None:
        self.left_out = [*self.left_out, *notes]

    def is_flag(self, name: str) -> bool:
        """Return whether the command line has set this option."""
        return (self.source(name) or "").startswith("--")

    def is_changed(self, name: str) -> bool:
        """Return whether this option is set, and not to its default (a run's recipe.yaml sets all options)."""
        return bool(self.source(name)) and hasattr(self, name) and getattr(self, name) != self._default(name)

    def _default(self, name: str) -> Any:
        return default_of(next(field for field in dataclasses.fields(self) if field.name == name))

    def adopt(self, name: str, value: Any, source: str) -> None:
        """Set an option that the user has not set to a value from another source, such as a DeepSpeed JSON."""
        setattr(self, name, value)
        self._sources = {**self._sources, name: source}

    def draft(self) -> Self:
        """A copy, to change."""
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
        """Override an option's value, e.g. by a local copy of a file; `to_dict` keeps the user's value."""
        now = getattr(self, name)
        local, given = self._stands_for.get(name, (None, None))
        given = given if now == local and name in self._stands_for else now
        self._stands_for = {**self._stands_for, name: (value, given)}
        setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        stand_ins = self._stands_for.items()
        return values | {name: given for name, (local, given) in stand_ins if values[name] == local}

    def to_publish(self) -> dict[str, Any]:
        """Return all options for model cards and trackers, without the folders of this machine."""
        return {name: value if name in TEXTS else without_folders(value) for name, value in self.to_dict().items()}

    def flags_given(self, kind: type | None = None, without: Sequence[str] = ()) -> list[str]:
        """`--config FILE` and the flags that were given, but for some. `kind`: of whose options; None: of this
        recipe's."""
        words = ["--config", config] if (config := self.source("config")) else []
        for field in dataclasses.fields(kind or self):
            if field.name in self.unset and field.name not in without:
                words += [f"--{field.name}", "null"]
            if self.source(field.name) == f"--{field.name}" and field.name not in without:
                value = getattr(self, field.name)
                words += [f"--{field.name}", *map(as_text, value if isinstance(value, list) else [value])]
        return words

    def problems(self) -> list[str]:
        """Return what is wrong with this combination of options; empty if nothing is."""
        missing = [each.metadata["required"] for each in dataclasses.fields(self) if not getattr(self, each.name)]
        return [*filter(None, missing), *(clash.text for clash in self.clashes() if not clash.is_noted)]

    def idle_options(self) -> list[str]:
        """A sentence for each option that is set and has no effect, and is not a mistake."""
        return [f"{clash.text} ({self.source(clash.name)})" for clash in self.clashes() if clash.is_noted]

    def clashes(self) -> list[Clash]:
        """The options that are set and do not go together with others, as their `needs` and `excludes` say."""
        found = []
        for field in dataclasses.fields(self):
            needs, noted = (field.metadata[kind].split() for kind in ("needs", "noted"))
            if not (needs or noted or field.metadata["excludes"]) or not self.is_changed(field.name):
                continue
            for need in (*needs, *noted):
                others, text = self._broken(need)
                if text:
                    what = f"{field.name} = {as_text(getattr(self, field.name))}" if need[0] == "!" else field.name
                    found.append(Clash(field.name, others, f"{what} has no effect {text}", is_noted=need in noted))
            for excluded in field.metadata["excludes"].split() if is_set(getattr(self, field.name)) else ():
                others, text = self._broken(f"!{excluded}")
                if text:
                    pair = " and ".join(f"{name} = {as_text(getattr(self, name))}" for name in (field.name, *others))
                    found.append(Clash(field.name, others, f"{pair}: keep one of them", excludes=True))
        return found

    def _broken(self, condition: str) -> tuple[list[str], str]:
        """Return (the options of a condition that does not hold, `without those`); ([], "") if it holds."""
        denied = condition.startswith("!")
        names, _, values = condition.removeprefix("!").partition("=")
        others = [name for name in names.split("|") if hasattr(self, name)]
        if not others:
            return [], ""
        wanted = values.split("|") if values else None
        given = {name: getattr(self, name) for name in others}
        holds = [name for name, value in given.items() if (as_text(value) in wanted if wanted else is_set(value))]
        if bool(holds) != denied:
            return [], ""
        if not denied:
            values = f" = {' or '.join(wanted)}" if wanted else ""
            return others, f"without {' or '.join(others)}{values}"
        why = next(field.metadata["why"] for field in dataclasses.fields(self) if field.name == others[0])
        why = f": {why}" if why else ""
        return others, f"with {others[0]} = {as_text(given[others[0]])}{why}. Remove one of them"


def is_set(value: Any) -> bool:
    """Return whether an option is set to anything but false, nothing or "no"."""
    return bool(value) and value not in ("no", "none")


def quoted(value: Any) -> str:
    """The value of an option, in a message, with quotes around a text."""
    return repr(value) if isinstance(value, str) else as_text(value)


def as_text(value: Any) -> str:
    """The value of an option, in a message."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
