"""The frame of an HTML file that holdfast writes: no scripts, nothing fetched. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

from holdfast.report.formatting import sanitize
from holdfast.report.svg_chart import COLOURS


class Raw(NamedTuple):
    """HTML of a wide cell, escaped where it was made."""

    html: str


class Number(NamedTuple):
    """A cell that is aligned to the right."""

    text: str


Cell = str | Raw | Number


def html_page(title: str, body: Iterable[str]) -> str:
    """The whole file; `body` is HTML."""
    style = files(__package__ or "").joinpath("report.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{text(title)}</title><style>{style}</style></head><body>\n{''.join(body)}\n</body></html>\n"
    )


def text(words: object) -> str:
    """Escaped, without control characters: ranks may have printed anything."""
    return escape(sanitize(str(words)))


def section(title: str, content: str) -> str:
    """A heading with what follows; empty without content."""
    return f"<h2>{escape(title)}</h2>\n{content}\n" if content else ""


def curve_keys(names: Iterable[str]) -> str:
    """A line for each curve of a chart, with its colour."""
    return "".join(
        f'<p><span class="key line{number % COLOURS}"></span> {text(name)}</p>' for number, name in enumerate(names)
    )


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table; the title of a column of numbers is aligned as they are."""
    rows = list(rows)
    numbers = {place for row in rows for place, cell in enumerate(row) if isinstance(cell, Number)}
    titles = "".join(f"<th{' class=n' * (place in numbers)}>{text(title)}</th>" for place, title in enumerate(head))
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    match cell:
        case Raw():
            return f'<td class="wide">{cell.html}</td>'
        case Number():
            return f'<td class="n">{text(cell.text)}</td>'
        case _:
            return f"<td>{text(cell)}</td>"
