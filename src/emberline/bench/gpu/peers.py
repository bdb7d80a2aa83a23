"""Measures other engines (peers), if they are installed, in the same way as ours.

Their results are reported as NAME/PEER.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from emberline.bench.gpu import engine, openloop
from emberline.bench.gpu.engine import EngineBench, is_measurement_selected, run_measurement
from emberline.bench.gpu.job_run import JobRun, run_job
from emberline.bench.gpu.limits import compute_token_cost
from emberline.bench.gpu.model import LLAMA_8B, write_config
from emberline.bench.job import BenchJob
from emberline.bench.peers.transformers import Transformers
from emberline.bench.report import BenchReport
from emberline.core.events import Output
from emberline.core.request import Submission

PEERS = ("vllm", "transformers")
# Measurements with equal lengths that take a tolerable time.
TRANSFORMERS_NAMES = ("decode_b1", "decode_b32", "prefill_2048", "prefill_8192")


class OfflineVLLM:
    """vLLM's offline engine with random weights, behind the interface of our engine."""

    def __init__(self, directory: Path) -> None:
        self._vllm: Any = import_module("vllm")
        llm = self._vllm.LLM(
            model=str(directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_prefix_caching=False,
            disable_log_stats=True,
            max_model_len=engine.SETTINGS["max_context"],
            max_num_seqs=engine.SETTINGS["max_running"],
            seed=0,
        )
        self._engine = llm.llm_engine
        self._received_tokens: dict[str, int] = {}  # tokens received so far, by open request
        self.version = str(self._vllm.__version__)

    @property
    def idle(self) -> bool:
        return not self._engine.has_unfinished_requests()

    def add(self, submission: Submission) -> None:
        max_tokens = submission.params.max_tokens
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._received_tokens[submission.id] = 0
        self._engine.add_request(submission.id, {"prompt_token_ids": submission.prompt}, params)

    def abort(self, submission_id: str) -> None:
        self._received_tokens.pop(submission_id, None)
        self._engine.abort_request([submission_id])

    def step(self) -> list[Output]:
        return [self._to_output(result) for result in self._engine.step() if result.request_id in self._received_tokens]

    def _to_output(self, result: Any) -> Output:
        tokens = list(result.outputs[0].token_ids)
        new = tokens[self._received_tokens[result.request_id] :]
        self._received_tokens[result.request_id] = len(tokens)
        if result.finished:
            del self._received_tokens[result.request_id]
        return Output(result.request_id, tokens=new)


class GPUTransformers(Transformers):
    """The `generate` method of Hugging Face transformers on the GPU.

    The method waits for the GPU after every token, so the recorded times are correct.
    """

    def __init__(self) -> None:
        self._torch = import_module("torch")
        self._library = import_module("transformers")
        self._torch.set_default_device("cuda")
        settings = {name: value for name, value in LLAMA_8B.items() if name != "architectures"}
        config = self._library.LlamaConfig(**settings)
        self._model = self._library.AutoModelForCausalLM.from_config(config, dtype=self._torch.bfloat16).eval()
        self.facts = {"transformers": self._library.__version__}

    def run_job(self, job: BenchJob, timeout_s: float) -> JobRun:
        timeline = self.run(job)
        timeline.check_token_counts(job)
        return JobRun(timeline, [])


def measure(
    report: BenchReport,
    peer_name: str,
    name_patterns: Sequence[str] = (),
    rounds: int = 0,
    rates: Sequence[float] = (),
    duration_s: float = 0,
) -> None:
    if peer_name not in PEERS:
        report.config.setdefault("failed", {})[peer_name] = f"unknown peer (hint: use one of {', '.join(PEERS)})"
        return
    if find_spec(peer_name) is None:
        report.config["skipped"] = {peer_name: "not installed"}
        print(f"peer skipped, not installed: peer={peer_name}", file=sys.stderr, flush=True)
        return
    began = time.perf_counter()
    if peer_name == "transformers":
        library = GPUTransformers()
        report.config |= {"version": library.facts["transformers"], "boot_s": time.perf_counter() - began}
        bench = EngineBench(report, library.run_job, compute_token_cost({}), rounds or engine.ROUNDS, peer_name)
        _measure_selected(bench, TRANSFORMERS_NAMES, name_patterns)
        return
    with TemporaryDirectory() as directory:
        write_config(Path(directory))
        vllm = OfflineVLLM(Path(directory))
        report.config |= {"version": vllm.version, "boot_s": time.perf_counter() - began}
        bench = EngineBench(report, partial(run_job, vllm), compute_token_cost({}), rounds or engine.ROUNDS, peer_name)
        _measure_selected(bench, engine.NAMES, name_patterns)
        loop = openloop.OpenLoopBench(report, vllm, duration_s or openloop.LOAD_SECONDS, peer_name)
        for rate, name in zip(rates, openloop.measurement_names(rates), strict=True):
            if is_measurement_selected(name, name_patterns):
                run_measurement(report, name, partial(loop, rate))


def _measure_selected(bench: EngineBench, names: Sequence[str], name_patterns: Sequence[str]) -> None:
    for name in names:
        if is_measurement_selected(name, name_patterns):
            run_measurement(bench.report, f"{name}/{bench.peer}", partial(bench.measure_by_name, name))
