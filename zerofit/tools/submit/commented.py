"""YAML with comments."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

LOADER, DUMPER = getattr(yaml, "CSafeLoader", yaml.SafeLoader), getattr(yaml, "CSafeDumper", yaml.SafeDumper)
NO_TEXT = re.compile(r"[-+]?\.?\d.*|[yYnN]")  # not text to some readers of YAML, where PyYAML takes it so
Path = tuple[str | int, ...]


class Dumper(DUMPER):
    """Texts in quotes where any reader may need them, and several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: Any, text: str) -> yaml.Node:
    style = "|" if "\n" in text else "'" if NO_TEXT.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, _text)


def commented(content: Mapping[str, Any], comments: Mapping[Path, str]) -> str:
    """A mapping as YAML, with a comment above some of its keys.

    Args:
        comments: {path of a key or an item, as ("spec", "containers", 0, "image"): the text, of any number of lines}.

    Raises:
        KeyError: there is no such key.
    """
    text = yaml.dump(content, Dumper=Dumper, sort_keys=False, width=10_000, allow_unicode=True)
    places = dict(_places(yaml.compose(text, Loader=LOADER), ()))
    lines = text.splitlines()
    for path, comment in sorted(comments.items(), key=lambda pair: -places[pair[0]]):
        line = places[path]
        indent = lines[line][: len(lines[line]) - len(lines[line].lstrip())]
        lines[line:line] = [f"{indent}# {part}" for part in comment.splitlines()]
    return "\n".join(lines) + "\n"


def _places(node: yaml.Node, path: Path) -> Iterator[tuple[Path, int]]:
    """(path, line) of each key and item."""
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value, value) for index, value in enumerate(node.value)]
    else:
        return
    for name, start, value in children:
        yield (*path, name), start.start_mark.line
        yield from _places(value, (*path, name))
