"""Unusual, incomplete, damaged or hostile checkpoints load correctly or raise a typed error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from emberline.core.errors import InvalidRequest, ModelError, ModelFileError, UnsupportedModel
from emberline.engine import memory
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.models.decoder import DecoderModel
from emberline.models.forward import ForwardBatch
from emberline.models.loader import load_decoder
from emberline.models.weights import Weights

Tensors = dict[str, Tensor]
Q = "model.layers.1.self_attn.q_proj.weight"


def logits(model: DecoderModel) -> Tensor:
    """Return the logits of the last of six tokens."""
    c, ids = model.config, [3, 1, 4, 1, 5, 9]
    keys, values = torch.zeros(2, c.layers, 1, c.kv_heads, 8, c.head_dim)
    at = torch.arange(len(ids))
    one = torch.tensor([0], dtype=torch.int32)
    start = torch.tensor([0, len(ids)], dtype=torch.int32)
    metadata = ops.AttentionMetadata(at.int(), at, start, one, one[None])
    return model.forward(ForwardBatch(torch.tensor(ids), metadata, torch.tensor([5]), keys, values))


def test_loads_sharded_checkpoint(tmp_path: Path) -> None:
    one, three = load_decoder(tiny.write(tmp_path / "1")), load_decoder(tiny.write(tmp_path / "3", shards=3))
    assert torch.equal(logits(one), logits(three))
    assert one.fingerprint == three.fingerprint


def test_model_does_not_depend_on_file_after_load(tmp_path: Path) -> None:
    for name in ("llama", "llama-tied-mha"):
        model = load_decoder(tiny.write(tmp_path / name, name))
        before = logits(model)
        file = tmp_path / name / "model.safetensors"
        with file.open("r+b") as f:
            f.write(bytes(file.stat().st_size))
        assert torch.equal(logits(model), before)


def test_weight_bytes(tmp_path: Path) -> None:
    for name in ("llama", "qwen3-moe-mixed", "llama-tied-mha"):
        tensors = tiny.tensors(tiny.CONFIGS[name])
        model = load_decoder(tiny.write(tmp_path / name, name))
        assert model.weight_bytes == sum(t.nbytes for t in tensors.values()) == memory.weight_bytes(model.config, 4)
    narrow = sum(t.numel() * (2 if t.dim() == 2 else 4) for t in tensors.values())
    assert load_decoder(tmp_path / name, "bfloat16").weight_bytes == narrow


def test_auto_keeps_the_dtype_of_the_file(tmp_path: Path) -> None:
    for dtype, kept in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float32),
    ):
        directory = tiny.write(tmp_path / str(dtype), dtype=dtype)
        model, exact = load_decoder(directory), load_decoder(directory, "float32")
        assert model.dtype == kept and exact.dtype == torch.float32
        assert model.weight_bytes == memory.weight_bytes(model.config, kept.itemsize)
        assert exact.weight_bytes == memory.weight_bytes(model.config, 4)


def test_float16_is_rounded_to_nearest(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-10, 65504.0, 2.0**-24, -(2.0**-14)])
    tensors = tiny.tensors(tiny.CONFIGS["llama"], dtype=torch.float16)
    tensors[Q].view(-1)[: len(values)] = values
    directory = tiny.write_tensors(tmp_path, tiny.CONFIGS["llama"], tensors)
    checkpoint = Checkpoint.open(directory)
    matrix = Weights(checkpoint).load_matrix(Q, *tensors[Q].shape)
    expected = [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, 65536.0, 2.0**-24, -(2.0**-14)]
    assert matrix.dtype == torch.bfloat16 and matrix.view(-1)[: len(values)].tolist() == expected
    exact = Weights(checkpoint, torch.float32).load_matrix(Q, *tensors[Q].shape)
    assert torch.equal(exact, tensors[Q].float())


@pytest.mark.parametrize("name", ["llama", "llama-tied-mha", "mixtral"])
def test_float16_on_request_is_exact(name: str, tmp_path: Path) -> None:
    directory = tiny.write(tmp_path, name, dtype=torch.float16)
    half, exact = load_decoder(directory, "float16"), load_decoder(directory, "float32")
    assert half.dtype == torch.float16 and half.weight_bytes == memory.weight_bytes(half.config, 2)
    assert torch.equal(logits(half), logits(exact))


def test_float16_keeps_matrices_of_other_dtypes(tmp_path: Path) -> None:
    tensors = tiny.tensors(tiny.CONFIGS["llama"], dtype=torch.float16)
    tensors[Q] = torch.full_like(tensors[Q], 1e6, dtype=torch.float32)  # too large for float16
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    weights = Weights(Checkpoint.open(tiny.write_tensors(tmp_path, tiny.CONFIGS["llama"], tensors)), torch.float16)
    assert torch.equal(weights.load_matrix(Q, *tensors[Q].shape), tensors[Q])
    assert weights.load_matrix("lm_head.weight", *tensors["lm_head.weight"].shape).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float16_needs_a_float16_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"dtype is float16, but the weights in .* are {str(dtype)[6:]}") as raised:
        load_decoder(tiny.write(tmp_path, dtype=dtype), "float16")
    assert raised.value.param == "dtype" and "auto" in str(raised.value.hint)


def test_tensors_at_odd_offsets(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path)
    before = logits(load_decoder(directory))
    file = directory / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    assert torch.equal(logits(load_decoder(directory)), before)


def with_tensors(directory: Path, name: str, change: Callable[[Tensors], Any]) -> Path:
    tensors = tiny.tensors(tiny.CONFIGS[name])
    change(tensors)
    return tiny.write_tensors(directory, tiny.CONFIGS[name], tensors)


def test_ignorable_tensors(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.rotary_emb.inv_freq": torch.ones(4)}
    plain = load_decoder(tiny.write(tmp_path / "a"))
    more = load_decoder(with_tensors(tmp_path / "b", "llama", lambda t: t.update(extra)))
    assert torch.equal(logits(plain), logits(more))


def test_head_beside_tied_embeddings(tmp_path: Path) -> None:
    """A copy of the embedding is dropped; a different head is used, as in transformers."""
    tied = load_decoder(tiny.write(tmp_path / "a", "llama-tied-mha"))
    embedding = "model.embed_tokens.weight"
    same = with_tensors(tmp_path / "b", "llama-tied-mha", lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    other = with_tensors(tmp_path / "c", "llama-tied-mha", lambda t: t.update({"lm_head.weight": t[embedding] * 2}))
    assert torch.equal(logits(load_decoder(same)), logits(tied))
    assert load_decoder(same).weight_bytes == tied.weight_bytes
    torch.testing.assert_close(logits(load_decoder(other)), logits(tied) * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), Q),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda t: t.update({Q: t[Q][:-1].clone()}), r"has the shape \(47, 48\); config.json requires \(48, 48\)"),
        (lambda t: t.update({Q: t[Q].flatten()}), r"has the shape \(2304,\)"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"][None].clone()}), "model.norm.weight"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(80, 48)}), "model.layers.3.mlp.up_proj"),
        (lambda t: t.update({Q.replace("weight", "bias"): torch.ones(48)}), "q_proj.bias"),
    ],
)
def test_invalid_tensors(change: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_decoder(with_tensors(tmp_path, "llama", change))


def test_all_missing_and_unused_tensors_are_listed(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            tensors[name.replace("layers.1.", "layers.7.")] = tensors.pop(name)
        tensors.pop("lm_head.weight")
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    with pytest.raises(ModelFileError) as raised:
        load_decoder(with_tensors(tmp_path, "llama", rename))
    message = raised.value.message
    assert "lacks tensors that config.json requires (10): " in message and "; unused tensors (9): " in message
    assert "'lm_head.weight'" in message and repr(Q) in message and repr(Q.replace("1", "7")) in message
    assert "inv_freq" not in message


def test_long_lists_of_tensors_are_cut(tmp_path: Path) -> None:
    more = {f"extra.{i:02}.weight": torch.ones(1) for i in range(12)}
    message = r"has tensors that the model does not use \(12\): 'extra\.00\.weight', .*'extra\.09\.weight' and 2 more"
    with pytest.raises(ModelFileError, match=message):
        load_decoder(with_tensors(tmp_path, "llama", lambda t: t.update(more)))


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_names_of_missing_tensors_are_those_of_a_whole_checkpoint(name: str, tmp_path: Path) -> None:
    tensors = tiny.tensors(tiny.CONFIGS[name])
    left = "model.layers.0.input_layernorm.weight"
    directory = tiny.write_tensors(tmp_path, tiny.CONFIGS[name], {left: tensors[left]})
    (directory / "model.safetensors").rename(directory / "one.safetensors")
    with pytest.raises(ModelFileError, match=rf"requires \({len(tensors) - 1}\): ") as raised:
        load_decoder(directory)
    assert "unused" not in raised.value.message


def test_one_tensor_of_all_experts_among_others_is_refused(tmp_path: Path) -> None:
    fused = "model.layers.0.mlp.experts.down_proj"

    def fuse(tensors: Tensors) -> None:
        tensors[fused] = torch.stack([tensors.pop(f"{fused[:-9]}{i}.down_proj.weight") for i in range(7)])

    message = r"requires \(1\): 'model.layers.0.mlp.experts.gate_up_proj'; unused tensors \(14\)"
    with pytest.raises(ModelFileError, match=message):
        load_decoder(with_tensors(tmp_path, "qwen3-moe", fuse))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_unsupported_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=Q):
        load_decoder(with_tensors(tmp_path, "llama", lambda t: t.update({Q: t[Q].to(dtype)})))


def test_invalid_arguments(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path)
    with pytest.raises(InvalidRequest, match="int4"):
        load_decoder(directory, "int4")
    for context in (-1, 0, 65):
        with pytest.raises(InvalidRequest, match="1 to 64"):
            load_decoder(directory, max_context=context)
    assert load_decoder(directory, max_context=16).context == 16


def test_fingerprint(tmp_path: Path) -> None:
    """Everything that changes keys and values must change the fingerprint."""
    base = tiny.CONFIGS["llama"]
    same = [load_decoder(tiny.write(tmp_path / str(i))) for i in range(2)]
    assert same[0].fingerprint == same[1].fingerprint
    assert load_decoder(tmp_path / "0", max_context=20).fingerprint == same[0].fingerprint
    assert load_decoder(tmp_path / "0", "float32").fingerprint == same[0].fingerprint, "auto resolves to this dtype"
    others = [
        load_decoder(tiny.write(tmp_path / "seed", seed=1)),
        load_decoder(tiny.write(tmp_path / "theta", {**base, "rope_theta": 2000.0})),
        load_decoder(tiny.write(tmp_path / "eps", {**base, "rms_norm_eps": 1e-6})),
        load_decoder(tmp_path / "0", "bfloat16"),
        load_decoder(tiny.write(tmp_path / "dynamic", "llama-dynamic")),
        load_decoder(tmp_path / "dynamic", max_context=100),
    ]
    assert len({model.fingerprint for model in (same[0], *others)}) == 1 + len(others)


def test_end_tokens_include_generation_config(tmp_path: Path) -> None:
    plain = load_decoder(tiny.write(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    model = load_decoder(tmp_path)
    assert (plain.config.eos, model.config.eos) == ((2,), (2, 7))
    assert model.fingerprint == plain.fingerprint  # keys and values are the same


def test_fingerprint_sees_both_ends_of_every_tensor(tmp_path: Path) -> None:
    seen = {load_decoder(tiny.write(tmp_path / "base")).fingerprint}
    for name in load_file(tmp_path / "base" / "model.safetensors"):
        for place in (0, -1):

            def nudge(tensors: Tensors, name: str = name, place: int = place) -> None:
                tensors[name].view(-1)[place] += 0.5

            seen.add(load_decoder(with_tensors(tmp_path / f"{name}{place}", "llama", nudge)).fingerprint)
    assert len(seen) == 1 + 2 * len(tiny.tensors(tiny.CONFIGS["llama"]))


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=4),
    st.none() | st.integers(0, 5000) | st.integers(-200, -1),
)
def test_damage_gives_a_model_or_a_typed_error(tmp_path: Path, changes: list[tuple[int, int]], cut: int | None) -> None:
    """Change bytes of the header (the first 4.6 kB) and of the data, then truncate the file."""
    source, directory = tmp_path / "good", tmp_path / "bad"
    if not source.exists():
        tiny.write(source)
        shutil.copytree(source, directory)
    data = bytearray((source / "model.safetensors").read_bytes())
    for at, value in changes:
        data[at] = value
    (directory / "model.safetensors").write_bytes(data[:cut])
    try:
        model = load_decoder(directory)
    except ModelError as e:
        assert e.message
    else:
        assert cut is None
        assert logits(model).shape == (1, 131)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1000},
        {"vocab_size": 4_000_000},
        {"hidden_size": 60_000, "head_dim": 8},
        {"num_attention_heads": 2048, "num_key_value_heads": 2048},
        {"head_dim": 1024},
        {"intermediate_size": 1_000_000},
    ],
    ids=str,
)
def test_config_sizes_beyond_the_file(changes: dict[str, Any], tmp_path: Path) -> None:
    directory = tiny.write(tmp_path)
    (directory / "config.json").write_text(json.dumps({**tiny.CONFIGS["llama"], **changes}))
    with pytest.raises(ModelFileError):
        load_decoder(directory)


def test_packs_each_matrix_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four matrices per layer and the head: q, k and v are one, and so are gate and up."""
    packed: list[tuple[int, ...]] = []
    pack = ops.pack_linear

    def count_calls(weight: Tensor, **options: Any) -> ops.PackedWeight:
        packed.append(tuple(weight.shape))
        return pack(weight, **options)

    monkeypatch.setattr(ops, "pack_linear", count_calls)
    load_decoder(tiny.write(tmp_path))
    assert packed == [(80, 48), (48, 48), (160, 48), (48, 80)] * 3 + [(131, 48)]
