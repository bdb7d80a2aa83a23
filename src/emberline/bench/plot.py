"""Draws result files as one SVG, with a panel for each result.

A panel shows our value, the values of the peers below it, and the machine's limit as a line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest

WIDTH, LABEL, VALUE = 760, 190, 110  # the bars lie between the labels and the values
BAR, GAP, TITLE, HEAD = 16, 5, 26, 52
OURS, PEER, LIMIT, INK, FAINT = "#d9480f", "#adb5bd", "#1864ab", "#212529", "#868e96"


@dataclass(frozen=True, slots=True)
class PlotPanel:
    title: str
    unit: str
    bars: list[tuple[str, float, tuple[float, float] | None]]  # name, value, minimum and maximum
    limit: float | None

    @property
    def height(self) -> int:
        return TITLE + len(self.bars) * (BAR + GAP) + 10


def draw_plot(result_files: Sequence[Path], svg_file: Path) -> None:
    parts: list[str] = []
    y = 0
    for file in result_files:
        whole = _read_result(file)
        y = _draw_heading(parts, whole, y)
        for panel in make_panels(whole["results"]):
            _draw_panel(parts, panel, y)
            y += panel.height
    svg_file.parent.mkdir(parents=True, exist_ok=True)
    style = f"text{{font:12px system-ui,sans-serif;fill:{INK}}} .faint{{fill:{FAINT}}} .title{{font-weight:600}}"
    svg_file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" width="{WIDTH}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n',
        "utf-8",
    )


def make_panels(results: dict[str, Any]) -> list[PlotPanel]:
    """Return the panels. The result `BASE` and the results `BASE/PEER` share one panel.

    A result without peers gets a panel only if it has a limit.
    """
    found = []
    for name, mine in results.items():
        others = {key.split("/", 1)[1]: r for key, r in results.items() if key.startswith(name + "/")}
        if "/" in name or not (others or mine.get("limit")):
            continue
        ranked = sorted(others.items(), key=lambda row: float(row[1]["value"]), reverse=mine["unit"].endswith("/s"))
        rows = [("emberline", mine), *ranked]
        bars = [(label, float(r["value"]), tuple(r["spread"]) if "spread" in r else None) for label, r in rows]
        found.append(PlotPanel(name.replace("_", " "), mine["unit"], bars, mine.get("limit")))
    return found


def _draw_panel(svg_parts: list[str], panel: PlotPanel, y: int) -> None:
    most = max([value for _, value, _ in panel.bars] + [panel.limit or 0.0]) or 1.0
    scale = (WIDTH - LABEL - VALUE) / most
    better = "higher is better" if panel.unit.endswith("/s") else "lower is better"
    svg_parts.append(
        _svg_text(12, y + 17, panel.title, "title") + _svg_text(LABEL, y + 17, f"{panel.unit}, {better}", "faint")
    )
    top = y = y + TITLE
    for i, (name, value, spread) in enumerate(panel.bars):
        middle = y + BAR / 2
        svg_parts.append(_svg_text(LABEL - 8, y + 12, name, anchor="end"))
        colour = PEER if i else OURS
        svg_parts.append(f'<rect x="{LABEL}" y="{y}" width="{value * scale:.1f}" height="{BAR}" fill="{colour}"/>')
        if spread is not None:
            low, high = (LABEL + end * scale for end in spread)
            svg_parts.append(f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="{INK}"/>')
        svg_parts.append(
            _svg_text(LABEL + (max(value, spread[1]) if spread else value) * scale + 6, y + 12, f"{value:,.4g}")
        )
        y += BAR + GAP
    if panel.limit:
        x = LABEL + panel.limit * scale
        svg_parts.append(f'<path d="M{x:.1f} {top - 3}V{y - 2}" stroke="{LIMIT}" stroke-dasharray="4 3"/>')
        svg_parts.append(_svg_text(x - 4, top - 9, f"limit {panel.limit:,.4g}", "faint", "end"))


def _draw_heading(svg_parts: list[str], result: dict[str, Any], y: int) -> int:
    hardware, config = result["hardware"], result["config"]
    model = f" · {config['model']}" if "model" in config else ""
    machine = f"{hardware.get('cpu', hardware['machine'])}, {hardware['cores']} cores · commit {result['commit']}"
    svg_parts.append(
        _svg_text(12, y + 22, f"{result['bench']}{model}", "title") + _svg_text(12, y + 40, machine, "faint")
    )
    return y + HEAD


def _svg_text(x: float, y: float, text: str, css_class: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css_class}" text-anchor="{anchor}">{escape(text)}</text>'


def _read_result(file: Path) -> dict[str, Any]:
    try:
        whole: dict[str, Any] = json.loads(file.read_text("utf-8"))
        missing = {"bench", "commit", "hardware", "config", "results"} - whole.keys()
    except (OSError, ValueError, AttributeError) as e:
        raise InvalidRequest(f"{file} is not a result file of a benchmark: {e}") from e
    if missing:
        raise InvalidRequest(f"{file} is not a result file of a benchmark: missing fields {', '.join(sorted(missing))}")
    return whole
