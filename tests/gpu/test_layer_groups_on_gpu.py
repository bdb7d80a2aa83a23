"""Block tables for each group of layers on a GPU: the same tokens as with one group, and windows free their blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import tiny_families
import torch
from gpu_settings import gpu_config

from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.speculation.drafter import Drafter
from emberline.kv.layer_groups import LayerGroups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (3, 130, 700, 64, 65, 257, 1)
SIZES = tiny.GPU_SIZES | {"num_hidden_layers": 4}
CONFIGS = {
    # With a tied head, a tiny Gemma repeats its last token, whatever it attends to.
    "gemma3": tiny_families.gemma3(**(SIZES | {"num_hidden_layers": 6}), sliding_window=100, tie_word_embeddings=False),
    "cohere2": tiny_families.cohere(
        "cohere2", **(SIZES | {"hidden_size": 512, "head_dim": None}), sliding_window=90, sliding_window_pattern=2
    ),
    "olmo3": tiny_families.config("olmo3", **SIZES, sliding_window=130),
    "llama4": tiny_families.llama4(
        **SIZES, attention_chunk_size=128, intermediate_size_mlp=512, no_rope_layer_interval=2, use_qk_norm=True
    ),
}
SEEDED = {"temperature": 1.0, "top_k": 40, "seed": 12}
VARIANTS: dict[str, tuple[int, dict[str, object]]] = {  # steps between requests, and settings
    "captured": (1, {}),
    "small chunks and blocks": (2, {"max_batch_tokens": 48, "block_size": 16}),
    "not captured, plain loop": (0, {"graphs": False, "overlap": False}),
}
DRAFTED: dict[str, dict[str, object]] = {
    "captured": {},
    "plain loop": {"overlap": False},
    "small blocks": {"block_size": 16, "max_batch_tokens": 64},
}
Tokens = dict[tuple[str, int], list[int]]


def write(directory: Path, name: str) -> Path:
    tiny.write_tensors(directory, CONFIGS[name], tiny_families.tensors(CONFIGS[name]))
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.fixture(autouse=True)
def short_starts() -> Iterator[None]:
    """Capture only a few shapes at the start: the others are captured at their first use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emberline.engine.gpu.boot.CAPTURE_BUDGET_S", 0.2)
        yield


def make_engine(
    checkpoint: Path, dtype: torch.dtype = torch.float32, *, grouped: bool = True, **settings: object
) -> Engine:
    from emberline.engine.gpu.boot import boot_from_checkpoint

    chosen = {"max_running": 8, "max_batch_tokens": 256, "max_context": 2048, "kv_tokens": 16 * 1024} | settings
    with pytest.MonkeyPatch.context() as patch:
        if not grouped:
            single = lambda windows, *_: LayerGroups.single(len(windows))  # noqa: E731
            patch.setattr("emberline.engine.memory.choose_groups", single)
        engine = boot_from_checkpoint(checkpoint, gpu_config(**chosen), dtype=dtype).engine
    assert engine.kv.has_windows == grouped
    return engine


def submissions(**params: object) -> list[Submission]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 1000) for _ in range(128)]
    prompts = [(shared + [rng.randrange(3, 1000) for _ in range(n)])[:n] for n in LENGTHS]
    chosen = SamplingParams(**({"max_tokens": 60, "temperature": 0.0, "ignore_eos": True} | params))  # type: ignore[arg-type]
    return [Submission(f"r{i}", prompt, chosen) for i, prompt in enumerate(prompts)]


def run(engine: Engine, pending: list[Submission], steps_between: int = 0) -> Tokens:
    outputs: list[Output] = []
    for submission in pending:
        engine.add(submission)
        for _ in range(steps_between):
            outputs += engine.step()
    for _ in range(5000):
        if engine.idle:
            break
        outputs += engine.step()
    assert engine.idle
    engine.kv.check_invariants()
    tokens: Tokens = {}
    for output in outputs:
        assert output.error is None
        tokens.setdefault((output.id, output.index), []).extend(output.tokens)
    return tokens


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Tokens:
    """The tokens of requests that are computed one after the other, with one group of layers."""
    engine = make_engine(checkpoint, grouped=False, graphs=False, overlap=False, prefix_cache=False, max_running=1)
    return {key: tokens for s in submissions(**SEEDED) for key, tokens in run(engine, [s]).items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_one_group(checkpoint: Path, expected: Tokens, variant: str) -> None:
    """In float32, in which rounding errors are smaller than the differences between logits here."""
    between, settings = VARIANTS[variant]
    engine = make_engine(checkpoint, **settings)
    assert run(engine, submissions(**SEEDED), between) == expected
    hits = engine.kv.hit_tokens
    again = [Submission(f"again-{s.id}", s.prompt, s.params) for s in submissions(**SEEDED)]
    found = {(key[0].removeprefix("again-"), key[1]): value for key, value in run(engine, again).items()}
    assert found == expected, "with prefixes from the cache"
    assert engine.kv.hit_tokens > hits + 700


def test_tokens_after_preemptions(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=120, temperature=1.0, top_k=40, seed=4, ignore_eos=True)
    pending = [Submission(f"r{i}", [3 + i, *range(100, 130)], params) for i in range(8)]
    small = {"block_size": 16, "max_batch_tokens": 64}
    tokens = run(make_engine(checkpoint, grouped=False, **small), pending)
    tight = make_engine(checkpoint, kv_tokens=512, **small)
    assert run(tight, pending) == tokens
    assert tight.scheduler.preemptions > 0, "the cache was meant to be too small"


@pytest.mark.parametrize("kv_dtype", ["auto", "float8"])
def test_bits_are_those_of_one_group(checkpoint: Path, kv_dtype: str) -> None:
    """The same steps in bfloat16, with the kernels of that type: log-probabilities are equal to the bit."""
    found: list[list[tuple[str, list[int], list[float]]]] = []
    for grouped in (False, True):
        engine = make_engine(checkpoint, torch.bfloat16, grouped=grouped, kv_dtype=kv_dtype, prefix_cache=False)
        outputs: list[Output] = []
        for submission in submissions(temperature=0.8, seed=3, logprobs=0):
            engine.add(submission)
            outputs += engine.step()
        while not engine.idle:
            outputs += engine.step()
        found.append([(o.id, o.tokens, [p.logprob for p in o.logprobs]) for o in outputs])
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def one_group(gemma3: Path) -> Engine:
    return make_engine(gemma3, grouped=False)


def test_choices_share_the_prompt(gemma3: Path, one_group: Engine) -> None:
    params = {"n": 3, "temperature": 1.0, "top_k": 40, "seed": 2}
    assert run(make_engine(gemma3), submissions(**params)) == run(one_group, submissions(**params))


@pytest.mark.parametrize("settings", DRAFTED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_uses_the_blocks_of_the_first_group(gemma3: Path, temperature: float, settings: str) -> None:
    """A draft model equal to the target is right at each greedy token, if it finds all its keys and values."""
    sampling = {"temperature": temperature, "top_k": 40, "seed": 7, "max_tokens": 120}
    without = make_engine(gemma3, grouped=False, **DRAFTED[settings])  # the same chunks, whose sums round alike
    engine = make_engine(gemma3, speculate=f"draft:{gemma3}", max_draft=4, **DRAFTED[settings])
    continues = settings != "plain loop"
    drafter = Drafter([], 4, max_rows=8, adaptive=False, uses_draft_model=True, continues_on_device=continues)
    engine.scheduler.drafter = drafter
    assert run(engine, submissions(**sampling), 1) == run(without, submissions(**sampling))
    assert drafter.drafted_tokens > 100
    assert (drafter.accepted_tokens == drafter.drafted_tokens) == (temperature == 0.0)


def test_passed_blocks_are_free_for_others(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, block_size=16, max_batch_tokens=64, prefix_cache=False)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine.add(Submission("long", [3 + i % 900 for i in range(1500)], params))
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.kv.num_blocks - engine.kv.num_free_blocks)
    windows, blocks = engine.groups.windows[1:], -(-1540 // 16)
    held = sum(-(-window // 16) + 2 * 64 // 16 + 2 for window in windows)
    assert most <= blocks + held < (1 + len(windows)) * blocks / 1.5
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
