"""A GPU that cannot be used is named with the reason; nothing computes on the CPU silently."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.gpu_kernels import KERNELS_VARIABLE, GPUKernels
from emberline.engine import boot, boot_checks
from emberline.engine.gpu import device, portable_limits
from emberline.kernels import gpu_choice, ops


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)

    def pretend(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)

    return pretend


def test_old_gpu_is_named_when_the_cpu_computes(pretend_gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    pretend_gpu("Tesla T4", (7, 5))
    config = EngineConfig.build("m")
    assert not boot.runs_on_gpu(config)
    with caplog.at_level(logging.WARNING):
        device.warn_of_unused_gpu()
    reason = "reason='compute capability 7.5 is below 8.0'"
    assert f"the GPU cannot be used: gpu='Tesla T4' capability=7.5 {reason}" in caplog.text
    with pytest.raises(InvalidRequest, match=r"device is cuda, but the GPU Tesla T4 cannot be used: .* below 8\.0"):
        device.CudaDevice()


def test_missing_triton_is_the_reason(pretend_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu("NVIDIA L4", (8, 9))
    assert device.can_use_gpu()
    monkeypatch.setattr(gpu_choice, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    found = gpu_choice.describe_gpu()
    assert found is not None and found.kernels == ("", "the package triton is not installed")
    assert not device.can_use_gpu()


def test_driver_without_a_visible_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "NVIDIA_DRIVER", SimpleNamespace(exists=lambda: True))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device.warn_of_unused_gpu()
    assert f"the GPU cannot be used: reason='{device.explain_missing_gpu()}'" in caplog.text
    caplog.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user hides the GPU
    device.warn_of_unused_gpu()
    assert not caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exact": True}, "exact is set, but the portable kernels"),
        ({"weights": "both"}, "weights is both, but the portable kernels"),
        ({"kv_dtype": "float8"}, r"kv_dtype is float8, which needs compute capability 8\.9 or later; the GPU has 8\.6"),
    ],
)
def test_unsupported_settings_are_refused(
    pretend_gpu: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    pretend_gpu("NVIDIA A10", (8, 6))
    monkeypatch.setattr(gpu_choice, "_selected", GPUKernels("portable", "compute capability 8.6"))
    config, gpu = EngineConfig.build("m", **settings), torch.device("cuda")
    with pytest.raises(InvalidRequest, match=message):
        portable_limits.reject_unsupported_settings(config, gpu)
    portable_limits.reject_unsupported_settings(EngineConfig.build("m"), gpu)
    with pytest.raises(InvalidRequest, match="weights is packed, but the portable kernels cannot read packed experts"):
        packed = EngineConfig.build("m", weights="packed")
        portable_limits.reject_unsupported_settings(packed, gpu, has_packed_experts=True)
    monkeypatch.setattr(gpu_choice, "_selected", GPUKernels("hopper", "compute capability 9.0"))
    portable_limits.reject_unsupported_settings(config, gpu)
    assert ops.has_hopper_kernels()


def test_kernels_of_a_gpu_are_refused_on_a_cpu() -> None:
    with pytest.raises(InvalidRequest, match="kernels is portable, but the CPU computes"):
        boot_checks.check_cpu_settings(EngineConfig.build("m", device="cpu", kernels="portable"))


def test_launch_uses_fewer_stages_where_shared_memory_is_small() -> None:
    jit = pytest.importorskip("emberline.kernels.triton.jit")
    tried: list[int] = []

    def run(*arguments: Any, num_stages: int = 3) -> str:
        tried.append(num_stages)
        if num_stages > arguments[0]:
            raise jit.OutOfResources(200_000, 100_000, "shared memory")
        return "launched"

    kernel = jit._fit_to_device(SimpleNamespace(run=run))
    assert kernel.run(2, num_stages=4) == "launched" and tried == [4, 3, 2]
    with pytest.raises(jit.OutOfResources):
        kernel.run(0, num_stages=2)
