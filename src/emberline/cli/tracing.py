"""Options of all commands whose requests can be traced."""

from __future__ import annotations

import argparse

from emberline.core.config import TraceConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="of an OpenTelemetry collector, for spans of requests (default: OTEL_EXPORTER_OTLP_ENDPOINT)",
    )
    parser.add_argument(
        "--trace-share",
        type=float,
        default=1.0,
        help="of requests whose client does not say whether to trace them, in [0, 1] (default: %(default)g)",
    )


def trace_config(args: argparse.Namespace) -> TraceConfig | None:
    return TraceConfig.given(args.otlp, args.trace_share)
