"""Weights: the tensors of a checkpoint, mapped from its files.

Each tensor is loaded once, by name and shape. `finish` raises an error if the checkpoint has unused tensors.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, reduce
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from emberline.core.cpus import core_count
from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.checkpoint import Checkpoint, format_names
from emberline.hub.dequant import Bytes
from emberline.hub.gguf_tensors import GGUFTensorInfo
from emberline.hub.tensorfile import TensorInfo
from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.models.dequantise import QuantisedMatrices
from emberline.models.gguf_matrices import BlockPacker, dequantise_tensor
from emberline.models.mapped_files import MappedFiles
from emberline.models.quantised_tensors import QuantisedTensorInfo, select_model_tensors
from emberline.models.shard import Shard
from emberline.models.slice_bytes import select_bytes
from emberline.models.tensor_sharding import shard_checkpoint
from emberline.models.weight_form import WeightForm
from emberline.models.weight_formats import QuantisedSize
from emberline.unweight.codec import WeightCodec, select_weight_codec
from emberline.unweight.ordered_map import map_in_order
from emberline.unweight.tensor import CodedTensor, check_raw_crc, is_coded

COMPARE_ELEMENTS = 16 << 20  # compared at once, to bound memory
MAX_DECODED_SPANS = 64  # of a rank's part of a coded tensor; if it has more, the whole tensor is decoded
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StackSource(NamedTuple):
    """A tensor of a checkpoint that fills a part of a stacked tensor."""

    name: str
    shape: tuple[int, ...]
    select: Callable[[Tensor], Tensor]  # returns a view of the part, with its elements in the tensor's order


def count_unfilled_bytes(whole: Tensor, sources: Sequence[StackSource]) -> int:
    """Return the bytes of a stacked tensor that no part fills: room for experts that are copied there later."""
    return whole.nbytes - sum(source.select(whole).nbytes for source in sources)


class Weights:
    device = torch.device("cpu")
    shard = Shard()
    comm: Communicator | None = None  # of the ranks that have the other parts; None: this is the whole model
    stacks_experts = False  # whether the experts of a layer are loaded into few tensors, as GPU kernels read them
    packed = False  # whether matrices are kept in the uw12 format, 12 bits per weight
    quantised_sizes: Sequence[QuantisedSize] = ()  # of the matrices that are kept quantised
    _blocks: BlockPacker | None = None  # packs matrices in a form for CPUs; None: plain

    @property
    def attention_comm(self) -> Communicator | None:
        """The communicator of the ranks among which the heads are divided; None: this rank has all heads."""
        return self.comm if self.shard.divides_attention else None

    @property
    def can_decode(self) -> bool:
        """Whether tensors of packed files can be decoded on this device."""
        return self.device.type == "cpu"

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None = None,
        *,
        shard: Shard | None = None,
        comm: Communicator | None = None,
        form: WeightForm = "plain",
    ) -> None:
        """Prepare to load a checkpoint's tensors.

        With `shard`, only the shard's part of each tensor is loaded; layers then sum their outputs by `comm`, which is
        required to run the model. `form`: how `linear`, `experts_linear` and `load_embedding_table` keep matrices.
        """
        self.shard, self.comm = shard or Shard(), comm
        self.checkpoint = shard_checkpoint(select_model_tensors(checkpoint), self.shard)
        self._blocks = None if form == "plain" else BlockPacker(form)
        # Of matrices; None: that of the file, but bfloat16 for float16. With float16, matrices of other dtypes stay.
        self.dtype = dtype
        self.loaded_bytes = 0  # counted in the final dtype
        self.read_bytes = 0  # read from the files
        self._lock = threading.Lock()  # of read_bytes
        self._unused = set(self.checkpoint.tensor_names())
        self._files = MappedFiles()

    def has_tensor(self, name: str) -> bool:
        return name in self._unused

    def load_vector(self, name: str, *shape: int, offset: float = 0.0) -> Tensor:
        """Return a norm or bias as a float32 copy, because kernels compute with it in float32.

        `offset` is added to each element.
        """
        vector = self._mark_used(name, self._view_tensor(name, shape).to(torch.float32, copy=True))
        return vector.add_(offset) if offset else vector

    def load_integers(self, name: str, size: int) -> Tensor:
        """Return a vector of 64-bit integers as a copy in host memory."""
        info = self.checkpoint.tensor_info(name)
        if info.shape != (size,) or info.dtype != "I64":
            raise ModelFileError(
                f"tensor {name!r} in {info.file} has the dtype {info.dtype} and the shape {info.shape}; "
                f"config.json requires I64 and {(size,)}"
            )
        return self._mark_used(name, self._view_raw_bytes(name, info).clone().view(torch.int64))

    def load_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix, which the caller must pack or copy.

        It is a view of the mapped file, unless its dtype had to be converted.
        """
        return self.stack([(name, rows)], columns)

    def stack(self, parts: Sequence[tuple[str, int]], columns: int, *, gated: bool = False) -> Tensor:
        """Return matrices (name, rows) stacked into one.

        With `gated`, the parts are a gate and an up matrix. Here their rows are not interleaved, because packing for
        the CPU does that; DeviceWeights interleaves them.
        """
        dtype = self.stack_dtype(parts, columns)
        views = [self._mark_used(name, self._view_tensor(name, (rows, columns)).to(dtype)) for name, rows in parts]
        return views[0] if len(views) == 1 else torch.cat(views)

    def stack_dtype(self, parts: Sequence[tuple[str, int]], columns: int) -> torch.dtype:
        """Check the shape and dtype of matrices (name, rows), and return the dtype of the stacked matrix."""
        for name, rows in parts:
            self._check_tensor(name, (rows, columns))
        return self._final_dtype([name for name, _ in parts])

    def _final_dtype(self, names: Sequence[str]) -> torch.dtype:
        stored = [DTYPES[self.checkpoint.tensor_info(name).dtype] for name in names]
        if self.dtype is torch.float16:  # only if it is exact: other dtypes have a wider range
            return reduce(torch.promote_types, stored)
        return self.dtype or (torch.float32 if torch.float32 in stored else torch.bfloat16)

    def linear(
        self, parts: Sequence[tuple[str, int]], columns: int, *,
        gated: bool = False, full_precision: bool = False, packable: bool = True,
    ) -> ops.PackedWeight:  # fmt: skip
        """Return matrices (name, rows) stacked into one, packed for the kernels of this device.

        `full_precision`: never quantised, as for heads and routers. `packable`: uw12 (12 bits per weight) is allowed.
        """
        if self._blocks is None:
            return ops.pack_linear(self.stack(parts, columns, gated=gated), gated=gated)
        return self._linear_of_blocks(self._blocks, parts, columns, gated)

    def _linear_of_blocks(
        self, packer: BlockPacker, parts: Sequence[tuple[str, int]], columns: int, gated: bool
    ) -> ops.PackedWeight:
        self.stack_dtype(parts, columns)  # checks the shapes
        infos = [self.checkpoint.tensor_info(name) for name, _ in parts]
        packed = packer.pack_stored(infos, self._view_file_bytes, gated=gated)
        if packed is None:
            before = self.loaded_bytes
            packed = packer.pack_floats(parts[0][0], self.stack(parts, columns, gated=gated), gated=gated)
            self.loaded_bytes = before
        else:
            self._unused.difference_update(name for name, _ in parts)
        self.loaded_bytes += packed.nbytes
        for info in infos:
            self._files.release_pages(info)
        return packed

    def load_rearranged_linears(
        self,
        parts: Sequence[tuple[str, int]],
        columns: int,
        arrange: Callable[[Tensor], Tensor],
        rows: Sequence[int],
    ) -> list[ops.PackedWeight]:
        """Stack matrices, reorder the rows, and return the parts, packed for this device's kernels.

        `parts`: the matrices (name, rows). `arrange`: returns the stacked matrix with its rows reordered. `rows`: the
        number of rows of each returned matrix."""
        matrix = self.transform(self.stack(parts, columns), arrange)
        return [self.pack(part) for part in matrix.split(list(rows))]

    def experts_linear(
        self, name: str, shape: tuple[int, ...], arrange: Callable[[Tensor], Tensor], *, gated: bool = False
    ) -> list[ops.PackedWeight]:
        """Return the matrices of all experts, which one tensor [experts, ...] holds, packed for the kernels.

        `arrange` returns the matrix [n, k] of an expert from its part of the tensor.
        """
        self._check_tensor(name, shape)
        dtype, info = self._final_dtype([name]), self.checkpoint.tensor_info(name)
        if isinstance(info, QuantisedTensorInfo):
            parts: Iterable[Tensor] = self._iter_matrices(self._open_quantised(name, info))
        else:
            parts = self._view_tensor(name, shape)
        self._unused.remove(name)
        packer = self._blocks
        if packer is not None:
            packed = [packer.pack_floats(name, arrange(part.to(dtype)), gated=gated) for part in parts]
            self.loaded_bytes += sum(weight.nbytes for weight in packed)
            return packed
        self.loaded_bytes += prod(shape) * dtype.itemsize
        return [ops.pack_linear(arrange(part.to(dtype)), gated=gated) for part in parts]

    def stack_experts(
        self, shape: tuple[int, ...], sources: Sequence[StackSource], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a tensor that the parts fill. `dtype`: of the result; None: the dtype that matrices have in memory."""
        whole = torch.empty(shape, dtype=dtype or self._final_dtype([source.name for source in sources]))
        self.loaded_bytes += count_unfilled_bytes(whole, sources)
        for name, part_shape, select in sources:
            destination = select(whole)
            destination.copy_(self._mark_used(name, self._view_tensor(name, part_shape)).reshape(destination.shape))
        return whole

    def have_same_format(self, stacks: Sequence[tuple[tuple[int, int, int], Sequence[StackSource]]]) -> bool:
        """Return whether the matrices of a layer's experts, given as shapes and parts, are kept in one format.

        Kernels compute both matrices of an expert in one format. If the formats differ, the caller loads both in full
        precision.
        """
        return True

    def load_experts(
        self, shape: tuple[int, int, int], sources: Sequence[StackSource], *,
        gated: bool = False, packable: bool = False, full_precision: bool = False,
    ) -> Tensor | ops.PackedExperts:  # fmt: skip
        """Return the matrices [experts, n, k] of a layer, which the parts fill, as the device's kernels read them.

        `gated`: whether they are gate and up, the rows of gate before those of up. `packable`: whether kernels also
        read them in the uw12 format. `full_precision`: whether quantised matrices become bf16.
        """
        return self.stack_experts(shape, sources)

    def transform(self, tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `function(tensor)`, of the same shape as `tensor`. The tensor itself must not be used any more."""
        return function(tensor)

    def pack(self, matrix: Tensor) -> ops.PackedWeight:
        """Return a matrix that was computed from loaded ones, packed for the kernels of this device."""
        return ops.pack_linear(matrix.contiguous())

    def pack_latent_products(self, matrix: Tensor, heads: int, plain_dim: int) -> ops.LatentProducts:
        """Return a loaded matrix, packed for the products of latent attention: see `ops.pack_latent_products`."""
        return ops.pack_latent_products(matrix, heads, plain_dim)

    def stack_vectors(self, parts: Sequence[tuple[str, int]]) -> Tensor:
        return torch.cat([self.load_vector(name, size) for name, size in parts])

    def load_embedding_table(self, name: str, rows: int, columns: int) -> Tensor | ops.PackedWeight:
        """Return a copy of the embedding matrix, for lookups of rows.

        The mapped file may be closed afterwards.
        """
        if self._blocks is not None:
            return self.linear([(name, rows)], columns)
        return self.load_matrix(name, rows, columns).clone()

    def drop_duplicate(self, name: str, original: str, rows: int, columns: int) -> bool:
        """Return whether tensor `name` equals tensor `original`.

        If so, mark `name` as used without loading it. This reads both tensors. Few checkpoints have duplicates, so the
        cost is acceptable.
        """
        ours, other = self._view_tensor(original, (rows, columns)), self._view_tensor(name, (rows, columns))
        dtype, step = self.dtype or ours.dtype, max(1, COMPARE_ELEMENTS // max(1, columns))
        repeats = all(
            torch.equal(ours[at : at + step].to(dtype), other[at : at + step].to(dtype)) for at in range(0, rows, step)
        )
        if repeats:
            self._unused.remove(name)
        return repeats

    def finish(self, ignorable_pattern: str) -> None:
        """Raise ModelFileError if a tensor was not used, unless its whole name matches `ignorable_pattern`."""
        if unused := self.unused_names(ignorable_pattern):
            raise ModelFileError(
                f"{self.checkpoint.directory} has tensors that the model does not use ({len(unused)}): "
                f"{format_names(unused)}",
                hint="check that config.json belongs to this model",
            )
        if self._blocks is not None:
            self._blocks.log_unpacked(self.checkpoint.directory)

    def unused_names(self, ignorable_pattern: str) -> list[str]:
        """Return the tensors that were not loaded and whose whole name does not match `ignorable_pattern`."""
        unused = (name for name in self._unused if not re.fullmatch(ignorable_pattern, name))
        return sorted(name for name in unused if not self._is_extra_bias(name))

    def _is_extra_bias(self, name: str) -> bool:
        """Return whether the tensor is a bias of zeros that GPTQ added to a matrix without one."""
        matrix = self.checkpoint.tensors.get(f"{name.removesuffix('.bias')}.weight")
        if not name.endswith(".bias") or not isinstance(matrix, QuantisedTensorInfo) or matrix.layout != "gptq":
            return False
        return not self._view_tensor(name, self.checkpoint.tensor_info(name).shape).any()

    def _mark_used(self, name: str, tensor: Tensor) -> Tensor:
        assert name in self._unused, f"{name} loaded twice"
        self._unused.remove(name)
        self.loaded_bytes += tensor.nbytes
        return tensor

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        info = self.checkpoint.tensor_info(name)
        if info.shape != shape:
            raise ModelFileError(
                f"tensor {name!r} in {info.file} has the shape {info.shape}; config.json requires {shape}"
            )

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        self._check_shape(name, shape)
        info = self.checkpoint.tensor_info(name)
        if info.dtype not in DTYPES:
            hint = f"supported: {' '.join(DTYPES)}"
            raise UnsupportedModel(f"tensor {name!r} in {info.file} has the unsupported dtype {info.dtype}", hint=hint)
        if is_coded(info) and not self.can_decode:
            hint = "run emberline unweight unpack"
            raise UnsupportedModel(f"{info.file} is packed, which is not supported on {self.device}", hint=hint)

    def _view_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._check_tensor(name, shape)
        info = self.checkpoint.tensor_info(name)
        if isinstance(info, QuantisedTensorInfo):
            return self._open_quantised(name, info).decode_all()
        if isinstance(info, GGUFTensorInfo):
            exact = self.dtype is torch.float32 or info.dtype == "F32"
            dtype = torch.float32 if exact else DTYPES[info.dtype]
            return dequantise_tensor(info, self._view_file_bytes, dtype, self._pool)
        dtype, flat = DTYPES[info.dtype], self._read_bytes(name, info)
        aligned = flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()  # the format allows any offset
        return aligned.view(dtype).view(info.shape)

    def _open_quantised(self, name: str, info: QuantisedTensorInfo) -> QuantisedMatrices:
        return QuantisedMatrices(name, info, lambda part: self._read_bytes(name, part))

    def _iter_matrices(self, matrices: QuantisedMatrices) -> Iterator[Tensor]:
        """Yield the matrices in order; a few are dequantised ahead, by other threads."""
        return map_in_order(self._pool, matrices.decode_matrix, range(len(matrices)))

    def _read_bytes(self, name: str, info: TensorInfo) -> Tensor:
        return self._decode_bytes(name, info) if is_coded(info) else self._view_raw_bytes(name, info)

    def _view_raw_bytes(self, name: str, info: TensorInfo) -> Tensor:
        flat = torch.from_numpy(self._files.view(info))
        if info.packing is not None:
            check_raw_crc(name, info, flat.numpy(), self._codec)
        self._add_read_bytes(
            info.nbytes if info.stored_slice is None or info.packing is not None else info.stored_slice.num_bytes
        )
        return select_bytes(flat, info.stored_slice)

    def _decode_bytes(self, name: str, info: TensorInfo) -> Tensor:
        stored, whole = self._files.view(info), info.whole
        tensor = CodedTensor.open(name, whole, lambda begin, end: stored[begin:end], self._codec)
        if info.stored_slice is None:
            out = torch.empty(whole.logical_bytes, dtype=torch.uint8)
            tensor.decode_all(stored, out.numpy(), self._pool)
            self._add_read_bytes(info.nbytes)
            return out

        def read(begin: int, end: int) -> Bytes:
            self._add_read_bytes(end - begin)
            return stored[begin:end]

        # Other threads may decode other tensors meanwhile, so this thread does it alone.
        if len(spans := list(info.stored_slice.list_spans())) > MAX_DECODED_SPANS:
            return select_bytes(torch.from_numpy(tensor.read(read, 0, whole.logical_bytes)), info.stored_slice)
        parts = [tensor.read(read, *span) for span in spans]
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def _add_read_bytes(self, num_bytes: int) -> None:
        with self._lock:
            self.read_bytes += num_bytes

    def _view_file_bytes(self, info: TensorInfo) -> Bytes:
        self._add_read_bytes(info.nbytes if info.stored_slice is None else info.stored_slice.num_bytes)
        return select_bytes(torch.from_numpy(self._files.view(info)), info.stored_slice).numpy()

    @cached_property
    def _codec(self) -> WeightCodec:
        return select_weight_codec(ops.current_backend().library)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(core_count(), "decoder")
