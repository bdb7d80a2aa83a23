"""StepKernels: how many bytes the kernels of a GPU allocate in a layer, by the form of the weights.

Memory plans use these functions; `tests/cpu/test_step_memory.py` compares them with what the backends allocate.
This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from emberline.kernels.four_bit_size import can_pack
from emberline.kernels.work_limits import (
    FLOAT4_TILE_ROWS,
    GATE_GROUP_ROWS,
    INT4_TILE_ROWS,
    MAX_COPIED_PLACES,
    MAX_GEMM_ROWS,
    MAX_TILE_ROWS,
    PACKED_TILE_ROWS,
    PLAIN_TILE_ROWS,
    can_use_gemm,
    max_pass_rows,
    supports_fp8_shape,
)

BF16_BYTES, F32_BYTES = 2, 4
FP8_SCALE_COLUMNS, FP8_SCALE_ROWS = 128, 128  # least columns of x per scale; scales are padded to these rows
PLACE_TABLE_BYTES = 24  # of the tables of sorted rows
UNSORTED: Sequence[tuple[float, int]] = ((math.inf, 0),)
QuantisedShape = tuple[str, int, int, int]  # of a quantised matrix: kind, rows, columns, and columns that share a scale


class WeightForm(StrEnum):
    """How matrices are stored, as far as products with them allocate different amounts of memory."""

    PLAIN = "plain"
    PACKED = "packed"  # uw12
    FP8 = "fp8"  # float8 with kernels that quantise their inputs
    INT4 = "int4"  # 4-bit integers in the layout of cuda/narrow_layout.py
    FLOAT4 = "float4"  # 4-bit floats in that layout
    CODES = "codes"  # codes that are dequantised in parts for many rows


FOUR_BIT_FORMS = (WeightForm.INT4, WeightForm.FLOAT4)


@dataclass(frozen=True, slots=True)
class KernelVariant:
    kernels: str  # hopper or portable
    form: WeightForm


@dataclass(frozen=True, slots=True)
class GatedNetwork:
    """A gated feed-forward network, or the shared expert of a layer."""

    hidden: int
    width: int
    has_silu: bool = True  # otherwise its activation is gelu
    has_biases: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNetwork:
    hidden: int
    width: int  # of an expert
    count: int
    chosen: int  # experts of a row
    shared: GatedNetwork | None = None
    slots: int = 0  # of all groups of ranks, if experts may move between ranks; 0: they do not move


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The kernels that compute a model's layers. Functions return the most bytes that any of the variants allocates."""

    variants: frozenset[KernelVariant]  # of dense matrices
    expert_variants: frozenset[KernelVariant]  # of routed experts
    dtype_bytes: int = BF16_BYTES

    @staticmethod
    def for_weights(
        kernels: str,
        dtype_bytes: int,
        *,
        packed: bool = False,
        quantised: Collection[QuantisedShape] = (),
        quantised_experts: Collection[QuantisedShape] = (),
        has_other_experts: bool = True,
    ) -> StepKernels:
        """Return the kernels for weights of this dtype.

        `kernels`: hopper or portable; empty: not known, so that both are counted. `quantised`, `quantised_experts`:
        matrices that are kept quantised. `has_other_experts`: whether some routed experts are not kept quantised."""
        names = (kernels,) if kernels else ("hopper", "portable")
        plain = {KernelVariant(name, WeightForm.PACKED if packed else WeightForm.PLAIN) for name in names}
        dense = plain | {
            KernelVariant(name, _choose_quantised_form(name, *matrix)) for name in names for matrix in quantised
        }
        experts = {
            KernelVariant(name, _choose_quantised_form(name, *each)) for name in names for each in quantised_experts
        }
        return StepKernels(frozenset(dense), frozenset(experts | plain if has_other_experts else experts), dtype_bytes)

    @property
    def unpacks_matrices(self) -> bool:
        """Whether products with many rows unpack whole matrices, the next one while the current one is used."""
        return any(each.form in (WeightForm.PACKED, *FOUR_BIT_FORMS) for each in self.variants)

    @property
    def packs_head(self) -> bool:
        """Whether the output head is packed, so that a part of it at a time is unpacked for products with many rows."""
        return any(each.form is WeightForm.PACKED for each in self.variants)

    @property
    def dequantises_parts(self) -> bool:
        """Whether a part of a matrix at a time is dequantised for products with many rows."""
        return any(each.form is WeightForm.CODES for each in self.variants)

    def gated_bytes(self, network: GatedNetwork, rows: int, max_tuned_rows: int) -> int:
        """Return the bytes that a network allocates besides x and the tensor to which its output is added.

        The normed input is counted. `max_tuned_rows`: the most rows for which tuning may have chosen cuBLAS, which
        stores gates and ups, instead of a kernel that stores only silu(gate) * up."""
        few = min(rows, max_tuned_rows)
        return max(
            max(
                self._gated_bytes(variant, network, rows, fused=self._fuses_activation(variant, network, rows)),
                self._gated_bytes(variant, network, few, fused=variant.form is WeightForm.FP8),
            )
            for variant in self.variants
        )

    def expert_bytes(self, network: ExpertNetwork, rows: int, max_tuned_rows: int) -> int:
        """Return the bytes that the largest pass of a layer of experts allocates.

        Counted are the normed rows, the router's logits, copies of the rows sorted by expert, the activations and
        outputs of each row's experts, and those of the shared expert. The input x and the tensor to which outputs are
        added are not."""
        if not network.slots:  # experts that may move are computed in one pass
            rows = min(rows, max_pass_rows(network.count, network.chosen))
        # Choices of slots are at most twice as wide as the other numbers.
        normed = rows * (self.dtype_bytes * (network.hidden + 2 * network.slots) + F32_BYTES * network.count)
        routed = max(self._routed_bytes(variant, network, rows) for variant in self.expert_variants)
        if network.shared is None:
            return normed + routed
        outputs = self.dtype_bytes * rows * network.hidden
        return normed + max(outputs + routed, self.gated_bytes(network.shared, rows, max_tuned_rows))

    def _fuses_activation(self, variant: KernelVariant, network: GatedNetwork, rows: int) -> bool:
        """Return whether a kernel stores the activations only, not gates and ups before them."""
        if variant.kernels != "hopper" or not network.has_silu or network.has_biases or self.dtype_bytes != BF16_BYTES:
            return False
        if variant.form is WeightForm.FP8:
            return True
        has_gemm = rows <= MAX_GEMM_ROWS and can_use_gemm(2 * network.width, network.hidden)
        return variant.form is not WeightForm.CODES and has_gemm and network.width % GATE_GROUP_ROWS == 0

    def _gated_bytes(self, variant: KernelVariant, network: GatedNetwork, rows: int, *, fused: bool) -> int:
        hidden, width, size = network.hidden, network.width, self.dtype_bytes
        fused = fused and self._fuses_activation(variant, network, min(rows, MAX_GEMM_ROWS))
        stored = width if fused else (3 + network.has_biases) * width
        if variant.form is not WeightForm.FP8:
            return size * rows * (hidden + stored)
        first = _quantised_bytes(rows, hidden) + size * rows * stored
        return max(first, size * rows * width + _quantised_bytes(rows, width))

    def _routed_bytes(self, variant: KernelVariant, network: ExpertNetwork, rows: int) -> int:
        found = previous = 0
        for limit, tile_rows in _list_tile_sizes(variant):
            last = int(min(rows, limit * network.count / network.chosen))
            if last > previous:
                found = max(found, self._sorted_bytes(variant.form, network, last, tile_rows))
            previous = last
        return found

    def _sorted_bytes(self, form: WeightForm, network: ExpertNetwork, rows: int, tile_rows: int) -> int:
        """Return the bytes of tables, activations and outputs of rows that are sorted into tiles.

        A place is a position of a row in a tile. `tile_rows`: rows of a tile; 0: no places are unused. Inputs may be
        copied to the places, but the copies are freed before outputs are allocated. Kernels for 4-bit codes copy inputs
        for some places at a time, and write outputs in the order of assignments (row, expert)."""
        assignments = rows * network.chosen
        unused = min(network.count, assignments) * ((tile_rows or MAX_TILE_ROWS) - 1)
        places = assignments + unused
        tables = PLACE_TABLE_BYTES * places
        if not tile_rows:
            return tables + self.dtype_bytes * assignments * (network.width + network.hidden)
        widest = max(assignments, min(places, MAX_COPIED_PLACES)) if form in FOUR_BIT_FORMS else places
        return tables + self.dtype_bytes * (places * network.width + widest * network.hidden)


def _list_tile_sizes(variant: KernelVariant) -> Sequence[tuple[float, int]]:
    """Return pairs (limit, rows of a tile) in ascending order of the limit.

    A tile size is used if experts have at most `limit` rows on average. 0: kernels leave no places in tiles unused."""
    sizes = {
        WeightForm.PLAIN: PLAIN_TILE_ROWS, WeightForm.PACKED: PACKED_TILE_ROWS,
        WeightForm.INT4: INT4_TILE_ROWS, WeightForm.FLOAT4: FLOAT4_TILE_ROWS,
    }  # fmt: skip
    return sizes.get(variant.form, UNSORTED) if variant.kernels == "hopper" else UNSORTED


def _choose_quantised_form(kernels: str, kind: str, rows: int, columns: int, group_columns: int) -> WeightForm:
    """Return the form in which kernels keep a matrix that stays quantised."""
    has_wide_groups = group_columns % FP8_SCALE_COLUMNS == 0 or group_columns >= columns  # 0: the whole row
    if kernels == "hopper" and kind == "fp8" and supports_fp8_shape(rows, columns) and has_wide_groups:
        return WeightForm.FP8
    if kernels == "hopper" and can_pack(kind, rows, columns, group_columns):
        return WeightForm.INT4 if kind == "int4" else WeightForm.FLOAT4
    return WeightForm.CODES


def _quantised_bytes(rows: int, columns: int) -> int:
    """Return the bytes of rows that are quantised to float8, with a scale for each 128 columns at most."""
    padded = -(-rows // FP8_SCALE_ROWS) * FP8_SCALE_ROWS
    return rows * columns + F32_BYTES * padded * -(-columns // FP8_SCALE_COLUMNS)
