"""Kernels are chosen by compute capability, by the setting, and by the environment, with a reason."""

from __future__ import annotations

import pytest

from emberline.core.errors import InvalidRequest
from emberline.core.gpu_kernels import KERNELS_VARIABLE, choose_gpu_kernels


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("capability", "name"),
    [((7, 5), ""), ((8, 0), "portable"), ((8, 6), "portable"), ((8, 9), "portable"), ((9, 0), "hopper")]
    + [((10, 0), "portable"), ((10, 3), "portable"), ((12, 0), "portable")],
)
def test_compute_capability_decides(capability: tuple[int, int], name: str) -> None:
    kernels = choose_gpu_kernels(capability)
    assert kernels.name == name and kernels.is_usable == (name != "")
    assert f"compute capability {capability[0]}.{capability[1]}" in kernels.reason


def test_portable_kernels_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_gpu_kernels((9, 0), "portable") == ("portable", "kernels is portable")
    assert choose_gpu_kernels((9, 0), "hopper").name == "hopper"
    monkeypatch.setenv(KERNELS_VARIABLE, "portable")
    assert choose_gpu_kernels((9, 0)) == ("portable", "EMBERLINE_KERNELS is portable")
    assert choose_gpu_kernels((9, 0), "hopper").name == "hopper"


def test_request_that_the_gpu_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match=r"kernels is hopper, but the GPU has compute capability 8\.6"):
        choose_gpu_kernels((8, 6), "hopper")
    assert not choose_gpu_kernels((7, 0), "portable").is_usable
    monkeypatch.setenv(KERNELS_VARIABLE, "fast")
    with pytest.raises(InvalidRequest, match=r"EMBERLINE_KERNELS is 'fast'; it must be one of auto, hopper, portable"):
        choose_gpu_kernels((9, 0))
