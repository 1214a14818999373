"""report.html: the report as one file, which contains its pictures and loads nothing from elsewhere."""

import html

from zerofit.recipe.errors import printable

STYLE = (
    "body { font: 15px/1.5 sans-serif; max-width: 1180px; margin: auto; padding: 1rem } "
    "table { border-collapse: collapse } div { overflow-x: auto } svg { max-width: 100%; height: auto } "
    "th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd } "
    "th:first-child, td:first-child { text-align: left }"
)


def html_report(
    title: str,
    conclusion: str,
    blocks: list[tuple[str, str, list[tuple[str, ...]]]],
    pictures: list[str],
    provenance: list[str],
) -> str:
    """The page.

    Args:
        blocks: (heading, text, table) of each part; the pictures come behind the first.
        pictures: as SVG.
        provenance: lines on where the numbers come from.
    """
    first, *others = [
        f"<h2>{escape(heading)}</h2><p>{escape(text)}</p><div>{_table(rows)}</div>" for heading, text, rows in blocks
    ]
    lines = "".join(f"<li>{escape(line)}</li>" for line in provenance)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1><p><b>{escape(conclusion)}</b></p>{first}"
        f"{''.join(pictures)}{''.join(others)}<ul>{lines}</ul></body></html>\n"
    )


def escape(text: str) -> str:
    """A text in HTML."""
    return html.escape(printable(text))


def _table(rows: list[tuple[str, ...]]) -> str:
    head, *rest = rows
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rest]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
