"""DeviceWeights: loads a checkpoint's tensors from disk into their final memory on the device.

The load methods allocate tensors on the device in their final shape. `finish` then reads the files once, in order, and
copies the bytes of each chunk to the tensors they belong to. Bytes that need conversion (to a different dtype, or to
rows interleaved with those of a second matrix) are copied to a staging tensor first, and converted on the device.

The parts of a quantised matrix are copied as they are stored, and converted on the device when the last has arrived.
The matrix stays quantised if the device has kernels for its codes, and is dequantised to bf16 otherwise. With `online`,
bf16 matrices are quantised as soon as they are complete. Tensors of packed files are decoded before they are copied.
With `packed`, a matrix is allocated when its first bytes arrive and compressed to uw12 after the last. So only a few
matrices exist in another form than the final one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from emberline.core.errors import ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.gguf_tensors import GGUFTensorInfo
from emberline.hub.tensorfile import TensorInfo
from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.kernels.quantised_matrix import QuantisedMatrix, dequantise_to_bf16, scale_matrix
from emberline.models.coded_tensor_load import CheckedTensorLoad, CodedTensorLoad
from emberline.models.gathered_loads import GatheredLoads
from emberline.models.kv_scales import read_kv_factors
from emberline.models.load_times import LoadTimes
from emberline.models.pending_weights import PendingExperts, PendingLinear, PendingQuantisedTensor, quantise_rows
from emberline.models.quantised_load import STORED_DTYPES, ValueChecks
from emberline.models.quantised_plan import QuantisedPlanner
from emberline.models.quantised_tensors import QuantisedTensorInfo
from emberline.models.reader import FileReader
from emberline.models.shard import Shard
from emberline.models.tensor_load import (
    MatrixPart,
    PendingMatrix,
    TensorLoad,
    TensorLoadIndex,
    TensorPlacement,
    list_byte_ranges,
    split_stack,
)
from emberline.models.textmodel import select_text_model
from emberline.models.weight_formats import QuantisedSize
from emberline.models.weight_uploader import WeightUploader
from emberline.models.weights import StackSource, Weights, count_unfilled_bytes
from emberline.unweight.tensor import is_coded


class DeviceWeights(Weights):
    load_times: LoadTimes | None = None  # set by `finish`
    can_decode = True
    stacks_experts = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
        reader: FileReader | None = None,
        *,
        packed: bool = False,
        online: str = "",
        keeps_quantised: bool = True,
        kv_scales: bool = False,
        shard: Shard | None = None,
        comm: Communicator | None = None,
    ) -> None:
        """Prepare to load a checkpoint.

        `reader`, if given, already reads the checkpoint's files; `finish` closes it. With `packed`, bf16 matrices are
        kept in the uw12 format, 12 bits per weight. `online`: the format to which bf16 matrices of layers are
        quantised, of ONLINE_FORMATS; empty: none. Without `keeps_quantised`, quantised matrices become bf16. With
        `kv_scales`, weights of attention are multiplied by the scales for a float8 KV cache (kv_scales.py). With
        `shard` and `comm`, only a rank's part of each tensor is loaded.
        """
        super().__init__(checkpoint, dtype, shard=shard, comm=comm)
        self.reads_ranges = not self.shard.is_whole  # whether only the bytes of tensors that are loaded are read
        self.device = torch.device(device)
        self.packed = packed
        self.quantised_sizes: list[QuantisedSize] = []
        self._planner = QuantisedPlanner(self.checkpoint, self.device, online=online, keeps_quantised=keeps_quantised)
        self._checks = ValueChecks()
        stored = select_text_model(checkpoint).tensors if kv_scales else {}
        self._factors = read_kv_factors(stored, self._unused, self._view_raw_bytes)
        self._reader = reader
        self._loads: list[TensorLoad] = []
        self._gathered = GatheredLoads()
        self._transforms: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = []  # what `finish` replaces in place
        # Tensors of GGUF files, which `finish` dequantises on the host, and what is added to each of their elements.
        self._gguf: list[tuple[str, Tensor | MatrixPart, float]] = []

    def load_vector(self, name: str, *shape: int, offset: float = 0.0) -> Tensor:
        vector = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._queue_load(name, shape, vector, offset)
        return vector

    def stack_vectors(self, parts: Sequence[tuple[str, int]]) -> Tensor:
        whole = torch.empty(sum(size for _, size in parts), dtype=torch.float32, device=self.device)
        start = 0
        for name, size in parts:
            self._queue_load(name, (size,), whole[start : start + size])
            start += size
        return whole

    def load_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.stack([(name, rows)], columns)

    def stack(self, parts: Sequence[tuple[str, int]], columns: int, *, gated: bool = False) -> Tensor:
        """Return a matrix that `finish` fills with the stacked parts.

        With `gated`, the parts are a gate and an up matrix, or one matrix with both. Their rows are interleaved in
        groups if the number of gate rows is a multiple of the group size.
        """
        rows = [count for _, count in parts]
        whole = torch.empty(sum(rows), columns, dtype=self.stack_dtype(parts, columns), device=self.device)
        for (name, count), view in zip(parts, split_stack(whole, rows, gated), strict=True):
            self._queue_load(name, (count, columns), view)
        return whole

    @property
    def allocates_in_finish(self) -> bool:
        """Whether some weights get their memory only in `finish`, when they are loaded."""
        return self.packed or bool(self.quantised_sizes)

    def linear(
        self, parts: Sequence[tuple[str, int]], columns: int, *,
        gated: bool = False, full_precision: bool = False, packable: bool = True,
    ) -> ops.PackedWeight:  # fmt: skip
        dtype, rows = self.stack_dtype(parts, columns), [count for _, count in parts]
        if not full_precision and (shape := self._planner.describe_linear(parts, columns, dtype)) is not None:
            return self._queue_quantised_linear(parts, shape, gated=gated)
        if not self.packed or not packable or dtype is not torch.bfloat16:
            return super().linear(parts, columns, gated=gated)
        weight = ops.empty_weight(sum(rows), columns, dtype, self.device, gated=gated)

        def settle(whole: Tensor) -> None:
            self.loaded_bytes += ops.fill_weight(weight, whole)

        self._queue_stack(parts, columns, settle, gated=gated)
        return weight

    def load_rearranged_linears(
        self,
        parts: Sequence[tuple[str, int]],
        columns: int,
        arrange: Callable[[Tensor], Tensor],
        rows: Sequence[int],
    ) -> list[ops.PackedWeight]:
        dtype = self.stack_dtype(parts, columns)
        if not self.packed or dtype is not torch.bfloat16:
            return super().load_rearranged_linears(parts, columns, arrange, rows)
        weights = [ops.empty_weight(count, columns, dtype, self.device) for count in rows]

        def settle(whole: Tensor) -> None:
            for weight, part in zip(weights, arrange(whole).split(list(rows)), strict=True):
                self.loaded_bytes += ops.fill_weight(weight, part)

        self._queue_stack(parts, columns, settle, gated=False)
        return weights

    def have_same_format(self, stacks: Sequence[tuple[tuple[int, int, int], Sequence[StackSource]]]) -> bool:
        dtypes = (self._final_dtype([part.name for part in parts]) for _, parts in stacks)
        found = [self._planner.describe_experts(*stack, dtype) for stack, dtype in zip(stacks, dtypes, strict=True)]
        return len({None if quantised is None else quantised.kind for quantised in found}) == 1

    def load_experts(
        self,
        shape: tuple[int, int, int],
        sources: Sequence[StackSource],
        *,
        gated: bool = False,
        packable: bool = False,
        full_precision: bool = False,
    ) -> Tensor | ops.PackedExperts:
        for name, part_shape, _ in sources:
            self._check_tensor(name, part_shape)
        dtype = self._final_dtype([source.name for source in sources])
        quantised = None if full_precision else self._planner.describe_experts(shape, sources, dtype)
        if quantised is not None:
            return self._queue_quantised_experts(sources, quantised, gated=gated)
        if not self.packed or not packable or dtype is not torch.bfloat16:
            return self.stack_experts(shape, sources)
        experts = ops.empty_experts(*shape, gated=gated)

        def settle(whole: Tensor) -> None:
            self._add_loaded_bytes(ops.fill_experts(experts, whole))

        pending = PendingMatrix(shape, dtype, self.device, lambda whole, i: sources[i].select(whole), settle)
        for index, (name, part_shape, _) in enumerate(sources):
            self._queue_load(name, part_shape, pending.add_part(index))
        return experts

    def stack_experts(
        self, shape: tuple[int, ...], sources: Sequence[StackSource], dtype: torch.dtype | None = None
    ) -> Tensor:
        used = dtype or self._final_dtype([source.name for source in sources])
        whole = torch.empty(shape, dtype=used, device=self.device)
        self.loaded_bytes += count_unfilled_bytes(whole, sources)
        for name, part_shape, select in sources:
            self._queue_load(name, part_shape, select(whole))
        return whole

    def transform(self, tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        self._transforms.append((tensor, function))
        return tensor

    def load_embedding_table(self, name: str, rows: int, columns: int) -> Tensor | ops.PackedWeight:
        if self.packed:
            return self.linear([(name, rows)], columns, full_precision=True)
        return self.load_matrix(name, rows, columns)

    def finish(self, ignorable_pattern: str) -> None:
        """Read the files and return when every tensor has its values."""
        try:
            super().finish(ignorable_pattern)
            self._planner.log_mixed_parts()
            self._fill_gguf_tensors()
            self._gathered.fill(self._pool)
            self._files.clear()
            self._reader = self._reader or self._start_reader()
            self.load_times = self._fill_tensors(self._reader)
            self._add_read_bytes(self.load_times.read.bytes)
            self._checks.finish()
            for tensor, function in self._transforms:
                tensor.copy_(function(tensor))
            self._transforms.clear()
        finally:
            if self._reader is not None:
                self._reader.close()

    def _queue_load(
        self, name: str, shape: tuple[int, ...], destination: Tensor | MatrixPart, offset: float = 0.0
    ) -> None:
        self._check_tensor(name, shape)
        info = self.checkpoint.tensor_info(name)
        self._unused.remove(name)
        self.loaded_bytes += destination.nbytes if isinstance(destination, Tensor) else 0
        if isinstance(info, GGUFTensorInfo):
            self._gguf.append((name, destination, offset))
        elif isinstance(info, QuantisedTensorInfo):
            assert not offset
            self._queue_quantised(name, info, partial(self._store_values, name, info, destination))
        else:
            self._add_load(name, info, destination, offset)

    def _queue_stack(
        self, parts: Sequence[tuple[str, int]], columns: int, settle: Callable[[Tensor], None], *, gated: bool
    ) -> None:
        """Queue the loads of a bf16 matrix's parts. When all have arrived, the matrix is passed to `settle`."""
        rows = [count for _, count in parts]

        def select(whole: Tensor, index: int) -> Tensor:
            return split_stack(whole, rows, gated)[index]

        pending = PendingMatrix((sum(rows), columns), torch.bfloat16, self.device, select, settle)
        for i, (name, count) in enumerate(parts):
            self._queue_load(name, (count, columns), pending.add_part(i))

    def _queue_quantised(
        self, name: str, info: QuantisedTensorInfo, on_complete: Callable[[QuantisedMatrix], None]
    ) -> None:
        pending = PendingQuantisedTensor(name, info, self.device, self._checks, on_complete)
        for index, part in enumerate(pending.parts):
            self._add_load(name, info.parts[part], MatrixPart(pending, index, is_stored_form=True))

    def _store_values(
        self, name: str, info: QuantisedTensorInfo, target: Tensor | MatrixPart, matrix: QuantisedMatrix
    ) -> None:
        """Dequantise a matrix and copy its values to `target`."""
        values = dequantise_to_bf16(matrix)
        values = values.transpose(-1, -2) if info.is_transposed else values
        values = values * self._factors.get(name, 1.0)
        destination = target if isinstance(target, Tensor) else target.matrix.get_destination(target.index)
        destination.copy_(values.reshape(destination.shape))
        if isinstance(target, MatrixPart):
            target.matrix.mark_part_complete()

    def _queue_quantised_linear(
        self, parts: Sequence[tuple[str, int]], shape: QuantisedMatrix, *, gated: bool
    ) -> ops.PackedWeight:
        weight = ops.empty_quantised_weight(shape, self.device, gated=gated)
        size = ops.count_quantised_bytes(self.device, shape)
        self.quantised_sizes.append(QuantisedSize.from_matrix(shape, 1, size))

        def settle(whole: Tensor) -> None:
            self._add_loaded_bytes(ops.fill_quantised_weight(weight, quantise_rows(whole, shape)))

        if not isinstance(self.checkpoint.tensor_info(parts[0][0]), QuantisedTensorInfo):
            self._queue_stack(parts, shape.k, settle, gated=False)
            return weight
        pending = PendingLinear(parts[0][0], len(parts), weight, self._add_loaded_bytes)
        for index, (name, _) in enumerate(parts):
            self._queue_part(name, partial(pending.set_part, index))
        return weight

    def _queue_quantised_experts(
        self, sources: Sequence[StackSource], shape: QuantisedMatrix, *, gated: bool
    ) -> ops.PackedExperts:
        pending = PendingExperts(shape, self.device, len(sources), self._add_loaded_bytes, gated=gated)
        num_bytes = ops.count_quantised_bytes(self.device, shape)
        self.quantised_sizes.append(QuantisedSize.from_matrix(shape, len(shape.codes), num_bytes))
        if isinstance(self.checkpoint.tensor_info(sources[0].name), QuantisedTensorInfo):
            for name, _, select in sources:
                self._queue_part(name, partial(pending.set_part, select))
            return pending.experts

        def settle(whole: Tensor) -> None:
            self._add_loaded_bytes(ops.fill_quantised_experts(pending.experts, quantise_rows(whole, shape)))

        size = (*shape.codes.shape[:2], shape.k)
        whole = PendingMatrix(size, torch.bfloat16, self.device, lambda w, i: sources[i].select(w), settle, zeroed=True)
        for index, (name, part_shape, _) in enumerate(sources):
            self._queue_load(name, part_shape, whole.add_part(index))
        return pending.experts

    def _queue_part(self, name: str, on_complete: Callable[[QuantisedMatrix], None]) -> None:
        info = self.checkpoint.tensor_info(name)
        assert isinstance(info, QuantisedTensorInfo)
        self._unused.remove(name)
        factor = self._factors.get(name, 1.0)
        self._queue_quantised(name, info, lambda matrix: on_complete(scale_matrix(matrix, factor)))

    def _add_loaded_bytes(self, num_bytes: int) -> None:
        self.loaded_bytes += num_bytes

    def _fill_gguf_tensors(self) -> None:
        for name, target, offset in self._gguf:
            values = self._view_tensor(name, self.checkpoint.tensor_info(name).shape)
            destination = target if isinstance(target, Tensor) else target.matrix.get_destination(target.index)
            destination.copy_(values.reshape(destination.shape))
            if offset:
                destination.add_(offset)
            if isinstance(target, MatrixPart):
                target.matrix.mark_part_complete()

    def _start_reader(self) -> FileReader:
        """Start to read the files. If the model is divided among ranks, read only the bytes that this rank needs."""
        ranges = list_byte_ranges(self._loads)  # a head may be in few of a checkpoint's files
        return FileReader.start(sorted(ranges), read_ahead_bytes=0, ranges=ranges if self.reads_ranges else None)

    def _add_load(self, name: str, info: TensorInfo, destination: Tensor | MatrixPart, offset: float = 0.0) -> None:
        if info.stored_slice is None:
            self._loads.append(self._make_load(name, info, destination, offset))
        else:
            part = replace(info, stored_slice=None, packing=None, nbytes=info.stored_slice.num_bytes)
            self._gathered.add(self._make_load(name, part, destination, offset), partial(self._read_bytes, name, info))

    def _make_load(
        self, name: str, info: TensorInfo, destination: Tensor | MatrixPart, offset: float = 0.0
    ) -> TensorLoad:
        is_part = isinstance(destination, MatrixPart) and destination.is_stored_form
        factor = 1.0 if is_part else self._factors.get(name, 1.0)
        placement = TensorPlacement(name, info, STORED_DTYPES[info.dtype], destination, offset, factor)
        if info.packing is None:
            return TensorLoad(placement)
        kind = CodedTensorLoad if is_coded(info) else CheckedTensorLoad
        return kind(placement, self._codec)

    def _fill_tensors(self, reader: FileReader) -> LoadTimes:
        index = TensorLoadIndex(self._loads)
        assert reader.files >= {load.file for load in self._loads}, "the reader reads other files"
        waited = copied = 0.0
        unread = sum(file.stat().st_size for file in reader.files) - reader.stats.bytes
        with WeightUploader(reader, self.device) as uploader:
            while True:
                began = time.perf_counter()
                uploader.wait_for_chunk()
                waiting = time.perf_counter()
                chunk = reader.next_chunk()
                taken = time.perf_counter()
                if chunk is None:
                    uploader.flush()
                else:
                    uploader.upload(chunk, index.find_loads(chunk))
                copied += waiting - began + time.perf_counter() - taken
                waited += taken - waiting
                if chunk is None:
                    break
        missing = [load for load in self._loads if load.remaining_bytes]
        if missing:
            raise ModelFileError(
                f"{missing[0].file} does not contain all of tensor {missing[0].name!r}", hint="download the file again"
            )
        return LoadTimes(
            reader.stats,
            waited,
            copied,
            uploader.pin_seconds,
            max(0, unread),
            uploader.decoded_bytes,
            uploader.decode_seconds,
        )
