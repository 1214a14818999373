"""The base of all recipes: the value of each option, its source and its default."""

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from zerofit.recipe.files import without_folders

TEXTS = ("sample_prompt", "system_prompt", "source_prefix")  # options that hold text which a user wrote


@dataclass
class Recipe:
    """Base of all recipes: the source of each value, and checks that concern several options."""

    def remember_sources(self, sources: dict[str, str], unset: Iterable[str] = ()) -> None:
        """Record what set each option, and which options of the recipe's file a flag has set to null."""
        self._sources, self._unset = dict(sources), set(unset)

    @property
    def unset(self) -> set[str]:
        """Options of the recipe's file that a flag has set to null."""
        return self.__dict__.get("_unset", set())

    def source(self, name: str) -> str | None:
        """What set this option: `--flag`, `file.yaml, line 3`, a file of the strategy pair; None: nothing did."""
        return self.__dict__.get("_sources", {}).get(name)

    def remember_left_out(self, notes: Iterable[str]) -> None:
        self._left_out = [*self.left_out, *notes]

    @property
    def left_out(self) -> list[str]:
        """A note on each value of the recipe's or the strategy's file that has no effect beside a flag."""
        return self.__dict__.get("_left_out", [])

    def is_flag(self, name: str) -> bool:
        """Whether the command line has set this option."""
        return (self.source(name) or "").startswith("--")

    def is_changed(self, name: str) -> bool:
        """Whether this option is set, and to a value other than its default (a run's recipe.yaml sets all options)."""
        return bool(self.source(name)) and hasattr(self, name) and getattr(self, name) != self._default(name)

    def _default(self, name: str) -> Any:
        field = next(field for field in dataclasses.fields(self) if field.name == name)
        return field.default_factory() if field.default is dataclasses.MISSING else field.default

    def adopt(self, name: str, value: Any, source: str) -> None:
        """Set an option that the user has not set to a value from another source, such as a DeepSpeed JSON. Only while
        the run's configuration is resolved; then the recipe is frozen."""
        setattr(self, name, value)
        self.__dict__.setdefault("_sources", {})[name] = source

    def draft(self) -> Self:
        """A copy that can change until it is frozen."""
        copied = copy.copy(self)
        copied.__dict__.pop("_frozen", None)
        copied.remember_sources(self.__dict__.get("_sources", {}), self.unset)
        copied.__dict__["_stands_for"] = dict(self.__dict__.get("_stands_for", {}))
        return copied

    def freeze(self) -> None:
        """Refuse any later change of an option."""
        self.__dict__["_frozen"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"{name}: the recipe is resolved, and frozen")
        super().__setattr__(name, value)

    @property
    def trains(self) -> bool:
        """Whether the launch trains. Without training it evaluates or predicts."""
        return True

    def reset_option(self, name: str) -> str | None:
        """Reset an option to its default, if the task has it. Returns what had set it."""
        if not hasattr(self, name):
            return None
        setattr(self, name, self._default(name))
        return self.__dict__.get("_sources", {}).pop(name, None)

    def settle(self) -> None:
        """Change what follows from other options. Called once all options are read."""

    def stand_in(self, name: str, value: Any) -> None:
        """Let an option have another value from now on, such as the copy of a file; `to_dict` has the one given."""
        now, stand_ins = getattr(self, name), self.__dict__.setdefault("_stands_for", {})
        local, given = stand_ins.get(name, (None, None))
        stand_ins[name] = (value, given if now == local and name in stand_ins else now)
        setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        stand_ins = self.__dict__.get("_stands_for", {}).items()
        return values | {name: given for name, (local, given) in stand_ins if values[name] == local}

    def to_publish(self) -> dict[str, Any]:
        """The same for model cards and trackers, without the folders of this machine."""
        return {name: value if name in TEXTS else without_folders(value) for name, value in self.to_dict().items()}

    def flags_given(self, kind: type | None = None, without: Sequence[str] = ()) -> list[str]:
        """`--config FILE` and the flags that were given, but for some.

        Args:
            kind: of whose options; None: of this recipe's.
        """
        words = ["--config", self.source("config")] if self.source("config") else []
        for field in dataclasses.fields(kind or self):
            if field.name in self.unset and field.name not in without:
                words += [f"--{field.name}", "null"]
            if self.source(field.name) == f"--{field.name}" and field.name not in without:
                value = getattr(self, field.name)
                values = (
                    value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else value]
                )
                words += [f"--{field.name}", *map(str, values)]
        return words

    def problems(self) -> list[str]:
        """What is wrong with this combination of options; empty if nothing is."""
        return []
