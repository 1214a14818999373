"""JSON that people copy from pages: a comma too few or too many, a text without quotes."""

import json


def what_to_mend(text: str, error: json.JSONDecodeError) -> tuple[int, str]:
    """(number of the line to mend, its text and what is wrong with it)."""
    at = error.pos
    before = len(text[:at].rstrip()) - 1  # the last character before the place where Python gave up
    lacks_comma = "',' delimiter" in error.msg
    if lacks_comma or text[before : before + 1] == ",":
        at = max(0, before)
    if text[at : at + 1] == "," and "Extra data" not in error.msg:
        wrong = "remove the comma at its end"
    elif lacks_comma:
        wrong = f"a {'comma' if error.pos < len(text.rstrip()) else 'bracket'} is missing at its end"
    elif "Expecting value" in error.msg and text.strip():
        wrong = "a text needs quotes"
    else:
        wrong = error.msg
    line = text.count("\n", 0, at) + 1
    shown = text.splitlines()[line - 1].strip()[:80] if text.strip() else "empty"
    return line, f"({shown}): {wrong}"
