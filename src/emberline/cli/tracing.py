"""Options of the commands whose requests can be traced."""

from __future__ import annotations

import argparse

from emberline.core.config import TraceConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="URL of an OpenTelemetry collector for traces of requests."
        " (default: OTEL_EXPORTER_OTLP_ENDPOINT; without it, no traces)",
    )
    parser.add_argument(
        "--trace-share",
        type=float,
        default=1.0,
        help="Share, 0 to 1, of requests without a trace context that are traced. (default: %(default)g)",
    )


def trace_config(args: argparse.Namespace) -> TraceConfig | None:
    return TraceConfig.from_options(args.otlp, args.trace_share)
