"""Conversations in special file formats: ParlAI's text and Topical-Chat's JSON."""

from pathlib import Path

from datasets import Dataset

from zerofit.data.encodings import open_bytes
from zerofit.data.records import BadRecord
from zerofit.data.tables import set_fingerprint
from zerofit.data.turns import turns_of
from zerofit.recipe.errors import UserError
from zerofit.recipe.parsing import parse_json


def read_conversation_files(paths: list[Path]) -> Dataset | None:
    """Read ParlAI's text or Topical-Chat's JSON. None for any other file."""
    with open_bytes(paths[0]) as file:
        first = file.readline(1 << 16).removeprefix(b"\xef\xbb\xbf")
    names = {field.partition(b":")[0] for field in first.split(b"\t")}
    parlai = b"text" in names and names & {b"labels", b"eval_labels"}
    return read_parlai(paths) if parlai else read_keyed_conversations(paths)


def read_parlai(paths: list[Path]) -> Dataset:
    """ParlAI's text: fields `name:value` between tabs, one line per exchange, `episode_done:True` in the last of a
    conversation. Of several labels, the first is the answer.

    Source: https://parl.ai/docs/tutorial_task.html (ParlAI dialog format).
    """
    conversations: list[list[dict[str, str]]] = [[]]
    for path in paths:
        with open_bytes(path) as file:
            for number, line in enumerate(file.read().decode("utf-8-sig").splitlines(), 1):
                fields = dict(field.partition(":")[::2] for field in line.split("\t"))
                if not line.strip():
                    continue
                labels = fields.get("labels", fields.get("eval_labels"))
                if "text" not in fields or labels is None:
                    raise UserError(f"{path}, line {number}: a line of ParlAI's text has `text:` and `labels:`")
                turns = {"user": fields["text"], "assistant": labels.split("|")[0]}
                conversations[-1] += [
                    {"role": role, "text": text.replace("\\n", "\n").replace("__PIPE__", "|")}
                    for role, text in turns.items()
                ]
                if fields.get("episode_done") == "True":
                    conversations.append([])
        if conversations[-1]:
            conversations.append([])
    return _named_after({"dialogue": conversations[:-1]}, paths)


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
