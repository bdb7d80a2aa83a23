"""Conversion of GGUF to a checkpoint: tensor names, head order, config and tokenizer."""

from __future__ import annotations

import json
import math
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ggufs
import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import load_file

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub import convert as conversion
from emberline.hub import gguf_rows
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.convert import convert_gguf
from emberline.hub.gguf import TENSOR_TYPES, GGUFTensor
from emberline.hub.gguf_architectures import GGUFArchitecture
from emberline.hub.ggufconfig import build_generation_config
from emberline.hub.gguftokenizer import build_tokenizer_files
from emberline.tokens.tokenizer import Tokenizer


def convert_file(tmp_path: Path, arch: str, **options: Any) -> Checkpoint:
    ggufs.write(tmp_path / "m.gguf", arch, **options)
    return Checkpoint.open(convert_gguf(tmp_path / "m.gguf", tmp_path / "out"))


def test_llama_rows_are_unpermuted(tmp_path: Path) -> None:
    usual = ggufs.tensors("llama", np.random.default_rng(1))
    stored = dict(usual)
    for i in range(ggufs.LAYERS):
        for part, heads in (("attn_q", ggufs.HEADS), ("attn_k", ggufs.KV_HEADS)):
            stored[f"blk.{i}.{part}.weight"] = ggufs.llama_cpp_order(usual[f"blk.{i}.{part}.weight"], heads)
    checkpoint = convert_file(tmp_path, "llama", values=stored)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    for theirs, ours in names.items():
        assert np.array_equal(loaded[f"model.layers.1.{ours}.weight"], usual[f"blk.1.{theirs}.weight"])
    assert np.array_equal(loaded["model.embed_tokens.weight"], usual["token_embd.weight"])
    assert np.array_equal(loaded["lm_head.weight"], usual["output.weight"])
    assert set(loaded) == set(checkpoint.tensor_names())
    assert checkpoint.config["torch_dtype"] == "float32"
    assert checkpoint.config["tie_word_embeddings"] is False


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_are_unchanged(arch: str, tmp_path: Path) -> None:
    values = ggufs.tensors(arch, np.random.default_rng(2))
    checkpoint = convert_file(tmp_path, arch, values=values)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(loaded["model.layers.0.self_attn.q_proj.weight"], values["blk.0.attn_q.weight"])
    extra = {"qwen2": "model.layers.1.self_attn.k_proj.bias", "qwen3": "model.layers.1.self_attn.k_norm.weight"}[arch]
    assert extra in loaded
    assert checkpoint.config["model_type"] == arch


def test_config_matches_gguf_metadata(tmp_path: Path) -> None:
    checkpoint = convert_file(tmp_path, "llama", quant="Q4_0", tied=True, extra={"attention.key_length": 16})
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "vocab_size": len(ggufs.BPE_TOKENS),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
    }
    assert {k: checkpoint.config[k] for k in expected} == expected
    assert "sliding_window" not in checkpoint.config
    assert checkpoint.generation_config["eos_token_id"] == [0]
    assert checkpoint.tensor_info("model.norm.weight").dtype == "F32"
    assert checkpoint.tensor_info("model.layers.0.mlp.up_proj.weight").dtype == "BF16"
    assert "lm_head.weight" not in checkpoint.tensor_names()


def test_sliding_window_makes_a_mistral(tmp_path: Path) -> None:
    config = convert_file(tmp_path, "llama", extra={"attention.sliding_window": 32}).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 32


def test_yarn_and_linear_scaling(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert convert_file(tmp_path / "a", "llama", extra=linear).config["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    yarn = {**linear, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 64}
    assert convert_file(tmp_path, "qwen2", extra=yarn).config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, None),
        (
            {"rope.scaling.factor": 4.0, "rope.scaling.type": "yarn", "rope.scaling.attn_factor": 1.0},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": pytest.approx(1.13863, abs=1e-5)},
        ),
    ],
)
def test_rope_scaling_conversion(tmp_path: Path, extra: dict[str, Any], expected: Any) -> None:
    assert convert_file(tmp_path, "llama", extra=extra).config["rope_scaling"] == expected


def test_partial_rotation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="rope to 8 of 16"):
        convert_file(tmp_path, "llama", extra={"rope.dimension_count": 8})


@pytest.mark.parametrize(("blocks", "drafted"), [(2**32 - 1, 0), (0, 0), (2, 5), (2, 2)])
def test_impossible_numbers_of_layers_are_refused(tmp_path: Path, blocks: int, drafted: int) -> None:
    extra = {"block_count": blocks, "nextn_predict_layers": drafted}
    with pytest.raises(ModelFileError, match=f"block_count {blocks} and nextn_predict_layers {drafted}"):
        convert_file(tmp_path, "llama", extra=extra)


def test_end_of_turn_tokens_by_text() -> None:
    tokens, kinds = ["<s>", "</s>", "<|im_end|>", "<|eot_id|>"], array("i", [3, 3, 3, 1])
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    ends = build_generation_config({**metadata, "tokenizer.ggml.eos_token_id": 1})["eos_token_id"]
    assert ends == [1, 2], "a token that users can type is not an end token"


def test_sampling_defaults_of_the_file() -> None:
    sampling = {"temp": float(np.float32(0.7)), "top_k": 20, "top_p": "0.8", "min_p": math.nan, "penalty_repeat": True}
    metadata = {"general.architecture": "llama", **{f"general.sampling.{k}": v for k, v in sampling.items()}}
    config = build_generation_config(metadata)
    assert {k: v for k, v in config.items() if not k.endswith("_id")} == {"temperature": 0.7, "top_k": 20}


def llama3_divisors(factor: float, theta: float, dim: int) -> NDArray[np.float32]:
    """Return the divisors by the published rule, with its three cases."""
    out = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (i / dim)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def test_llama3_scaling_from_divisors(tmp_path: Path) -> None:
    values = ggufs.tensors("llama", np.random.default_rng(3))
    values["rope_freqs.weight"] = llama3_divisors(8.0, 10000.0, 16)
    checkpoint = convert_file(tmp_path, "llama", values=values)
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in checkpoint.tensor_names())


def test_unknown_divisors_are_refused(tmp_path: Path) -> None:
    values = ggufs.tensors("llama", np.random.default_rng(3))
    values["rope_freqs.weight"] = np.linspace(1, 8, 8, dtype=np.float32)
    with pytest.raises(UnsupportedModel, match="rope frequencies"):
        convert_file(tmp_path, "llama", values=values)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    ggufs.write(tmp_path / "m.gguf", "gemma3n", values=ggufs.tensors("llama", np.random.default_rng(0)))
    with pytest.raises(UnsupportedModel, match=r"m\.gguf: .*gemma3n"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    with pytest.raises(UnsupportedModel, match="architecture 'qwen2' with experts"):
        convert_file(tmp_path, "qwen2", extra={"expert_count": 8})
    with pytest.raises(UnsupportedModel, match="architecture 'qwen3moe' is not supported"):
        convert_file(tmp_path, "qwen3moe", values=ggufs.tensors("qwen3", np.random.default_rng(0)))


def test_architectures_add_tensor_names() -> None:
    architecture = GGUFArchitecture("GemmaForCausalLM", "gemma", other_tensors={"post_ffw_norm": "post_ffn_norm"})
    names = {
        "blk.3.post_ffw_norm.weight": "model.layers.3.post_ffn_norm.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for gguf_name, name in names.items():
        tensor = GGUFTensor(gguf_name, TENSOR_TYPES[0], (4,), 0, 16)
        assert architecture.list_checkpoint_tensors(tensor) == [(name, tensor)]
    for unknown in (
        "blk.3.other.weight",
        "blk.3.attn_q.0.weight",
        "blk.3.ffn_gate_inp.weight",
        "other",
        "blk.x.attn_q.bias",
    ):
        with pytest.raises(UnsupportedModel, match=f"{unknown}' is not known for gemma"):
            architecture.list_checkpoint_tensors(GGUFTensor(unknown, TENSOR_TYPES[0], (4,), 0, 16))


def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(conversion, "write_tensors", fail)
    ggufs.write(tmp_path / "m.gguf")
    with pytest.raises(OSError, match="disk full"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_leftovers_of_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".out").mkdir()
    (tmp_path / ".out" / "model.safetensors").write_bytes(b"half")
    convert_file(tmp_path, "llama")
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf", "out"}


def test_concurrent_conversions_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], conversion.write_tensors

    def count_calls(path: Path, *args: Any) -> None:
        written.append(path)
        write(path, *args)

    monkeypatch.setattr(conversion, "write_tensors", count_calls)
    ggufs.write(tmp_path / "m.gguf")
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: convert_gguf(tmp_path / "m.gguf", tmp_path / "out"), range(8)))
    assert found == {tmp_path / "out"} and len(written) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf", "out"}


def test_large_tensors_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    convert_file(tmp_path / "a", "llama", quant="Q4_1")
    monkeypatch.setattr(gguf_rows, "CHUNK_BYTES", 1000)
    convert_file(tmp_path, "llama", quant="Q4_1")
    whole, pieces = (tmp_path / d / "model.safetensors" for d in ("a/out", "out"))
    assert whole.read_bytes() == pieces.read_bytes()


def spm_metadata(add_space_prefix: bool = True) -> dict[str, Any]:
    pieces = ["▁the", "▁t", "he", "th", "▁", "t", "h", "e", "▁c", "c", "a", "at", "cat", "ca"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [float(-i) for i in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def load_tokenizer(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    text, config = build_tokenizer_files(metadata)
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, spm_metadata())

    def pieces(text: str) -> list[str]:
        return [tokenizer.token_text(i) for i in tokenizer.encode(text)]

    assert pieces("the cat") == ["<s>", " the", " c", "at"]  # " c" outscores "cat"
    assert pieces("é") == ["<s>", " ", "\ufffd", "\ufffd"]
    assert tokenizer.token_bytes(tokenizer.encode("é")[-2]) == b"\xc3"
    for text in ("the cat", " the", "héh 🙂", "t\nt"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    bare = load_tokenizer(tmp_path, spm_metadata(add_space_prefix=False))
    assert [bare.token_text(i) for i in bare.encode("the", add_special=False)] == ["t", "he"]  # "he" outscores "th"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tokenizer.ggml.model": "t5"}, UnsupportedModel),
        ({"tokenizer.ggml.scores": [0.0]}, ModelFileError),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, ModelFileError),
        ({"tokenizer.ggml.tokens": [1, 2]}, ModelFileError),
        ({"tokenizer.ggml.tokens": 7}, ModelFileError),
        ({"tokenizer.ggml.token_type": 1.0}, ModelFileError),
        ({"tokenizer.ggml.bos_token_id": 10**6}, ModelFileError),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "who-knows"}, UnsupportedModel),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["no such"]}, ModelFileError),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "kimi-k2"}, UnsupportedModel),
    ],
)
def test_bad_vocabularies_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        build_tokenizer_files({**spm_metadata(), **changes})


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["ab", " 123", "'s", "  ", " x"]),
        ("smollm", ["ab", " ", "1", "2", "3", "'s", "  ", " x"]),
        ("llama-bpe", ["ab", " ", "123", "'s", "  ", " x"]),
        ("qwen2", ["ab", " ", "1", "2", "3", "'s", "  ", " x"]),
        ("tekken", ["ab", " ", "1", "2", "3", "'s", "  ", " x"]),
        ("glm4", ["ab", " ", "123", "'s", "  ", " x"]),
        ("gpt-4o", ["ab", " ", "123", "'s", "  ", " x"]),
        ("llama4", ["ab", " ", "123", "'s", "  ", " x"]),
        ("deepseek-v3", ["ab", " ", "123", "'s", "  ", " x"]),
        ("kimi-k2", ["ab", " ", "123", "'s", "  ", " x"]),
    ],
)
def test_pre_tokenizers_split_correctly(pre: str, pieces: list[str]) -> None:
    """The vocabulary has every merge within these words, so the tokens are the words."""
    words = {p.replace(" ", "Ġ") for p in pieces}
    merges, tokens = [], list(ggufs.ALPHABET)
    for word in sorted(words):
        for cut in range(1, len(word)):
            if word[: cut + 1] not in tokens:
                merges.append(f"{word[:cut]} {word[cut]}")
                tokens.append(word[: cut + 1])
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}  # type: ignore[dict-item]
    inner = tokenizers.Tokenizer.from_str(build_tokenizer_files(metadata)[0])
    assert [t.replace("Ġ", " ") for t in inner.encode("ab 123's   x").tokens] == pieces


def test_chinese_words_are_apart_for_kimi() -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "kimi-k2", "tokenizer.ggml.merges": ["a b"]}
    metadata["tokenizer.ggml.tokens"] = [*ggufs.ALPHABET, "ab"]
    inner = tokenizers.Tokenizer.from_str(build_tokenizer_files(metadata)[0])
    found = [span for _, span in inner.pre_tokenizer.pre_tokenize_str("ab\u4e2d\u6587cd")]
    assert found == [(0, 2), (2, 4), (4, 6)]
