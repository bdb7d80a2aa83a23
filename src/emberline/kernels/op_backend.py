"""OpBackend: the interface of a backend, which implements every op for one kind of device.

To add a backend, write a module with a subclass, and choose it in `backend.py`. All backends must
give the results of `ReferenceBackend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from emberline.kernels.arguments import (
    AttentionInputs,
    AttentionLayer,
    AttentionMetadata,
    LatentInputs,
    LatentProducts,
    LayerProducts,
    LinearLayer,
    LinearOutput,
    PositionShift,
)
from emberline.kernels.attention_plan import AttentionPlan
from emberline.kernels.delta_rule import DeltaGates, DeltaLayer, LayerStates
from emberline.kernels.dense_stack import DenseStack
from emberline.kernels.exact_sums import round_term
from emberline.kernels.gguf_blocks import dequantise_blocks
from emberline.kernels.mixture import LocalExpertSums, Mixture, SelectedExperts
from emberline.kernels.packed_weight import PackedExperts, PackedWeight, WeightLayout
from emberline.kernels.quantised_matrix import QuantisedMatrix, dequantise_to_bf16
from emberline.kernels.sampling_arguments import LogProbs, SamplingTensors
from emberline.kernels.weight_unpacker import WeightUnpacker


class OpBackend(ABC):
    @abstractmethod
    def pack_linear(self, weight: Tensor, *, gated: bool = False) -> PackedWeight:
        """Return the weight [n, k] in the layout that `linear` or, with gated=True, `gate_up_silu` reads."""

    def fill_weight(self, weight: PackedWeight, values: Tensor) -> int:
        """Store the values in the empty weight and return the device memory used, in bytes."""
        packed = self.pack_linear(values, gated=weight.gated)
        weight.data, weight.ptr, weight.handle, weight.layout = packed.data, packed.ptr, packed.handle, packed.layout
        return packed.data.nbytes

    def fill_experts(self, experts: PackedExperts, values: Tensor) -> int:
        """Store the values [count, n, k] in the empty experts and return the device memory used, in bytes.

        The rows of gate are before those of up.
        """
        experts.handle, experts.layout, experts.nbytes = values, WeightLayout.ROWS, values.nbytes
        return values.nbytes

    def keeps_quantised(self, matrix: QuantisedMatrix) -> bool:
        """Return whether `pack_quantised`, or `pack_quantised_experts` for stacked matrices, keeps the codes.

        Loaders and memory plans call this before the codes are read, with a matrix on the meta device. If the result is
        False, they load bf16 values.
        """
        return False

    def count_quantised_bytes(self, matrix: QuantisedMatrix) -> int:
        """Return the device memory of a matrix that is kept quantised. The matrix may be on the meta device."""
        return matrix.nbytes

    def arrange_gate_rows(self, weight: Tensor) -> Tensor:
        """Reorder a weight with all rows of gate before those of up as `pack_linear` with gated=True expects it."""
        return weight

    def pack_quantised(self, matrix: QuantisedMatrix, *, gated: bool = False) -> PackedWeight:
        """Return the matrix in the layout that `linear` or, with gated=True, `gate_up_silu` reads.

        A gated matrix has the rows of gate before those of up. Backends without a kernel for the matrix dequantise it.
        """
        values = dequantise_to_bf16(matrix)
        return self.pack_linear(self.arrange_gate_rows(values) if gated else values, gated=gated)

    def pack_quantised_experts(self, matrices: QuantisedMatrix, *, gated: bool = False) -> Tensor | PackedExperts:
        """Return the matrices of all experts of a layer as `run_mixture` reads them.

        Gated matrices have the rows of gate before those of up.
        """
        return dequantise_to_bf16(matrices)

    def pack_gguf(self, blocks: Tensor, type_name: str, k: int, *, gated: bool = False) -> PackedWeight:
        """Return a matrix of GGUF blocks, uint8 [n, bytes of a row], in the layout that the products and `embed` read.

        A gated matrix has the rows of gate before those of up. Raises UnsupportedBlocks if the type has no kernel or k
        is not a multiple of its block size. Backends without such kernels dequantise the matrix.
        """
        return self.pack_linear(dequantise_blocks(blocks, type_name, k).to(torch.bfloat16), gated=gated)

    def add_packed_copy(self, weight: PackedWeight) -> int:
        """Add a losslessly compressed copy to the weight if that is smaller.

        Return the size of the copy in bytes. The result is 0 if no copy was added.
        """
        return 0

    @abstractmethod
    def linear(self, x: Tensor, layer: LinearLayer, output: LinearOutput) -> Tensor:
        """Return y = norm(x) @ W^T + bias. With `output.add_to`, add y to that tensor in place and return it."""

    @abstractmethod
    def gate_up_silu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        """Return silu(norm(x) Wg^T) * (norm(x) Wu^T).

        The layer's weight was packed with gated=True. Its bias is ignored.
        """

    @abstractmethod
    def gate_up_gelu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        """Return gelu(norm(x) Wg^T) * (norm(x) Wu^T), where gelu is the approximation by a tanh.

        The layer's weight was packed with gated=True, as for `gate_up_silu`.
        """

    @abstractmethod
    def embed(self, ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
        """Return the rows `ids` of `table`, which may be the packed weight of a tied LM head."""

    @abstractmethod
    def rope_and_cache(
        self, qkv: Tensor, layer: AttentionLayer, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> None:
        """Rotate the queries inside `qkv`, and write the rotated keys and the values to the KV cache."""

    @abstractmethod
    def paged_attention(self, inputs: AttentionInputs, plan: AttentionPlan | None = None) -> Tensor:
        """Return causal attention of each sequence's new queries over its cached keys and its new keys.

        The i-th query of sequence b has position p = context[b] + i and attends to the keys in (p - window, p], or
        [0, p] if the layer has no window. GPU backends require `plan`; others ignore it.
        """

    def run_dense_layers(
        self, x: Tensor, stack: DenseStack, keys: Tensor, values: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        """Run x through the stack's layers, overwriting x, and return `rows` of the last layer's output.

        `keys` and `values` are the KV caches of all layers. The last layer caches the keys and values of
        all rows, and computes everything after that only for `rows`.
        """
        for layer, k, v in zip(stack.layers, keys, values, strict=True):
            qkv = self.linear(x, layer.qkv, LinearOutput())
            self.rope_and_cache(qkv, layer.attention, k, v, metadata)
            mixed = self.paged_attention(AttentionInputs(qkv, layer.attention, k, v, metadata))
            if layer is stack.layers[-1]:
                x, mixed = x[rows], mixed[rows]
            self.linear(mixed, layer.o, LinearOutput(add_to=x))
            self.linear(self.gate_up_silu(x, layer.gate_up), layer.down, LinearOutput(add_to=x))
        return x

    @abstractmethod
    def pack_latent_products(self, matrix: Tensor, heads: int, plain_dim: int) -> LatentProducts:
        """Return each head's matrices from the weight [heads * (plain_dim + value size), rank] of latent attention.

        For each head, the weight has `plain_dim` rows for the unrotated elements of keys, then the rows for values.
        """

    @abstractmethod
    def latent_attention(
        self, inputs: LatentInputs, plan: AttentionPlan | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Cache the latents of the new tokens, and return the result of attention, [T, heads * value_dim].

        With `rows`, only the results of these tokens are returned. GPU backends require `plan`; others ignore it.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """Write the RMS norm of each row of x into `out`, whose rows may be parts of longer rows, and return it.

        `out` may be x.
        """

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """Write the layer norm (without bias) of each row of x into `out`, which may be x, and return it.

        With a `weight` [groups, width], each group of `width` columns of a row is normed separately.
        """

    @abstractmethod
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Replace each element of x by cap * tanh(x / cap) in place and return x."""

    def convolve(self, x: Tensor, layer: DeltaLayer, states: LayerStates) -> Tensor:
        """Return the silu of a causal convolution over the tokens of each sequence.

        The inputs before the step are read from the sequence's slot, and the last inputs of the step replace them. The
        rows of x may be parts of longer rows. delta_rule.py describes `states.saves` and `states.drafts`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no kernels for recurrent layers")

    def compute_delta_rule(self, mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates) -> Tensor:
        """Return the outputs of all value heads, and advance the states of the sequences; see delta_rule.py.

        A row of `mixed`, which may be overwritten, has the queries, keys and values of all heads.
        """
        raise NotImplementedError(f"{type(self).__name__} has no kernels for recurrent layers")

    def norm_and_gate(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Replace each head of x, as wide as `weight`, by its RMS norm times the silu of the gate; return x."""
        raise NotImplementedError(f"{type(self).__name__} has no kernels for recurrent layers")

    def apply_sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply x by the sigmoid of the gate in place and return x."""
        raise NotImplementedError(f"{type(self).__name__} has no kernel for gated attention")

    def run_layer_products(self, mixed: Tensor, x: Tensor, products: LayerProducts) -> Tensor | None:
        """Compute a layer's products in one kernel, or return None; see `layer_ops.run_layer_products`."""
        return None

    @abstractmethod
    def run_mixture(self, x: Tensor, mixture: Mixture, out: Tensor | None = None) -> Tensor:
        """Add the mixture-of-experts output for x to `out`, by default x, in place and return that tensor."""

    def select_experts(self, x: Tensor, mixture: Mixture) -> SelectedExperts:
        """Norm the rows of x, and select the experts of each row among the experts of all ranks."""
        raise NotImplementedError(f"{type(self).__name__} cannot dispatch rows to experts of other ranks")

    def run_experts(self, x: Tensor, experts: Tensor, mixture: Mixture) -> Tensor:
        """Return the output of one given expert for each row of x. The rows are already normed.

        `experts`: int32 [rows], the index of each row's expert among the experts of this rank."""
        raise NotImplementedError(f"{type(self).__name__} cannot compute rows of other ranks")

    def add_shared_expert(self, out: Tensor, normed: Tensor, mixture: Mixture) -> Tensor:
        """Add the output of the shared expert for the rows `normed` to `out` in place, and return `out`."""
        raise NotImplementedError(f"{type(self).__name__} cannot compute a shared expert by itself")

    def sum_local_experts(self, x: Tensor, mixture: Mixture) -> LocalExpertSums:
        """Return this rank's share of the output of a mixture whose experts are in slots (see ExpertSlots).

        `expert_ops.sum_local_experts` describes the result. This method defines it for all backends. It waits for the
        device, so it cannot be captured."""
        slots, scales_inputs = mixture.slots, mixture.routing.scales_inputs
        assert slots is not None
        normed, weights, numbers = self.select_experts(x, mixture)
        chosen, sums = slots.choose(numbers.long()), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        row, rank = ((chosen >= slots.local_slots.start) & (chosen < slots.local_slots.stop)).nonzero(as_tuple=True)
        if len(row):
            inputs, weight, places = normed[row], weights[row, rank, None], chosen[row, rank] - slots.local_slots.start
            outputs = self.run_experts(inputs * weight if scales_inputs else inputs, places.int(), mixture)
            sums.index_add_(0, row, round_term(outputs if scales_inputs else outputs * weight))
        if mixture.shared is not None:
            sums += round_term(self.add_shared_expert(torch.zeros_like(x), normed, mixture))
        return LocalExpertSums(sums, chosen)

    @abstractmethod
    def sample_with_seed(self, logits: Tensor, settings: SamplingTensors, seed: Tensor, position: Tensor) -> Tensor:
        """Return one sampled token id per row.

        It depends only on that row's logits, settings, seed and position. The logits may be overwritten.
        """

    @abstractmethod
    def log_probs(self, logits: Tensor, ids: Tensor, top_n: int) -> LogProbs:
        """Return for each row the log-probability and rank of its id in `ids`, and the `top_n` likeliest ids."""

    @abstractmethod
    def apply_bitmask(self, logits: Tensor, mask: Tensor, rows: Tensor) -> None:
        """Set logits[rows[i], t] to -inf wherever bit t of mask[i] (little-endian int32 words) is 0."""

    @abstractmethod
    def edit_logits(self, logits: Tensor, rows: Tensor, ids: Tensor, divide: Tensor, add: Tensor) -> None:
        """Scale single logits, logits[rows[i], ids[i]], by divide[i], then add add[i].

        Scaling divides a positive logit and multiplies any other. Each (row, id) may occur only once.
        """

    @abstractmethod
    def apply_penalties(self, logits: Tensor, rows: Tensor, slots: Tensor, penalties: Tensor, counts: Tensor) -> None:
        """Apply repetition, frequency and presence penalties (`penalties` [P, 3]) to logits[rows[i]].

        counts[slots[i]] has a 16-bit number for each token of the vocabulary: the low 15 bits count the token's
        occurrences in the output, and the sign bit is set if the prompt contains the token.
        """

    @abstractmethod
    def count_tokens(self, counts: Tensor, slots: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Add one occurrence of tokens[rows[i]] to counts[slots[i]], up to MAX_TOKEN_COUNT.

        Slots must be distinct.
        """

    @abstractmethod
    def fill_newest_tokens(self, tokens: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
        """Return a copy of `tokens` in which each negative tokens[i] is replaced by newest[rows[i]]."""

    @abstractmethod
    def find_slots(self, position: Tensor, limits: Tensor, tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Return the position (int32) and the KV cache slot of one token for each row of the block tables `tables`.

        A position at or above the row's limit is replaced by limit - 1. If the limit is 0, the slot is -1."""

    @abstractmethod
    def shift_positions(self, shift: PositionShift) -> None:
        """Correct positions and KV cache slots in place by counts on the device; see PositionShift."""
