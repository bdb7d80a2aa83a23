"""Draft models on a GPU: tokens equal those without drafts in float32, and drafts are those of the CPU's definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from bytelevel import EOS, tokenizer_file
from eagle3_head import write_eagle3_head
from engine_runs import run_engine
from mixed_sampling import make_engine, make_submissions, write_checkpoint

from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.speculation.drafter import Drafter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RUNNING = 32
CONFIG = tiny.config("llama", **tiny.GPU_SIZES, eos_token_id=EOS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("models")
    target = write_checkpoint(made / "target")
    smaller = tiny.write(made / "smaller", {**CONFIG, "num_hidden_layers": 1, "num_attention_heads": 4}, seed=5)
    tokenizer_file(smaller)
    head = write_eagle3_head(made / "head", CONFIG, draft_vocab=640)
    wide = write_eagle3_head(made / "wide", CONFIG, draft_vocab=1000, num_attention_heads=4, num_key_value_heads=4)
    return {
        "target": str(target),
        "same": f"draft:{target}",
        "smaller": f"draft:{smaller}",
        "eagle3": f"eagle3:{head}",
        "eagle3 with other heads": f"eagle3:{wide}",
    }


def always_draft(engine: Engine, max_draft: int) -> Drafter:
    drafter = Drafter([], max_draft, max_rows=RUNNING, adaptive=False, uses_draft_model=True, continues_on_device=True)
    engine.scheduler.drafter = drafter
    return drafter


@pytest.mark.parametrize("kind", ["same", "smaller", "eagle3", "eagle3 with other heads"])
def test_drafts_never_change_the_tokens(checkpoints: dict[str, str], kind: str) -> None:
    plain = make_engine(Path(checkpoints["target"]), graphs=False, overlap=False, prefix_cache=False, max_running=1)
    alone: dict[str, list[int]] = {}
    for submission in make_submissions(3):
        alone |= run_engine(plain, [submission])
    for settings in ({}, {"graphs": False}, {"overlap": False}, {"kv_tokens": 768, "block_size": 16}):
        engine = make_engine(
            Path(checkpoints["target"]), max_running=RUNNING, speculate=checkpoints[kind], max_draft=4, **settings
        )
        drafter = always_draft(engine, 4)
        assert run_engine(engine, make_submissions(3), steps_between=1) == alone, settings
        assert drafter.drafted_tokens > 100
        assert drafter.accepted_tokens > 100 or kind != "same"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_model_equal_to_the_target_is_right(checkpoints: dict[str, str], dtype: torch.dtype) -> None:
    """In bfloat16 the kernels of small and large batches may round differently, so a few drafts may be wrong."""
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    submissions = [Submission(f"r{i}", list(range(3, 20 + 40 * i)), params) for i in range(6)]
    target = Path(checkpoints["target"])
    engine = make_engine(target, dtype=dtype, max_running=RUNNING, speculate=checkpoints["same"], max_draft=4)
    drafter = always_draft(engine, 4)
    run_engine(engine, submissions, steps_between=2)
    assert drafter.accepted_tokens >= (1.0 if dtype is torch.float32 else 0.9) * drafter.drafted_tokens > 200


def test_the_bfloat16_head_drafts_as_in_float32(checkpoints: dict[str, str]) -> None:
    """With tokens of both dtypes mostly equal, so are the drafts: compare how often the two heads are right."""
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    submissions = [Submission(f"r{i}", list(range(3 + i, 40 + i)), params) for i in range(8)]
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(
            Path(checkpoints["target"]), dtype=dtype, max_running=64, speculate=checkpoints["eagle3"], max_draft=3
        )
        drafter = always_draft(engine, 3)
        run_engine(engine, submissions)
        rates[dtype] = drafter.accepted_tokens / drafter.drafted_tokens
    assert abs(rates[torch.float32] - rates[torch.bfloat16]) < 0.05, rates
