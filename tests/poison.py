"""A plugin, for the tests that name it: those of a GPU run without the others' conftest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody fills reads as NaN, or as bytes of ones."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", poisoned)
