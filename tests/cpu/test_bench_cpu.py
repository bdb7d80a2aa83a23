"""`bench cpu` from end to end on a tiny model: our engine and a peer take turns, the result has the one shape."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import tiny

from emberline.bench import cpu, machine_limits, workload
from emberline.bench.contender import ContenderProcess
from emberline.bench.contenders import BenchEnvironment, make_emberline_spec, make_peer_spec
from emberline.core.errors import InvalidRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model"), tiny.config("llama", max_position_embeddings=512))


def test_ourselves_and_a_peer_in_one_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        machine_limits,
        "measure_limits",
        lambda threads: machine_limits.MachineLimits({"read_sum": 5.0, "matmul_float32": 50.0}),
    )
    names = ["prefill_16", "decode_2", "mix_3"]
    rules = cpu.CPUBenchSettings(threads=1, rounds=2, deadline=60.0, idle_wait_s=0.0)
    report = cpu.bench(str(model), ["transformers-float32", "vllm"], names, rules, tmp_path)
    report.print_and_save()
    whole = json.loads(capsys.readouterr().out.splitlines()[-1])
    results = whole["results"]
    for name in names:
        assert results[name]["value"] > 0 and results[name]["limit"] > 0
        assert len(results[name]["spread"]) == 2
    for name in ("prefill_16", "decode_2", "ready"):
        assert results[name]["peer"] == results[f"{name}/transformers-float32"]["value"]
    assert results["decode_2_step"]["unit"] == "ms" and results["decode_2_host"]["value"] > 0
    assert {"ready_imports", "ready_kernels", "ready_weights", "ready_cache"} <= set(results)
    failed = whole["config"]["failed"]
    assert "not installed" in failed["vllm"]["start"]
    assert "pad the shorter" in failed["transformers-float32"]["mix_3"] and "mix_3/transformers-float32" not in results


def test_our_engine_makes_every_token_of_a_job(model: Path, tmp_path: Path) -> None:
    contender = ContenderProcess(make_emberline_spec(BenchEnvironment(model, None, 1, tmp_path)), tmp_path / "log")
    job = workload.make_job([(40, 3), (5, 20), (1, 1)], 131)
    run = contender.run_job(job, 60.0)
    contender.stop()
    assert [len(times) for times in run.timeline.times] == [3, 20, 1]
    assert all(times == sorted(times) for times in run.timeline.times)
    assert 0 < run.counters["host"] < run.timeline.wall_seconds


def test_the_ceiling_of_this_machine_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "MIN_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(machine_limits, "last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr(machine_limits, "SQUARE", 64)
    top = machine_limits.measure_limits(1)
    assert top.bandwidth > 0 and top.flops > 0
    assert {"read_sum", "read_max", "read_matvec", "matmul_float32"} <= set(top.how)


def test_unknown_peers_and_models_without_a_gguf_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = BenchEnvironment(model, None, 1, tmp_path)
    monkeypatch.setattr(cpu, "ContenderProcess", None)  # nobody is started before that
    with pytest.raises(InvalidRequest, match="unknown peer 'llama'"), ExitStack() as stack:
        cpu._start_contenders(ground, ["llama"], 131, stack)
    with pytest.raises(InvalidRequest, match="unknown peer 'llama'"):
        make_peer_spec("llama", ground)
    with pytest.raises(InvalidRequest, match="GGUF"):
        make_peer_spec("llamacpp", ground)
    assert make_peer_spec("transformers", ground).python == Path(sys.executable)
