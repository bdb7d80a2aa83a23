"""Draft models on tiny models: their drafts, and tokens that equal those without drafts, to the bit.

The pipelined runner is that of GPUs, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from eagle3_head import draft_by_definition, write_eagle3_head
from gpu_settings import gpu_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_drafts import record_drafts
from safetensors.torch import load_file, save_file
from test_speculation_on_models import SETTINGS, make_params, run

from emberline.core.engine_config import SchedulerConfig, SpeculationConfig
from emberline.core.errors import ModelError, ModelFileError, UnsupportedModel
from emberline.core.params import SamplingParams
from emberline.core.plan import StepPlan
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.gpu import draft_boot
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.draft_boot import max_row_queries
from emberline.engine.gpu.draft_inputs import DraftInputs
from emberline.engine.gpu.graphs import StepInputs
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.grammar import GrammarCompiler
from emberline.engine.runner import TorchRunner
from emberline.engine.sampler import SamplingStateFactory
from emberline.engine.speculation.draft_cache import make_draft_cache
from emberline.engine.speculation.draft_loader import load_draft_model
from emberline.engine.speculation.draft_runner import DraftRunner
from emberline.engine.speculation.drafter import Drafter
from emberline.kernels import work_limits
from emberline.kernels.mixture import Mixture
from emberline.kv.cache import KVCache, KVShape
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DraftModel
from emberline.models.loader import load_decoder
from emberline.models.sleep import iter_instances
from emberline.models.weights import Weights

CONTEXT = 128
CONFIG = tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS, max_position_embeddings=CONTEXT)
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tokenizer_file(tiny.write(made, CONFIG))
    return made


@pytest.fixture(scope="module")
def model(directory: Path) -> DecoderModel:
    return load_decoder(directory, "float32")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle3_head(tmp_path_factory.mktemp("eagle3"), CONFIG, draft_vocab=100)


@pytest.fixture(scope="module")
def drafts(
    model: DecoderModel, directory: Path, head: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, DraftModel]:
    """The target model itself as a draft model, a smaller one, and an EAGLE-3 head."""
    made = tmp_path_factory.mktemp("drafts")
    smaller = tiny.write(made / "smaller", {**CONFIG, "num_hidden_layers": 1, "num_attention_heads": 4}, seed=5)
    tokenizer_file(smaller)
    sources = {"same": f"draft:{directory}", "smaller": f"draft:{smaller}", "eagle3": f"eagle3:{head}"}
    found = {}
    for name, source in sources.items():
        loaded = load_draft_model(
            SpeculationConfig(speculate=source), model, directory, lambda checkpoint: Weights(checkpoint, model.dtype)
        )
        assert loaded is not None
        found[name] = loaded
    return found


@pytest.fixture(scope="module")
def make_engine(model: DecoderModel, directory: Path) -> MakeEngine:
    c, eos = model.config, frozenset({EOS})
    compiler = partial(GrammarCompiler, directory / "tokenizer.json", c.vocab, [EOS])

    def make(
        draft: DraftModel | None,
        *,
        pipelined: bool = False,
        graphs: bool = False,
        blocks: int = 96,
        budget: int = 256,
        max_draft: int = 4,
        drafter: Drafter | None = None,
        exact: bool = False,
    ) -> Engine:
        cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, 8, torch.float32), blocks)
        config = SchedulerConfig(block_size=8, max_batch_tokens=budget, max_running=12, max_context=CONTEXT)
        if draft is not None and drafter is None:
            drafter = Drafter(
                [], max_draft, max_rows=12, adaptive=False, uses_draft_model=True, continues_on_device=pipelined
            )
        if not pipelined:
            draft_runner = None if draft is None else DraftRunner(draft, make_draft_cache(draft, cache))
            return Engine(config, TorchRunner(model, cache, eos, compiler, draft_runner), drafter=drafter)
        gpu = gpu_config(max_running=12, max_batch_tokens=budget, graphs=graphs, exact=exact)
        gpu = replace(gpu, speculation=SpeculationConfig("auto" if draft is None else "draft:model", max_draft))
        runner = GPURunner(model, cache, eos, SamplingStateFactory(eos, compiler), gpu, HostDevice(), CONTEXT, draft)
        return Engine(config, runner, drafter=drafter)

    return make


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(st.tuples(st.sampled_from(sorted(SETTINGS)), st.integers(1, 60)), min_size=1, max_size=4),
    kind=st.sampled_from(["same", "smaller", "eagle3"]),
    pipelined=st.booleans(),
    graphs=st.booleans(),
    blocks=st.sampled_from([26, 96]),
    budget=st.sampled_from([16, 256]),
    gap=st.integers(0, 3),
    max_draft=st.integers(1, 6),
    seed=st.integers(0, 3),
)
def test_tokens_equal_those_without_drafts(
    make_engine: MakeEngine,
    drafts: dict[str, DraftModel],
    chosen: list[tuple[str, int]],
    kind: str,
    pipelined: bool,
    graphs: bool,
    blocks: int,
    budget: int,
    gap: int,
    max_draft: int,
    seed: int,
) -> None:
    submissions = [
        Submission(f"r{i}", encode(f"{name} {'x' * length}"), make_params(name, max_tokens=24, seed=seed))
        for i, (name, length) in enumerate(chosen)
    ]
    expected = {key: one for s in submissions for key, one in run(make_engine(None), [s]).items()}
    e = make_engine(drafts[kind], pipelined=pipelined, graphs=graphs, blocks=blocks, budget=budget, max_draft=max_draft)
    assert run(e, submissions, gap) == expected


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("budget", [16, 256])
def test_a_draft_model_equal_to_the_target_is_always_right(
    make_engine: MakeEngine, drafts: dict[str, DraftModel], pipelined: bool, budget: int
) -> None:
    """Prompts in one or several chunks, several requests of different lengths, and a cached prefix."""
    texts = ["some text", "some text that is quite a lot longer than one chunk of a prompt", "x", "some text that is"]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    submissions = [Submission(f"r{i}", encode(text), params) for i, text in enumerate(texts)]
    expected = run(make_engine(None), submissions)
    e = make_engine(drafts["same"], pipelined=pipelined, budget=budget)
    assert run(e, submissions[:2], 3) | run(e, submissions[2:], 3) == expected
    drafter = e.scheduler.drafter
    assert drafter is not None
    assert drafter.accepted_tokens == drafter.drafted_tokens > 100


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("budget", [16, 256])
def test_drafts_of_an_eagle3_head_are_what_its_definition_says(
    make_engine: MakeEngine,
    drafts: dict[str, DraftModel],
    directory: Path,
    head: Path,
    pipelined: bool,
    budget: int,
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    e = make_engine(drafts["eagle3"], pipelined=pipelined, budget=budget)
    proposed: dict[str, dict[int, list[int]]] = {"a": {}, "b": {}}  # by request: drafts by number of known tokens
    record_drafts(e, proposed)
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=1, ignore_eos=True)
    prompts = {"a": encode("some text"), "b": encode("another one, of more than sixteen bytes")}
    outputs = run(e, [Submission(name, tokens, params) for name, tokens in prompts.items()], 2)
    for name, prompt in prompts.items():
        tokens = [*prompt, *outputs[name, 0][0]]
        with torch.inference_mode():
            states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        joined = torch.cat([state[0] for state in states[:3]], dim=1)
        embedding = reference.get_input_embeddings().weight
        assert len(proposed[name]) > 10
        for known, draft in proposed[name].items():
            if known >= len(tokens):
                continue
            wanted = draft_by_definition(head, embedding, joined[: known - 1], tokens[1:known], len(draft))
            assert draft == wanted, (name, known)


class PausedDrafter(Drafter):
    """Has no drafts while it is paused, as if the steps without them were measured."""

    paused = False

    def is_on(self, num_requests: int) -> bool:
        return not self.paused

    def complete_plan(self, plan: StepPlan) -> StepPlan:
        return replace(super().complete_plan(plan), runs_draft_model=True)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_draft_model_stays_up_to_date_during_steps_without_drafts(
    make_engine: MakeEngine, drafts: dict[str, DraftModel], pipelined: bool
) -> None:
    """One that equals the target model is still always right afterwards."""
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    submissions = [Submission(f"r{i}", encode(text), params) for i, text in enumerate(["some text", "another one"])]
    expected = run(make_engine(None), submissions)
    accepted = {}
    for pause in (0, 10):
        drafter = PausedDrafter(
            [], 4, max_rows=12, uses_draft_model=True, adaptive=False, continues_on_device=pipelined
        )
        e = make_engine(drafts["same"], pipelined=pipelined, drafter=drafter)
        for submission in submissions:
            e.add(submission)
        outputs = [output for _ in range(4) for output in e.step()]
        drafter.paused = True
        outputs += [output for _ in range(pause) for output in e.step()]
        drafter.paused = False
        while not e.idle:
            outputs += e.step()
        tokens: dict[str, list[int]] = {}
        for output in outputs:
            tokens.setdefault(output.id, []).extend(output.tokens)
        assert tokens == {name: found for (name, _), (found, _, _) in expected.items()}
        accepted[pause] = drafter.accepted_tokens / drafter.drafted_tokens
        assert not drafter._drafted  # nothing is kept of requests that ended
    assert accepted == {0: 1.0, 10: 1.0}


@pytest.mark.parametrize("budget", [1400, 2048])
def test_buffers_hold_the_largest_padded_step(
    make_engine: MakeEngine, drafts: dict[str, DraftModel], budget: int
) -> None:
    e = make_engine(drafts["eagle3"], pipelined=True, graphs=True, budget=budget)
    assert isinstance(e.runner, GPURunner) and e.runner._drafting is not None
    capture = e.runner._drafting.capture
    assert capture is not None
    assert len(capture.out) >= max(shape.singles + shape.tokens for shape in e.runner.shapes)


def test_steps_captured_ahead_have_the_plans_of_their_shapes(
    make_engine: MakeEngine, drafts: dict[str, DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention kernel of a captured step is chosen by the plan: rows with drafts need that of several queries."""
    e = make_engine(drafts["eagle3"], pipelined=True, graphs=True)
    assert isinstance(e.runner, GPURunner)
    planned, run_model = [], e.runner._run_model

    def record(inputs: StepInputs, out: torch.Tensor | None) -> torch.Tensor:
        planned.append(inputs.tiles.max_queries)
        return run_model(inputs, out)

    monkeypatch.setattr(e.runner, "_run_model", record)
    for shape in e.runner.shapes:
        planned.clear()
        assert e.runner.prepare_next()
        assert planned and set(planned) == {shape.queries}, shape
    assert {shape.queries for shape in e.runner.shapes} == {1, 5}


@pytest.mark.parametrize("exact", [False, True])
def test_drafted_tokens_read_no_key_before_it_is_written(
    make_engine: MakeEngine,
    model: DecoderModel,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exact: bool,
) -> None:
    """With --exact each drafted token is a row, which attends to keys that the same pass of the head writes."""
    other_heads = write_eagle3_head(tmp_path, CONFIG, draft_vocab=100, num_attention_heads=4, num_key_value_heads=4)
    e = make_engine(load(model, directory, f"eagle3:{other_heads}"), pipelined=True, exact=exact)
    assert isinstance(e.runner, GPURunner) and e.runner._drafting is not None
    drafting, plans, run_passes = e.runner._drafting, [], e.runner._drafting._run

    def record(inputs: DraftInputs, step: StepInputs) -> None:
        plans.append((inputs.step_plan, step.tiles, inputs.plan))
        run_passes(inputs, step)

    monkeypatch.setattr(drafting, "_run", record)
    run(e, [Submission("a", encode("some text"), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))])
    assert len(plans) > 5
    for ours, target, chain in plans:
        assert ours is not None and ours.reads_early == target.reads_early == (not exact)
        assert chain.reads_early  # of passes with one token of each request


def test_rows_are_planned_for_few_queries_if_drafts_are_short(
    make_engine: MakeEngine, drafts: dict[str, DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if rows of up to 3 queries, of 3 heads each, had a kernel of their own."""
    monkeypatch.setattr(work_limits, "MAX_HEADS_OF_SMALL_CTA", 9)
    params = SamplingParams(max_tokens=23, temperature=0.0, ignore_eos=True)
    submissions = [Submission(f"r{i}", encode(text), params) for i, text in enumerate(("some text", "x"))]
    expected, used = run(make_engine(None), submissions), {}
    for max_draft in (2, 4):
        drafter = Drafter([], max_draft, max_rows=12, adaptive=False, uses_draft_model=True, continues_on_device=True)
        e = make_engine(drafts["eagle3"], pipelined=True, graphs=True, drafter=drafter)
        assert run(e, submissions) == expected
        assert isinstance(e.runner, GPURunner)
        used[max_draft] = {shape.queries for shape in e.runner._graphs.captured}
        assert {shape.queries for shape in e.runner.shapes} == {1, 3, 5}
    assert used[2] == {1, 3} and 5 in used[4]


@pytest.mark.parametrize(("heads", "head_dim", "queries"), [((32, 8), 128, 8), ((48, 2), 128, 2), ((8, 4), 256, 8)])
def test_rows_with_drafts_have_several_queries(heads: tuple[int, int], head_dim: int, queries: int) -> None:
    """Also with many query heads per KV head, whose rows the CUDA kernel does not compute."""
    fields = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    assert max_row_queries(ModelConfig.from_hf({**CONFIG, **fields, "hidden_size": 64}), None) == queries


@pytest.mark.parametrize("kind", ["eagle3", "smaller"])
def test_chains_are_captured_ahead(
    make_engine: MakeEngine, drafts: dict[str, DraftModel], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Once all steps are captured, the draft passes of requests with drafts of full length are captured too."""
    e = make_engine(drafts[kind], pipelined=True, graphs=True)
    assert isinstance(e.runner, GPURunner) and e.runner._drafting is not None
    while e.runner.prepare_next():
        pass
    known = set(e.runner._drafting._replays)
    assert known
    e.add(Submission("a", encode("some text"), SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)))
    while not e.idle:
        e.step()
    used = {key for key in e.runner._drafting._seen if key[2] == e.runner._rows.max_draft}
    assert used <= known


def load(model: DecoderModel, directory: Path, source: str) -> DraftModel | None:
    return load_draft_model(
        SpeculationConfig(speculate=source), model, directory, lambda checkpoint: Weights(checkpoint, model.dtype)
    )


def test_draft_model_with_another_vocabulary_is_refused(model: DecoderModel, directory: Path, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other", CONFIG)
    tokenizer_file(other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"A":', '"AA":', 1))
    with pytest.raises(UnsupportedModel, match=r"another vocabulary.*'A'|another vocabulary.*'AA'"):
        load(model, directory, f"draft:{other}")
    (other / "tokenizer.json").unlink()
    tiny.write(other, {**CONFIG, "vocab_size": VOCAB_SIZE + 1})
    with pytest.raises(UnsupportedModel, match=f"{VOCAB_SIZE + 1} tokens"):
        load(model, directory, f"draft:{other}")


def test_draft_model_with_a_shorter_context_is_refused(model: DecoderModel, directory: Path, tmp_path: Path) -> None:
    short = tiny.write(tmp_path / "short", {**CONFIG, "max_position_embeddings": CONTEXT // 2})
    tokenizer_file(short)
    with pytest.raises(UnsupportedModel, match="has a context of 64 tokens"):
        load(model, directory, f"draft:{short}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 96}, "hidden size of 96"),
        ({"vocab_size": VOCAB_SIZE + 64}, f"vocabulary of {VOCAB_SIZE + 64}"),
        ({"num_hidden_layers": 2}, "has 2 layers"),
        ({"architectures": ["LlamaForCausalLM"]}, "not an EAGLE-3 head"),
        ({"target_hidden_size": 64}, "hidden size of the target model of 64"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "3 ascending layers from 0 to 2"),
    ],
)
def test_head_of_another_model_is_refused(
    model: DecoderModel, directory: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    head = write_eagle3_head(tmp_path, CONFIG | {}, draft_vocab=100)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        load(model, directory, f"eagle3:{head}")


def test_damaged_head_is_refused(model: DecoderModel, directory: Path, tmp_path: Path) -> None:
    head = write_eagle3_head(tmp_path, CONFIG, draft_vocab=100)
    whole = load_file(head / "model.safetensors")
    for change in ("d2t", "fc.weight", "midlayer.hidden_norm.weight"):
        save_file({name: tensor for name, tensor in whole.items() if name != change}, head / "model.safetensors")
        with pytest.raises(ModelFileError, match=change.partition(".")[0]):
            load(model, directory, f"eagle3:{head}")
    save_file(whole | {"d2t": whole["d2t"] + VOCAB_SIZE}, head / "model.safetensors")
    with pytest.raises(ModelFileError, match="ids outside the vocabulary"):
        load(model, directory, f"eagle3:{head}")
    save_file(whole | {"fc.weight": whole["fc.weight"][:, 1:].contiguous()}, head / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"fc\.weight"):
        load(model, directory, f"eagle3:{head}")
    save_file(whole, head / "model.safetensors")
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelFileError):
        load(model, directory, f"eagle3:{head}")


@pytest.mark.parametrize(("kind", "is_packed"), [("llama", True), ("qwen3-moe", False)])
def test_a_draft_model_with_experts_has_plain_weights(
    model: DecoderModel, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_packed: bool
) -> None:
    """Also if those of the target model on a GPU are packed."""
    fields = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": CONTEXT}
    tokenizer_file(tiny.write(tmp_path, {**tiny.CONFIGS[kind], **fields}))
    opened, open_weights = [], draft_boot.DeviceWeights
    monkeypatch.setattr(
        draft_boot, "DeviceWeights", lambda *given, packed: opened.append(packed) or open_weights(*given, packed=packed)
    )
    draft = draft_boot.load_on_device(
        SpeculationConfig(f"draft:{tmp_path}"), model, directory, HostDevice(), packed=True
    )
    assert draft is not None and opened == [is_packed]
    assert any(iter_instances(Mixture, draft)) == (not is_packed)
