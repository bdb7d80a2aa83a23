"""The benchmark of float8 KV caches: its rounding equals that of a GPU, and rounding equals storing in float8."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from emberline.bench import kv8
from emberline.bench.report import BenchReport
from emberline.core.plan import WorkItem
from emberline.engine.batch import build_forward_batch
from emberline.kernels import ops
from emberline.kv.cache import KVCache, KVShape
from emberline.models import attention
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

TOKENS = np.random.default_rng(7).integers(3, 131, 75).tolist()


@pytest.fixture(scope="module", params=["llama", "qwen3"])  # without and with norms of q and k
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_decoder(tiny.write(tmp_path_factory.mktemp("model"), request.param), "float32")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv8, "WINDOW", 32)
    monkeypatch.setattr(kv8, "CHUNK", 8)


def test_float8_rounds_to_nearest_and_saturates() -> None:
    x = torch.tensor([0.0, 1.0, 1.06, 1.07, 1.0625, 1.1875, 300.0, 447.0, 465.0, 1e9, -1e9, 2.0**-9, 2.0**-11])
    near = [0.0, 1.0, 1.0, 1.125, 1.0, 1.25, 288.0, 448.0, 448.0, 448.0, -448.0, 2.0**-9, 0.0]  # ties round to even
    assert kv8.round_to_float8(x).tolist() == near
    assert kv8.round_to_float8(torch.tensor(float("nan"))).isnan()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(kv8.round_to_float8(every).nan_to_num(1e9), every.nan_to_num(1e9))


@torch.inference_mode()
def test_rounding_equals_storing(model: DecoderModel) -> None:
    """Rounding must give the same bits as a bfloat16 cache, over several steps."""
    c = model.config
    stored = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, kv8.BLOCK, torch.bfloat16), 2)
    ours, plain = kv8.RoundingRun(model, kv8.round_to_bfloat16), kv8.RoundingRun(model, None)
    for start in range(0, 32, 8):
        chunk = TOKENS[start : start + 8]
        work = [WorkItem("", start, chunk, range(2), samples=True, prompt_logprobs=True)]
        expected = model.forward(build_forward_batch(work, stored))
        assert torch.equal(ours.compute_logits(chunk, start), expected)
        assert not torch.equal(plain.compute_logits(chunk, start), expected)  # the rounding has an effect
    assert torch.equal(ours.cache.keys, stored.keys.float()) and torch.equal(ours.cache.values, stored.values.float())
    assert vars(attention)["ops"] is ops


@torch.inference_mode()
def test_cache_holds_float8(model: DecoderModel) -> None:
    run = kv8.RoundingRun(model, kv8.round_to_float8)
    run.compute_logits(TOKENS[:20], 0)
    for cache in (run.cache.keys, run.cache.values):
        assert cache.abs().sum() > 0 and torch.equal(cache, kv8.round_to_float8(cache))


def test_windows_do_not_overlap_and_cover_every_position(model: DecoderModel) -> None:
    errors, positions, largest = kv8.compare_cache_dtypes(model, TOKENS)
    assert positions.tolist() == [i % 32 for i in range(75)]
    for name, one in errors.items():
        assert len(torch.cat(one.kl)) == len(torch.cat(one.same)) == 75
        assert len(torch.cat(one.nll)) == 75 - 3  # the last of each window has no successor within it
        assert (torch.cat(one.kl).mean() > 0) == (name != "float32")
    assert torch.cat(errors["float8"].kl).mean() > 10 * torch.cat(errors["bfloat16"].kl).mean()
    again, _, _ = kv8.compare_cache_dtypes(model, TOKENS[32:64])
    for name, one in again.items():
        assert torch.equal(torch.cat(one.kl), torch.cat(errors[name].kl)[32:64])
    assert min(largest.values()) > 0


def test_error_metrics_of_known_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]), torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]])
    errors = kv8.RoundingErrors()
    errors.add_chunk(p.log(), q.log(), torch.tensor([2]))
    assert errors.kl[0].tolist() == pytest.approx([0.5 * np.log(2) - 0.25 * np.log(2), 0.0])
    assert errors.same[0].tolist() == [False, True]
    assert errors.nll[0].tolist() == pytest.approx([-np.log(0.25)])
    assert errors.most[0].tolist() == pytest.approx([np.log(2), 0.0])
    report = BenchReport("x")
    kv8.add_error_results(report, errors, np.array([0, 200]), "")
    assert report.results["top1_agreement"].value == 50
    assert report.results["top1_agreement_0_127"].value == 0 and report.results["top1_agreement_128_511"].value == 100
    assert "kl_mean_512_1023" not in report.results
