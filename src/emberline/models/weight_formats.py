"""read_weight_formats: how the weights of each kind are stored, from the quantization_config of a config.json.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from emberline.core.errors import UnsupportedModel
from emberline.models.outline import ModelOutline
from emberline.models.quantisation_config import FP8_ROWS, WeightFormat, make_int4_format, read_quantisation
from emberline.models.weight_matrices import WeightKind, WeightMatrices, list_weight_matrices

if TYPE_CHECKING:  # needs torch
    from emberline.kernels.quantised_matrix import QuantisedMatrix

QUANTISABLE_KINDS: tuple[WeightKind, ...] = ("attention", "dense ffn", "routed experts", "shared experts")
MODULES: Mapping[WeightKind, tuple[str, ...]] = {
    "attention": ("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"),
    "dense ffn": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "routed experts": ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
    "shared experts": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.down_proj"),
}
# What `--weights` can make of bf16 matrices at load: codes with a scale for each row, or for groups of a row.
ONLINE_FORMATS: Mapping[str, WeightFormat] = {"fp8": FP8_ROWS, "int4": make_int4_format(128)}
ONLINE_INT4_GROUPS = (128, 64, 32)  # the first that divides the columns is used


@dataclass(frozen=True, slots=True)
class QuantisedSize:
    """The size of quantised matrices in memory that all have the same shape and format."""

    rows: int
    columns: int
    num_matrices: int
    num_bytes: int  # of all these matrices
    kind: str = ""  # of the codes: fp8, int4, mxfp4 or nvfp4; others have no kernels of their own on any GPU
    group_columns: int = 0  # columns that share a scale; 0: the whole row

    @staticmethod
    def from_matrix(matrix: QuantisedMatrix, num_matrices: int, num_bytes: int) -> QuantisedSize:
        """Return the size of `num_matrices` matrices like `matrix`, which take `num_bytes` together."""
        columns = 0 if matrix.group_columns >= matrix.k else matrix.group_columns
        return QuantisedSize(matrix.n, matrix.k, num_matrices, num_bytes, matrix.kind, columns)


def read_weight_formats(config: Mapping[str, Any], outline: ModelOutline) -> dict[WeightKind, WeightFormat]:
    """Return the format of each kind of weights that is quantised. `config`: that of the language model.

    An output head is never kept quantised. Raises UnsupportedModel if a format cannot be loaded, or if matrices of one
    kind have different formats."""
    quantisation = read_quantisation(config)
    if quantisation is None:
        return {}
    formats: dict[WeightKind, WeightFormat] = {}
    for kind in QUANTISABLE_KINDS:
        found = {quantisation.find_format(name) for name in _module_names(kind, outline)}
        if len(found) > 1:
            raise UnsupportedModel(
                f"config.json: quantization_config has several formats for some matrices of the kind {kind!r},"
                " which cannot be planned"
            )
        if found and (wanted := found.pop()) is not None:
            formats[kind] = wanted
    return formats


def choose_online_format(name: str, columns: int) -> WeightFormat | None:
    """Return the format to which `--weights` quantises bf16 matrices with so many columns; None: they stay bf16."""
    if name != "int4":
        return ONLINE_FORMATS[name]
    group = next((size for size in ONLINE_INT4_GROUPS if columns % size == 0), None)
    return None if group is None else make_int4_format(group)


def list_online_sizes(outline: ModelOutline, name: str) -> list[QuantisedSize]:
    """Return the sizes, after quantisation, of the matrices that `--weights` quantises at load."""
    sizes = []
    for matrices in list_weight_matrices(outline):
        found = choose_online_format(name, matrices.columns) if is_quantisable(matrices) else None
        if found is not None:
            num_bytes = matrices.num_matrices * found.kept_bytes(matrices.rows, matrices.columns)
            group = found.group_columns
            sizes.append(
                QuantisedSize(matrices.rows, matrices.columns, matrices.num_matrices, num_bytes, found.name, group)
            )
    return sizes


def is_quantisable(matrices: WeightMatrices) -> bool:
    """Return whether matrices of this kind are kept quantised, if a checkpoint or `--weights` quantises them."""
    if matrices.kind not in QUANTISABLE_KINDS or matrices.is_never_quantised:
        return False
    return matrices.kind == "routed experts" or not matrices.is_never_packed


def _module_names(kind: WeightKind, outline: ModelOutline) -> Iterator[str]:
    has_latents = outline.latent is not None
    for index, layer in enumerate(outline.layers):
        is_there = {
            "attention": layer.attention != "state",
            "dense ffn": not layer.has_experts,
            "routed experts": layer.has_experts,
            "shared experts": layer.has_experts and outline.experts is not None and outline.experts.shared_ffn > 0,
        }[kind]
        if kind == "attention" and not is_there:
            yield f"model.layers.{index}.linear_attn.out_proj"
        for module in MODULES[kind] if is_there else ():
            if has_latents or not module.endswith("_b_proj"):
                yield f"model.layers.{index}.{module}"
