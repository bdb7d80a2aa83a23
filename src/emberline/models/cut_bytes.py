"""select_bytes: copies a rank's part of a stored tensor's bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.hub.tensorfile import TensorCut


def select_bytes(flat: Tensor, cut: TensorCut | None) -> Tensor:
    """Return the part of a tensor's bytes that `cut` describes, as a copy; `flat` itself if `cut` is None."""
    if cut is None:
        return flat
    records = flat.view(-1, cut.record_bytes)[cut.first_record :][: cut.num_records]
    return torch.cat([records[:, begin:end] for begin, end in cut.ranges], dim=1).flatten()
