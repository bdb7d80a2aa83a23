"""`python -m emberline.bench.gpu.http DIR`: measures a model that is served over HTTP on a GPU.

A new server is started for each concurrency. The first pass over the prompts is reported as cold, the third as warm;
every pass has new prompts. With `--peers vllm`, the same passes run against one vLLM server.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from emberline.bench import processes
from emberline.bench import report as reports
from emberline.bench.report import BenchReport
from emberline.bench.streams import ClientProcesses, StreamsResult, quantile_of_sorted
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port

MAX_LOAD_STREAMS = 256
MAX_TOKENS = 256
ROUNDS = 3  # requests of each stream in a pass
READY_TIMEOUT_S = 240.0
SERVED_NAME = "model"


@contextmanager
def running_server(command: list[str], port: int, log_file: Path, packages_dir: Path | None = None) -> Iterator[float]:
    """Run a server while the context is open, and yield the seconds from its start until it lists its model.

    `packages_dir` is added to the front of its PYTHONPATH. Raises EmberlineError if the server does not become ready.
    """
    environment = os.environ if packages_dir is None else {**os.environ, "PYTHONPATH": str(packages_dir)}
    began = time.perf_counter()
    with log_file.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment)
    try:
        while not _lists_models(port):
            if process.poll() is not None or time.perf_counter() - began > READY_TIMEOUT_S:
                raise EmberlineError(
                    f"the server did not become ready; the end of its log: {log_file.read_text()[-1500:]}"
                )
            time.sleep(0.01)
        yield time.perf_counter() - began
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20.0)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lists_models(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def emberline_command(model: str, weights: str | None, port: int) -> list[str]:
    start = [sys.executable, "-m", "emberline.cli", "serve", model, "--served-name", SERVED_NAME]
    return [*start, "--port", str(port), *(() if weights is None else ("--weights", weights))]


def vllm_command(model: str, port: int) -> list[str]:
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*start, "--served-model-name", SERVED_NAME, "--port", str(port), "--host", "127.0.0.1"]


class ServerBench:
    """Measures one server program and adds the results to the report. `suffix` marks the results of a peer."""

    def __init__(self, report: BenchReport, clients: ClientProcesses, suffix: str = "") -> None:
        self._report, self._clients, self._suffix = report, clients, suffix
        self.ready_seconds: list[float] = []

    def add_result(self, name: str, value: float, unit: str) -> None:
        self._report.add(name + self._suffix, value, unit)
        print(f"  {name}{self._suffix} {value:,.4g} {unit}", file=sys.stderr, flush=True)

    def measure_fresh_starts(
        self, make_command: Callable[[int], list[str]], log_dir: Path, concurrencies: list[int]
    ) -> None:
        """Start a new server for each concurrency, so that each concurrency has a first pass after a start."""
        for streams in concurrencies:
            port = free_port()
            with running_server(
                make_command(port), port, log_dir / f"{streams}{self._suffix.replace('/', '-')}.log"
            ) as ready:
                self.ready_seconds.append(ready)
                self.measure_concurrency(port, streams)

    def measure_one_start(
        self,
        make_command: Callable[[int], list[str]],
        log_dir: Path,
        concurrencies: list[int],
        packages_dir: Path | None,
    ) -> None:
        """Start one server for all concurrencies, because it takes long to start. Only its first pass is cold."""
        port = free_port()
        log = log_dir / f"all{self._suffix.replace('/', '-')}.log"
        with running_server(make_command(port), port, log, packages_dir) as ready:
            self.ready_seconds.append(ready)
            for streams in concurrencies:
                self.measure_concurrency(port, streams)

    def measure_concurrency(self, port: int, streams: int) -> None:
        if streams == MAX_LOAD_STREAMS:
            self.measure_max_load(port)
        else:
            self.measure_cold_and_warm(port, streams)

    def measure_cold_and_warm(self, port: int, streams: int) -> None:
        passes = [self._run_pass(port, streams, seed) for seed in range(3)]
        cold, warm = passes[0], passes[-1]
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            self.add_result(
                f"http_cold_ttft_{name}_{streams}", quantile_of_sorted(cold.ttft_seconds, share) * 1e3, "ms"
            )
            self.add_result(
                f"http_warm_ttft_{name}_{streams}", quantile_of_sorted(warm.ttft_seconds, share) * 1e3, "ms"
            )
        ratio = quantile_of_sorted(cold.ttft_seconds, 0.99) / quantile_of_sorted(warm.ttft_seconds, 0.99)
        self.add_result(f"http_cold_ttft_p99_ratio_{streams}", ratio, "x")
        self.add_result(f"http_cold_tok_s_{streams}", cold.tokens_per_second, "tok/s")
        self.add_result(f"http_tok_s_{streams}", warm.tokens_per_second, "tok/s")

    def measure_max_load(self, port: int) -> None:
        pids = processes.find_process_tree(pid) if (pid := processes.find_listener_pid(port)) is not None else {}
        first = self._run_pass(port, MAX_LOAD_STREAMS, 0)
        self.add_result(f"http_cold_tok_s_{MAX_LOAD_STREAMS}", first.tokens_per_second, "tok/s")
        before = {name: processes.read_usage(pid) for name, pid in pids.items()}
        warm = self._run_pass(port, MAX_LOAD_STREAMS, 1)
        after = {name: processes.read_usage(pid) for name, pid in pids.items()}
        gaps, tokens = warm.inter_token_seconds, sum(s.tokens for s in warm.streams)
        self.add_result(f"http_tok_s_{MAX_LOAD_STREAMS}", warm.tokens_per_second, "tok/s")
        self.add_result(f"http_ttft_p90_{MAX_LOAD_STREAMS}", quantile_of_sorted(warm.ttft_seconds, 0.9) * 1e3, "ms")
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            self.add_result(f"http_itl_{name}_{MAX_LOAD_STREAMS}", quantile_of_sorted(gaps, share) * 1e3, "ms")
        ratio = quantile_of_sorted(gaps, 0.9) / max(quantile_of_sorted(gaps, 0.5), 1e-6)
        self.add_result(f"http_itl_p90_over_p50_{MAX_LOAD_STREAMS}", ratio, "x")
        self.add_result(
            f"http_tokens_per_event_{MAX_LOAD_STREAMS}", tokens / (len(gaps) + len(warm.ttft_seconds)), "tokens"
        )
        for name, start in before.items():
            end = after[name]
            if start is not None and end is not None:
                self.add_result(f"http_cpu_{name}_{MAX_LOAD_STREAMS}", (end.cpu - start.cpu) / tokens * 1e6, "us/token")

    def _run_pass(self, port: int, streams: int, seed: int) -> StreamsResult:
        result = self._clients.run(f"http://127.0.0.1:{port}", SERVED_NAME, streams, ROUNDS, MAX_TOKENS, seed)
        if result.errors:
            raise EmberlineError(f"{len(result.errors)} of {len(result.streams)} streams failed: {result.errors[0]}")
        return result


def measure(
    report: BenchReport,
    model: str,
    server: str,
    clients: ClientProcesses,
    log_dir: Path,
    concurrencies: list[int],
    packages_dir: Path | None = None,
    weights: str | None = None,
) -> None:
    measurement = ServerBench(report, clients, "" if server == "emberline" else f"/{server}")
    if server == "emberline":
        measurement.measure_fresh_starts(partial(emberline_command, model, weights), log_dir, concurrencies)
    else:
        measurement.measure_one_start(partial(vllm_command, model), log_dir, concurrencies, packages_dir)
    measurement.add_result("http_ready_s", measurement.ready_seconds[-1], "s")
    measurement.add_result("http_ready_first_start_s", measurement.ready_seconds[0], "s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emberline.bench.gpu.http", description=__doc__)
    reports.add_report_arguments(parser)
    parser.add_argument("model", help="a checkpoint directory")
    parser.add_argument("--peers", default="", help="other servers to measure: vllm, which must be installed")
    packages_help = "directory with the peer's Python packages, if it is not installed here"
    parser.add_argument("--peer-packages", type=Path, metavar="DIR", help=packages_help)
    parser.add_argument("--streams", default="1,16,64,256", help="concurrencies to measure, separated by commas")
    parser.add_argument("--weights", metavar="FORMAT", help="of `emberline serve`, for example fp8 or int4")
    parser.add_argument("--logs", type=Path, help="directory in which to keep the servers' logs")
    args = parser.parse_args()
    if args.weights is not None and args.peers:
        parser.error("--weights cannot be used with --peers: a peer would serve the checkpoint as it is")
    only = [int(streams) for streams in args.streams.split(",")]
    settings = "default, also of the embedder: without a network its download fails and is part of http_ready_s"
    config = {"max_tokens": MAX_TOKENS, "rounds": ROUNDS, "prompt_words": 200, "settings": settings}
    report = BenchReport("gpu-http", config | ({} if args.weights is None else {"weights": args.weights}))
    clients = ClientProcesses()
    with TemporaryDirectory() as directory:
        logs = args.logs or Path(directory)
        logs.mkdir(parents=True, exist_ok=True)
        measure(report, args.model, "emberline", clients, logs, only, weights=args.weights)
        for peer in filter(None, args.peers.split(",")):
            if args.peer_packages is None and importlib.util.find_spec(peer) is None:
                raise SystemExit(
                    f"peer {peer} is not installed (hint: give the directory of its packages with --peer-packages)"
                )
            measure(report, args.model, peer, clients, logs, only, args.peer_packages)
    clients.close()
    report.print_and_save(args.json, args.commit)


if __name__ == "__main__":
    main()
