"""Engines of the GPU runner on several ranks sample the same tokens as on one. Here the ranks are threads, and the CPU
is their device; see also tests/gpu/test_rank_engine_on_gpu.py."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import tiny
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from device_rank_engines import DeviceThreadRanks, load_host_rank_model, make_device_thread_engine
from engine_runs import run_engine
from rank_models import HEADS, WRITERS

from emberline.cli import serve
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EngineFailed, InvalidRequest
from emberline.core.events import Output
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.plan import StepResult
from emberline.core.request import Submission
from emberline.engine import memory
from emberline.engine.boot import boot
from emberline.engine.engine import Engine, GrammarRunner
from emberline.engine.ranks import device_boot, ray_boot
from emberline.engine.ranks.control import RankLoaded
from emberline.engine.ranks.device_boot import check_same_devices, plan_device_caches
from emberline.engine.ranks.device_follower import StepWaiter
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.engine.ranks.device_rank import explain_gpu_error
from emberline.engine.ranks.device_settings import check_device_settings, gpu_of_rank, order_visible_gpus
from emberline.engine.ranks.layout import Layout
from emberline.kernels.comm.lone_rank import LoneRank

SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_memory": 1 << 20, "block_size": 16, "max_context": 64}
SETTINGS |= {"max_batch_tokens": 16, "max_running": 3, "graphs": True}  # prompts are computed in chunks
PREFIX = [5, 9, 17, 4, 80, 33, 9, 21, 6, 14, 7, 7, 30, 2, 8, 11, 12]  # more than a block
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
NODES = {"nodes": 2, "master": "10.0.0.1:29500"}
LAYOUTS: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]


def submissions() -> list[Submission]:
    """Return requests that share a prefix: greedy, drawn, with penalties and log-probabilities, and two of one."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 11, "logprobs": 1},
        {"temperature": 1.2, "seed": 12, **PENALTIES},
        {"temperature": 0.9, "seed": 13, "n": 2, "logit_bias": {7: 2.0}, "min_tokens": 3},
    ]
    prompts = [(PREFIX + [3 + (7 * i + j) % 90 for j in range(n)])[:n] for i, n in enumerate((3, 21, 30, 19))]
    each = zip(prompts, kinds, strict=True)
    return [Submission(f"r{i}", prompt, SamplingParams(max_tokens=9, **k)) for i, (prompt, k) in enumerate(each)]


def collect(engine: Engine, pending: list[Submission], gap: int = 1) -> dict[tuple[str, int], list[Any]]:
    """Return the tokens and rounded log-probabilities of each output, and those of prompts."""
    outputs: list[Output] = []
    for submission in pending:
        engine.add(submission)
        for _ in range(gap):
            outputs += engine.step()
    while not engine.idle:
        outputs += engine.step()
    engine.kv.check_invariants()
    found: dict[tuple[str, int], list[Any]] = {}
    for o in outputs:
        assert o.error is None
        row = found.setdefault((o.id, o.index), [])
        row += o.tokens
        row += [round(p.logprob, 3) for p in (*o.logprobs, *(o.prompt_logprobs or ()))]
    return found


def build_config(directory: Path, name: str, **settings: Any) -> EngineConfig:
    if name == "llama":  # each of two ranks has half of the vocabulary
        tiny.write(directory, tiny.config("llama", **HEADS, vocab_size=256))
    else:
        WRITERS[name](directory)
    return EngineConfig.build(str(directory), **SETTINGS | settings)


def run_on_one_rank(config: EngineConfig, pending: list[Submission]) -> dict[tuple[str, int], list[Any]]:
    one = config.with_settings(device="cpu", threads=1, tp=1, pp=1, ep=1, kv_memory=1 << 20)
    return collect(boot(one).engine, pending, gap=0)


def run_on_ranks(config: EngineConfig, pending: list[Submission], **layout: int) -> dict[tuple[str, int], list[Any]]:
    engine = make_device_thread_engine(config.with_settings(**layout))
    found = collect(engine, pending)
    assert collect(engine, pending, gap=0) == found, "requests with the ids of others that have ended"
    engine.close()
    return found


@pytest.mark.parametrize("name", ["llama", "cohere2", "deepseek_v3"])
def test_same_tokens_as_one_rank(name: str, tmp_path: Path) -> None:
    """Also with windows, latents and experts, in chunks, with hits of the prefix cache and captured steps."""
    config = build_config(tmp_path, name)
    expected = run_on_one_rank(config, submissions())
    for layout in LAYOUTS:
        assert run_on_ranks(config, submissions(), **layout) == expected, layout


@pytest.mark.parametrize(("name", "layout"), [("delta-moe", {"tp": 2, "ep": 2}), ("gpt-oss", {"tp": 4})])
def test_states_and_experts_of_ranks(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    config = build_config(tmp_path, name, graphs=False)
    assert run_on_ranks(config, submissions(), **layout) == run_on_one_rank(config, submissions())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_preempted_requests_continue(layout: dict[str, int], tmp_path: Path) -> None:
    config = build_config(tmp_path, "llama", max_running=4, prefix_cache=False)
    pending = [replace(s, params=replace(s.params, n=1, max_tokens=30, prompt_logprobs=None)) for s in submissions()]
    expected = run_on_one_rank(config, pending)
    ranks = DeviceThreadRanks(config.with_settings(kv_memory=6 * block_bytes(config, layout), **layout))
    engine = ranks.make_engine(config.with_settings(**layout))
    assert collect(engine, pending) == expected
    engine.close()
    assert engine.scheduler.preemptions, "the cache was meant to be too small"


def block_bytes(config: EngineConfig, layout: dict[str, int]) -> int:
    """Return the bytes of a rank's part of a KV block."""
    divided = Layout(layout.get("tp", 1), layout.get("pp", 1))
    part = load_host_rank_model(config, divided, divided.leader, lambda name, rank, size: LoneRank(rank, size))
    return part.planned.kv_shape.block_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grammars(layout: dict[str, int], tmp_path: Path) -> None:
    """Masks need the previous token on the host: other ranks wait for the tokens of such a step."""
    tokenizer_file(tiny.write(tmp_path, tiny.config("llama", **HEADS, vocab_size=VOCAB_SIZE, eos_token_id=EOS)))
    config = EngineConfig.build(str(tmp_path), **SETTINGS)
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    grammar = GrammarSpec("json_schema", schema)
    params = SamplingParams(max_tokens=14, temperature=0.7, seed=5)
    pending = [
        Submission("json", encode("give "), replace(params, grammar=grammar)),
        Submission("plain", encode("abcabcabcabc"), replace(params, temperature=0.0)),
    ]
    expected = run_on_one_rank(config, pending)
    engine = make_device_thread_engine(config.with_settings(**layout))
    assert isinstance(engine.runner, GrammarRunner)
    compiled = engine.runner.prepare(grammar)
    compiled.result(60)  # so that both requests run together
    assert collect(engine, pending) == expected
    engine.close()


def test_drafts_are_verified_on_all_ranks(tmp_path: Path) -> None:
    """A second request without a draft runs beside it, whose pending tokens all ranks get from the leader."""
    config = build_config(tmp_path, "llama", max_batch_tokens=64)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    pending = [Submission("r0", [7, 8, 9, 10], params), Submission("r1", [3, 4], replace(params, max_tokens=20))]
    expected = run_on_one_rank(config, pending)
    guess = tuple(token if i % 5 != 4 else 3 for i, token in enumerate(expected["r0", 0]))  # every fifth is wrong
    engine = make_device_thread_engine(config.with_settings(tp=2, speculate="ngram"))
    assert collect(engine, [replace(pending[0], prediction=guess), pending[1]]) == expected
    engine.close()
    speculation = engine.stats().speculation
    assert speculation is not None and speculation.drafted_tokens >= speculation.accepted_tokens > 0


def test_all_ranks_capture_the_same_shapes(tmp_path: Path) -> None:
    config = build_config(tmp_path, "llama", max_running=2, tp=2)
    ranks = DeviceThreadRanks(config)
    engine = ranks.make_engine(config)
    assert isinstance(engine.runner, DeviceLeaderRunner) and engine.is_preparing
    engine.runner.run_uncaptured_once()
    while engine.prepare_next():
        pass
    run_engine(engine, submissions()[:2])
    engine.close()
    runners = [part.runner for part in ranks.parts]
    assert len(runners) == 2 and set(runners[0].shapes) <= set(runners[0]._graphs.captured)
    assert list(runners[0]._graphs.captured) == list(runners[1]._graphs.captured)
    assert all(len(runner._rows.by_request) <= 2 for runner in runners), "rows of ended requests are not freed"


def test_error_of_a_rank_ends_the_steps_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_config(tmp_path, "llama", tp=2)
    ranks = DeviceThreadRanks(config)
    engine = ranks.make_engine(config)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ranks.parts[1].runner, "_run_model", fail)
    engine.add(submissions()[0])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()


def test_error_on_the_device_is_reported_without_a_further_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's main thread waits for the next plan then."""
    reported: SimpleQueue[BaseException] = SimpleQueue()
    checks: SimpleQueue[bool] = SimpleQueue()

    def fail() -> StepResult:
        raise RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronous")

    waiter = StepWaiter(lambda: checks.put(True), reported.put)
    waiter.add(lambda: StepResult(1, {}))
    assert checks.get(timeout=10)
    waiter.add(fail)
    error = reported.get(timeout=10)
    assert isinstance(error, RuntimeError)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0,1,2")
    assert explain_gpu_error(error).message == "GPU 3 failed: RuntimeError: CUDA error: unspecified launch failure"


@pytest.mark.parametrize("name", ["llama-biased", "qwen3-moe", "deepseek_v3", "delta-moe"])
def test_planned_weights_of_a_rank_are_those_it_loads(name: str, tmp_path: Path) -> None:
    config = build_config(tmp_path, name)
    for layout in (Layout(2), Layout(1, 2), Layout(2, 2)) if name != "delta-moe" else (Layout(2),):
        for rank in range(layout.num_ranks):
            part = load_host_rank_model(config, layout, rank, lambda name, rank, size: LoneRank(rank, size))
            planned = memory.weight_bytes(part.planned.rank_config, 4)
            assert planned == pytest.approx(part.planned.model.weight_bytes, rel=0.01), (layout, rank)


def test_ranks_must_agree() -> None:
    """The caches are as large as those of the rank with the least memory, and all GPUs are of one kind."""
    parts = [RankLoaded("", 1, 0, 64, 0, max_blocks=9), RankLoaded("", 1, 0, 64, 8, max_blocks=7, max_slots=5)]
    assert plan_device_caches(parts) == (7, 5)
    parts[0].device_name = "another GPU"
    with pytest.raises(EngineFailed, match=r"rank 0 of 2 .* has the GPU another GPU, and the leader has cpu"):
        check_same_devices(dict(enumerate(parts)), Layout(1, 2))


def test_each_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(2, 2)
    assert [gpu_of_rank(layout, rank, 1) for rank in range(4)] == [2, 3, 0, 1]
    assert [gpu_of_rank(layout, rank, 4) for rank in range(4)] == [0, 0, 0, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e")
    assert order_visible_gpus(layout, 1, 1) == ["GPU-d", "GPU-a", "GPU-b", "GPU-c"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert order_visible_gpus(layout, 0, 2) == ["1", "0"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 4}, "4 ranks .* need 4 GPUs, and CUDA_VISIBLE_DEVICES lets this process see 2"),
        ({"tp": 2, "exact": True}, "exact does not work with 2 ranks .* on GPUs"),
        ({"tp": 8, **NODES}, "8 ranks .* need 4 GPUs on each of 2 nodes, and CUDA_VISIBLE_DEVICES .* see 2"),
        ({"pp": 2, "kv_host_memory": 1 << 20, **NODES}, "kv_host_memory does not work with 2 nodes"),
        ({"pp": 2, "node_rank": 1, **NODES}, "node_rank is 1, but only node 0 has an engine"),
        ({"pp": 2, "speculate": "ngram"}, "speculate does not work"),
        ({"tp": 2, "kv_mooncake": True, **NODES}, "kv_mooncake does not work with 2 nodes"),
        ({"tp": 2, "launcher": "ray"}, "launcher does not work"),
        ({"tp": 2, "overlap": False}, "overlap does not work"),
    ],
)
def test_settings_that_do_not_work(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_device_settings(EngineConfig.build(str(tmp_path), **settings), 2)
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    for flag in re.findall("--[a-z-]+", str(caught.value.hint)):
        assert flag in parser._option_string_actions, "the hint names an option that does not exist"


def test_ray_reserves_no_gpus_for_settings_that_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(*_: object, **__: object) -> None:
        raise AssertionError("GPUs were reserved")

    monkeypatch.setattr(ray_boot, "boot_on_ray", reserve)
    monkeypatch.setattr(device_boot.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = EngineConfig.build(str(tmp_path), tp=4, launcher="ray", ray_address="h:1")
    with pytest.raises(InvalidRequest, match="need 4 GPUs, and this machine has 2"):
        device_boot.boot_device_ranks_on_ray(config)
