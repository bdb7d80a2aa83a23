"""Reports how much packing saved per tensor, compared with the entropy bound: table, plot or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from math import ceil, floor, prod
from pathlib import Path
from typing import Any

from emberline.core.errors import ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.unweight.description import TensorDescription

PLOT_COLUMNS, PLOT_ROWS = 64, 16  # characters of the text plot
SVG_WIDTH, SVG_HEIGHT, SVG_MARGIN = 640, 420, 56  # pixels
TEXT_COLOR, LINE_COLOR, POINT_COLOR = "#212529", "#868e96", "#d9480f"


@dataclass(frozen=True, slots=True)
class TensorSavings:
    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    bytes: int
    packed_bytes: int
    bound: float | None  # lower bound in bits per element: symbol entropy plus raw bits; None for a raw tensor

    @property
    def bits_per_element(self) -> float:
        return 8 * self.packed_bytes / max(1, self.count)

    @property
    def saved_ratio(self) -> float:
        return 1 - self.packed_bytes / self.bytes if self.bytes else 0.0


def measure_savings(directory: Path) -> list[TensorSavings]:
    """Return the savings of each tensor of a packed model. Raises ModelFileError if it is not packed."""
    savings = []
    for name, info in Checkpoint.open(directory).tensors.items():
        if info.packing is None:
            raise ModelFileError(f"{info.file} is not packed", hint="run emberline unweight pack first")
        described = TensorDescription.from_info(info)
        bound = described.min_bits_per_element if described.code is not None else None
        size = info.logical_bytes
        savings.append(TensorSavings(name, info.dtype, info.shape, prod(info.shape), size, info.nbytes, bound))
    return savings


def savings_as_dict(savings: Sequence[TensorSavings], file_bytes: int) -> dict[str, Any]:
    rows = [asdict(f) | {"bits": round(f.bits_per_element, 4), "saved": round(f.saved_ratio, 5)} for f in savings]
    return {"totals": sum_savings(savings, file_bytes), "tensors": rows}


def sum_savings(savings: Sequence[TensorSavings], file_bytes: int) -> dict[str, Any]:
    """Return the savings summed over all tensors.

    `file_bytes` is the size of the weight files with headers.
    """
    plain, packed = sum(f.bytes for f in savings), sum(f.packed_bytes for f in savings)
    coded = [f for f in savings if f.bound is not None]
    count = max(1, sum(f.count for f in coded))
    return {
        "tensors": len(savings),
        "coded": len(coded),
        "bytes": plain,
        "packed_bytes": packed,
        "file_bytes": file_bytes,
        "saved": round(1 - packed / plain, 5) if plain else 0.0,
        "bits": round(
            sum(f.bits_per_element * f.count for f in coded) / count, 4
        ),  # average per element of the coded tensors
        "bound": round(sum((f.bound or 0) * f.count for f in coded) / count, 4),
    }


def format_table(savings: Sequence[TensorSavings]) -> str:
    header = ("tensor", "dtype", "shape", "bits", "bound", "saved")
    rows = [header, *(_format_row(f) for f in savings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    text_columns = 3  # columns of text; the others are numbers
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < text_columns else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _format_row(savings: TensorSavings) -> tuple[str, ...]:
    shape = " x ".join(map(str, savings.shape)) or "scalar"
    bound = "raw" if savings.bound is None else f"{savings.bound:.3f}"
    return savings.name, savings.dtype, shape, f"{savings.bits_per_element:.3f}", bound, f"{savings.saved_ratio:.1%}"


def format_plot(savings: Sequence[TensorSavings]) -> str:
    """Return a text plot with a point per coded tensor: x is its entropy bound, y its bits per element.

    On the dotted line both are equal; `o` is one tensor, `O` several.
    """
    points, low, high = _plot_points(savings)
    if not points:
        return "no tensor is coded"
    grid = [[" "] * PLOT_COLUMNS for _ in range(PLOT_ROWS)]

    def column(x: float) -> int:
        return min(PLOT_COLUMNS - 1, int((x - low) / (high - low) * PLOT_COLUMNS))

    def row(y: float) -> int:
        return PLOT_ROWS - 1 - min(PLOT_ROWS - 1, int((y - low) / (high - low) * PLOT_ROWS))

    for i in range(PLOT_COLUMNS):
        grid[row(low + (i + 0.5) / PLOT_COLUMNS * (high - low))][i] = "·"
    for x, y, _ in points:
        cell = grid[row(y)][column(x)]
        grid[row(y)][column(x)] = "O" if cell in "oO" else "o"
    labels = [f"{high:6.2f}", *[" " * 6] * (PLOT_ROWS - 2), f"{low:6.2f}"]
    lines = [f"{label} │{''.join(cells)}" for label, cells in zip(labels, grid, strict=True)]
    scale = f"{low:.2f}" + f"{high:.2f}".rjust(PLOT_COLUMNS - len(f"{low:.2f}"))
    return "\n".join(["bits per weight", *lines, f"{' ' * 7}└{'─' * PLOT_COLUMNS}", " " * 8 + scale + "  bound"])


def format_svg(savings: Sequence[TensorSavings]) -> str:
    points, low, high = _plot_points(savings)

    def x(value: float) -> float:
        return SVG_MARGIN + (value - low) / (high - low) * (SVG_WIDTH - 2 * SVG_MARGIN)

    def y(value: float) -> float:
        return SVG_HEIGHT - SVG_MARGIN - (value - low) / (high - low) * (SVG_HEIGHT - 2 * SVG_MARGIN)

    path = f"M{x(low):.1f} {y(low):.1f}L{x(high):.1f} {y(high):.1f}"
    parts = [f'<path d="{path}" stroke="{LINE_COLOR}" stroke-dasharray="3 3"/>']
    for tick in (low, (low + high) / 2, high):
        parts.append(
            f'<text x="{x(tick):.1f}" y="{SVG_HEIGHT - SVG_MARGIN + 20}" text-anchor="middle">{tick:.2f}</text>'
        )
        parts.append(f'<text x="{SVG_MARGIN - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.2f}</text>')
    for bound, bits, name in points:
        label = f"<title>{escape(name)}: {bits:.3f} bits, bound {bound:.3f}</title>"
        parts.append(
            f'<circle cx="{x(bound):.1f}" cy="{y(bits):.1f}" r="3" fill="{POINT_COLOR}" fill-opacity=".5">'
            f"{label}</circle>"
        )
    parts.append(
        f'<text x="{SVG_WIDTH / 2}" y="{SVG_HEIGHT - 14}" text-anchor="middle">bound: entropy and raw bits</text>'
    )
    parts.append(f'<text x="14" y="{SVG_MARGIN - 24}">bits per weight on disk; the line is the lower bound</text>')
    style = f"text{{font:12px system-ui,sans-serif;fill:{TEXT_COLOR}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SVG_WIDTH} {SVG_HEIGHT}" width="{SVG_WIDTH}">'
        f"<style>{style}</style>"
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _plot_points(savings: Sequence[TensorSavings]) -> tuple[list[tuple[float, float, str]], float, float]:
    """Return (entropy bound, bits, name) of each coded tensor, and the plot's minimum and maximum bits."""
    points = [(f.bound, f.bits_per_element, f.name) for f in savings if f.bound is not None]
    ends = [end for bound, bits, _ in points for end in (bound, bits)] or [0.0]
    low = floor(4 * min(ends)) / 4
    return points, low, max(ceil(4 * max(ends)) / 4, low + 0.25)
