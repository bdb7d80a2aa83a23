"""measure_http: measures `emberline serve` over HTTP, with one rank, pipeline stages, and tensor parallel ranks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from emberline.bench import serve, start
from emberline.bench.client import CompletionClient
from emberline.bench.report import BenchReport
from emberline.bench.server_launch import EmberlineServer
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.source import resolve_model
from emberline.models.config import ModelConfig

NUM_REQUESTS, CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 8, 64, 48  # of the load
LOAD_RESULTS = ("ttft_p50", "ttft_p90", "itl_p50", "itl_p90", "output", "errors")


def measure_http(report: BenchReport, model_name: str, pp: int, tp: int) -> None:
    """Measure the start of the server, the first and later answers to one client, and a load of several clients."""
    vocab = ModelConfig.from_checkpoint(Checkpoint.open(Path(resolve_model(model_name)))).vocab
    layouts = {"one_rank": [], f"pp{pp}": ["--pp", str(pp)], f"tp{tp}": ["--tp", str(tp)]}
    load = {"requests": NUM_REQUESTS, "concurrency": CONCURRENCY, "prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS}
    report.config["http"] = {"model": model_name, **load}
    with TemporaryDirectory() as folder:
        for name, options in layouts.items():
            arguments = [model_name, *options, *(["--threads", "1"] if options else [])]
            report.config["http"][name] = " ".join(arguments)
            with EmberlineServer(arguments, Path(folder) / f"{name}.log") as server:
                _measure_server(report, f"http_{name}", server, model_name, vocab)


def _measure_server(report: BenchReport, name: str, server: EmberlineServer, model: str, vocab: int) -> None:
    report.add(f"{name}_ready", server.ready_seconds, "s")
    first, warm, rate = start.measure_answers(server.url.removesuffix("/v1"), model)
    report.add(f"{name}_first_answer", first, "ms")
    report.add(f"{name}_warm_answer", warm, "ms")
    report.add(f"{name}_decode", rate, "tok/s")
    job = serve.make_uniform_job(NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, vocab)
    loaded = serve.bench(CompletionClient(server.url, model), server.url, job, CONCURRENCY, None, {})
    for each in LOAD_RESULTS:
        report.results[f"{name}_load_{each}"] = loaded.results[each]
