"""select_bytes: copies a rank's part of a stored tensor's bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.hub.tensorfile import TensorSlice


def select_bytes(flat: Tensor, stored_slice: TensorSlice | None) -> Tensor:
    """Return the part of a tensor's bytes that `stored_slice` describes, as a copy; None: return `flat` itself."""
    if stored_slice is None:
        return flat
    records = flat.view(-1, stored_slice.record_bytes)[stored_slice.first_record :][: stored_slice.num_records]
    return torch.cat([records[:, begin:end] for begin, end in stored_slice.ranges], dim=1).flatten()
