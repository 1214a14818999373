"""YAML and JSON of others: what is nested too deeply, or grows as it is read, is refused. Numbers and sizes."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import read_text

TOO_DEEP = "nested too deeply"
DEEPEST = 50  # lists and maps in each other
LONGEST_ALIAS = 1000  # characters of a value that is repeated


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's, which would follow aliases of aliases, and nesting until Python's stack is full. A key that stands
    twice in a map is refused."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        mark = event.start_mark
        repeated = self.anchors.get(event.anchor) if isinstance(event, yaml.AliasEvent) else None
        is_short = isinstance(repeated, yaml.ScalarNode) and len(repeated.value) <= LONGEST_ALIAS
        if isinstance(event, yaml.AliasEvent) and not is_short:
            raise yaml.composer.ComposerError(
                None, None, f"*{event.anchor} repeats more than a short value: write it out", mark
            )
        if self.depth == DEEPEST:
            raise yaml.composer.ComposerError(None, None, TOO_DEEP, mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The map of a node, in which each key may stand once: PyYAML would take the last."""
        names = [str(key.value) for key, _ in node.value]
        if again := [key for place, (key, _) in enumerate(node.value) if str(key.value) in names[:place]]:
            raise yaml.constructor.ConstructorError(
                None, None, f"{again[0].value} is set twice: keep one", again[0].start_mark
            )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; None of an empty one. Raises UserError if it cannot be read."""
    try:
        return yaml.load(read_text(path), BoundedLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:400]}") from None


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON as json.loads does, with its options. Raises json.JSONDecodeError also where Python's stack is too
    small for the nesting."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise json.JSONDecodeError(TOO_DEEP, "", 0) from None


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its keys and values (`object_pairs_hook`). Raises json.JSONDecodeError: a key is there
    twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise json.JSONDecodeError(f"{max(names, key=names.count)} is there twice, keep one of the two", "", 0)
    return found


def has_half_pair(value: Any) -> bool:
    """Return whether a text in a value of JSON has half of a surrogate pair, which cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def object_of(text: bytes, is_yaml: bool = False) -> dict[str, Any] | None:
    """The object that a text of JSON or YAML is; None if it is another value, or damaged."""
    try:
        found = yaml.load(text, BoundedLoader) if is_yaml else parse_json(text)
    except (ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None


def read_record(path: Path) -> dict[str, Any]:
    """The object in a .json or .yaml file of a record, which a kill, a full disk or a hand may have damaged: empty if
    the file is missing, cannot be read, or holds something else."""
    try:
        return object_of(path.read_bytes(), is_yaml=path.suffix == ".yaml") or {}
    except OSError:
        return {}


def parse_bytes(text: str) -> int:
    """24GiB -> 25769803776. Powers of 1024 are KiB, MiB, GiB, TiB, powers of 1000 kB, MB, GB, TB; the B may be
    missing, and then G is GiB. Raises ValueError: it is not a positive size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B?)\s*", text)
    if not match or (match[3] and not match[2]):
        raise ValueError(text)
    base = 1000 if match[4] and not match[3] else 1024
    size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if size < 1:
        raise ValueError(text)
    return size


def counted(number: int | str, noun: str) -> str:
    """`1 file`, `2,000 files`, `3 processes`. A number that is a text stands as it is."""
    shown = number if isinstance(number, str) else f"{number:,}"
    ending = "" if shown == "1" else "es" if noun.endswith("s") else "ies" if noun.endswith("y") else "s"
    return f"{shown} {noun[:-1] if ending == 'ies' else noun}{ending}"
