"""BlockPacker, dequantise_tensor: load tensors of GGUF files, as quantised blocks for kernels, or dequantised."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from emberline.core.errors import ModelFileError
from emberline.hub.dequant import Bytes
from emberline.hub.gguf_rows import ReadBytes, Values, decode_rows, join_latents, read_rows
from emberline.hub.gguf_tensors import GGUFTensorInfo
from emberline.hub.tensorfile import TensorInfo
from emberline.kernels import ops
from emberline.kernels.gguf_blocks import DamagedBlocks, UnsupportedBlocks
from emberline.kernels.packed_weight import join_rows
from emberline.kernels.quantise_blocks import BLOCK_COLUMNS, quantise_blocks
from emberline.models.weight_form import BLOCK_TYPES, WeightForm

log = logging.getLogger("emberline.engine")

BATCH_VALUES = 2 << 20  # dequantised or quantised at once
# Modules whose matrices are never quantised at load: routers, and the decays and step sizes of recurrent layers.
EXACT_MODULES = ("gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")
END_MODULES = ("embed_tokens", "lm_head")


class BlockPacker:
    """Packs matrices as quantised blocks for the kernels of a CPU, and counts those that cannot be packed."""

    def __init__(self, form: WeightForm) -> None:
        self._form = form
        self._unpacked = Counter[str]()  # matrices of GGUF files that were dequantised, by the reason

    def pack_stored(self, parts: Sequence[TensorInfo], read: ReadBytes, *, gated: bool) -> ops.PackedWeight | None:
        """Return matrices of a GGUF file, stacked and packed without dequantisation; None: they must be dequantised.

        Raises ModelFileError if a scale is NaN or infinite."""
        infos = [info for info in parts if isinstance(info, GGUFTensorInfo) and info.has_blocks]
        if self._form != "gguf" or not infos:
            return None
        types = [info.block_type.name for info in infos]
        if len(infos) < len(parts) or (gated and len(set(types)) > 1):
            self._unpacked[f"types {' '.join(types)} in one matrix"] += len(infos)
            return None
        try:
            packed = [
                _pack_rows([read_rows(info, read) for info in same], kind, same[0].shape[-1], gated=gated)
                for kind, same in [(kind, list(each)) for kind, each in groupby(infos, lambda i: i.block_type.name)]
            ]
        except UnsupportedBlocks as e:
            self._unpacked[str(e)] += len(infos)
            return None
        except DamagedBlocks as e:
            names = ", ".join(repr(info.name) for info in infos)
            raise ModelFileError(f"tensor {names} in {infos[0].file}: {e}", hint="download the file again") from e
        return packed[0] if len(packed) == 1 else join_rows(packed)

    def pack_floats(self, name: str, matrix: Tensor, *, gated: bool) -> ops.PackedWeight:
        """Return a packed matrix. Quantise it if `--weights` is q4 or q8 and the matrix allows that.

        Some modules are never quantised, and the number of columns must be a multiple of BLOCK_COLUMNS."""
        module = name.split(".")[-2]
        if self._form == "gguf" or module in EXACT_MODULES or matrix.shape[1] % BLOCK_COLUMNS:
            return ops.pack_linear(matrix, gated=gated)
        matrices, ends = BLOCK_TYPES[self._form]
        kind, batch = ends if module in END_MODULES else matrices, max(1, BATCH_VALUES // matrix.shape[1])
        blocks = torch.cat([quantise_blocks(part, kind) for part in matrix.split(batch)])
        return ops.pack_gguf(blocks, kind, matrix.shape[1], gated=gated)

    def log_unpacked(self, directory: Path) -> None:
        for reason, count in self._unpacked.items():
            log.info("Weights dequantised: model=%s tensors=%d reason=%r", directory.name, count, reason)


def _pack_rows(rows: list[Bytes], type_name: str, columns: int, *, gated: bool) -> ops.PackedWeight:
    blocks = torch.from_numpy(rows[0] if len(rows) == 1 else np.concatenate(rows))
    return ops.pack_gguf(blocks, type_name, columns, gated=gated)


def dequantise_tensor(info: GGUFTensorInfo, read: ReadBytes, dtype: torch.dtype, pool: ThreadPoolExecutor) -> Tensor:
    """Return the values of a tensor in this dtype; several threads dequantise a large one."""
    if info.latent_values is not None:
        return _to_tensor(join_latents(info, read)).to(dtype).view(info.shape)
    rows, width = read_rows(info, read), info.shape[-1]
    batch, values = max(1, BATCH_VALUES // width), torch.empty(len(rows), width, dtype=dtype)

    def fill(start: int) -> None:
        part = rows[start : start + batch]
        values[start : start + batch] = _to_tensor(decode_rows(info, part)).view(-1, width)

    starts = range(0, len(rows), batch)
    for _ in map(fill, starts) if len(starts) == 1 else pool.map(fill, starts):
        pass
    return values.view(info.shape)


def _to_tensor(values: Values) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.uint16 else tensor
