"""Prints the report of a plan as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def format_plan(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report of `report_plan`."""
    traffic, slo = report["traffic"], report["slo"]
    yield (
        f"{report['model']} on {report['gpu']}: {traffic['requests_per_second']:g} requests/s,"
        f" {traffic['mean_prompt_tokens']:g} + {traffic['mean_output_tokens']:g} tokens,"
        f" p90 targets: first token {slo['ttft_p90_ms']:g} ms, inter-token {slo['itl_p90_ms']:g} ms"
    )
    if report["gpu_note"]:
        yield report["gpu_note"]
    yield ""
    yield from _format_candidates(report)
    yield ""
    best = report["candidates"][0]
    yield f"best: {best['topology']}, {count_gpus(best['gpus'])}"
    for pool in best["pools"]:
        yield f"  {pool['workers']} x emberline worker MODEL --router URL {pool['worker_options']}"
    yield f"worth validating: {'; '.join(report['validate'])}"
    yield ""
    yield from _format_sensitivity(report["sensitivity"])
    yield ""
    yield "what the figures rest on"
    rows = [(row["figure"], row["basis"], row["source"], row["error"]) for row in report["basis"]]
    yield from _align([("figure", "basis", "source", "error"), *rows], "<<<<")


def _format_candidates(report: dict[str, Any]) -> Iterator[str]:
    has_price = report["gpu_price"] is not None
    cost = "cost/M tokens" if has_price else "GPU-h/M tokens"
    rows = [("candidate", "GPUs", "first token p50", "p90 ms", "inter-token p50", "p90 ms", cost, "steps", "targets")]
    for each in report["candidates"]:
        value = each["cost_per_million_tokens" if has_price else "gpu_hours_per_million_tokens"]
        rows.append(
            (
                each["topology"] + " *" * each["changes_output"],
                str(each["gpus"]),
                *(show_ms(each[f"{name}_ms"]) for name in ("ttft_p50", "ttft_p90", "itl_p50", "itl_p90")),
                f"{value:.4f}",
                each["step_costs"],
                "met" if each["meets_slo"] else "missed",
            )
        )
    yield from _align(rows, "<>>>>>><<")
    if any(each["changes_output"] for each in report["candidates"]):
        yield "* weights are quantised when they are loaded, which changes the output slightly"


def _format_sensitivity(found: dict[str, Any]) -> Iterator[str]:
    yield f"sensitivity of {found['topology']}"
    for each in found["traffic"]:
        state = "met" if each["meets_slo"] else "missed"
        needed = "none found" if each["gpus_needed"] is None else count_gpus(each["gpus_needed"])
        first, between = (show_ms(each[f"{name}_p90_ms"], " ms") for name in ("ttft", "itl"))
        yield (
            f"  traffic {each['factor'] - 1:+.0%}: first token p90 {first}, inter-token p90 {between}, targets {state};"
            f" needs about {needed}"
        )
    shares = [
        f"{each['shared_prefix_share']:.0%} {'none' if each['gpus_needed'] is None else each['gpus_needed']}"
        for each in found["prefix"]
    ]
    yield f"  GPUs by share of shared prefixes: {', '.join(shares)}"
    starts = [f"{each['start_seconds']:.3g} s: {show_ms(each['ttft_p90_ms'], ' ms')}" for each in found["start"]]
    yield f"  first token p90 while one worker is replaced, by start time: {', '.join(starts)}"


def count_gpus(count: int) -> str:
    return f"{count} GPU" + "s" * (count != 1)


def show_ms(value: float | None, unit: str = "") -> str:
    if value is None:
        return "overload"
    return (f"{value:.0f}" if value >= 100 else f"{value:.1f}") + unit


def _align(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        yield "  ".join(cells).rstrip()
