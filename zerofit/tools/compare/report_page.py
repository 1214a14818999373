"""report.html: the report of a comparison as one page, for a wide screen and for a phone."""

import base64
import html
import re
from pathlib import Path

from zerofit.recipe.errors import printable

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 1180px; margin: auto; padding: 1rem; overflow-wrap: anywhere }
table { border-collapse: collapse }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #ddd; overflow-wrap: normal }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 1rem }
figure { flex: 1 1 20rem; max-width: 40rem; margin: 0 }
img { width: 100% }
@media (max-width: 800px) { /* a block for each row, its cells below each other */
  table, tbody, tr { display: block }
  tr:first-child { display: none }
  tr { padding: .5rem 0; border-bottom: 1px solid #ddd }
  td { display: flex; justify-content: space-between; gap: 1rem; padding: 0; border: 0 }
  td:first-child { font-weight: bold }
  td:not(:first-child)::before { content: attr(data-label); text-align: left; color: #555 }
}
"""


def html_report(
    title: str,
    conclusion: str,
    blocks: list[tuple[str, str, list[tuple[str, ...]]]],
    pictures: dict[str, bytes],
    provenance: list[str],
) -> str:
    """report.html: one file with its pictures, behind the first block, which loads nothing from elsewhere.

    Args:
        pictures: {name of the file: its contents}, a PNG, which is shown, and an SVG of each.
    """
    first, *others = [
        f"<h2>{escape(heading)}</h2><p>{_prose(text)}</p>{_table(rows)}" for heading, text, rows in blocks
    ]
    figures = "".join(_figure(Path(name).stem, pictures) for name in pictures if name.endswith(".png"))
    lines = "".join(f"<li>{_prose(line)}</li>" for line in provenance)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p><b>{escape(conclusion)}</b></p>{first}"
        f'<div class="pictures">{figures}</div>{"".join(others)}<ul>{lines}</ul></body></html>\n'
    )


def _prose(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _figure(name: str, pictures: dict[str, bytes]) -> str:
    """A picture to copy from the page, and to save as SVG."""
    png_text, svg_text = (base64.b64encode(pictures[f"{name}.{form}"]).decode() for form in ("png", "svg"))
    return (
        f'<figure><img alt="{name}" src="data:image/png;base64,{png_text}"><figcaption>{name}: a PNG to copy, '
        f'or <a download="{name}.svg" href="data:image/svg+xml;base64,{svg_text}">SVG</a></figcaption></figure>'
    )


def escape(text: str) -> str:
    """A text in HTML."""
    return html.escape(printable(text))


def _table(rows: list[tuple[str, ...]]) -> str:
    """A table; each cell has the name of its column, which is shown on a narrow screen."""
    unbroken = [[re.sub(r"(?<=\d) (?=\S+$)", "\N{NO-BREAK SPACE}", cell) for cell in row] for row in rows]  # 1.2 MiB
    names, *rest = [[escape(cell) for cell in row] for row in unbroken]
    lines = ["".join(f"<th>{name}</th>" for name in names)]
    lines += ["".join(f'<td data-label="{name}">{cell}</td>' for name, cell in zip(names, row)) for row in rest]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
