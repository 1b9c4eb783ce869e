"""Charts as SVG text, without scripts: curves over steps, and what happened over time. Pure.

Colours are classes of the page's style sheet, `line0` to `line7`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 230
WIDE = 1120
"""Of a timeline, which takes the whole width of a page."""
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 30
COLOURS = 8
DIGIT = 6
"""Width of a digit of a label."""
TICKS = 5


class Line(NamedTuple):
    """One curve, broken where training was interrupted."""

    name: str
    segments: Sequence[Sequence[tuple[float, float]]]


class Lane(NamedTuple):
    """One row of a timeline: moments with what happened."""

    name: str
    colour: int
    moments: Sequence[tuple[float, str]]


def line_chart(
    lines: Sequence[Line], *, unit: str = "", x_name: str = "step", x_labels: Mapping[float, str] | None = None
) -> str:
    """Curves over the steps; empty if there is no point. Values that are not finite are left out.

    `x_labels` names places along the x axis instead of round numbers.
    """
    drawn = [
        Line(line.name, [kept for part in line.segments if (kept := [each for each in part if math.isfinite(each[1])])])
        for line in lines
    ]
    points = [point for line in drawn for part in line.segments for point in part]
    if not points:
        return ""
    x_axis = _Axis([x for x, _ in points], LEFT, WIDTH - RIGHT, exact=x_labels is not None)
    y_axis = _Axis([y for _, y in points], HEIGHT - BOTTOM, TOP)
    named = x_labels or {value: _number(value, x_axis.step) for value in x_axis.ticks}
    parts = [*_grid(x_axis, y_axis, unit, x_name, named)]
    for number, line in enumerate(drawn):
        path = " ".join(
            "M" + " L".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in part) for part in line.segments
        )
        parts.append(f'<path class="line line{number % COLOURS}" d="{path}"><title>{escape(line.name)}</title></path>')
        parts += [
            f'<circle class="dot line{number % COLOURS}" cx="{x_axis.place(part[0][0]):.1f}"'
            f' cy="{y_axis.place(part[0][1]):.1f}" r="2"/>'
            for part in line.segments
            if len(part) == 1
        ]
    return _svg(parts, WIDTH, HEIGHT)


def timeline(lanes: Sequence[Lane], *, first: float, last: float) -> str:
    """Moments from `first` to `last`, in seconds; each says what happened when the pointer is over it."""
    lanes = [lane for lane in lanes if lane.moments]
    height = TOP + 24 * len(lanes) + BOTTOM
    axis = _Axis([0.0, max(1.0, last - first)], 2 * LEFT, WIDE - RIGHT, exact=True)
    parts: list[str] = []
    for number, lane in enumerate(lanes):
        y = TOP + 24 * number + 12
        parts.append(_label(lane.name, 4, y + 4, "start"))
        parts.append(f'<line class="grid" x1="{2 * LEFT}" x2="{WIDE - RIGHT}" y1="{y}" y2="{y}"/>')
        parts += [_mark(axis.place(at - first), y, lane.colour, text) for at, text in lane.moments]
    for value in axis.ticks:
        parts.append(_label(_time(value), axis.place(value), height - 8, "middle"))
    return _svg(parts, WIDE, height)


def _mark(x: float, y: float, colour: int, text: str) -> str:
    place = f'x="{x - 1.5:.1f}" y="{y - 8}" width="3" height="16"'
    return f'<rect class="mark line{colour % COLOURS}" {place}><title>{escape(text)}</title></rect>'


class _Axis:
    """Maps values to places, over a range that ends at ticks."""

    def __init__(self, values: Iterable[float], begin: float, end: float, *, exact: bool = False) -> None:
        known = list(values)
        low, high = min(known), max(known)
        if high <= low:
            low, high = low - (abs(low) * 0.05 or 0.5), high + (abs(high) * 0.05 or 0.5)
        step = _tick_step((high - low) / TICKS)
        first, last = math.floor(low / step) * step, math.ceil(high / step) * step
        self.low, self.high = (low, high) if exact else (first, last)
        count = round((last - first) / step)
        self.ticks = [
            first + step * number for number in range(count + 1) if self.low <= first + step * number <= self.high
        ]
        self.step = step
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        """Pixels."""
        return self._begin + (value - self.low) / (self.high - self.low) * (self._end - self._begin)


def _tick_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least the given distance."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _grid(x_axis: _Axis, y_axis: _Axis, unit: str, x_name: str, named: Mapping[float, str]) -> Iterable[str]:
    for value in y_axis.ticks:
        y = y_axis.place(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _label(_number(value, y_axis.step), LEFT - 6, y + 4, "end")
    for value, name in named.items():
        x = x_axis.place(value)
        fits = x + len(name) * DIGIT / 2 <= WIDTH
        yield _label(name, x, HEIGHT - 10, "middle" if fits else "end")
    yield _label(x_name, WIDTH - RIGHT, HEIGHT, "end")
    if unit:
        yield _label(unit, LEFT + 4, TOP + 4, "start")


def _label(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text class="tick" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _number(value: float, step: float) -> str:
    """A tick's label, as exact as the distance of the ticks."""
    size = max(abs(value), step)
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= factor:
            scale = 1e3 if suffix == "k" else factor
            return f"{value / scale:.{max(0, -math.floor(math.log10(step / scale)))}f}{suffix}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, -math.floor(math.log10(step)))}f}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86400:.1f} d"


def _svg(parts: Iterable[str], width: int, height: int) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'
