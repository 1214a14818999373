"""A font for a text that a picture shows: names of runs and classes are in any language."""

from collections.abc import Iterable

LAST_RESORT = "Last Resort"  # has a box for every character


def font_for(texts: Iterable[str]) -> str | None:
    """The family of an installed font that has every character of these texts, the default one if it does; None if
    there is none."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager
    from matplotlib.ft2font import FT2Font

    needed = {ord(letter) for text in texts for letter in text}
    usual = findfont(FontProperties())
    fonts = [font for font in fontManager.ttflist if not font.name.startswith(LAST_RESORT)]
    for font in sorted(
        fonts, key=lambda font: (font.fname != usual, font.style != "normal", font.weight not in (400, "normal"))
    ):
        try:
            if needed <= FT2Font(font.fname).get_charmap().keys():
                return font.name
        except (OSError, RuntimeError):  # it was removed, or is damaged
            continue
    return None
