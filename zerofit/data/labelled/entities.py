"""Named entities, from the tags of a sentence's words: B-PER, I-PER, O (IOB1, IOB2 and IOBES)."""


def located(rows: list[list[str]]) -> set[tuple[int, str, int, int]]:
    """(sentence, kind, first word, last word) of each entity of these sentences."""
    return {(row, *entity) for row, tags in enumerate(rows) for entity in entities(tags)}


def entities(tags: list[str]) -> list[tuple[str, int, int]]:
    """(kind, first word, last word) of each entity. One begins at B or S, after O, E or S, and where the kind changes:
    I needs no B before it, as in conlleval."""
    found: list[tuple[str, int, int]] = []
    before, kind_before = "O", ""
    for place, tag in enumerate(tags):
        mark, _, kind = tag.partition("-")
        if mark != "O":
            begins = mark in "BS" or before in "OES" or kind != kind_before
            found.append((kind, place if begins else found.pop()[1], place))
        before, kind_before = mark, kind
    return found
