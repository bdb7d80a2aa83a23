"""The native kernels of this machine, for tests that compare them with plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from emberline.kernels import ops


@contextmanager
def native_backend() -> Iterator[None]:
    """Run the native kernels with two threads; skip the tests if the machine has no compiler."""
    backend = ops.start_backend(threads=2)
    if backend.library is None and "no C++ compiler" in backend.reason:
        pytest.skip(backend.reason)
    assert backend.library, backend.reason
    yield
    ops.start_backend(threads=2)
