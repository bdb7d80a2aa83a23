"""InputStaging: writes a step's inputs to a pinned buffer and copies them to the device at once.

The device has one buffer, so a captured step finds its inputs at the same addresses. The host has a ring of buffers,
since a copy may still be running when the inputs of the next step are written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from emberline.engine.gpu.device import Device, DeviceEvent

ALIGN_BYTES = 128
RING_BUFFERS = 3
MAX_CACHED_VIEWS = 4096
DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.float32): torch.float32,
}


class StagedInputs:
    """The inputs of one step. Arrays of equal shapes, put in the same order, get the same addresses."""

    def __init__(self, staging: InputStaging, index: int) -> None:
        self._staging, self._index = staging, index
        self._host = staging.host_buffers[index]
        self._bytes = staging.host_arrays[index]
        self._end = 0

    def put(self, values: np.ndarray) -> Tensor:
        """Write the values to the staging buffer; return the device tensor that contains them after `send`."""
        begin, end = self._end, self._end + values.nbytes
        if end > len(self._bytes):  # only with penalties over very long texts, so an extra copy is acceptable
            return torch.from_numpy(values).to(self._staging.device.device)
        self._bytes[begin:end] = values.reshape(-1).view(np.uint8)
        self._end = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        return self._staging.view(begin, end, values.dtype, values.shape)

    def send(self) -> None:
        self._staging.device[: self._end].copy_(self._host[: self._end], non_blocking=True)
        self._staging.mark_sent(self._index)


class InputStaging:
    def __init__(self, size: int, device: Device, num_buffers: int = RING_BUFFERS) -> None:
        """`num_buffers`: buffers on the host. If all are in use, the host waits until the oldest has been copied."""
        self._stream = device.step_stream
        self.device = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        self.host_buffers = [device.allocate_pinned(size) for _ in range(num_buffers)]
        self.host_arrays = [host.numpy() for host in self.host_buffers]
        self._sent_events: list[DeviceEvent | None] = [None] * num_buffers
        self._next_index = 0
        self._views: dict[tuple[object, ...], Tensor] = {}

    def new_inputs(self) -> StagedInputs:
        index = self._next_index
        self._next_index = (index + 1) % len(self.host_buffers)
        if (sent := self._sent_events[index]) is not None:
            sent.wait()  # has usually passed, unless the host is a whole ring ahead
        return StagedInputs(self, index)

    def mark_sent(self, buffer_index: int) -> None:
        self._sent_events[buffer_index] = self._stream.record_event()

    def view(self, begin: int, end: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Tensor:
        """Return bytes [begin, end) of the device's buffer as a tensor.

        The returned tensors are cached, because most steps use the same parts of the buffer."""
        key = begin, dtype, shape
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_CACHED_VIEWS:
                self._views.clear()
            view = self._views[key] = self.device[begin:end].view(DTYPES[dtype]).view(shape)
        return view

    def forget_views(self) -> None:
        """Drop the tensors that `view` cached, because the device's buffer will move to another address."""
        self._views.clear()


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor in pinned memory, which is complete when a later event of the stream has passed."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
