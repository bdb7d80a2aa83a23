"""Bar and line charts as SVG elements for a page. Colours are CSS classes, so that light and dark pages fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 440  # so that a phone shows texts at about their own size
VALUE_WIDTH = 70  # of the text beside a bar; the label is above it
LABEL_HEIGHT, BAR_HEIGHT, BAR_GAP, TOP = 18, 14, 8, 26
LINE_HEIGHT, MARGIN_LEFT, MARGIN_RIGHT, MARGIN_BOTTOM = 260, 56, 16, 44
LEGEND_LINE_HEIGHT = 18
SERIES_CLASSES = 5  # classes s0 to s4 of the page's style
GRID_LINES = 4


@dataclass(frozen=True, slots=True)
class ChartBar:
    label: str
    value: float | None  # None: beyond all bounds
    is_good: bool = True


@dataclass(frozen=True, slots=True)
class ChartLine:
    label: str
    points: Sequence[tuple[float, float]]


def draw_bars(title: str, unit: str, bars: Sequence[ChartBar], limit: float | None = None) -> str:
    """Return a chart with a bar for each value, and a dashed line at the limit."""
    most = max([bar.value for bar in bars if bar.value is not None] + [limit or 0.0]) * 1.05 or 1.0
    scale = (WIDTH - VALUE_WIDTH) / most
    row_height = LABEL_HEIGHT + BAR_HEIGHT + BAR_GAP
    height = TOP + len(bars) * row_height + 22
    parts = []
    for number, bar in enumerate(bars):
        y = TOP + number * row_height + LABEL_HEIGHT
        width = scale * (most if bar.value is None else bar.value)
        shown = "overload" if bar.value is None else format_number(bar.value)
        style = "good" if bar.is_good and bar.value is not None else "bad"
        parts.append(_text(0, y - 4, bar.label))
        parts.append(f'<rect class="{style}" x="0" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}"/>')
        parts.append(_text(width + 6, y + 11, shown, "value"))
    if limit is not None:
        x = limit * scale
        parts.append(f'<path class="limit" d="M{x:.1f} {TOP - 6}V{height - 20}"/>')
        parts.append(_text(x, height - 6, f"target {format_number(limit)}", "faint", "middle"))
    return _svg(f"{title}, {unit}", height, parts)


def draw_lines(title: str, x_label: str, y_label: str, lines: Sequence[ChartLine], mark: float | None = None) -> str:
    """Return a chart of counts, as lines over the same axes. `mark`: x of a dashed line."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    right, top = max(x for x, _ in points), GRID_LINES * max(1, math.ceil(max(y for _, y in points) / GRID_LINES))
    x_scale, y_scale = (WIDTH - MARGIN_LEFT - MARGIN_RIGHT) / right, (LINE_HEIGHT - TOP) / top
    parts = [*_draw_axes(right, top, x_scale, y_scale, x_label)]
    if mark is not None:
        parts.append(f'<path class="limit" d="M{MARGIN_LEFT + mark * x_scale:.1f} {TOP}V{LINE_HEIGHT}"/>')
    for number, line in enumerate(lines):
        style = f"s{number % SERIES_CLASSES}"
        path = " ".join(f"{MARGIN_LEFT + x * x_scale:.1f},{LINE_HEIGHT - y * y_scale:.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line {style}" points="{path}"/>')
        y = LINE_HEIGHT + MARGIN_BOTTOM + number * LEGEND_LINE_HEIGHT
        parts.append(f'<path class="line {style}" d="M{MARGIN_LEFT} {y}h24"/>')
        parts.append(_text(MARGIN_LEFT + 32, y + 4, line.label))
    height = LINE_HEIGHT + MARGIN_BOTTOM + len(lines) * LEGEND_LINE_HEIGHT
    return _svg(f"{title}, {y_label}", height, parts)


def _draw_axes(right: float, top: float, x_scale: float, y_scale: float, x_label: str) -> list[str]:
    parts = []
    for number in range(GRID_LINES + 1):
        y_value, x_value = top * number / GRID_LINES, right * number / GRID_LINES
        y, x = LINE_HEIGHT - y_value * y_scale, MARGIN_LEFT + x_value * x_scale
        parts.append(f'<path class="grid" d="M{MARGIN_LEFT} {y:.1f}H{WIDTH - MARGIN_RIGHT}"/>')
        parts.append(_text(MARGIN_LEFT - 6, y + 4, format_number(y_value), "faint", "end"))
        parts.append(_text(x, LINE_HEIGHT + 16, format_number(x_value), "faint", "middle"))
    parts.append(_text(WIDTH - MARGIN_RIGHT, LINE_HEIGHT + 30, x_label, "faint", "end"))
    return parts


def format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    # On a narrow screen, the chart keeps its size and its frame scrolls, because scaled-down texts cannot be read.
    frame = '<div class="wide" tabindex="0">'
    head = f'{frame}<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return f"{head}{_text(0, 14, title, 'title')}{''.join(parts)}</svg></div>"


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'
