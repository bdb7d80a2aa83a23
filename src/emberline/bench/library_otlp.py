"""Our OTLP exporter compared with the OpenTelemetry SDK's: CPU per span, start, memory, and a collector that hangs.

pip install opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.1
python -m emberline.bench.library_otlp --json benchmarks/results/library-otlp.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from statistics import median

from emberline.bench import report as reports
from emberline.bench.report import BenchReport

LIBRARIES = ("ours", "sdk")
HUNG_SPANS, HUNG_PADDING = 3000, 1 << 16  # spans for a collector that hangs, and characters of text in each
MAX_CHILD_S = 180.0
PEER_PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "protobuf", "requests")


class Collector(BaseHTTPRequestHandler):
    """Accepts every batch of spans."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


class HungCollector(Collector):
    """Takes batches of spans and never replies."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        threading.Event().wait()


@contextmanager
def running_collector(handler: type[Collector]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        server.server_close()


def run_child(library: str, url: str, spans: int, padding_chars: int) -> dict[str, float]:
    command = [sys.executable, "-m", "emberline.bench.library_otlp_child", library, url, str(spans), str(padding_chars)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=MAX_CHILD_S, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def run(rounds: int, spans: int) -> BenchReport:
    measured: dict[str, list[dict[str, float]]] = {library: [] for library in LIBRARIES}
    with running_collector(Collector) as url:
        for _ in range(rounds):
            for library in LIBRARIES:
                measured[library].append(run_child(library, url, spans, 0))
    with running_collector(HungCollector) as url:
        hung = {library: run_child(library, url, HUNG_SPANS, HUNG_PADDING) for library in LIBRARIES}
    versions = {name: version(name) for name in PEER_PACKAGES}
    config = {"rounds": rounds, "spans": spans, "hung_spans": HUNG_SPANS, "hung_span_characters": HUNG_PADDING}
    report = BenchReport("library-otlp", {**config, "clock": "CPU time of the exporting process", "versions": versions})

    def add(name: str, unit: str, figure: str, scale: float = 1.0) -> None:
        values = {library: [each[figure] * scale for each in measured[library]] for library in LIBRARIES}
        report.add(name, values["ours"], unit, peer=median(values["sdk"]))

    add("span", "us", "cpu_s", 1e6 / spans)
    add("start", "s", "start_cpu_s")
    add("memory", "MB", "memory_mb")
    add("threads", "threads", "threads")
    report.add("hung_collector_memory", hung["ours"]["memory_mb"], "MB", peer=hung["sdk"]["memory_mb"])
    report.add("hung_collector_shutdown", hung["ours"]["shutdown_s"], "s", peer=hung["sdk"]["shutdown_s"])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--spans", type=int, default=10_000, help="spans in each round")
    reports.add_report_arguments(parser)
    options = parser.parse_args()
    run(options.rounds, options.spans).print_and_save(options.json, options.commit)


if __name__ == "__main__":
    main()
