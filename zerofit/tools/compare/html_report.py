"""report.html: one file that contains its pictures and its style, and loads nothing from elsewhere."""

import html

from zerofit.recipe.errors import printable
from zerofit.tools.compare.plots import colour

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem }
.conclusion { font-size: 1.1rem; background: #eef4fa; border-left: 4px solid #0072B2; padding: .6rem 1rem }
.table { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px }
th, td { padding: .3rem .55rem; text-align: right; border-bottom: 1px solid #ddd }
th { border-bottom: 2px solid #888; font-weight: 600; vertical-align: bottom } td { white-space: nowrap }
th:first-child, td:first-child { text-align: left }
td:first-child, .words { white-space: normal; min-width: 6rem; overflow-wrap: anywhere }
tr.none td { color: #a33 }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 1rem } .plots figure { flex: 1 1 460px; margin: 0 }
.plots svg { width: 100%; height: auto } figcaption, .text { color: #555; max-width: 75ch }
details summary { cursor: pointer } code { word-break: break-word }
footer { margin-top: 2rem; font-size: 13px; color: #555 }
"""
CAPTIONS = {
    "Memory": "Peak memory of the process that needs most: points are measured, lines predicted. A cross: this "
    "does not fit. Hollow: the process had tried other sizes before, which may have fragmented its memory.",
    "Throughput": "All processes together. A ring: the strategy's fastest.",
}


def html_report(
    title: str,
    conclusion: str,
    blocks: list[tuple[str, str, list[tuple[str, ...]]]],
    pictures: dict[str, str],
    provenance: list[str],
) -> str:
    """The page as HTML.

    Args:
        blocks: (heading, text, table) of each part; the first comes before the pictures, the last is folded.
        pictures: {name: SVG}.
        provenance: lines on where the numbers come from, below all.
    """
    colours = {row[0]: colour(index) for index, row in enumerate(blocks[0][2][1:])}
    figures = "".join(
        f"<figure>{svg}<figcaption>{escape(CAPTIONS[name])}</figcaption></figure>" for name, svg in pictures.items()
    )
    first, *others = [_block(*block, colours, folded=block is blocks[-1]) for block in blocks]
    provenance_lines = "".join(f"<div>{_with_code(line)}</div>" for line in provenance)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f'<h1>{escape(title)}</h1><p class="conclusion">{escape(conclusion)}</p>{first}'
        f'<div class="plots">{figures}</div>{"".join(others)}<footer>{provenance_lines}</footer></body></html>\n'
    )


def escape(text: str) -> str:
    """A text in HTML."""
    return html.escape(printable(text))


def _block(heading: str, text: str, rows: list[tuple[str, ...]], colours: dict[str, str], folded: bool) -> str:
    body = f'<p class="text">{escape(text)}</p><div class="table">{_table(rows, colours)}</div>'
    if folded:
        return f"<h2>{escape(heading)}</h2><details><summary>{len(rows) - 1} trials</summary>{body}</details>"
    return f"<h2>{escape(heading)}</h2>{body}"


def _table(rows: list[tuple[str, ...]], colours: dict[str, str]) -> str:
    head, *rest = rows
    parts = ["<table><thead><tr>", *(f"<th>{escape(cell)}</th>" for cell in head), "</tr></thead><tbody>"]
    for name, *cells in rest:
        fits = not any(cell.startswith(("none", "failed", "out of", "timed")) for cell in cells)
        dot = f'<span class="dot" style="background:{colours.get(name, "#888")}"></span>'
        parts += [
            f"<tr{'' if fits else ' class=none'}><td>{dot}{escape(name)}</td>",
            *(f"<td{_class(cell)}>{escape(cell)}</td>" for cell in cells),
            "</tr>",
        ]
    return "".join([*parts, "</tbody></table>"])


def _class(cell: str) -> str:
    """Sentences may wrap; numbers with their units may not."""
    return ' class="words"' if len(cell) > 16 else ""


def _with_code(text: str) -> str:
    pieces = text.split("`")
    return "".join(
        f"<code>{escape(piece)}</code>" if place % 2 else escape(piece) for place, piece in enumerate(pieces)
    )
