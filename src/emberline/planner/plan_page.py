"""write_page: the report of a plan as one HTML page, with plots and without external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from emberline.planner.plan_table import count_gpus, show_ms
from emberline.planner.svg_charts import ChartBar, ChartLine, draw_bars, draw_lines

# Colours as in web/style.css.
STYLE = """
:root { color-scheme: light dark; --paper: light-dark(#fbf8f4, #151210); --raised: light-dark(#ffffff, #1d1916);
  --ink: light-dark(#2a211b, #efe6dc); --soft: light-dark(#6f6257, #a69787); --line: light-dark(#e6dcd1, #2f2822);
  --ember: light-dark(#d2481a, #ff8a4c); --sky: light-dark(#2f6f94, #7fb6d6); --sage: light-dark(#5a7a46, #a3bf8a);
  --sand: light-dark(#8a6a1f, #d9b86c); --bad: light-dark(#a8201a, #ff8f85); }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.6 ui-sans-serif, system-ui, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; } td.number { white-space: nowrap; }
td.number, th.number { text-align: right; } td:first-child { min-width: 11rem; }
.badge { color: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: 0 .4em; font-size: .85em; }
.missed { color: var(--bad); } td code { white-space: nowrap; }
code { font: .88em ui-monospace, Menlo, Consolas, monospace; }
svg { display: block; width: 100%; max-width: 640px; margin: 1rem 0; padding: .8rem; background: var(--raised);
  border: 1px solid var(--line); border-radius: 12px; box-sizing: border-box; }
@media (max-width: 45rem) { body { padding: 1rem; } svg { width: 860px; max-width: none; } }
svg text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: var(--ink); }
svg .faint { fill: var(--soft); } svg .title { font-weight: 600; font-size: 13px; }
svg .good { fill: var(--sage); } svg .bad { fill: var(--bad); opacity: .55; }
svg .limit { stroke: var(--sky); stroke-dasharray: 4 3; fill: none; } svg .grid { stroke: var(--line); fill: none; }
svg .line { fill: none; stroke-width: 2; } svg .s0 { stroke: var(--ember); } svg .s1 { stroke: var(--sky); }
svg .s2 { stroke: var(--sage); } svg .s3 { stroke: var(--sand); } svg .s4 { stroke: var(--soft); }
"""


def write_page(report: dict[str, Any], path: Path) -> None:
    """Write a report of `report_plan`."""
    path.write_text(render_page(report), "utf-8")


def render_page(report: dict[str, Any]) -> str:
    best = report["candidates"][0]
    model = Path(report["model"])
    name = model.stem if model.suffix == ".json" else model.name
    served = "serves" if best["gpus"] == 1 else "serve"
    outcome = served if best["meets_slo"] else "cannot serve within the targets"
    title = f"{count_gpus(best['gpus'])} ({report['gpu']}) {outcome} {name}, as {best['topology']}"
    body = [
        *_head(report, title),
        "<h2>Candidates</h2>",
        *_candidates(report),
        "<h2>Latencies, simulated</h2>",
        *_latency_charts(report),
        "<h2>Workers of the candidates worth validating</h2>",
        *_workers(report),
        "<h2>Sensitivity</h2>",
        *_sensitivity(report),
        "<h2>What the figures rest on</h2>",
        _table(
            ("figure", "basis", "source", "error"),
            [(row["figure"], _badge(row["basis"]), row["source"], row["error"]) for row in report["basis"]],
        ),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(body)}</body></html>\n'
    )


def _head(report: dict[str, Any], title: str) -> Iterable[str]:
    traffic, slo = report["traffic"], report["slo"]
    yield f"<h1>{escape(title)}</h1>"
    yield (
        f'<p class="soft">Traffic: {traffic["requests_per_second"]:g} requests/s of'
        f" {traffic['mean_prompt_tokens']:g} + {traffic['mean_output_tokens']:g} tokens,"
        f" {traffic['shared_prefix_share']:.0%} of prompts shared. Targets, 90th percentiles: first token"
        f" {slo['ttft_p90_ms']:g} ms, inter-token {slo['itl_p90_ms']:g} ms. Seed {report['seed']}.</p>"
    )
    if report["gpu_note"]:
        yield f"<p>{escape(report['gpu_note'])}</p>"


def _candidates(report: dict[str, Any]) -> Iterable[str]:
    has_price = report["gpu_price"] is not None
    cost = "cost per million tokens" if has_price else "GPU-hours per million tokens"
    output = "of output" if has_price else "of output tokens"
    key = "cost_per_million" if has_price else "gpu_hours_per_million"
    rows = []
    for each in report["candidates"]:
        targets = "met" if each["meets_slo"] else Markup('<span class="missed">missed</span>')
        note = " *" if each["changes_output"] else ""
        rows.append(
            (
                each["topology"] + note,
                each["gpus"],
                *(show_ms(each[f"{name}_ms"]) for name in ("ttft_p50", "ttft_p90", "itl_p50", "itl_p90")),
                f"{each[f'{key}_tokens']:.4f}",
                f"{each[f'{key}_output_tokens']:.4f}",
                _badge(each["step_costs"]),
                targets,
            )
        )
    names = ("candidate", "GPUs", "first token p50 ms", "p90 ms", "inter-token p50 ms", "p90 ms", cost, output)
    yield _table((*names, "step costs", "targets"), rows, numbers=range(1, 8))
    if any(each["changes_output"] for each in report["candidates"]):
        yield '<p class="soft">* Weights are quantised when they are loaded, which changes the output slightly.</p>'


def _latency_charts(report: dict[str, Any]) -> Iterable[str]:
    for name, title in (("ttft_p90_ms", "First token p90"), ("itl_p90_ms", "Inter-token p90")):
        limit = report["slo"][name]
        bars = [
            ChartBar(each["topology"], each[name], each[name] is not None and each[name] <= limit)
            for each in report["candidates"]
        ]
        yield draw_bars(title, "ms", bars, limit)


def _workers(report: dict[str, Any]) -> Iterable[str]:
    rows = [
        (
            each["topology"],
            pool["workers"],
            pool["gpus_each"],
            f"{pool['kv_tokens_each']:,}",
            Markup(f"<code>emberline worker MODEL --router URL {escape(pool['worker_options'])}</code>"),
        )
        for each in report["candidates"]
        if each["topology"] in report["validate"]
        for pool in each["pools"]
    ]
    yield _table(("candidate", "workers", "GPUs each", "KV tokens each", "command"), rows, numbers=range(1, 4))


def _sensitivity(report: dict[str, Any]) -> Iterable[str]:
    found = report["sensitivity"]
    yield f"<p>Of {escape(found['topology'])}. GPUs are estimated by formulas, latencies are simulated.</p>"
    rows = [
        (
            f"{each['factor'] - 1:+.0%}",
            f"{each['requests_per_second']:g}",
            show_ms(each["ttft_p90_ms"]),
            show_ms(each["itl_p90_ms"]),
            "met" if each["meets_slo"] else Markup('<span class="missed">missed</span>'),
            "none found" if each["gpus_needed"] is None else each["gpus_needed"],
        )
        for each in found["traffic"]
    ]
    names = ("traffic", "requests/s", "first token p90 ms", "inter-token p90 ms", "targets", "GPUs needed")
    yield _table(names, rows, numbers=(1, 2, 3, 5))
    labels = list(dict.fromkeys(label for point in found["curve"] for label in point["gpus"]))
    lines = [
        ChartLine(
            label,
            [
                (point["requests_per_second"], point["gpus"][label])
                for point in found["curve"]
                if label in point["gpus"]
            ],
        )
        for label in labels
    ]
    yield draw_lines("GPUs by traffic", "requests/s", "estimated", lines, report["traffic"]["requests_per_second"])
    bars = [
        ChartBar(f"{each['shared_prefix_share']:.0%} of prompt tokens shared", each["gpus_needed"])
        for each in found["prefix"]
    ]
    yield draw_bars("GPUs by prefix reuse", "estimated", bars)
    starts = [ChartBar(f"replaced after {each['start_seconds']:.3g} s", each["ttft_p90_ms"]) for each in found["start"]]
    yield draw_bars(
        "First token p90 after the loss of a worker, just before it is replaced",
        "ms, estimated",
        starts,
        report["slo"]["ttft_p90_ms"],
    )


class Markup(str):
    """A string of HTML, which is not escaped when it is inserted into the page."""

    __slots__ = ()


def _badge(text: str) -> Markup:
    return Markup(f'<span class="badge">{escape(text)}</span>')


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Iterable[int] = ()) -> str:
    right = set(numbers)

    def cells(row: Sequence[Any], tag: str) -> str:
        shown = ((cell if isinstance(cell, Markup) else escape(str(cell))) for cell in row)
        classes = (' class="number"' if column in right else "" for column in range(len(row)))
        return "".join(f"<{tag}{style}>{cell}</{tag}>" for cell, style in zip(shown, classes, strict=True))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells(names, "th")}</tr>{body}</table></div>'
