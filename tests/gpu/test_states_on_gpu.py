"""Models with recurrent layers on a GPU: kernels, logits of our CPU engine, and the same tokens however computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_delta
import torch
from draft_oracle import DraftOracle
from gpu_settings import gpu_config

pytest.importorskip("triton")

from delta_cases import DeltaCase, DraftCase, Row, Sizes

from emberline.core.engine_config import EngineConfig
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.swap import reset_prefix_cache, sleep_runner, wake_runner
from emberline.engine.speculation.drafter import Drafter
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kv.state_manager import StateKVManager
from emberline.models.sleep import iter_instances

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU, BF16, F32 = "cuda", torch.bfloat16, torch.float32
QWEN3_NEXT = Sizes(16, 32, 128, 128)
# The sizes of heads that published models have, for which the attention has CUDA kernels.
WIDE = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 1024,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "next": tiny_delta.make_config("next") | {"max_position_embeddings": 1024},
    "dense": tiny_delta.make_config("dense") | {"max_position_embeddings": 1024},
    "moe": tiny_delta.make_config("moe") | {"max_position_embeddings": 1024},
    "wide": tiny_delta.make_config("next") | WIDE | {"max_position_embeddings": 1024},
}
LENGTHS = (3, 130, 400, 64, 65, 257, 1)
SEEDED = {"temperature": 1.0, "top_k": 40, "seed": 12}
VARIANTS: dict[str, tuple[int, dict[str, object]]] = {  # steps between requests, and settings
    "captured": (1, {}),
    "small chunks": (2, {"max_batch_tokens": 48}),
    "not captured, plain loop": (0, {"graphs": False, "overlap": False}),
}
Tokens = dict[tuple[str, int], list[int]]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("sizes", "few", "chunks"),
    [
        (QWEN3_NEXT, [(70, 1), (0, 1), (9, 3), (0, 0)], []),
        (QWEN3_NEXT, [(5, 1)], [(0, 200), (64, 64), (0, 0), (7, 1), (0, 65)]),
        (Sizes(1, 3, 17, 134, 6), [(5, 1)], [(0, 40), (8, 3), (0, 130)]),
        (Sizes(2, 2, 64, 32, 1), [], [(0, 5), (4, 77)]),
    ],
)
def test_kernels(sizes: Sizes, few: list[Row], chunks: list[Row], dtype: torch.dtype) -> None:
    DeltaCase(sizes, few, chunks, GPU, dtype).check(pdl=True)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("sizes", [QWEN3_NEXT, Sizes(1, 3, 17, 134, 6), Sizes(2, 2, 64, 32, 1)])
def test_kernels_with_drafts(sizes: Sizes, dtype: torch.dtype) -> None:
    DraftCase(sizes, GPU, dtype).check(steps=8, pdl=True)


@pytest.fixture(autouse=True)
def short_starts() -> Iterator[None]:
    """Capture only a few shapes at the start: the others are captured at their first use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emberline.engine.gpu.boot.CAPTURE_BUDGET_S", 0.2)
        yield


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_delta.write_random(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


def make_engine(checkpoint: Path, dtype: torch.dtype = F32, **settings: object) -> Engine:
    from emberline.engine.gpu.boot import boot_from_checkpoint

    chosen = {"max_running": 8, "max_batch_tokens": 256, "kv_tokens": 16 * 1024, "block_size": 16} | settings
    engine = boot_from_checkpoint(checkpoint, gpu_config(**chosen), dtype=dtype).engine
    assert isinstance(engine.kv, StateKVManager)
    return engine


def submissions(**params: object) -> list[Submission]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 131) for _ in range(128)]
    prompts = [(shared + [rng.randrange(3, 131) for _ in range(n)])[:n] for n in LENGTHS]
    chosen = SamplingParams(**({"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | params))  # type: ignore[arg-type]
    return [Submission(f"r{i}", prompt, chosen) for i, prompt in enumerate(prompts)]


def run_outputs(engine: Engine, pending: list[Submission], steps_between: int = 0) -> list[Output]:
    outputs: list[Output] = []
    for submission in pending:
        engine.add(submission)
        for _ in range(steps_between):
            outputs += engine.step()
    for _ in range(5000):
        if engine.idle:
            break
        outputs += engine.step()
    assert engine.idle and not any(output.error for output in outputs)
    engine.kv.check_invariants()
    return outputs


def run(engine: Engine, pending: list[Submission], steps_between: int = 0) -> Tokens:
    tokens: Tokens = {}
    for output in run_outputs(engine, pending, steps_between):
        tokens.setdefault((output.id, output.index), []).extend(output.tokens)
    return tokens


def score_prompts(engine: Engine) -> torch.Tensor:
    """Return the log-probability of each token of all prompts."""
    outputs = run_outputs(engine, submissions(max_tokens=2, prompt_logprobs=0))
    found = {o.id: [each.logprob for each in o.prompt_logprobs] for o in outputs if o.prompt_logprobs is not None}
    return torch.tensor([value for name in sorted(found) for value in found[name]])


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 2e-3), (BF16, 0.25)], ids=str)
def test_logits_equal_those_of_the_cpu(checkpoint: Path, dtype: torch.dtype, bound: float) -> None:
    """In bfloat16 the mean error is checked, since rounding has large effects in a tiny model."""
    name = str(dtype).removeprefix("torch.")
    on_cpu = EngineConfig.build(str(checkpoint), device="cpu", kv_memory=1 << 26, dtype=name)
    theirs = score_prompts(boot(on_cpu).engine)
    ours = score_prompts(make_engine(checkpoint, dtype))
    error = (ours - theirs).abs()
    print(f"{checkpoint.name} {name} mean {float(error.mean()):.2e} max {float(error.max()):.2e}")
    assert len(ours) == sum(LENGTHS) - len(LENGTHS)
    assert float(error.max() if dtype is F32 else error.mean()) < bound


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Tokens:
    """The tokens of requests that are computed one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emberline.engine.gpu.boot.CAPTURE_BUDGET_S", 0.2)
        engine = make_engine(checkpoint, graphs=False, overlap=False, prefix_cache=False, max_running=1)
    return {key: tokens for s in submissions(**SEEDED) for key, tokens in run(engine, [s]).items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_however_they_are_computed(checkpoint: Path, expected: Tokens, variant: str) -> None:
    """In float32, in which rounding errors are smaller than the differences between logits here."""
    between, settings = VARIANTS[variant]
    engine = make_engine(checkpoint, **settings)
    assert run(engine, submissions(**SEEDED), between) == expected
    hits = engine.kv.hit_tokens
    again = [Submission(f"again-{s.id}", s.prompt, s.params) for s in submissions(**SEEDED)]
    found = {(key[0].removeprefix("again-"), key[1]): value for key, value in run(engine, again).items()}
    assert found == expected, "with states from snapshots"
    assert engine.kv.hit_tokens > hits + 700


def test_tokens_after_preemptions(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=120, temperature=1.0, top_k=40, seed=4, ignore_eos=True)
    pending = [Submission(f"r{i}", [3 + i, *range(60, 90)], params) for i in range(8)]
    tokens = run(make_engine(checkpoint, max_batch_tokens=64), pending)
    tight = make_engine(checkpoint, kv_tokens=512, max_batch_tokens=64)
    assert run(tight, pending) == tokens
    assert tight.scheduler.preemptions > 0, "the cache was meant to be too small"


def test_choices_start_from_a_snapshot_of_the_prompt(checkpoint: Path) -> None:
    params = {"n": 3, "temperature": 1.0, "top_k": 40, "seed": 2, "max_tokens": 20}
    engine = make_engine(checkpoint)
    tokens = run(engine, submissions(**params))
    assert engine.kv.hit_tokens > 2 * 500
    assert tokens == run(make_engine(checkpoint, graphs=False, max_batch_tokens=64), submissions(**params))


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_of_the_host_never_change_the_tokens(checkpoint: Path, expected: Tokens, graphs: bool) -> None:
    """With prefixes from snapshots in the second round, some of which were made within a step."""
    engine = make_engine(checkpoint, speculate="ngram", max_draft=5, graphs=graphs, max_running=32)
    oracle = DraftOracle(expected, [True, True, True, False, True, True], vocab_size=131)
    drafter = engine.scheduler.drafter = Drafter([oracle], 5, max_rows=32, adaptive=False)
    assert run(engine, submissions(**SEEDED), 1) == expected
    assert drafter.accepted_tokens > 100 and drafter.drafted_tokens > drafter.accepted_tokens + 50
    hits = engine.kv.hit_tokens
    assert run(engine, submissions(**SEEDED)) == expected
    assert engine.kv.hit_tokens > hits + 700
    longer = [
        Submission(s.id, [*s.prompt, *expected[s.id, 0], 7], replace(s.params, max_tokens=1)) for s in submissions()
    ]
    hits, engine.scheduler.drafter = engine.kv.hit_tokens, None
    found = run(engine, longer)
    assert engine.kv.hit_tokens > hits + sum(LENGTHS) + 3 * 16
    assert found == run(engine, [replace(s, salt="computed again") for s in longer]), "with states behind an answer"


HEAD_SETTINGS: dict[str, dict[str, object]] = {
    "captured": {},
    "plain loop": {"graphs": False, "overlap": False},
    "few blocks": {"kv_tokens": 640},
}


@pytest.mark.parametrize("setting", HEAD_SETTINGS)
@pytest.mark.parametrize("name", ["next", "wide"])
def test_drafts_of_a_head_never_change_the_tokens(name: str, setting: str, tmp_path: Path) -> None:
    """With few tokens in the vocabulary, a random head is right often enough. The device counts what was accepted."""
    directory = tiny_delta.write_random(tmp_path, CONFIGS[name] | {"vocab_size": 8, "eos_token_id": 0}, has_head=True)
    params = SamplingParams(max_tokens=80, temperature=0.7, top_k=4, seed=4, ignore_eos=True, n=2)
    pending = [Submission(f"r{i}", [(i + j * j) % 8 for j in range(20 + 60 * i)], params) for i in range(4)]
    settings = HEAD_SETTINGS[setting]
    engine = make_engine(directory, speculate="mtp", max_draft=3, max_running=32, **settings)
    engine.scheduler.drafter = None
    expected = run(engine, [replace(submission, salt="without drafts") for submission in pending])
    options = {"adaptive": False, "uses_draft_model": True, "continues_on_device": "overlap" not in settings}
    drafter = engine.scheduler.drafter = Drafter([], 3, max_rows=32, **options)
    assert run(engine, pending, 1) == expected
    print("accepted", drafter.accepted_tokens, "of", drafter.drafted_tokens)
    assert drafter.accepted_tokens > 20
    assert setting != "few blocks" or engine.scheduler.preemptions > 0, "the cache was meant to be too small"


# -- copies of states ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_delta.write_random(tmp_path_factory.mktemp("small"), CONFIGS["next"])


def boot_engine(checkpoint: Path, **settings: Any) -> Engine:
    """Return an engine that was started as a worker starts it. It has room for few snapshots."""
    chosen = {"max_running": 3, "max_batch_tokens": 256, "kv_memory": 1 << 20, "block_size": 16} | settings
    engine = boot(EngineConfig.build(str(checkpoint), device="cuda", dtype="float32", **chosen)).engine
    assert isinstance(engine.kv, StateKVManager)
    return engine


def test_states_in_tiers(small_checkpoint: Path, tmp_path: Path) -> None:
    pending = submissions(**SEEDED)
    tiers = {"kv_host_memory": 8 << 20, "kv_disk": str(tmp_path), "kv_disk_size": 1 << 24}
    before = boot_engine(small_checkpoint, **tiers)
    expected = {key: tokens for s in pending for key, tokens in run(before, [replace(s, salt=s.id)]).items()}
    assert run(before, pending, 1) == expected
    for turn in range(3):
        for i in range(5):  # these evict snapshots and blocks
            params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            run(before, [Submission(f"other-{turn}-{i}", [3 + turn, 4 + i, *range(5, 105)], params)])
        again = [Submission(s.id, s.prompt, s.params) for s in pending]
        assert run(before, again, turn) == expected
    assert before.kv.tiers is not None and before.kv.tiers.wait_until_written(20.0)
    assert before.stats().tiers["host"].loaded_blocks > 0
    before.close()
    after = boot_engine(small_checkpoint, **tiers)
    assert run(after, pending, 1) == expected
    assert after.stats().tiers["disk"].hit_tokens > 0
    after.close()


def test_states_after_sleep(small_checkpoint: Path) -> None:
    """Slots and kept rows are lost; snapshots in host memory are not."""
    engine = boot_engine(small_checkpoint, kv_host_memory=8 << 20, speculate="ngram")
    expected = run(engine, submissions(**SEEDED), 1)
    runner = engine.runner
    assert isinstance(runner, GPURunner)
    slept = sleep_runner(runner)
    reset_prefix_cache(engine)
    assert runner.states is not None and runner.states.matrices.untyped_storage().nbytes() == 0
    wake_runner(slept)
    hits = engine.stats().tiers["host"].hit_tokens
    assert run(engine, submissions(**SEEDED), 1) == expected
    assert engine.stats().tiers["host"].hit_tokens > hits + 400
    engine.close()
    slept.close()


def test_states_from_another_engine(small_checkpoint: Path) -> None:
    pending = [s for s in submissions(**SEEDED) if len(s.prompt) > 64]
    p, d = (boot_engine(small_checkpoint, transfer=TransferConfig(name), kv_memory=1 << 21) for name in "pd")
    expected = run(d, [replace(submission, salt="computed") for submission in pending])
    for submission in pending:
        p.add(replace(submission, publish=True, timeout=60.0))
        while not (outputs := p.step()):
            pass
        assert outputs[0].ticket is not None
        peer = outputs[0].ticket["peer"]  # only by TCP: CUDA IPC needs two processes
        ticket = {**outputs[0].ticket, "peer": {**peer, "endpoints": {"tcp": peer["endpoints"]["tcp"]}}}
        d.add(replace(submission, source=ticket, timeout=60.0))
        tokens: list[int] = []
        while not d.idle:
            tokens += [token for output in d.step() for token in output.tokens]
            d.kv.check_invariants()
            p.step()
        assert tokens == expected[submission.id, 0]
        while not p.idle:
            p.step()
    moved = d.stats().transfer
    assert moved is not None and moved.pull_failures == {}
    assert moved.hit_tokens == sum((len(s.prompt) - 1) // 16 * 16 for s in pending)
    for one in (p, d):
        one.close()


def test_packed_weights(tmp_path: Path) -> None:
    """They are the same numbers, so only the order of sums differs."""
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    sizes = WIDE | heads | {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "intermediate_size": 512}
    config = {
        field: value
        for field, value in (CONFIGS["dense"] | sizes).items()
        if "expert" not in field and "moe" not in field
    }
    directory = tiny_delta.write_random(tmp_path, config, BF16)
    plain = score_prompts(make_engine(directory, BF16))
    packed = make_engine(directory, BF16, weights="packed")
    assert isinstance(packed.runner, GPURunner)
    layouts = {weight.layout for weight in iter_instances(PackedWeight, packed.runner.model.layers[0].attention)}
    assert layouts == {WeightLayout.UW12}
    error = (score_prompts(packed) - plain).abs()
    print(f"mean {float(error.mean()):.2e} max {float(error.max()):.2e}")
    assert float(error.mean()) < 0.05
