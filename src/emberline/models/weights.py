"""Weights: a checkpoint's tensors, mapped from its files. Each is taken once, by name and shape; none may be left."""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from emberline.core.config import core_count
from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.tensorfile import TensorInfo
from emberline.kernels import ops
from emberline.models.shard import Shard
from emberline.unweight.codec import Codec, codec_of
from emberline.unweight.tensor import CodedTensor, check_raw, is_coded

COMPARED = 16 << 20  # elements compared at once
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Weights:
    device = torch.device("cpu")  # where its tensors are
    packed = False  # whether matrices are kept in 12 bits a weight

    @property
    def decodes(self) -> bool:
        """Whether it reads packed files."""
        return self.device.type == "cpu"

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None, *, shard: Shard | None = None) -> None:
        """`shard`: only its part of each tensor is handed out."""
        self.checkpoint = checkpoint
        self.shard = shard or Shard()
        self.dtype = dtype  # of matrices; None: as in the file, but float16 widens, since no kernel reads it
        self.taken_bytes = 0  # in the dtype they are used in
        self._left = set(checkpoint.names())
        self._files: dict[Path, mmap.mmap] = {}

    def has(self, name: str) -> bool:
        return name in self._left

    def vector(self, name: str, size: int) -> Tensor:
        """Norms and biases are a copy in float32: they are small, and kernels add them to float32."""
        return self._take(name, self._view(name, (size,)).to(torch.float32, copy=True))

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """A view of the file unless it must be cast: pack or copy it, so that nothing depends on the file later."""
        view = self._view(name, (rows, columns))
        kept = torch.float32 if view.dtype == torch.float16 else view.dtype
        return self._take(name, view.to(self.dtype or kept))

    def stack(self, parts: Sequence[tuple[str, int]], columns: int, *, gated: bool = False) -> Tensor:
        """Matrices of so many rows each, one under the other. `gated`: a gate and its up, which a source for a device
        may interleave; here, packing does."""
        views = [self.matrix(name, rows, columns) for name, rows in parts]
        return views[0] if len(views) == 1 else torch.cat(views)

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, gated: bool = False) -> ops.PackedWeight:
        """A stack in the form that its kernel reads."""
        return ops.pack_linear(self.stack(parts, columns, gated=gated), gated=gated)

    def stack_vectors(self, parts: Sequence[tuple[str, int]]) -> Tensor:
        return torch.cat([self.vector(name, size) for name, size in parts])

    def table(self, name: str, rows: int, columns: int) -> Tensor | ops.PackedWeight:
        """A matrix whose rows are looked up. What nothing packs must not be a view of the file."""
        return self.matrix(name, rows, columns).clone()

    def drop_copy(self, name: str, original: str, rows: int, columns: int) -> bool:
        """Whether `name` only repeats `original`; then it counts as seen. Rare enough to read a matrix twice."""
        ours, other = self._view(original, (rows, columns)), self._view(name, (rows, columns))
        dtype, step = self.dtype or ours.dtype, max(1, COMPARED // max(1, columns))
        repeats = all(
            torch.equal(ours[at : at + step].to(dtype), other[at : at + step].to(dtype)) for at in range(0, rows, step)
        )
        if repeats:
            self._left.remove(name)
        return repeats

    def finish(self, ignorable: str) -> None:
        """`ignorable` is a pattern of whole names that checkpoints are known to carry without need."""
        strangers = sorted(name for name in self._left if not re.fullmatch(ignorable, name))
        if strangers:
            more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
            raise ModelFileError(
                f"{self.checkpoint.directory} has tensor {strangers[0][:120]!r}{more}, for which there is no use",
                hint="does its config.json belong to this model?",
            )

    def _take(self, name: str, tensor: Tensor) -> Tensor:
        assert name in self._left, f"{name} taken twice"
        self._left.remove(name)
        self.taken_bytes += tensor.nbytes
        return tensor

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        info = self.checkpoint.info(name)
        if self.shard.shape(name, info.shape) != shape:
            raise ModelFileError(
                f"tensor {name!r} in {info.file} has the shape {info.shape}; config.json asks for {shape}"
            )
        if info.dtype not in DTYPES:
            hint = f"supported: {' '.join(DTYPES)}"
            raise UnsupportedModel(f"tensor {name!r} in {info.file} has the dtype {info.dtype}", hint=hint)
        if is_coded(info) and not self.decodes:
            raise UnsupportedModel(f"{info.file} is packed", hint="emberline unweight unpack")

    def _view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._check(name, shape)
        info = self.checkpoint.info(name)
        dtype = DTYPES[info.dtype]
        flat = self._decoded(name, info) if is_coded(info) else self._stored(name, info)
        aligned = flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()  # the format allows any offset
        return aligned.view(dtype).view(info.shape)[self.shard.cut(name, info.shape)]

    def _stored(self, name: str, info: TensorInfo) -> Tensor:
        flat = torch.frombuffer(self._map(info.file), dtype=torch.uint8, offset=info.offset, count=info.nbytes)
        if info.packed is not None:
            check_raw(name, info, flat.numpy(), self._codec)
        return flat

    def _decoded(self, name: str, info: TensorInfo) -> Tensor:
        stored = np.frombuffer(self._map(info.file), np.uint8, info.nbytes, info.offset)
        out = torch.empty(info.logical_bytes, dtype=torch.uint8)
        tensor = CodedTensor.open(name, info, lambda begin, end: stored[begin:end], self._codec)
        tensor.decode_all(stored, out.numpy(), self._pool)
        return out

    @cached_property
    def _codec(self) -> Codec:
        return codec_of(ops.describe().library)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(core_count(), "decoder")

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._files:
            try:
                with file.open("rb") as f:
                    # Copy-on-write only because torch wants a writable buffer; nobody writes.
                    self._files[file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as e:
                raise ModelFileError(f"cannot read {file}: {e}") from e
        return self._files[file]
