"""Heads for multi-token prediction on tiny models: their drafts, and tokens that equal those without drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import random_checkpoints
import tiny
import tiny_experts
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from gpu_settings import gpu_config
from host_engine import simulate_gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mtp_head import HeadByDefinition, add_tensors, head_tensors, make_counting_tensors
from recorded_drafts import record_drafts
from safetensors.torch import load_file, save_file
from test_speculation_on_models import SETTINGS, make_params, run

from emberline.cli import doctor
from emberline.cli.__main__ import main
from emberline.core.engine_config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.draft_boot import load_on_device
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.grammar import GrammarCompiler
from emberline.engine.kv_shape import make_kv_shape
from emberline.engine.runner import TorchRunner
from emberline.engine.sampler import SamplingStateFactory
from emberline.engine.speculation.draft_cache import make_draft_cache
from emberline.engine.speculation.draft_loader import load_draft_model
from emberline.engine.speculation.draft_runner import DraftRunner
from emberline.engine.speculation.drafter import Drafter
from emberline.kernels import ops
from emberline.kernels.mixture import Mixture, StackedExperts
from emberline.kv.cache import KVCache
from emberline.models.config_outline import outline_of
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DraftModel
from emberline.models.loader import load_decoder
from emberline.models.mtp import MTPHead
from emberline.models.reader import FileReader
from emberline.models.sleep import iter_instances
from emberline.models.weight_matrices import list_weight_matrices
from emberline.models.weights import Weights

CONTEXT = 128
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": CONTEXT}
SIZES |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
FAMILIES = ("deepseek", "glm", "dense glm")


def write_base(directory: Path, family: str) -> dict[str, Any]:
    """Write a checkpoint without the tensors of its head, and return its config.json."""
    sizes = SIZES | ({"first_k_dense_replace": 3} if "dense" in family else {})
    if "deepseek" in family:
        return dict(random_checkpoints.write(directory, "deepseek-v3", **sizes).config.to_dict())
    config = tiny_experts.glm4(attention_bias=True, use_qk_norm=True, n_group=3, topk_group=2, **sizes)
    tiny_experts.write(directory, config)
    return config


def load_head(model: DecoderModel, directory: Path) -> DraftModel:
    found = load_draft_model(
        SpeculationConfig(speculate="mtp"), model, directory, lambda checkpoint: Weights(checkpoint, model.dtype)
    )
    assert found is not None
    return found


class LoadedCase:
    """A model with a head, and what makes engines of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = load_decoder(directory, "float32")
        self.head = load_head(self.model, directory)

    def make_engine(
        self,
        *,
        drafts: bool = True,
        pipelined: bool = False,
        graphs: bool = False,
        blocks: int = 96,
        budget: int = 256,
        max_draft: int = 4,
    ) -> Engine:
        eos, model = frozenset({EOS}), self.model
        compiler = partial(GrammarCompiler, self.directory / "tokenizer.json", model.config.vocab, [EOS])
        cache = KVCache(make_kv_shape(model.config, 8, torch.float32), blocks)
        config = SchedulerConfig(block_size=8, max_batch_tokens=budget, max_running=12, max_context=CONTEXT)
        head, drafter = (self.head, None) if drafts else (None, None)
        if head is not None:
            drafter = Drafter(
                [], max_draft, max_rows=12, adaptive=False, uses_draft_model=True, continues_on_device=pipelined
            )
        if not pipelined:
            draft_runner = None if head is None else DraftRunner(head, make_draft_cache(head, cache))
            return Engine(config, TorchRunner(model, cache, eos, compiler, draft_runner), drafter=drafter)
        gpu = gpu_config(max_running=12, max_batch_tokens=budget, graphs=graphs)
        gpu = replace(gpu, speculation=SpeculationConfig("mtp" if drafts else "auto", max_draft))
        runner = GPURunner(model, cache, eos, SamplingStateFactory(eos, compiler), gpu, HostDevice(), CONTEXT, head)
        return Engine(config, runner, drafter=drafter)


Cases = dict[str, LoadedCase]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    made = {}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family)
        config = write_base(directory, family)
        tokenizer_file(directory)
        add_tensors(directory, head_tensors(config))
        made[family] = LoadedCase(directory)
    return made


@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(st.tuples(st.sampled_from(sorted(SETTINGS)), st.integers(1, 60)), min_size=1, max_size=4),
    family=st.sampled_from(FAMILIES),
    pipelined=st.booleans(),
    graphs=st.booleans(),
    blocks=st.sampled_from([26, 96]),
    budget=st.sampled_from([16, 256]),
    gap=st.integers(0, 3),
    max_draft=st.integers(1, 6),
    seed=st.integers(0, 3),
)
def test_tokens_equal_those_without_drafts(
    cases: Cases,
    chosen: list[tuple[str, int]],
    family: str,
    pipelined: bool,
    graphs: bool,
    blocks: int,
    budget: int,
    gap: int,
    max_draft: int,
    seed: int,
) -> None:
    """Chunks of prompts, preemption with few blocks, prefix hits, several choices, with all settings of sampling."""
    submissions = [
        Submission(f"r{i}", encode(f"{name} {'x' * length}"), make_params(name, max_tokens=24, seed=seed))
        for i, (name, length) in enumerate(chosen)
    ]
    case = cases[family]
    expected = {key: one for s in submissions for key, one in run(case.make_engine(drafts=False), [s]).items()}
    e = case.make_engine(pipelined=pipelined, graphs=graphs, blocks=blocks, budget=budget, max_draft=max_draft)
    assert run(e, submissions, gap) == expected


@pytest.mark.parametrize(("pipelined", "budget"), [(False, 16), (True, 256)])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_what_the_definition_says(cases: Cases, family: str, pipelined: bool, budget: int) -> None:
    from transformers import AutoModelForCausalLM

    case = cases[family]
    reference = AutoModelForCausalLM.from_pretrained(case.directory, dtype=torch.float32).model
    e = case.make_engine(pipelined=pipelined, budget=budget)
    proposed: dict[str, dict[int, list[int]]] = {"a": {}, "b": {}}  # by request: drafts by number of known tokens
    record_drafts(e, proposed)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True)
    prompts = {"a": encode("some text"), "b": encode("another one, of more than sixteen bytes")}
    outputs = run(e, [Submission(name, tokens, params) for name, tokens in prompts.items()], 2)
    head = HeadByDefinition(case.directory)
    for name, prompt in prompts.items():
        tokens = [*prompt, *outputs[name, 0][0]]
        with torch.inference_mode():
            states = reference(torch.tensor([tokens])).last_hidden_state[0]  # behind the final norm
        assert len(proposed[name]) > 10
        for known, draft in proposed[name].items():
            if known < len(tokens):
                assert draft == head.draft(states[: known - 1], tokens[1:known], len(draft)), (name, known)


@pytest.mark.parametrize("reads", ["token", "hidden state"])
@pytest.mark.parametrize(("family", "pipelined"), [("glm", False), ("glm", True), ("deepseek", False)])
def test_a_head_that_is_right_is_always_accepted(tmp_path: Path, family: str, pipelined: bool, reads: str) -> None:
    """Prompts in one or several chunks, several requests of different lengths, and a cached prefix."""
    config = write_base(tmp_path, family)
    tokenizer_file(tmp_path)
    add_tensors(tmp_path, make_counting_tensors(tmp_path, config, reads))
    case = LoadedCase(tmp_path)
    texts = ["some text", "some text that is quite a lot longer than one chunk of a prompt", "x", "some text that is"]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    submissions = [Submission(f"r{i}", encode(text), params) for i, text in enumerate(texts)]
    for budget in (16, 256):
        e = case.make_engine(pipelined=pipelined, budget=budget)
        outputs = run(e, submissions[:2], 3) | run(e, submissions[2:], 3)
        for submission in submissions:
            last = submission.prompt[-1]
            assert outputs[submission.id, 0][0] == [(last + 1 + i) % VOCAB_SIZE for i in range(24)]
        drafter = e.scheduler.drafter
        assert drafter is not None and drafter.accepted_tokens == drafter.drafted_tokens > 60


def test_matrices_that_the_target_model_has_too_are_shared(cases: Cases, tmp_path: Path) -> None:
    """Published checkpoints have copies of them; others have none. A head with other ones keeps them."""
    config = write_base(tmp_path, "glm")
    tensors = head_tensors(config)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    shared = {"model.layers.2.embed_tokens.weight": "model.embed_tokens.weight"}
    shared |= {"model.layers.2.shared_head.head.weight": "lm_head.weight"}
    own = cases["glm"].head
    assert own.weight_bytes == stored and isinstance(own, MTPHead) and own.embedding is not cases["glm"].model.embedding
    size = sum(tensors[name].nbytes for name in shared)
    base = load_file(tmp_path / "model.safetensors")
    add_tensors(tmp_path, {name: tensor for name, tensor in tensors.items() if name not in shared})
    for copies in ({}, {name: base[original] for name, original in shared.items()}):
        add_tensors(tmp_path, copies)
        model = load_decoder(tmp_path, "float32")
        head = load_head(model, tmp_path)
        assert isinstance(head, MTPHead) and head.weight_bytes == stored - size
        assert head.embedding is model.embedding and head.head.weight is model.head.weight
    outline = outline_of(model.config)  # by which memory is planned
    parts = [sum(part.num_weights for part in list_weight_matrices(o)) for o in (outline, outline.with_mtp_head())]
    assert (parts[1] - parts[0]) * 4 == head.weight_bytes


def test_doctor_shows_whether_there_is_a_head(
    cases: Cases, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in ("_check_kernels", "_check_software", "_check_transports"):
        monkeypatch.setattr(doctor, check, lambda *_: iter(()))
    write_base(tmp_path, "glm")
    main(["doctor", "--model", str(tmp_path)])
    assert "no tensors 'model.layers.2.*': --speculate mtp is refused" in capsys.readouterr().out
    main(["doctor", "--model", str(cases["glm"].directory)])
    assert "loaded with --speculate mtp" in capsys.readouterr().out


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    llama = tiny.write(tmp_path / "llama")
    with pytest.raises(UnsupportedModel, match="no head for multi-token prediction is known for llama"):
        load_head(load_decoder(llama), llama)
    glm = tmp_path / "glm"
    config = write_base(glm, "glm")
    with pytest.raises(UnsupportedModel, match=r"has no tensors 'model\.layers\.2\.\*', although num_nextn_pred"):
        load_head(load_decoder(glm), glm)
    (glm / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UnsupportedModel, match=r"num_nextn_predict_layers is 0 or missing in config\.json of "):
        load_head(load_decoder(glm), glm)


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    config = write_base(tmp_path, "deepseek")
    model, whole = load_decoder(tmp_path, "float32"), head_tensors(config)
    base = load_file(tmp_path / "model.safetensors")
    at, file = "model.layers.2", tmp_path / "model.safetensors"
    missing = {f"{at}.{name}.weight" for name in ("enorm", "self_attn.kv_b_proj", "mlp.experts.3.down_proj")}
    save_file(base | {name: tensor for name, tensor in whole.items() if name not in missing}, file)
    with pytest.raises(ModelFileError, match=r"lacks tensors that config.json requires \(3\)") as raised:
        load_head(model, tmp_path)
    assert all(repr(name) in raised.value.message for name in missing) and "unused" not in raised.value.message
    for name in ("eh_proj", "embed_tokens", "shared_head.head", "mlp.gate"):
        save_file(base | whole | {f"{at}.{name}.weight": torch.zeros(7, 7)}, file)
        with pytest.raises(ModelFileError, match=rf"'{at}\.{name}\.weight' in .* has the shape \(7, 7\)"):
            load_head(model, tmp_path)
    save_file(base | whole | {f"{at}.other.weight": torch.zeros(7)}, file)
    with pytest.raises(ModelFileError, match=rf"does not use.*'{at}\.other\.weight'"):
        load_head(model, tmp_path)


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_an_engine_counts_the_cache_of_the_head(cases: Cases, family: str) -> None:
    settings = {"device": "cpu", "block_size": 8, "kv_memory": 1 << 18, "threads": 1, "dtype": "float32"}
    config = EngineConfig.build(str(cases[family].directory), **settings)
    plain, loaded = boot(config), boot(config.with_settings(speculate="mtp"))
    assert loaded.kv_tokens == plain.kv_tokens * 2 // 3 // 8 * 8  # two layers of three
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    submissions = [Submission("r", encode("some text"), params)]
    assert run(loaded.engine, submissions) == run(plain.engine, submissions)
    stats = loaded.engine.stats().speculation
    assert stats is not None and stats.drafted_tokens > 0


def test_a_gpu_loads_heads_with_experts_in_few_tensors(cases: Cases) -> None:
    """All values of the head are those that a CPU loads."""
    device = HostDevice()
    for family in ("glm", "deepseek"):
        case = cases[family]
        head = load_on_device(SpeculationConfig("mtp"), case.model, case.directory, device)
        assert isinstance(head, MTPHead) and head.weight_bytes == case.head.weight_bytes
        (ours,), (theirs,) = (list(iter_instances(Mixture, one)) for one in (head, case.head))
        assert isinstance(ours.experts, StackedExperts) and isinstance(theirs.experts, tuple)
        by_name = HeadByDefinition(case.directory).weights
        for number, (gate_up, down) in enumerate(zip(ours.experts.gate_up, ours.experts.down, strict=True)):
            at = f"mlp.experts.{number}"
            gate, up = (by_name[f"{at}.{name}_proj.weight"] for name in ("gate", "up"))
            assert torch.equal(gate_up, torch.cat([gate, up])) and torch.equal(down, by_name[f"{at}.down_proj.weight"])


def test_only_files_with_tensors_of_the_head_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_base(tmp_path, "glm")
    base, head = load_file(tmp_path / "model.safetensors"), head_tensors(config)
    parts = {"first.safetensors": base, "second.safetensors": head}
    for name, tensors in parts.items():
        save_file(tensors, tmp_path / name)
    (tmp_path / "model.safetensors").unlink()
    where = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    model, started, start = load_decoder(tmp_path, "float32"), [], FileReader.start
    monkeypatch.setattr(
        FileReader, "start", lambda files, **given: started.append(list(files)) or start(files, **given)
    )
    head_on_device = load_on_device(SpeculationConfig("mtp"), model, tmp_path, HostDevice())
    assert isinstance(head_on_device, MTPHead) and started == [[tmp_path / "second.safetensors"]]


class StackingWeights(Weights):
    stacks_experts = True


@pytest.fixture
def reference_backend() -> Iterator[None]:
    before = ops.current_backend()
    ops.start_backend(native=False)
    yield
    ops.start_backend(native=before.library is not None)


@pytest.mark.parametrize("family", ["glm", "deepseek"])
def test_stacked_experts_draft_the_same_tokens(cases: Cases, family: str, reference_backend: None) -> None:
    """As a GPU has them, with captured chains of drafts."""
    directory, found = cases[family].directory, []
    for kind in (Weights, StackingWeights):
        case = LoadedCase(directory)
        head = load_draft_model(SpeculationConfig("mtp"), case.model, directory, partial(kind, dtype=torch.float32))
        assert head is not None
        case.head = head
        e = case.make_engine(pipelined=True, graphs=True)
        proposed: dict[str, dict[int, list[int]]] = {"a": {}, "b": {}}
        record_drafts(e, proposed)
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
        texts = {"a": "some text", "b": "another one, of more than sixteen bytes"}
        found.append((run(e, [Submission(name, encode(text), params) for name, text in texts.items()]), proposed))
        assert isinstance(e.runner, GPURunner) and e.runner._drafting is not None and e.runner._drafting._replays
    assert found[0] == found[1] and len(found[0][1]["b"]) > 5


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_an_engine_for_a_gpu_counts_and_captures_the_head(
    cases: Cases, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_gpu(monkeypatch)
    settings = {"device": "cuda", "block_size": 16, "kv_memory": 1 << 20, "max_running": 4, "max_batch_tokens": 64}
    config = EngineConfig.build(str(cases[family].directory), **settings, max_context=CONTEXT, dtype="float32")
    plain, loaded = boot(config), boot(config.with_settings(speculate="mtp", max_draft=3))
    assert loaded.kv_bytes == plain.kv_bytes * 3 // 2  # keys and values of one more layer for as many tokens
    runner = loaded.engine.runner
    assert isinstance(runner, GPURunner) and runner._drafting is not None and runner.draft_model is not None
    while runner.prepare_next():
        pass
    captured = set(runner._drafting._replays)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    run(loaded.engine, [Submission("r", encode("some text"), params)])
    stats = loaded.engine.stats().speculation
    assert stats is not None and stats.drafted_tokens > 0
    assert captured and {key for key in runner._drafting._seen if key[2] == 3} <= captured
