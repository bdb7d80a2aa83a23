"""Heads for multi-token prediction of Qwen3-Next and Qwen3.5: their drafts, and the same tokens as without drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_delta
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from gated_head import GatedHead
from gpu_settings import gpu_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mtp_head import add_tensors
from safetensors.torch import load_file, save_file
from test_speculation_on_models import SETTINGS, make_params, run
from torch import Tensor

from emberline.cli import doctor
from emberline.cli.__main__ import main
from emberline.core.engine_config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.core.params import SamplingParams
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.grammar import GrammarCompiler
from emberline.engine.kv_shape import make_kv_shape, make_state_shape
from emberline.engine.runner import TorchRunner
from emberline.engine.sampler import SamplingStateFactory
from emberline.engine.speculation.draft_cache import make_draft_cache
from emberline.engine.speculation.draft_loader import load_draft_model
from emberline.engine.speculation.draft_runner import DraftRunner
from emberline.engine.speculation.drafter import Drafter
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.models.config_outline import outline_of
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DraftModel
from emberline.models.loader import load_decoder
from emberline.models.weight_matrices import list_weight_matrices
from emberline.models.weights import Weights

CONTEXT = 128
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": CONTEXT}
FAMILIES = ("next", "dense", "moe")


def write(directory: Path, family: str, *, with_head: bool = True) -> GatedHead:
    """Write a checkpoint, and return its head."""
    sizes = SIZES if family == "next" else SIZES | {"mtp_num_hidden_layers": 1}
    head = GatedHead(tiny_delta.write(directory, family, **sizes))
    tokenizer_file(directory)
    if with_head:
        add_tensors(directory, head.split_experts() if family == "next" else head.tensors)
    return head


def load_head(model: DecoderModel, directory: Path) -> DraftModel:
    found = load_draft_model(
        SpeculationConfig(speculate="mtp"), model, directory, lambda checkpoint: Weights(checkpoint, model.dtype)
    )
    assert found is not None
    return found


class LoadedCase:
    """A model with a head, and what makes engines of them."""

    def __init__(self, directory: Path, head: GatedHead) -> None:
        self.directory, self.definition = directory, head
        self.model = load_decoder(directory, "float32")
        self.head = load_head(self.model, directory)

    def make_engine(
        self,
        *,
        drafts: bool = True,
        blocks: int = 96,
        slots: int = 24,
        budget: int = 256,
        max_draft: int = 4,
        pipelined: bool = False,
        graphs: bool = False,
    ) -> Engine:
        """`pipelined`: with the runner for GPUs, on the CPU."""
        eos, c, shape = frozenset({EOS}), self.model.config, make_state_shape(self.model.config)
        assert shape is not None
        groups = LayerGroups.with_states(c.layers, c.parts.attention.state_layers)
        compiler = partial(GrammarCompiler, self.directory / "tokenizer.json", c.vocab, [EOS])
        cache = KVCache(make_kv_shape(c, 8, torch.float32, groups), blocks)
        config = SchedulerConfig(block_size=8, max_batch_tokens=budget, max_running=12, max_context=CONTEXT)
        states = StateCache(shape, slots, has_padding_slot=pipelined, num_draft_slots=12, max_draft=max_draft)
        options = {"adaptive": False, "uses_draft_model": True, "continues_on_device": pipelined, "max_rows": 12}
        drafter = Drafter([], max_draft, **options) if drafts else None  # type: ignore[arg-type]
        if pipelined:
            gpu = gpu_config(max_running=12, max_batch_tokens=budget, graphs=graphs)
            gpu = replace(gpu, speculation=SpeculationConfig("mtp", max_draft))
            factory, sizes = SamplingStateFactory(eos, compiler), (HostDevice(), CONTEXT)
            on_gpu = GPURunner(self.model, cache, eos, factory, gpu, *sizes, self.head, groups, states)
            return Engine(config, on_gpu, drafter=drafter)
        draft_runner = DraftRunner(self.head, make_draft_cache(self.head, cache)) if drafts else None
        runner = TorchRunner(self.model, cache, eos, compiler, draft_runner, groups, states)
        return Engine(config, runner, drafter=drafter)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedCase]:
    made = {}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family)
        made[family] = LoadedCase(directory, write(directory, family))
    return made


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(st.tuples(st.sampled_from(sorted(SETTINGS)), st.integers(1, 60)), min_size=1, max_size=4),
    family=st.sampled_from(FAMILIES),
    blocks=st.sampled_from([26, 96]),
    slots=st.sampled_from([2, 24]),
    budget=st.sampled_from([16, 256]),
    pipelined=st.booleans(),
    graphs=st.booleans(),
    gap=st.integers(0, 3),
    max_draft=st.integers(1, 6),
    seed=st.integers(0, 3),
)
def test_tokens_equal_those_without_drafts(
    cases: dict[str, LoadedCase],
    chosen: list[tuple[str, int]],
    family: str,
    blocks: int,
    slots: int,
    budget: int,
    pipelined: bool,
    graphs: bool,
    gap: int,
    max_draft: int,
    seed: int,
) -> None:
    submissions = [
        Submission(f"r{i}", encode(f"{name} {'x' * length}"), make_params(name, max_tokens=16, seed=seed))
        for i, (name, length) in enumerate(chosen)
    ]
    plain = cases[family].make_engine(drafts=False)
    expected = {key: one for s in submissions for key, one in run(plain, [s]).items()}
    sizes = {"blocks": blocks, "slots": slots, "budget": budget, "max_draft": max_draft}
    e = cases[family].make_engine(**sizes, pipelined=pipelined, graphs=graphs)
    assert run(e, submissions, gap) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_what_the_definition_says(cases: dict[str, LoadedCase], family: str) -> None:
    case = cases[family]
    e = case.make_engine(budget=16)
    proposed: dict[str, dict[int, list[int]]] = {"a": {}, "b": {}}  # by request: drafts by number of known tokens
    scheduler, update = e.scheduler, e.scheduler.update

    def record(plan: StepPlan, result: StepResult) -> None:
        update(plan, result)
        for name, draft in result.drafted.items():
            if (request := scheduler.requests.get(name)) is not None:
                proposed[request.submission_id][len(request.tokens)] = list(draft)

    scheduler.update = record  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
    prompts = {"a": encode("some text"), "b": encode("another one, of more than sixteen bytes")}
    outputs = run(e, [Submission(name, tokens, params) for name, tokens in prompts.items()], 2)
    for name, prompt in prompts.items():
        tokens = [*prompt, *outputs[name, 0][0]]
        states = case.definition.compute_states(tokens)
        assert len(proposed[name]) > 7
        for known, draft in proposed[name].items():
            if known < len(tokens):
                wanted = case.definition.draft(states[: known - 1], tokens[1:known], len(draft))
                assert draft == wanted, (name, known)


def make_counting_tensors(tensors: dict[str, Tensor], hidden: int, reads: str) -> dict[str, Tensor]:
    """Return tensors of a model that always continues with the next token id, and of a head that predicts this.

    No layer adds anything, so a hidden state is the embedding of its token. A rotation maps each embedding to that of
    the next id. `reads`: whether the head continues from the token alone or from the hidden state alone."""
    turns = 1 + torch.randperm(VOCAB_SIZE // 2 - 1, generator=torch.Generator().manual_seed(0))[: hidden // 2]
    angles = 2 * torch.pi * turns / VOCAB_SIZE
    table = torch.polar(torch.tensor(2.0).sqrt(), torch.arange(VOCAB_SIZE)[:, None] * angles)
    embedding = torch.view_as_real(table).flatten(1).contiguous()
    cos, sin = angles.cos(), angles.sin()
    rotation, zero = (
        torch.block_diag(*torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)),
        torch.zeros(hidden, hidden),
    )
    made = dict(tensors)
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            made[name] = torch.zeros_like(tensors[name])
    for name in ("model.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"):
        made[f"{name}.weight"] = torch.zeros(hidden)  # to which 1 is added
    projection = [torch.eye(hidden), zero] if reads == "token" else [zero, rotation]
    made |= {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.roll(1, 0)}
    return made | {"mtp.fc.weight": torch.cat(projection, 1)}


@pytest.mark.parametrize(("reads", "pipelined"), [("token", False), ("hidden state", False), ("hidden state", True)])
def test_a_head_that_is_right_is_always_accepted(tmp_path: Path, reads: str, pipelined: bool) -> None:
    """Prompts in one or several chunks, several requests of different lengths, and a cached prefix."""
    head = write(tmp_path, "next")
    file = tmp_path / "model.safetensors"
    save_file(make_counting_tensors(load_file(file), 48, reads), file, metadata={"format": "pt"})
    case = LoadedCase(tmp_path, head)
    texts = ["some text", "some text that is quite a lot longer than one chunk of a prompt", "x", "some text that is"]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    submissions = [Submission(f"r{i}", encode(text), params) for i, text in enumerate(texts)]
    e = case.make_engine(budget=16, pipelined=pipelined, graphs=pipelined)
    outputs = run(e, submissions[:2], 3) | run(e, submissions[2:], 3)
    for submission in submissions:
        last = submission.prompt[-1]
        assert outputs[submission.id, 0][0] == [(last + 1 + i) % VOCAB_SIZE for i in range(24)]
    drafter = e.scheduler.drafter
    assert drafter is not None and drafter.accepted_tokens == drafter.drafted_tokens > 60


def test_an_engine_counts_the_head(cases: dict[str, LoadedCase]) -> None:
    for case in cases.values():
        outline = outline_of(case.model.config)  # by which memory is planned
        parts = [sum(part.num_weights for part in list_weight_matrices(o)) for o in (outline, outline.with_mtp_head())]
        assert (parts[1] - parts[0]) * 4 == case.head.weight_bytes
    settings = {"device": "cpu", "block_size": 8, "kv_memory": 1 << 19, "threads": 1, "dtype": "float32"}
    config = EngineConfig.build(str(cases["next"].directory), max_running=4, **settings)
    plain, loaded = boot(config), boot(config.with_settings(speculate="mtp"))
    assert loaded.kv_bytes < plain.kv_bytes  # the head has the layer that the model has
    submissions = [Submission("r", encode("some text"), SamplingParams(max_tokens=20, temperature=0.0))]
    assert run(loaded.engine, submissions) == run(plain.engine, submissions)
    stats = loaded.engine.stats().speculation
    assert stats is not None and stats.drafted_tokens > 0


def test_a_missing_or_damaged_head_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write(tmp_path, "next", with_head=False)
    file, whole = tmp_path / "model.safetensors", head.split_experts()
    model, base = load_decoder(tmp_path, "float32"), load_file(file)
    for check in ("_check_kernels", "_check_software", "_check_transports"):
        monkeypatch.setattr(doctor, check, lambda *_: iter(()))
    main(["doctor", "--model", str(tmp_path)])
    assert "the files have no tensors 'mtp.*': --speculate mtp is refused" in capsys.readouterr().out
    with pytest.raises(UnsupportedModel, match=r"speculate is mtp, but .* has no tensors 'mtp\.\*'"):
        load_head(model, tmp_path)
    missing = {f"mtp.{name}.weight" for name in ("fc", "layers.0.self_attn.q_proj", "layers.0.mlp.experts.3.down_proj")}
    save_file(base | {name: tensor for name, tensor in whole.items() if name not in missing}, file)
    with pytest.raises(ModelFileError, match=r"lacks tensors that config.json requires \(3\)") as raised:
        load_head(model, tmp_path)
    assert all(repr(name) in raised.value.message for name in missing) and "unused" not in raised.value.message
    for name in ("pre_fc_norm_hidden", "layers.0.self_attn.o_proj"):
        save_file(base | whole | {f"mtp.{name}.weight": torch.zeros(7, 7)}, file)
        with pytest.raises(ModelFileError, match=rf"'mtp\.{name}\.weight' in .* has the shape \(7, 7\)"):
            load_head(model, tmp_path)
    save_file(base | whole | {"mtp.other.weight": torch.zeros(7)}, file)
    with pytest.raises(ModelFileError, match=r"does not use.*'mtp\.other\.weight'"):
        load_head(model, tmp_path)
    main(["doctor", "--model", str(tmp_path)])
    assert "loaded with --speculate mtp" in capsys.readouterr().out
