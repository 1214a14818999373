"""Who says what: values that the recipe and a DeepSpeed configuration both may state."""

import json
import math
from typing import Any

from zerofit.recipe.errors import UserError


class OptionResolver:
    """Fills "auto" from the recipe, lets the recipe adopt what it leaves unset, and collects contradictions."""

    def __init__(self, config: dict[str, Any], source: str, recipe: Any) -> None:
        self.config, self.source, self.recipe = config, source, recipe
        self.problems: list[str] = []

    def resolve(self, option: str, key: str, default: Any = None) -> None:
        """The recipe owns `key` as `option`: agree with it, or adopt the stated value if the option is unset."""
        node, name = _node(self.config, key)
        stated = node.get(name, "auto")
        if stated == "auto":
            value = getattr(self.recipe, option)
            node[name] = default if value is None else value
        else:
            self.resolve_value(option, key, stated)

    def resolve_value(self, option: str, key: str, stated: Any) -> None:
        if isinstance(stated, bool) or not isinstance(stated, (int, float)):
            self.problems.append(f'{self.source}: {key} = {stated!r}: expected a number or "auto"')
            return
        if self.recipe.source(option) is None:
            self.recipe.adopt(option, stated, self.source)
            return
        ours = getattr(self.recipe, option)
        if ours is None or not math.isclose(stated, ours, rel_tol=1e-9):
            self.problems.append(self._contradiction(key, stated, option, ours))

    def fill(self, key: str, value: Any, what: str) -> None:
        """Set `key` where it is absent or "auto"; anything else than `value` is a contradiction."""
        node, name = _node(self.config, key)
        stated = node.get(name, "auto")
        if stated == "auto":
            node[name] = value
        elif stated != value:
            self.problems.append(self._contradiction(key, stated, what, value))

    def _contradiction(self, key: str, stated: Any, option: str, ours: Any) -> str:
        where = self.recipe.source(option) if hasattr(self.recipe, option) else None
        return (
            f"{self.source} says {key} = {json.dumps(stated)}, and {option} = {json.dumps(ours)}"
            f'{f" ({where})" if where else ""}. Make them agree, or write "auto" in the DeepSpeed configuration'
        )

    def raise_problems(self) -> None:
        if self.problems:
            raise UserError(self.problems)


def _node(config: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *parents, name = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    return config, name
