"""The peers under the same protocol, where they are installed: their figures stand beside ours as NAME/PEER."""

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
from emberline.bench.gpu.engine import Bench, Course, attempt, cost, drive, wanted
from emberline.bench.gpu.model import LLAMA_8B, write_config
from emberline.bench.job import Job
from emberline.bench.peers.transformers import Transformers
from emberline.bench.report import Report
from emberline.core.events import Output
from emberline.core.request import Submission

PEERS = ("vllm", "transformers")
TRANSFORMERS_CAN = ("decode_b1", "decode_b32", "prefill_2048", "prefill_8192")  # equal lengths, in bearable time


class VLLM:
    """vLLM's offline engine in the shape of ours, its weights random too."""

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
        self._told: dict[str, int] = {}  # tokens seen so far, of each open request
        self.version = str(self._vllm.__version__)

    @property
    def idle(self) -> bool:
        return not self._engine.has_unfinished_requests()

    def add(self, submission: Submission) -> None:
        most = submission.params.max_tokens
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        self._told[submission.id] = 0
        self._engine.add_request(submission.id, {"prompt_token_ids": submission.prompt}, params)

    def abort(self, submission_id: str) -> None:
        self._told.pop(submission_id, None)
        self._engine.abort_request([submission_id])

    def step(self) -> list[Output]:
        return [self._output(said) for said in self._engine.step() if said.request_id in self._told]

    def _output(self, said: Any) -> Output:
        tokens = list(said.outputs[0].token_ids)
        new = tokens[self._told[said.request_id] :]
        self._told[said.request_id] = len(tokens)
        if said.finished:
            del self._told[said.request_id]
        return Output(said.request_id, tokens=new)


class HuggingFace(Transformers):
    """`generate` on the GPU. It waits for every token itself, so the times are true."""

    def __init__(self) -> None:
        self._torch = import_module("torch")
        self._library = import_module("transformers")
        self._torch.set_default_device("cuda")
        settings = {name: value for name, value in LLAMA_8B.items() if name != "architectures"}
        config = self._library.LlamaConfig(**settings)
        self._model = self._library.AutoModelForCausalLM.from_config(config, dtype=self._torch.bfloat16).eval()
        self.facts = {"transformers": self._library.__version__}

    def course(self, job: Job, limit: float) -> Course:
        timeline = self.run(job)
        timeline.check(job)
        return Course(timeline, [])


def measure(
    report: Report, who: str, only: Sequence[str] = (), rounds: int = 0, rates: Sequence[float] = (), seconds: float = 0
) -> None:
    if who not in PEERS:
        report.config.setdefault("failed", {})[who] = f"no such peer; known: {', '.join(PEERS)}"
        return
    if find_spec(who) is None:
        report.config["skipped"] = {who: "not installed"}
        print(f"{who} is not installed here: skipped", file=sys.stderr, flush=True)
        return
    began = time.perf_counter()
    if who == "transformers":
        peer = HuggingFace()
        report.config |= {"version": peer.facts["transformers"], "boot_s": time.perf_counter() - began}
        _figures(Bench(report, peer.course, cost({}), rounds or engine.ROUNDS, who), TRANSFORMERS_CAN, only)
        return
    with TemporaryDirectory() as directory:
        write_config(Path(directory))
        served = VLLM(Path(directory))
        report.config |= {"version": served.version, "boot_s": time.perf_counter() - began}
        _figures(Bench(report, partial(drive, served), cost({}), rounds or engine.ROUNDS, who), engine.NAMES, only)
        loop = openloop.OpenLoop(report, served, seconds or openloop.SECONDS, who)
        for rate, name in zip(rates, openloop.names(rates), strict=True):
            if wanted(name, only):
                attempt(report, name, partial(loop, rate))


def _figures(bench: Bench, names: Sequence[str], only: Sequence[str]) -> None:
    for name in names:
        if wanted(name, only):
            attempt(bench.report, f"{name}/{bench.who}", partial(bench.measure, name))
