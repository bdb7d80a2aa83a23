"""Eagle3Head: a draft model of one layer that continues from hidden states of the target model (EAGLE-3).

At position i it gets the target model's hidden states of position i, from three layers, and the embedding of token
i + 1, and predicts token i + 2. In later passes its own output replaces the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emberline.core.errors import ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.models.attention import make_attention_layer
from emberline.models.config import ModelConfig
from emberline.models.eagle3_config import EMBEDDING_NAMES, IGNORABLE_TENSORS, NUM_CAPTURED_LAYERS, Eagle3Config
from emberline.models.ffn import FeedForward
from emberline.models.forward import ForwardBatch
from emberline.models.layers import load_linear
from emberline.models.rope import make_cos_sin_table
from emberline.models.weights import Weights

LAYER_NAMES = ("midlayer", "layers.0", "model.midlayer", "model.layers.0")  # of the layer, in published checkpoints


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    config: ModelConfig
    captured_layers: tuple[int, ...]
    weight_bytes: int
    embedding: Tensor | ops.PackedWeight
    fc: ops.LinearLayer  # from three hidden states of the target model to one
    embedding_norm: Tensor
    hidden_norm: Tensor
    norm_before_residual: bool
    qkv: ops.LinearLayer
    o: ops.LinearLayer
    attention: ops.AttentionLayer
    ffn: FeedForward
    head: ops.LinearLayer
    target_ids: Tensor | None  # [draft_vocab] int64: the target model's id of each predicted token; None: the same

    @staticmethod
    def load(
        config: Eagle3Config, weights: Weights, context: int, target_embedding: Tensor | ops.PackedWeight
    ) -> Eagle3Head:
        """Load a head for sequences of up to `context` tokens. A head without an embedding uses `target_embedding`."""
        model, hidden, dim = config.model, config.model.hidden, config.model.head_dim
        at = next((name for name in LAYER_NAMES if weights.has_tensor(f"{name}.hidden_norm.weight")), LAYER_NAMES[0])
        top = at.rpartition(at.removeprefix("model."))[0]  # "model." or nothing
        q, kv = model.heads * dim, model.kv_heads * dim
        qkv = [(f"{at}.self_attn.q_proj", q), (f"{at}.self_attn.k_proj", kv), (f"{at}.self_attn.v_proj", kv)]
        table = make_cos_sin_table(model.rope, context).to(weights.device)
        own = next((name for name in EMBEDDING_NAMES if weights.has_tensor(name)), None)
        norm = weights.load_vector(f"{top}norm.weight", hidden)
        return Eagle3Head(
            config=model,
            captured_layers=config.captured_layers,
            weight_bytes=0,
            embedding=target_embedding if own is None else weights.load_embedding_table(own, model.vocab, hidden),
            fc=load_linear(weights, [(f"{top}fc", hidden)], NUM_CAPTURED_LAYERS * hidden),
            embedding_norm=weights.load_vector(f"{at}.input_layernorm.weight", hidden),
            hidden_norm=weights.load_vector(f"{at}.hidden_norm.weight", hidden),
            norm_before_residual=config.norm_before_residual,
            qkv=load_linear(weights, qkv, 2 * hidden, bias=model.qkv_bias),
            o=load_linear(weights, [(f"{at}.self_attn.o_proj", hidden)], q, bias=model.o_bias),
            attention=make_attention_layer(model, 0, table),
            ffn=FeedForward.load_from(model, weights, at),
            head=ops.LinearLayer(
                weights.linear([("lm_head.weight", config.draft_vocab)], hidden, full_precision=True),
                norm=norm,
                eps=model.norm_eps,
            ),
            target_ids=_load_target_ids(weights, config),
        )

    def combine(self, captured: Tensor) -> Tensor:
        return ops.linear(captured, self.fc)

    def forward(self, batch: ForwardBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert hidden is not None
        width, eps = self.config.hidden, self.config.norm_eps
        inputs = hidden.new_empty(len(hidden), 2 * width)
        ops.rms_norm(ops.embed(batch.tokens, self.embedding), self.embedding_norm, eps, inputs[:, :width])
        normed = ops.rms_norm(hidden, self.hidden_norm, eps, inputs[:, width:])
        x = normed.clone() if self.norm_before_residual else hidden
        keys, values = batch.keys[0], batch.values[0]
        qkv = ops.linear(inputs, self.qkv)
        ops.rope_and_cache(qkv, self.attention, keys, values, batch.attention)
        mixed = ops.paged_attention(qkv, self.attention, keys, values, batch.attention, batch.plan)
        if batch.logit_rows is not None:  # the other rows only write their keys and values
            x, mixed = x[batch.logit_rows], mixed[batch.logit_rows]
        if not len(x):
            return batch.tokens[:0], x
        x = self.ffn(ops.linear(mixed, self.o, add_to=x))
        tokens = ops.linear(x, self.head, float32_output=True).argmax(dim=-1)
        return tokens if self.target_ids is None else self.target_ids[tokens], x


def load_eagle3_head(
    checkpoint: Checkpoint, weights: Weights, target: ModelConfig, context: int, embedding: Tensor | ops.PackedWeight
) -> Eagle3Head:
    """Load the head of a checkpoint. Raise UnsupportedModel or ModelFileError if it cannot draft for the target."""
    head = Eagle3Head.load(Eagle3Config.from_checkpoint(checkpoint, target), weights, context, embedding)
    weights.finish(IGNORABLE_TENSORS)
    return replace(head, weight_bytes=weights.loaded_bytes)


def _load_target_ids(weights: Weights, config: Eagle3Config) -> Tensor | None:
    """Return the target model's id of each token of the draft vocabulary.

    The checkpoint stores differences: id of the target model minus id in the draft vocabulary."""
    size, vocab = config.draft_vocab, config.model.vocab
    if not weights.has_tensor("d2t"):
        if size == vocab:
            return None
        raise ModelFileError(
            f"{weights.checkpoint.directory} has no tensor 'd2t', and its draft vocabulary has {size} of {vocab} tokens"
        )
    ids = weights.load_integers("d2t", size) + torch.arange(size)
    if not bool(((ids >= 0) & (ids < vocab)).all()):
        raise ModelFileError(
            f"tensor 'd2t' in {weights.checkpoint.directory} has ids outside the vocabulary of {vocab}"
        )
    return ids.to(weights.device)
