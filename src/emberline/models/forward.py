"""ForwardBatch: all input tensors of one forward pass, the argument of `DecoderModel.forward`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emberline.core.plan import STATE_GROUP
from emberline.kernels import ops
from emberline.models.row_exchange import RowExchange


@dataclass(frozen=True, slots=True)
class HiddenCapture:
    """Where a forward pass copies hidden states for a draft model that continues from them."""

    layers: tuple[int, ...]  # ascending: layers whose inputs are copied; the model's layer count stands for its output
    out: Tensor  # [at least T, len(layers) * hidden]: for each token, these states side by side

    @staticmethod
    def allocate(layers: tuple[int, ...], num_tokens: int, hidden: int) -> HiddenCapture | None:
        """Return memory for the states of this many tokens; None if there are no layers."""
        return HiddenCapture(layers, torch.empty(num_tokens, len(layers) * hidden)) if layers else None

    def select_stage(self, stage: range, *, is_last: bool) -> HiddenCapture | None:
        """Return the capture of a pipeline stage, with its layers numbered from 0; None if it captures nothing."""
        begin, end = self.count_before(stage.start), len(self.layers) if is_last else self.count_before(stage.stop)
        if begin == end:
            return None
        return HiddenCapture(tuple(layer - stage.start for layer in self.layers[begin:end]), self._columns(begin, end))

    def states_before(self, layer: int, num_tokens: int) -> Tensor:
        """Return the columns of `out` for captured layers below `layer`, for `num_tokens` tokens.

        The result is a view. It has no columns if no captured layer is below `layer`."""
        return self._columns(0, self.count_before(layer))[:num_tokens]

    def count_before(self, layer: int) -> int:
        return sum(each < layer for each in self.layers)

    def _columns(self, begin: int, end: int) -> Tensor:
        width = self.out.shape[1] // len(self.layers)
        return self.out[:, begin * width : end * width]

    def copy_input(self, layer: int, x: Tensor) -> None:
        """Copy the input of a layer if it is one of `layers`."""
        if layer in self.layers:
            width, at = x.shape[1], self.layers.index(layer)
            self.out[: len(x), at * width : (at + 1) * width].copy_(x)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The T new tokens of all requests of a forward pass, and the KV cache that it reads and writes."""

    tokens: Tensor  # [T] int64
    attention: ops.AttentionMetadata  # which rows belong to which request, and where they are cached
    logit_rows: Tensor | None  # [S] int64: rows of [0, T) whose logits are computed; None: all
    keys: Tensor  # [layers, blocks, kv_heads, block_size, head_dim]: the cache, written in place
    values: Tensor
    plan: ops.AttentionPlan | None = None  # how the attention is split into work for a GPU
    unpacker: ops.WeightUnpacker | None = None  # state for unpacking weights, on a device that keeps them packed
    capture: HiddenCapture | None = None
    # Whether the last layer computes all rows, not only `logit_rows`: the leader of several ranks captures its output.
    computes_all_rows: bool = False
    # If layers with an attention window have block tables of their own: `window_attention` has the metadata of each
    # group of such layers. `layer_positions` has for each layer its group (0: `attention`) and its index in `keys` and
    # `values`.
    window_attention: tuple[ops.AttentionMetadata, ...] = ()
    layer_positions: tuple[tuple[int, int], ...] = ()
    # Of a model with recurrent layers: the states of these layers, which are overwritten, and the slot of each request.
    # A recurrent layer has the group STATE_GROUP in `layer_positions`, and its index among the recurrent layers.
    conv_states: Tensor | None = None  # [layers, slots, kernel - 1, channels] float32
    matrix_states: Tensor | None = None  # [layers, slots, heads, key size, value size] float32
    state_slots: Tensor | None = None  # [B] int32; without states, [0]
    state_saves: ops.StateSaves | None = None
    state_drafts: ops.StateDrafts | None = None  # its rows are those of all recurrent layers, as first dimension
    # Where whole sequences begin, and whether tokens precede them, if rows of `attention` are only parts of sequences.
    # Only query_start and context are used.
    state_sequences: ops.AttentionMetadata | None = None
    # With data-parallel attention, all other fields are about this rank's requests. These have the tokens of all ranks,
    # in the order of the ranks, and exchange rows between ranks: all rows, and those in `logit_rows`.
    all_tokens: Tensor | None = None  # [tokens of all ranks] int64
    exchange: RowExchange | None = None
    logit_exchange: RowExchange | None = None
    # [n] int64: the rows of `logit_exchange` whose logits are computed, in this order; None: all.
    chosen_rows: Tensor | None = None

    def exchange_of(self, rows: Tensor | None) -> RowExchange | None:
        """Return a layer's row exchange: `exchange`, or `logit_exchange` if it returns only `rows`.

        `rows`: the `logit_rows`, or None."""
        return self.exchange if rows is None else self.logit_exchange

    def layer_views(self, layers: int) -> Iterator[tuple[ForwardBatch, Tensor, Tensor]]:
        """Yield for each layer the batch with the layer's block tables, and the keys and values of the layer.

        For a recurrent layer, these are the inputs of the convolution and the matrices of the delta rule."""
        keys, values = self.keys.unbind(), self.values.unbind()
        if not self.layer_positions:
            yield from zip((self,) * layers, keys, values, strict=True)
            return
        groups = (self, *(replace(self, attention=metadata) for metadata in self.window_attention))
        for group, index in self.layer_positions:
            if group == STATE_GROUP:
                assert self.conv_states is not None and self.matrix_states is not None
                drafts = self.state_drafts and self.state_drafts.of_layer(index)
                batch = self if drafts is None else replace(self, state_drafts=drafts)
                yield batch, self.conv_states[index], self.matrix_states[index]
            else:
                yield groups[group], keys[index], values[index]
