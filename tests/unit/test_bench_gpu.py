"""The GPU benchmarks without a GPU: times, counts and limits, with a fake runner and a manual clock."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emberline.bench import workload
from emberline.bench.gpu import __main__ as command
from emberline.bench.gpu import cold, engine, job_run, openloop, peers
from emberline.bench.gpu.engine import EngineBench, is_measurement_selected, make_warm_up_lengths, run_measurement
from emberline.bench.gpu.job_run import SteadyPhase, run_job
from emberline.bench.gpu.model import (
    LLAMA_8B,
    WEIGHT_STD,
    RandomWeights,
    list_tensor_shapes,
    split_shapes,
    write_checkpoint,
)
from emberline.bench.gpu.openloop import OpenLoopBench, draw_arrivals, latency_percentiles, run_open_loop
from emberline.bench.gpu.shapes import find_routing
from emberline.bench.job import BenchJob, TokenTimeline
from emberline.bench.report import BenchReport, BenchResult
from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.events import Output
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.fake import FakePipelinedRunner, FakeRunner
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig
from emberline.models.weights import Weights

STEP, TOKEN = 0.010, 0.001  # seconds of any step, and of each prompt token in it
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
}


class SlowRunner(FakeRunner):
    """A runner whose steps take time on the test's clock, more with more tokens to prefill."""

    def __init__(self, clock: ManualClock, **more: Any) -> None:
        super().__init__(vocab_size=job_run.VOCAB, **more)
        self.clock = clock
        self.batches: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.batches.append(len(plan.work))
        prompt = sum(len(work.tokens) for work in plan.work if len(work.tokens) > 1)
        self.clock.advance(STEP + TOKEN * prompt)
        return super().run(plan)


class OverlappedEngine:
    """An engine that returns the outputs of a step with the next one."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self._delayed: list[Output] = []

    @property
    def idle(self) -> bool:
        return self.inner.idle and not self._delayed

    def add(self, submission: Submission) -> None:
        self.inner.add(submission)

    def abort(self, submission_id: str) -> None:
        self.inner.abort(submission_id)

    def step(self) -> list[Output]:
        before, self._delayed = self._delayed, self.inner.step()
        return before


def fake_engine(clock: ManualClock, *, batch_tokens: int = 64, running: int = 64, blocks: int = 4096) -> Engine:
    config = SchedulerConfig(max_batch_tokens=batch_tokens, max_running=running, prefix_cache=False)
    return Engine(config, SlowRunner(clock, num_blocks=blocks), clock)


def late_sleep(clock: ManualClock) -> Callable[[float], None]:
    """Return a sleep that wakes a little late, as a real one does, so that rounding never prevents the wake-up."""
    return lambda seconds: clock.advance(seconds + 1e-9)


def small_job(batch: int) -> BenchJob:
    return workload.make_job([(24, 20)] * batch, job_run.VOCAB)


# -- decode -----------------------------------------------------------------------------------------------------


def test_decode_step_time_excludes_prefill_of_other_requests() -> None:
    clock = ManualClock(5.0)
    job = small_job(6)  # 144 prompt tokens, 64 per step: the first requests decode while the last prefill
    course = run_job(fake_engine(clock), job, clock=clock.now)
    part = SteadyPhase.from_timeline(job, course.timeline)
    assert part.step_seconds == pytest.approx(STEP)
    assert 10 < part.steps < 19
    whole = course.timeline.wall_seconds / (len(course.step_times) - 1)
    assert whole > 1.2 * STEP  # so that the test would notice


def test_overlapped_engine_has_the_same_step_time() -> None:
    clock = ManualClock()
    job = small_job(6)
    served = OverlappedEngine(fake_engine(clock))
    part = SteadyPhase.from_timeline(job, run_job(served, job, clock=clock.now).timeline)
    # The last outputs come without a step of their own, at the same time as those before.
    assert part.step_seconds == pytest.approx(STEP, rel=0.1)
    assert served.idle


def test_context_is_the_average_number_of_keys() -> None:
    job = BenchJob([[1] * 10, [1] * 20], [4, 4])
    timeline = TokenTimeline([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]])
    part = SteadyPhase.from_timeline(job, timeline)
    assert (part.begin, part.end, part.steps) == (2.0, 4.0, 2)
    assert part.context == np.mean([12, 13, 21, 22])


def test_tokens_of_one_step_at_different_times_count_once() -> None:
    late = 1e-5  # the second request gets its token a little later than the first, in every step
    timeline = TokenTimeline([[float(t) for t in range(1, 8)], [t + late for t in range(1, 8)]])
    part = SteadyPhase.from_timeline(BenchJob([[1], [1]], [7, 7]), timeline)
    assert part.steps == 6
    assert part.step_seconds == pytest.approx(1.0, rel=1e-4)


def test_requests_that_never_decode_together_are_an_error() -> None:
    with pytest.raises(EmberlineError, match="at no time were all requests of the job decoding"):
        SteadyPhase.from_timeline(BenchJob([[1], [1]], [2, 2]), TokenTimeline([[1.0, 2.0], [3.0, 4.0]]))


def test_job_timeout_aborts_all_requests() -> None:
    clock = ManualClock()
    served = fake_engine(clock)
    with pytest.raises(EmberlineError, match="timed out"):
        run_job(served, small_job(4), timeout_s=5 * STEP, clock=clock.now)
    assert served.idle
    job = small_job(2)
    run_job(served, job, clock=clock.now).timeline.check_token_counts(job)


def test_cpu_percent_counts_only_steps_within_the_bounds() -> None:
    course = job_run.JobRun(TokenTimeline([[1.0]]), [(0.0, 0.0), (1.0, 1.0), (2.0, 1.25), (4.0, 1.75), (5.0, 2.75)])
    assert course.cpu_percent(1.0, 4.0) == pytest.approx(25.0)
    assert course.cpu_percent(0.0, 5.0) == pytest.approx(55.0)


def test_warm_up_reaches_the_batch_sizes_of_a_shrinking_batch() -> None:
    clock = ManualClock()
    served = fake_engine(clock, batch_tokens=4096, running=100)
    run_job(served, workload.make_job(make_warm_up_lengths(100), job_run.VOCAB), clock=clock.now)
    assert isinstance(served.runner, SlowRunner)
    seen = set(served.runner.batches)
    assert set(range(1, 17)) <= seen
    assert all(seen & set(range(low, low + 8)) for low in range(16, 100, 8))


# -- limits -----------------------------------------------------------------------------------------------------


def test_model_has_the_shape_of_llama_8b() -> None:
    shapes = list_tensor_shapes(job_run.CONFIG)
    assert sum(map(prod, shapes.values())) == 8_030_261_248
    assert job_run.CONFIG.rope.kind == "llama3"
    assert job_run.CONFIG.max_context == 131072


def test_shapes_with_experts_are_chosen_by_name() -> None:
    settings = {"shape": "qwen3-30b-a3b"}
    config, one = ModelConfig.from_hf(engine.shape_of(settings).hf_config), engine.compute_token_cost(settings)
    expert = 3 * 768 * 2048 * 48
    assert config.experts is not None and one.weight_bytes == pytest.approx(2 * 3.03e9, rel=0.01)
    assert one.with_experts(config, 8).weight_bytes == one.weight_bytes
    assert one.with_experts(config, 128).weight_bytes - one.weight_bytes == 2 * 120 * expert
    assert ModelConfig.from_hf(engine.shape_of({"shape": "deepseek-v2-lite"}).hf_config).experts is not None
    recurrent = engine.compute_token_cost({"shape": "qwen3.5-35b-a3b"})
    assert recurrent.kv_bytes == 10 * 2 * 2 * 256 * 2 and recurrent.state_bytes == 30 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert recurrent.weight_bytes == pytest.approx(2 * 2.9e9, rel=0.02)
    with pytest.raises(InvalidRequest, match="shape is 'qwen'"):
        engine.shape_of({"shape": "qwen"})
    assert find_routing({"routing": "tied"}) == "tied" and find_routing({}) == "random"
    tied = engine.shape_of({"shape": "deepseek-v2-lite", "routing": "tied"})
    assert tied.vllm_figures["decode_b64_ms"] == 5.19
    assert list(engine.shape_of({"shape": "deepseek-v2-lite"}).vllm_figures) == ["prefill_2048_ms", "prefill_8192_ms"]
    assert "decode_b64_ms" in engine.shape_of(settings).vllm_figures
    with pytest.raises(InvalidRequest, match="routing is 'same'"):
        find_routing({"routing": "same"})


def test_limits_follow_from_bandwidth_and_flops() -> None:
    whole = engine.compute_token_cost({})
    weights = 2 * (32 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 128256 * 4096)
    kv = 32 * 2 * 8 * 128 * 2
    assert engine.min_decode_step_ms(1, 640, whole) == pytest.approx((weights + 640 * kv) / 4.39e12 * 1e3)
    assert engine.min_decode_step_ms(256, 640, whole) == pytest.approx((weights + 256 * 640 * kv) / 4.39e12 * 1e3)
    for kept in ("packed", "both"):  # a step reads only the packed weights
        assert engine.compute_token_cost({"weights": kept}).weight_bytes == pytest.approx(
            whole.weight_bytes * 12.03 / 16
        )
    half = engine.compute_token_cost({"kv_dtype": "float8_e4m3fn"})
    assert engine.min_decode_step_ms(8, 640, half) == pytest.approx((weights + 8 * 640 * kv / 2) / 4.39e12 * 1e3)
    n = 8192
    linears = 2 * n * (weights // 2 - 128256 * 4096) + 2 * 128256 * 4096
    attention = 4 * 32 * 4096 * n * (n + 1) // 2
    assert engine.min_prefill_ms(n, whole) == pytest.approx((linears + attention) / 758e12 * 1e3)


# -- the open loop ----------------------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert latency_percentiles([float(i) for i in range(101)]) == [50.0, 90.0, 99.0]
    assert latency_percentiles([7.0]) == [7.0, 7.0, 7.0]


def test_arrivals_are_seeded_and_poisson() -> None:
    due = draw_arrivals(8.0, 500.0, seed=3)
    assert due == draw_arrivals(8.0, 500.0, seed=3) != draw_arrivals(8.0, 500.0, seed=4)
    assert due == sorted(due)
    assert due[0] > 0 and due[-1] < 500.0
    assert len(due) == pytest.approx(4000, rel=0.06)
    gaps = np.diff(due)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as of an exponential distribution


def run_load(due: list[float], limit: float = 60.0) -> tuple[openloop.OpenLoopRun, Engine, ManualClock]:
    clock = ManualClock(100.0)
    served = fake_engine(clock, batch_tokens=4096)
    job = workload.make_job([(24, 5)] * len(due), job_run.VOCAB)
    return run_open_loop(served, job, due, limit, clock=clock.now, sleep=late_sleep(clock)), served, clock


def test_time_to_first_token_counts_from_the_due_time() -> None:
    # The second comes in the middle of the first one's prefill of 34 ms, and can only be added after it.
    prefill = STEP + 24 * TOKEN
    seen, served, _ = run_load([1.0, 1.005, 3.0])
    assert seen.unfinished == 0
    assert served.idle
    assert seen.added == pytest.approx([1.0, 1.0 + prefill, 3.0])
    assert seen.first_token_seconds == pytest.approx([prefill, 2 * prefill - 0.005, prefill])
    # The first request's second token came with the second one's prompt; all others took a plain step.
    assert sorted(seen.token_gaps) == pytest.approx([STEP] * 11 + [prefill])


def test_an_idle_engine_sleeps_until_the_next_request() -> None:
    seen, served, clock = run_load([2.0, 30.0])
    assert clock.now() == pytest.approx(130.0 + STEP * 5 + 24 * TOKEN)
    assert served.stats().step == 10
    assert len(seen.token_gaps) == 8


def test_open_loop_stops_at_the_deadline_and_counts_unfinished_requests() -> None:
    seen, served, _ = run_load([1.0, 1.01, 1.02, 9.0], limit=1.06)
    assert seen.unfinished == 4
    assert len(seen.added) == 3
    assert not served.idle  # nothing was aborted


def test_open_loop_reports_figures_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(openloop, "run_open_loop", partial(run_open_loop, clock=clock.now, sleep=late_sleep(clock)))
    monkeypatch.setattr(
        openloop, "make_open_loop_job", partial(openloop.make_open_loop_job, prompt_tokens=32, output_tokens=8)
    )
    report = BenchReport("open")
    OpenLoopBench(report, fake_engine(clock, batch_tokens=4096), seconds=5.0).measure(8.0)
    assert report.results["open8_itl_p90_ms"].peer == 108.8
    assert report.results["open8_itl_p90_ms/vllm-2048"].value == 62.1
    assert report.results["open8_ttft_p99_ms"].peer is None
    assert report.results["open8_itl_p50_ms"].value == pytest.approx(1e3 * STEP, rel=0.5)
    assert report.config["open8"]["unfinished"] == 0
    other = BenchReport("open")
    OpenLoopBench(other, fake_engine(clock, batch_tokens=4096), seconds=5.0, peer="vllm").measure(8.0)
    assert set(other.results) == {f"open8_{kind}_p{p}_ms/vllm" for kind in ("itl", "ttft") for p in (50, 90, 99)}


def test_unfinished_warm_up_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(openloop, "run_open_loop", partial(run_open_loop, clock=clock.now, sleep=late_sleep(clock)))
    monkeypatch.setattr(openloop, "run_job", partial(run_job, clock=clock.now))
    monkeypatch.setattr(
        openloop, "make_open_loop_job", partial(openloop.make_open_loop_job, prompt_tokens=32, output_tokens=8)
    )
    monkeypatch.setattr(openloop, "PROMPT_TOKENS", 32)
    report = BenchReport("open")
    served = fake_engine(clock, batch_tokens=4096, running=128)
    run_measurement(report, "open8", partial(OpenLoopBench(report, served, seconds=5.0), 8.0))
    assert "failed" not in report.config
    assert len(report.results) == 12
    monkeypatch.setattr(openloop, "DRAIN_TIMEOUT_S", -4.9)
    late = BenchReport("open")
    run_measurement(late, "open8", partial(OpenLoopBench(late, served, seconds=5.0), 8.0))
    assert "had not finished when the time limit was reached" in late.config["failed"]["open8"]
    assert not late.results


# -- the engine's figures ---------------------------------------------------------------------------------------


def test_figures_have_their_limits_and_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PROMPT_TOKENS", 24)
    monkeypatch.setattr(engine, "OUTPUT_TOKENS", 12)
    monkeypatch.setattr(engine, "CPU_BATCHES", (8,))
    clock, cpu = ManualClock(), ManualClock()
    served = fake_engine(clock, batch_tokens=4096)

    def cpu_now() -> float:
        cpu.advance(STEP / 4)
        return cpu.now()

    report = BenchReport("engine")
    bench = EngineBench(
        report, partial(run_job, served, clock=clock.now, cpu_clock=cpu_now), engine.compute_token_cost({}), rounds=2
    )
    for name in ("decode_b8", "prefill_2048", "chat40"):
        bench.measure_by_name(name)
    got = report.results
    assert got["decode_b8_ms"].value == pytest.approx(1e3 * STEP)
    assert got["decode_b8_ms"].peer == 5.13
    assert got["decode_b8_ms"].limit == pytest.approx(engine.min_decode_step_ms(8, 30, engine.compute_token_cost({})))
    assert got["decode_b8_tok_s"].value == pytest.approx(8 / STEP)
    assert got["decode_b8_cpu"].value == pytest.approx(25.0)
    assert got["prefill_2048_ms"].value == pytest.approx(1e3 * (STEP + 2048 * TOKEN))
    assert got["chat40_out_tok_s"].value > 0
    assert served.idle


def test_names_select_measurements() -> None:
    assert all(is_measurement_selected(name, []) for name in engine.NAMES)
    assert [name for name in engine.NAMES if is_measurement_selected(name, ["decode_b1"])] == ["decode_b1"]
    assert [name for name in engine.NAMES if is_measurement_selected(name, ["decode_b1_ms"])] == ["decode_b1"]
    assert [name for name in engine.NAMES if is_measurement_selected(name, ["prefill_*"])] == [
        "prefill_2048",
        "prefill_8192",
        "prefill_30000",
    ]
    assert is_measurement_selected("chat1000", ["chat1000_out_tok_s"])


def test_missing_peers_are_skipped_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report = BenchReport("peers")
    peers.measure(report, "vllm")
    assert report.config["skipped"] == {"vllm": "not installed"}
    assert "peer skipped, not installed: peer=vllm" in capsys.readouterr().err
    peers.measure(report, "other")
    assert "unknown peer" in report.config["failed"]["other"]


# -- the model on disk ------------------------------------------------------------------------------------------


def test_random_weights_replace_a_checkpoint() -> None:
    weights = RandomWeights("cpu", torch.bfloat16, seed=1)
    matrix = weights.load_matrix("a.weight", 300, 200)
    assert (matrix.shape, matrix.dtype) == ((300, 200), torch.bfloat16)
    assert matrix.float().std().item() == pytest.approx(WEIGHT_STD, rel=0.05)
    stack = weights.stack([("gate", 30), ("up", 20)], 64, gated=True)
    assert stack.shape == (50, 64)
    assert torch.equal(weights.load_vector("norm.weight", 9), torch.ones(9))
    assert weights.loaded_bytes == 2 * (300 * 200 + 50 * 64) + 4 * 9
    assert weights.has_tensor("a.weight") and not weights.has_tensor("a.bias")
    head = weights.linear([("lm_head.weight", 64)], 32, full_precision=True)
    assert (head.n, head.k, weights.quantised_sizes) == (64, 32, [])
    weights.finish()


def test_shards_are_about_equal() -> None:
    shapes = list_tensor_shapes(job_run.CONFIG)
    shards = split_shapes(shapes, 4)
    assert [name for shard in shards for name in shard] == list(shapes)
    sizes = [2 * sum(map(prod, shard.values())) for shard in shards]
    assert max(sizes) < 1.1 * min(sizes)


def test_written_checkpoint_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "emberline.bench.gpu.model.PIECE_BYTES", 1000
    )  # tensors are split, and the last piece is shorter
    write_checkpoint(tmp_path, TINY, device="cpu")
    assert len(list(tmp_path.glob("model-0000?-of-00004.safetensors"))) == 4
    write_checkpoint(tmp_path, TINY, device="cpu")  # over an earlier one, which may be incomplete
    checkpoint = Checkpoint.open(tmp_path)
    config = ModelConfig.from_hf(checkpoint.config)
    weights = Weights(checkpoint)
    for name, shape in list_tensor_shapes(config).items():
        if len(shape) == 1:
            assert torch.equal(weights.load_vector(name, *shape), torch.ones(shape))
        else:
            matrix = weights.load_matrix(name, *shape)
            assert matrix.float().std().item() == pytest.approx(WEIGHT_STD, rel=0.1)
    weights.finish("")


def test_start_from_the_page_cache_is_not_reported_as_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, TINY, device="cpu")
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    read = size

    def child(action: str, directory: Path, settings: dict[str, Any], seconds: float) -> dict[str, Any]:
        now = cold.time.monotonic()
        return {"entered": now, "ready": now + 2.0, "seconds": {"boot": 1.5}, "read_bytes": read}

    monkeypatch.setattr(cold, "_run_child", child)
    monkeypatch.setattr(cold, "drop_page_cache", lambda directory, drop_all_files: drop_all_files)
    report = BenchReport("cold")
    cold.measure(report, tmp_path)
    assert report.results["cold_ready_s"].value == pytest.approx(2.0, abs=0.5)
    assert report.results["cold_ready_s"].limit == pytest.approx(size / 4.1e9)
    assert report.results["cold_boot_s"].value == 1.5
    read, report = size // 2, BenchReport("cold")
    with pytest.raises(EmberlineError, match="was not cold"):
        cold.measure(report, tmp_path)
    assert "cold_ready_s" not in report.results


# -- the parts --------------------------------------------------------------------------------------------------


def test_failing_part_keeps_its_figures(tmp_path: Path) -> None:
    def measure(report: BenchReport) -> None:
        report.add("first", [3.0, 1.0, 2.0], "us", limit=0.5)
        raise RuntimeError("an illegal access")

    lines = tmp_path / "lines"
    command.run_part(command.BenchPart("kernels.linear", 1.0, measure), lines)
    with lines.open("a") as file:
        file.write('{"name": "cut short')
    report = BenchReport("gpu")
    config = command.merge_child_results(lines, report)
    assert report.results["first"].as_dict() == BenchResult(2.0, "us", limit=0.5, spread=(1.0, 3.0)).as_dict()
    assert "illegal access" in config["failed"]["kernels.linear"]


def test_child_that_exits_or_hangs_is_reported_as_one_failure(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import json, sys, time\n"
        "open(sys.argv[-1], 'w').write(json.dumps({'name': 'a', 'result': {'value': 1.0, 'unit': 'ms'}}) + '\\n')\n"
        "time.sleep(60) if sys.argv[1] == 'hang' else sys.exit(3)\n"
    )
    for behaviour, reason in (("die", "exited with status 3"), ("hang", "timed out after 2 s")):
        report = BenchReport("gpu", {"failed": {}})
        part = command.BenchPart("engine", 2.0, lambda report: None)
        command.run_part_in_child(part, [sys.executable, str(script), behaviour], report, 2.0)
        assert report.config["failed"] == {"engine": reason}
        assert report.results["a"].value == 1.0


def test_command_line_selects_parts() -> None:
    def selected(*words: str) -> list[str]:
        return [part.name for part in command.select_parts(command._argument_parser().parse_args(words))]

    kernels = [f"kernels.{name}" for name in command.KERNEL_BENCHES]
    assert selected() == ["engine", "open", "cold", *kernels]
    assert selected("kernels", "--only", "linear,sample") == ["kernels.linear", "kernels.sample"]
    assert selected("all", "--only", "decode_b1") == ["engine"]
    assert selected("collectives") == ["collectives"]
    assert selected("open", "--peers", "vllm") == ["open", "peers.vllm"]
    args = command._argument_parser().parse_args(["--set", "itl_target_ms=25", "--set", "kv_dtype=float8_e4m3fn"])
    assert dict(args.set) == {"itl_target_ms": 25, "kv_dtype": "float8_e4m3fn"}


def test_failed_measurement_is_recorded_with_its_reason() -> None:
    report = BenchReport("gpu")

    def broken() -> None:
        raise ValueError("no")

    run_measurement(report, "decode_b1", broken)
    assert report.config["failed"] == {"decode_b1": "ValueError: no"}
    assert json.dumps(report.config)


def test_soak_counts_completions_and_detects_a_missing_one() -> None:
    from emberline.bench.gpu.soak import run_soak

    config = SchedulerConfig(block_size=64, max_batch_tokens=512, max_running=8)
    engine = Engine(config, FakePipelinedRunner(200, 64, vocab_size=200_000))
    found = run_soak(engine, 0.5, requests_per_second=40.0)
    assert found["requests"] > 3 and found["leaked"] == 0 and found["completions"] >= found["requests"]

    lost = Engine(config, FakePipelinedRunner(200, 64, vocab_size=200_000))
    collect = lost._collect_outputs
    lost._collect_outputs = lambda: [o for o in collect() if o.finish is None]  # type: ignore[method-assign]
    with pytest.raises(EmberlineError, match="do not match"):
        run_soak(lost, 0.2, requests_per_second=40.0)


def test_random_model_is_a_checkpoint_with_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from emberline.bench.gpu.random_checkpoint import write_random_model

    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LLAMA_8B | small | {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 300}
    write_random_model(tmp_path, config, device="cpu")
    assert Checkpoint.open(tmp_path).tensor_info("model.embed_tokens.weight").shape == (300, 64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("two words").ids
    assert len(ids) == 9 and tokenizer.decode(ids) == "two words"
    assert tokenizer.get_vocab_size() == 300 and tokenizer.decode([299]) == "w299"
