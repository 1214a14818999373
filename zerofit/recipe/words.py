"""Numbers and their nouns, for messages."""


def counted(number: int | str, noun: str) -> str:
    """`1 file`, `2,000 files`, `3 processes`. A number that is a text stands as it is."""
    shown = number if isinstance(number, str) else f"{number:,}"
    ending = "" if shown == "1" else "es" if noun.endswith("s") else "ies" if noun.endswith("y") else "s"
    return f"{shown} {noun[:-1] if ending == 'ies' else noun}{ending}"
