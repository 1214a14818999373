"""Conversations in a format of their own: Topical-Chat's JSON."""

from pathlib import Path

from datasets import Dataset

from zerofit.data.records import BadRecord
from zerofit.data.tables import set_fingerprint
from zerofit.data.turns import turns_of
from zerofit.recipe.files import open_bytes
from zerofit.recipe.parsing import parse_json


def read_keyed_conversations(paths: list[Path]) -> Dataset | None:
    """Topical-Chat's format: one JSON object, {id: {"content": [{"message": ...}, ...]}}. None for any other.

    Source: https://github.com/alexa/Topical-Chat (conversations/*.json).
    """
    conversations: list[list[str]] = []
    for path in paths:
        with open_bytes(path) as file:
            if file.read(64).lstrip()[:1] != b"{":
                return None
            file.seek(0)
            try:
                content = parse_json(file.read())
            except ValueError:
                return None  # JSON lines, or invalid JSON, which the datasets library reports
        held = content.values()
        if not content or not all(
            isinstance(value, dict) and isinstance(value.get("content"), list) for value in held
        ):
            return None
        try:
            conversations += [[text for _, text in turns_of(value["content"])] for value in held]
        except BadRecord:
            return None
    return _named_after({"dialogue": conversations}, paths)


def _named_after(columns: dict[str, list], paths: list[Path]) -> Dataset:
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return set_fingerprint(Dataset.from_dict(columns), "conversations", stamps)
