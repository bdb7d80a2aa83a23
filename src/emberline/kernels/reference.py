"""ReferenceBackend: every op in plain torch.

It defines the results of all backends, and runs without a compiler. All activations are float32. Positions and block
tables are int32, slots and ids int64. The keys and the values that a layer caches are tensors [blocks, kv_heads,
block_size, head_dim]. Within a block, however, the keys lie in memory as [head_dim][block_size], the order in which the
product with queries reads them. Only the ops of a backend depend on this order. block_size is at least 8, and divides
64 or is a multiple of it.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels import delta_rule
from emberline.kernels.arguments import (
    AttentionInputs,
    AttentionLayer,
    AttentionMetadata,
    LatentInputs,
    LatentProducts,
    LinearLayer,
    LinearOutput,
    PerHeadWeights,
    PositionShift,
)
from emberline.kernels.attention_plan import AttentionPlan
from emberline.kernels.delta_rule import DeltaGates, DeltaLayer, LayerStates
from emberline.kernels.gguf_blocks import dequantise_blocks
from emberline.kernels.mixture import ClampedSwiGLU, Expert, Mixture, SelectedExperts, SharedExpert, select_experts
from emberline.kernels.op_backend import OpBackend
from emberline.kernels.packed_weight import PackedWeight
from emberline.kernels.sampling_arguments import LogProbs, SamplingTensors
from emberline.kernels.weight_unpacker import WeightUnpacker

MAX_TOKEN_COUNT = 0x7FFF  # most occurrences of one token in one output that penalties count
IN_PROMPT_BIT = -0x8000  # bit of a 16-bit count: the prompt contains the token


class ReferenceBackend(OpBackend):
    library: ctypes.CDLL | None = None  # the native library; only CPUBackend has one
    isa = ""  # instruction set of the native kernels

    def __init__(self, reason: str = "") -> None:
        self.reason = reason  # why the native kernels are not used

    def __str__(self) -> str:
        return f"torch ({self.reason})"

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def progress_count(self) -> int:
        """Return a count that grows with each op of the native library; it stays 0 without the library."""
        return 0

    def pack_linear(self, weight: Tensor, *, gated: bool = False) -> PackedWeight:
        n, k = weight.shape
        return PackedWeight(weight.to(torch.float32, copy=True).contiguous(), n, k, weight.dtype, gated=gated)

    def pack_gguf(self, blocks: Tensor, type_name: str, k: int, *, gated: bool = False) -> PackedWeight:
        packed = self.pack_linear(dequantise_blocks(blocks, type_name, k), gated=gated)
        packed.dtype = torch.bfloat16  # as of other backends; the KV cache has this dtype by default
        return packed

    def linear(self, x: Tensor, layer: LinearLayer, output: LinearOutput) -> Tensor:
        if layer.weight.parts:
            y = self._run_parts(x, layer)
        else:
            x = x if layer.norm is None else rms_norm(x, layer.norm, layer.eps)
            y = F.linear(x, layer.weight.data, layer.bias)
        return _store_result(output.out, y) if output.add_to is None else output.add_to.add_(y)

    def _run_parts(self, x: Tensor, layer: LinearLayer) -> Tensor:
        """Return the product with a weight whose rows have several layouts."""
        parts = layer.weight.parts
        biases = [None] * len(parts) if layer.bias is None else layer.bias.split([part.n for part in parts])
        layers = [LinearLayer(p, bias, layer.norm, layer.eps) for p, bias in zip(parts, biases, strict=True)]
        return torch.cat([self.linear(x, part, LinearOutput()) for part in layers], dim=-1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return out.copy_(rms_norm(x, weight, eps))

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        groups = x.view(len(x), -1, weight.shape[-1])
        centered = groups - groups.mean(-1, keepdim=True)
        return out.copy_(rms_norm(centered, weight, eps).view(x.shape))

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return x.copy_(cap * (x / cap).tanh())

    def convolve(self, x: Tensor, layer: DeltaLayer, states: LayerStates) -> Tensor:
        return delta_rule.convolve(x, layer, states)

    def compute_delta_rule(self, mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates) -> Tensor:
        return delta_rule.compute_delta_rule(mixed, gates, layer, states)

    def norm_and_gate(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return delta_rule.norm_and_gate(x, gate, weight, eps)

    def apply_sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x.mul_(gate.sigmoid())

    def gate_up_silu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        gate, up = self._multiply_gate_up(x, layer)
        return _store_result(out, F.silu(gate) * up)

    def gate_up_gelu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        gate, up = self._multiply_gate_up(x, layer)
        return _store_result(out, F.gelu(gate, approximate="tanh") * up)

    def _multiply_gate_up(self, x: Tensor, layer: LinearLayer) -> tuple[Tensor, ...]:
        assert layer.weight.gated, "pack the gate and up rows with gated=True"
        return self.linear(x, layer, LinearOutput()).chunk(2, dim=-1)

    def embed(self, ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
        rows = table.data if isinstance(table, PackedWeight) else table
        return rows[ids].float()

    def rope_and_cache(
        self, qkv: Tensor, layer: AttentionLayer, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> None:
        block_size, positions, slots = values.shape[2], metadata.positions, metadata.slots
        heads = qkv.view(len(qkv), layer.qkv_heads, layer.head_dim)
        q, k, v = heads.tensor_split([layer.q_heads, layer.q_heads + layer.kv_heads], dim=1)
        q_norm, k_norm, eps = layer.q_norm, layer.k_norm, layer.eps
        q.copy_(_rotate(q if q_norm is None else rms_norm(q, q_norm, eps), positions, layer))
        k = _rotate(k if k_norm is None else rms_norm(k, k_norm, eps), positions, layer)
        is_cached = slots >= 0
        block, offset = slots[is_cached] // block_size, slots[is_cached] % block_size
        _view_key_panels(keys)[block, :, :, offset] = k[is_cached].to(keys.dtype)
        if not layer.latent_dim:
            values[block, :, offset] = v[is_cached].to(values.dtype)

    def paged_attention(self, inputs: AttentionInputs, plan: AttentionPlan | None = None) -> Tensor:
        qkv, layer, keys, values, metadata = inputs
        tokens, q_heads, kv_heads, head_dim = len(qkv), layer.q_heads, layer.kv_heads, layer.head_dim
        out = qkv.new_empty(tokens, q_heads * layer.value_dim)
        q = qkv.view(tokens, -1, head_dim)[:, :q_heads]
        starts = metadata.query_start.tolist()
        for b, before in enumerate(metadata.context.tolist()):
            first, last = starts[b], starts[b + 1]
            length = before + last - first
            blocks = metadata.block_tables[b, : -(-length // values.shape[2])].long()
            k = _view_key_panels(keys)[blocks].permute(1, 0, 3, 2).reshape(kv_heads, -1, head_dim)[:, :length].float()
            if layer.latent_dim:
                v = k[..., -layer.latent_dim :]
            else:
                v = values[blocks].permute(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)[:, :length].float()
            group = q_heads // kv_heads
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            scores = q[first:last].transpose(0, 1) @ k.transpose(1, 2) * layer.scale
            if layer.softcap:
                scores = layer.softcap * (scores / layer.softcap).tanh()
            hidden = _make_attention_mask(before, length, layer)
            weights = _softmax_with_sinks(scores.masked_fill(hidden, -torch.inf), layer.sinks)
            out[first:last] = (weights @ v).transpose(0, 1).flatten(1)
        return out

    def pack_latent_products(self, matrix: Tensor, heads: int, plain_dim: int) -> LatentProducts:
        pairs = matrix.view(heads, -1, matrix.shape[1])
        keys = tuple(self.pack_linear(pair[:plain_dim].T.contiguous()) for pair in pairs)
        values = tuple(self.pack_linear(pair[plain_dim:].contiguous()) for pair in pairs)
        empty = matrix.new_empty(0)
        return LatentProducts(PerHeadWeights(empty, keys), PerHeadWeights(empty, values))

    def latent_attention(
        self, inputs: LatentInputs, plan: AttentionPlan | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Attend on the cached latents, without computing the keys and values of each head.

        The queries are multiplied by the matrix that turns latents into keys. The result of attention on the latents is
        multiplied by the matrix that turns latents into values.
        """
        q, kv, layer, keys, metadata = inputs
        (tokens, heads, _), rank, rotary = q.shape, layer.rank, layer.rotary_dim
        parts = q.new_empty(tokens, heads + 1, rotary + rank)
        self._multiply_by_head(q[..., : layer.plain_dim], layer.products.keys, parts[:, :heads, rotary:])
        parts[:, :heads, :rotary] = q[..., layer.plain_dim :]
        parts[:, heads, :rotary] = kv[:, rank:]
        self.rms_norm(kv[:, :rank], layer.norm, layer.eps, parts[:, heads, rotary:])
        qkv, values = parts.flatten(1), keys[..., :0]
        self.rope_and_cache(qkv, layer.attention, keys, values, metadata)
        if rows is not None and not len(rows):
            return qkv[:0, : heads * layer.value_dim]
        mixed = self.paged_attention(AttentionInputs(qkv, layer.attention, keys, values, metadata))
        mixed = mixed if rows is None else mixed[rows]
        out = q.new_empty(len(mixed), heads, layer.value_dim)
        return self._multiply_by_head(mixed.view(len(mixed), heads, rank), layer.products.values, out).flatten(1)

    def _multiply_by_head(self, x: Tensor, weights: PerHeadWeights, out: Tensor) -> Tensor:
        """Write x[:, h] @ W[h]^T of each head h into out [T, heads, n] and return it; x is [T, heads, k]."""
        for head, weight in enumerate(weights.packed):
            out[:, head] = self.linear(x[:, head].contiguous(), LinearLayer(weight), LinearOutput())
        return out

    def run_mixture(self, x: Tensor, mixture: Mixture, out: Tensor | None = None) -> Tensor:
        """Add the output of the shared expert, then that of the experts that each row selects."""
        routing, out = mixture.routing, x if out is None else out
        normed, weights, chosen = self.select_experts(x, mixture)
        if mixture.shared is not None:
            out += self._run_shared_expert(normed, mixture.shared, mixture.clamp)
        for number, expert in enumerate(mixture.split_experts(), routing.first_expert):
            rows, ranks = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                weight, inputs = weights[rows, ranks, None], normed[rows]
                if routing.scales_inputs:
                    out[rows] += self._run_expert(inputs * weight, expert, mixture.clamp)
                else:
                    out[rows] += weight * self._run_expert(inputs, expert, mixture.clamp)
        return out

    def select_experts(self, x: Tensor, mixture: Mixture) -> SelectedExperts:
        normed = rms_norm(x, mixture.norm, mixture.eps)
        logits = self.linear(normed, LinearLayer(mixture.router, mixture.routing.bias), LinearOutput())
        weights, chosen = select_experts(logits, mixture.routing)
        numbers, order = chosen.sort(dim=1)
        return SelectedExperts(normed, weights.gather(1, order), numbers.int())

    def run_experts(self, x: Tensor, experts: Tensor, mixture: Mixture) -> Tensor:
        own, out = mixture.split_experts(), torch.empty_like(x)
        for index in experts.unique().tolist():
            rows = experts == index
            out[rows] = self._run_expert(x[rows], own[index], mixture.clamp)
        return out

    def add_shared_expert(self, out: Tensor, normed: Tensor, mixture: Mixture) -> Tensor:
        assert mixture.shared is not None
        return out.add_(self._run_shared_expert(normed, mixture.shared, mixture.clamp))

    def _run_shared_expert(self, normed: Tensor, shared: SharedExpert, clamp: ClampedSwiGLU | None) -> Tensor:
        y = self._run_expert(normed, shared.expert, clamp) * shared.scale
        if shared.gate is None:
            return y
        return self.linear(normed, LinearLayer(shared.gate), LinearOutput()).sigmoid() * y

    def _run_expert(self, inputs: Tensor, expert: Expert, clamp: ClampedSwiGLU | None) -> Tensor:
        if expert.gate_up.gated:
            assert clamp is None and expert.gate_up_bias is None
            inner = self.gate_up_silu(inputs, LinearLayer(expert.gate_up))
        else:
            both = self.linear(inputs, LinearLayer(expert.gate_up, expert.gate_up_bias), LinearOutput())
            gate, up = both.chunk(2, dim=-1)
            inner = F.silu(gate) * up if clamp is None else _clamped_swiglu(gate, up, clamp)
        return self.linear(inner, LinearLayer(expert.down, expert.down_bias), LinearOutput())

    def sample(self, logits: Tensor, settings: SamplingTensors, uniform: Tensor) -> Tensor:
        """Return one sampled id per row, which depends on that row only.

        This overwrites `logits`, so call `log_probs` first if it is needed.

        Temperature 0 selects the largest logit, and of equal logits the one with the lowest id. Otherwise tokens are
        ordered by descending probability, and equal ones by ascending id. Top-k keeps the first k tokens. Top-p keeps
        the shortest prefix with at least the share p of the probability that top-k kept. Min-p keeps tokens that are at
        least min_p times as probable as the first token. `uniform`, one number in [0, 1) per row, then selects a kept
        token by inverse CDF.
        """
        return torch.stack([_sample_row(*row) for row in zip(logits, *settings, uniform, strict=True)])

    def sample_with_seed(self, logits: Tensor, settings: SamplingTensors, seed: Tensor, position: Tensor) -> Tensor:
        """Call `sample` with uniform numbers that are derived from each row's seed and position."""
        return self.sample(logits, settings, uniform_from_seed(seed, position))

    def log_probs(self, logits: Tensor, ids: Tensor, top_n: int) -> LogProbs:
        chosen = logits.gather(1, ids[:, None])
        total = logits.double().logsumexp(-1, keepdim=True)
        _, order = logits.sort(descending=True, stable=True)
        top = order[:, :top_n]
        rank = (logits > chosen).sum(-1) + 1
        return LogProbs((chosen - total).squeeze(1).float(), top, (logits.gather(1, top) - total).float(), rank)

    def apply_bitmask(self, logits: Tensor, mask: Tensor, rows: Tensor) -> None:
        bits = (mask[:, :, None] >> torch.arange(32)) & 1
        allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)

    def edit_logits(self, logits: Tensor, rows: Tensor, ids: Tensor, divide: Tensor, add: Tensor) -> None:
        at = rows.long(), ids.long()
        values = logits[at]
        logits[at] = torch.where(values > 0, values / divide, values * divide) + add

    def apply_penalties(self, logits: Tensor, rows: Tensor, slots: Tensor, penalties: Tensor, counts: Tensor) -> None:
        for row, slot, (repetition, frequency, presence) in zip(rows.tolist(), slots.tolist(), penalties, strict=True):
            values, seen = logits[row], counts[slot, : logits.shape[1]]
            count = (seen & MAX_TOKEN_COUNT).float()
            scaled = torch.where(values > 0, values / repetition, values * repetition)
            changed = scaled - (count * frequency + (count > 0) * presence)
            logits[row] = torch.where(seen != 0, changed, values)

    def count_tokens(self, counts: Tensor, slots: Tensor, rows: Tensor, tokens: Tensor) -> None:
        at = slots.long(), tokens[rows.long()]
        old = counts[at]
        counts[at] = torch.where((old & MAX_TOKEN_COUNT) == MAX_TOKEN_COUNT, old, old + 1)

    def fill_newest_tokens(self, tokens: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
        return torch.where(tokens < 0, newest[rows], tokens)

    def find_slots(self, position: Tensor, limits: Tensor, tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        at = torch.minimum(position, limits - 1).clamp_(min=0)
        blocks = tables.gather(1, (at // block_size)[:, None]).squeeze(1).long()
        return at.int(), torch.where(limits > 0, blocks * block_size + at % block_size, -1)

    def shift_positions(self, shift: PositionShift) -> None:
        shifted, size = shift.token_shifts != shift.padding_row, shift.block_size
        shift.positions.add_(shift.accepted[shift.token_shifts].int())
        at = shift.positions.long()
        further = () if shift.window_slots is None else shift.window_slots[:, : len(at)].unbind()
        for group, slots in enumerate((shift.slots, *further)):
            blocks = shift.tables[shift.token_shifts, group * shift.table_width + at // size].long()
            slots.copy_(torch.where(shifted, blocks * size + at % size, slots))
        shift.context.add_(shift.accepted[shift.row_shifts].int())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * weight


def uniform_from_seed(seed: Tensor, position: Tensor) -> Tensor:
    """Return numbers in [0, 1) that depend only on seed and position: the splitmix64 finaliser over both."""
    with np.errstate(over="ignore"):
        x = seed.numpy().view(np.uint64) + (position.numpy().astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)


def _sample_row(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    scaled, order = (logits.double() / temperature.double()).sort(descending=True, stable=True)
    p = scaled.softmax(-1)
    keep = int(top_k) if 0 < top_k < len(p) else len(p)
    if top_p < 1:
        mass = p[:keep].cumsum(0)
        keep = min(keep, 1 + int((mass < top_p.double() * mass[-1]).sum()))
    keep = min(keep, max(1, int((p >= min_p.double() * p[0]).sum())))
    mass = p[:keep].cumsum(0)
    return order[min(keep - 1, int((mass <= uniform * mass[-1]).sum()))]


def _make_attention_mask(first_position: int, num_keys: int, layer: AttentionLayer) -> Tensor:
    """Return a mask [queries, keys] that is True where a query must not attend to a key.

    The queries have the positions [first_position, num_keys), and the keys [0, num_keys).
    """
    key, position = torch.arange(num_keys), torch.arange(first_position, num_keys)[:, None]
    if not layer.window:
        return key > position
    first_key = position // layer.window * layer.window if layer.chunked else position + 1 - layer.window
    return (key > position) | (key < first_key)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [heads, queries, keys], with each head's sink in the denominator."""
    if sinks is None:
        return scores.softmax(-1)
    columns = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, columns], dim=-1).softmax(-1)[..., :-1]


def _rotate(x: Tensor, positions: Tensor, layer: AttentionLayer) -> Tensor:
    half = layer.cos_sin.shape[1] // 2
    if not half:
        return x
    cos, sin = layer.cos_sin[positions.long(), None].chunk(2, dim=-1)
    if layer.interleaved:
        a, b, unrotated = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
        pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([pairs.flatten(-2), unrotated], dim=-1)
    a, b, unrotated = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, unrotated], dim=-1)


def _view_key_panels(keys: Tensor) -> Tensor:
    """Return a layer's key cache viewed as [blocks, kv_heads, head_dim, block_size], its memory order."""
    blocks, heads, block_size, head_dim = keys.shape
    inner = keys.stride(0), block_size * head_dim, block_size, 1
    return keys.as_strided((blocks, heads, head_dim, block_size), inner)


def _clamped_swiglu(gate: Tensor, up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * (gate * clamp.alpha).sigmoid() * (up + 1)


def _store_result(out: Tensor | None, y: Tensor) -> Tensor:
    return y if out is None else out.copy_(y)
