"""Compiles kernels that GPU tests will launch in parallel: one after the other takes minutes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from shared_tests import read_share
from triton.runtime.jit import JITFunction

from emberline.kernels.cuda.driver import compile_in_parallel
from emberline.kernels.cuda.kernel_modules import list_modules
from emberline.kernels.triton import jit


def is_alone() -> bool:
    """Return whether this process runs all tests. Otherwise each process compiles what its own tests launch."""
    return read_share()[1] == 1 and "PYTEST_XDIST_WORKER" not in os.environ


def compile_cuda_kernels(*sources: str) -> None:
    """Compile all kernels that these modules of emberline.kernels.cuda launch, unless the cache has them."""
    with compile_in_parallel(*list_modules(*sources)):
        pass


@contextmanager
def compiling_only(*modules: ModuleType) -> Iterator[None]:
    """Compile the Triton kernels of these modules that are launched inside the block, without running them.

    So nothing may be read that they would have written. Compilation is complete when the block ends."""
    with pytest.MonkeyPatch.context() as patch, jit.compile_in_parallel():
        for kernel in {each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)}:
            patch.setattr(kernel, "run", partial(_compile, kernel.run))
        yield


def _compile(run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return run(*arguments, **options | {"warmup": True})
