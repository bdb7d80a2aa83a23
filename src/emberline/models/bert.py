"""BertEmbedder: a BERT encoder for sentence-transformers checkpoints.

It maps each text to one unit vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.core.errors import ContextLengthExceeded, InvalidRequest, UnsupportedModel
from emberline.core.jsonfile import read_object, read_object_if_exists, read_objects
from emberline.hub.checkpoint import Checkpoint
from emberline.models.fields import ConfigFields
from emberline.models.weights import Weights

SUPPORTED_MODULES = {"Transformer", "Pooling", "Normalize"}
POOLING_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "mean": "mean", "cls": "cls"}
IGNORABLE_TENSORS = r"embeddings\.position_ids|pooler\.dense\.(weight|bias)"
MAX_CHUNK_TOKENS = 4096  # computed at once, to bound memory


@dataclass(frozen=True, slots=True)
class Affine:
    """The weight and bias of a linear layer or a layer norm."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class EncoderBlock:
    qkv: Affine
    attention_output: Affine
    attention_norm: Affine
    up: Affine
    down: Affine
    norm: Affine


@dataclass(frozen=True, slots=True)
class BertEmbedder:
    tokens: Tensor
    positions: Tensor  # the embedding of token type 0 is already added
    norm: Affine
    blocks: tuple[EncoderBlock, ...]
    heads: int
    eps: float
    pooling: str  # mean or cls
    max_length: int  # tokens of one text, including special tokens
    vocab: int
    dim: int

    @staticmethod
    def load(directory: Path) -> BertEmbedder:
        checkpoint = Checkpoint.open(directory)
        config = ConfigFields(checkpoint.config, "config.json")
        _check_supported(config)
        vocab, dim = config.size("vocab_size", maximum=1 << 22), config.size("hidden_size", maximum=1 << 14)
        heads, ffn = config.size("num_attention_heads", maximum=1024), config.size("intermediate_size", maximum=1 << 16)
        if dim % heads:
            raise config.invalid_error("num_attention_heads", f"a divisor of hidden_size, {dim}")
        max_position = config.size("max_position_embeddings", maximum=1 << 16)
        types = config.size("type_vocab_size", 2, maximum=1 << 10)
        reader = _WeightLoader(Weights(checkpoint, torch.float32))
        segments = reader.weights.load_matrix("embeddings.token_type_embeddings.weight", types, dim)
        sentence = ConfigFields(
            read_object_if_exists(directory / "sentence_bert_config.json"), "sentence_bert_config.json"
        )
        embedder = BertEmbedder(
            tokens=reader.weights.load_matrix("embeddings.word_embeddings.weight", vocab, dim).clone(),
            positions=reader.weights.load_matrix("embeddings.position_embeddings.weight", max_position, dim)
            + segments[0],
            norm=reader.load_norm("embeddings.LayerNorm", dim),
            blocks=tuple(reader.load_block(i, dim, ffn) for i in range(config.size("num_hidden_layers", maximum=256))),
            heads=heads,
            eps=config.number("layer_norm_eps", 1e-12),
            pooling=_read_pooling(directory),
            max_length=min(max_position, sentence.size("max_seq_length", max_position, maximum=1 << 16)),
            vocab=vocab,
            dim=dim,
        )
        reader.weights.finish(IGNORABLE_TENSORS)
        return embedder

    def embed(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return float32[n, dim], a unit vector per text. A text is a list of token ids with special tokens."""
        for i, ids in enumerate(texts):
            self._check_token_ids(i, ids)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = torch.empty(len(texts), self.dim)
        with torch.inference_mode():
            while order:
                chunk: list[int] = []
                total = 0
                while order and (not chunk or total + len(texts[order[-1]]) <= MAX_CHUNK_TOKENS):
                    chunk.append(order.pop())
                    total += len(texts[chunk[-1]])
                out[chunk] = self._encode([texts[i] for i in chunk])
        return out

    def _check_token_ids(self, index: int, ids: Sequence[int]) -> None:
        if not ids:
            raise InvalidRequest(f"input {index} has no tokens", param="input")
        if len(ids) > self.max_length:
            raise ContextLengthExceeded(
                f"input {index} has {len(ids)} tokens; this embedding model accepts at most {self.max_length}",
                param="input",
            )
        if min(ids) < 0 or max(ids) >= self.vocab:
            raise InvalidRequest(f"input {index} has a token id outside [0, {self.vocab})", param="input")

    def _encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Encode the texts as one concatenated sequence without padding.

        Attention and pooling are computed for each text on its own.
        """
        lengths = [len(ids) for ids in texts]
        ids = torch.tensor([token for text in texts for token in text])
        positions = torch.tensor([position for length in lengths for position in range(length)])
        x = self._layer_norm(self.tokens[ids] + self.positions[positions], self.norm)
        for block in self.blocks:
            qkv = F.linear(x, block.qkv.weight, block.qkv.bias)
            mixed = torch.cat([self._attend(part) for part in torch.split(qkv, lengths)])
            x = self._layer_norm(
                x + F.linear(mixed, block.attention_output.weight, block.attention_output.bias), block.attention_norm
            )
            wide = F.gelu(F.linear(x, block.up.weight, block.up.bias))
            x = self._layer_norm(x + F.linear(wide, block.down.weight, block.down.bias), block.norm)
        parts = torch.split(x, lengths)
        return F.normalize(torch.stack([part[0] if self.pooling == "cls" else part.mean(0) for part in parts]))

    def _attend(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(len(qkv), 3, self.heads, -1).permute(1, 2, 0, 3)
        mixed: Tensor = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return mixed.transpose(0, 1).reshape(len(qkv), -1)

    def _layer_norm(self, x: Tensor, norm: Affine) -> Tensor:
        return F.layer_norm(x, (self.dim,), norm.weight, norm.bias, self.eps)


class _WeightLoader:
    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def load_norm(self, name: str, dim: int) -> Affine:
        return Affine(self.weights.load_vector(f"{name}.weight", dim), self.weights.load_vector(f"{name}.bias", dim))

    def load_linear(self, names: list[str], rows: int, columns: int) -> Affine:
        return Affine(
            torch.cat([self.weights.load_matrix(f"{name}.weight", rows, columns) for name in names]),
            torch.cat([self.weights.load_vector(f"{name}.bias", rows) for name in names]),
        )

    def load_block(self, index: int, dim: int, ffn_dim: int) -> EncoderBlock:
        at = f"encoder.layer.{index}"
        return EncoderBlock(
            qkv=self.load_linear([f"{at}.attention.self.{part}" for part in ("query", "key", "value")], dim, dim),
            attention_output=self.load_linear([f"{at}.attention.output.dense"], dim, dim),
            attention_norm=self.load_norm(f"{at}.attention.output.LayerNorm", dim),
            up=self.load_linear([f"{at}.intermediate.dense"], ffn_dim, dim),
            down=self.load_linear([f"{at}.output.dense"], dim, ffn_dim),
            norm=self.load_norm(f"{at}.output.LayerNorm", dim),
        )


def _check_supported(config: ConfigFields) -> None:
    for name, only in (("model_type", "bert"), ("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        found = config.text(name, None if name == "model_type" else only)
        if found != only:
            raise UnsupportedModel(
                f"an embedding model with {name} {found[:80]!r} is not supported", hint=f"supported: {only}"
            )


def _read_pooling(directory: Path) -> str:
    """Return the pooling mode of the checkpoint, `cls` or `mean`. The default is mean."""
    kinds = {str(module.get("type")).rpartition(".")[2] for module in read_objects(directory / "modules.json")}
    if others := ", ".join(sorted(kinds - SUPPORTED_MODULES)):
        raise UnsupportedModel(
            f"an embedding model with the modules {others[:200]} is not supported",
            hint=f"supported: {sorted(SUPPORTED_MODULES)}",
        )
    path = directory / "1_Pooling" / "config.json"
    if not path.exists():
        return "mean"
    fields = read_object(path)
    modes = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True]
    modes += [mode] if isinstance(mode := fields.get("pooling_mode"), str) else []
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        configured = ", ".join(modes)[:200] or "none"
        raise UnsupportedModel(f"{path}: pooling mode {configured} is not supported", hint="supported: mean, cls")
    return POOLING_MODES[modes[0]]
