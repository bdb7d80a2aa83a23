"""KVCache: the memory of keys and values. One tensor holds the keys of all layers and blocks, a second the values.

If the values are parts of the keys, as in multi-head latent attention, there is no second tensor. StateCache is the
memory of recurrent layers, which have states instead of keys and values.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.region import HostRegion
from emberline.kv.transfer.shm import SharedSegment


@dataclass(frozen=True, slots=True)
class KVShape:
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    values_in_keys: bool = False  # whether values are parts of the keys, so that the cache has only keys

    @property
    def num_tensors(self) -> int:
        """The number of tensors of a cache: 2 for keys and values, 1 for keys that contain the values."""
        return 1 if self.values_in_keys else 2

    @property
    def block_bytes(self) -> int:
        return self.num_tensors * self.layers * self.kv_heads * self.head_dim * self.block_size * self.dtype.itemsize

    def layout(self, model: str, *, transposed_keys: bool = True, groups: str = "") -> KVLayout:
        """Return the memory layout for KV transfer between workers.

        A CPU cache stores keys transposed, a GPU cache does not. `groups`: the name of the model's LayerGroups.
        """
        item, dtype = self.dtype.itemsize, str(self.dtype).removeprefix("torch.")
        width = self.head_dim * item
        turned = item if transposed_keys else 0
        return KVLayout(
            model,
            self.layers,
            self.num_tensors,
            self.kv_heads,
            self.block_size,
            width,
            dtype,
            turned=turned,
            groups=groups,
        )


class KVCache:
    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        device: str = "cpu",
        *,
        segment: SharedSegment | None = None,
        region: HostRegion | None = None,
    ) -> None:
        """Allocate the cache, or place it in `segment`, a shared memory segment, or in `region`, other shared memory.

        `segment` and `region` have exactly the needed size."""
        dims = (shape.layers, num_blocks, shape.kv_heads, shape.block_size, shape.head_dim)
        self.shape = shape
        self.num_blocks = num_blocks
        self.segment = segment
        region = region if segment is None else segment.region
        if region is None:
            parts = [_zeroed_tensor(dims, shape.dtype, device) for _ in range(shape.num_tensors)]
        else:
            assert region.blocks == num_blocks
            parts = [torch.frombuffer(part, dtype=shape.dtype).view(dims) for part in region.parts]
        # Values that are parts of the keys are read from there: the tensor of values has no elements.
        self.keys, self.values = parts[0], parts[0][..., :0] if shape.values_in_keys else parts[1]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the cache: keys and values, or only keys that contain the values."""
        return [self.keys] if self.shape.values_in_keys else [self.keys, self.values]

    def free_pages(self) -> None:
        """Give the memory of a cache on a CPU back to the system. All its values are zero afterwards."""
        _free_pages(self.tensors)


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of the states that recurrent layers keep for a sequence. States are in float32."""

    layers: int
    conv_rows: int  # last inputs of a convolution
    conv_channels: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def slot_bytes(self) -> int:
        values = self.conv_rows * self.conv_channels + self.heads * self.key_dim * self.value_dim
        return self.layers * values * torch.float32.itemsize

    @property
    def draft_width(self) -> int:
        """How many numbers the delta rule of a layer keeps for each drafted token.

        DeltaLayer.draft_width is the same number."""
        return self.conv_channels + 2 * self.heads

    @property
    def draft_bytes(self) -> int:
        """The bytes that all layers keep for each drafted token, in float32."""
        return self.layers * (self.conv_channels + self.draft_width) * torch.float32.itemsize


class StateCache:
    """The memory of the states of recurrent layers. A slot holds the states of one sequence in all layers.

    For speculative decoding, there is also room for the layers' inputs (rows) for up to `max_draft` drafted tokens of
    each of `num_draft_slots` sequences."""

    def __init__(
        self,
        shape: StateShape,
        num_slots: int,
        device: str = "cpu",
        *,
        has_padding_slot: bool = False,
        num_draft_slots: int = 0,
        max_draft: int = 0,
        draft_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`has_padding_slot`: allocate one more slot, which the padding rows of captured CUDA graphs overwrite.

        `draft_dtype`: the dtype of the rows of drafted tokens: float32 on a CPU, the model's dtype on a GPU."""
        self.shape, self.num_slots, self.max_draft = shape, num_slots, max_draft
        slots = num_slots + has_padding_slot
        conv = shape.layers, slots, shape.conv_rows, shape.conv_channels
        matrices = shape.layers, slots, shape.heads, shape.key_dim, shape.value_dim
        drafts = shape.layers, num_draft_slots, max_draft
        self.conv, self.matrices = (_zeroed_tensor(dims, torch.float32, device) for dims in (conv, matrices))
        self.draft_conv = _zeroed_tensor((*drafts, shape.conv_channels), draft_dtype, device)
        self.draft_rule = _zeroed_tensor((*drafts, shape.draft_width), draft_dtype, device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.conv, self.matrices, self.draft_conv, self.draft_rule]

    def free_pages(self) -> None:
        """Give the memory of the states on a CPU back to the system. All values are zero afterwards."""
        _free_pages(self.tensors)

    @property
    def num_bytes(self) -> int:
        return self.matrices.shape[1] * self.shape.slot_bytes + self.draft_conv.nbytes + self.draft_rule.nbytes

    @property
    def padding_slot(self) -> int:
        assert self.matrices.shape[1] > self.num_slots, "there is no slot for padding"
        return self.num_slots

    def copy_slot(self, source: int, target: int) -> None:
        self.conv[:, target] = self.conv[:, source]
        self.matrices[:, target] = self.matrices[:, source]


def _zeroed_tensor(dims: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return a tensor of zeros, because kernels may read masked positions and must not find NaN there.

    On a CPU the memory comes from mmap, so that pages that were never written use no physical memory.
    """
    if device != "cpu" or not math.prod(dims):
        return torch.zeros(dims, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(dims) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(dims)


def _free_pages(tensors: list[Tensor]) -> None:
    """Free the physical memory of tensors that `_zeroed_tensor` allocated on a CPU. Only Linux can."""
    if not hasattr(mmap, "MADV_REMOVE"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    for tensor in tensors:
        address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        if tensor.numel() and library.madvise(address, size, mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), f"{tensor.nbytes} bytes of a cache cannot be freed")
