"""`emberline doctor` says what booting does: the same checkpoint and options through both, on a pretended GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
import torch

from emberline.cli import doctor
from emberline.cli.__main__ import main
from emberline.core.config import EngineConfig
from emberline.core.errors import EmberlineError, UnsupportedModel
from emberline.engine import memory
from emberline.engine.boot import LoadedEngine, boot
from emberline.engine.gpu import boot as gpu_boot
from emberline.engine.gpu.device import HostDevice
from emberline.kernels import gpu, ops
from emberline.kernels.cpu.library import find_library
from emberline.models.config import ModelConfig
from emberline.unweight import model as unweight
from emberline.unweight.codec import select_weight_codec

MEMORY = 4 << 30
OPTIONS = (
    {},
    {"kv_dtype": "float8"},
    {"kv_dtype": "float32", "dtype": "bfloat16"},
    {"dtype": "float32"},
    {"max_context": 40, "max_running": 300, "max_batch_tokens": 1024, "block_size": 32},
    {"kv_memory": 1 << 20},
    {"kv_memory": 1 << 12, "kv_dtype": "float8", "block_size": 16},
)


@pytest.fixture
def booted(monkeypatch: pytest.MonkeyPatch) -> list[memory.MemoryPlan]:
    """What was planned by each boot that comes, on a GPU that is none."""
    plans: list[memory.MemoryPlan] = []
    plan = memory.plan_memory

    def watched(*arguments: object, **more: object) -> memory.MemoryPlan:
        plans.append(plan(*arguments, **more))  # type: ignore[arg-type]
        return plans[-1]

    monkeypatch.setattr(memory, "plan_memory", watched)
    monkeypatch.setattr(gpu_boot, "CudaDevice", HostDevice)
    monkeypatch.setattr(gpu_boot, "_device_memory", lambda device: MEMORY)
    monkeypatch.setattr(gpu_boot, "warm_up", lambda runner: 0.0)  # no kernel of the CPU reads float8
    monkeypatch.setattr(gpu_boot.gc, "freeze", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended")
    return plans


def model(directory: Path, dtype: torch.dtype) -> Path:
    return tiny.write(directory / str(dtype), dtype=dtype)


def serve(directory: Path, options: dict[str, object]) -> LoadedEngine:
    return boot(EngineConfig(model=str(directory), device="cuda", **options))  # type: ignore[arg-type]


def ask(capsys: pytest.CaptureFixture[str], directory: Path, options: dict[str, object]) -> tuple[int, str]:
    words = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    code = main(["doctor", "--model", str(directory), "--gpu-memory", str(MEMORY), *words])
    return code, capsys.readouterr().out


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_check_kernels", lambda: iter(()))
    monkeypatch.setattr(doctor, "_check_software", lambda: iter(()))
    monkeypatch.setattr(doctor, "_check_gpu", lambda gpu: iter(()))
    monkeypatch.setattr(doctor, "_check_transports", lambda gpu: iter(()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_they_plan_the_same(
    booted: list[memory.MemoryPlan],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    dtype: torch.dtype,
    options: dict[str, object],
) -> None:
    directory = model(tmp_path, dtype)
    loaded = serve(directory, options)
    code, output = ask(capsys, directory, options)
    assert code == 0, output
    done, told = booted
    assert told == done
    assert f": {done.kv_tokens} tokens" in output
    assert loaded.kv_tokens == done.kv_tokens and loaded.kv_bytes == done.kv_bytes
    assert loaded.device == "cuda" and loaded.kv_dtype.startswith(str(options.get("kv_dtype", "")))
    cut = re.search(r"limited to (\d+) tokens", output)
    context = re.search(r"per step, context (\d+)$", output, re.MULTILINE)
    assert context is not None
    assert loaded.max_context == int(cut[1] if cut else context[1])


def test_experts_are_refused_before_anything_is_loaded(
    booted: list[memory.MemoryPlan], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.write(tmp_path, "mixtral")
    monkeypatch.delattr(gpu_boot, "CudaDevice")  # nobody opens the device
    with pytest.raises(UnsupportedModel, match="only supported on the CPU") as refused:
        serve(directory, {})
    assert "--device cpu" in (refused.value.hint or "")
    code, output = ask(capsys, directory, {})
    assert code == 1 and "only supported on the CPU" in output and not booted


@pytest.mark.parametrize("odd", range(3))
def test_the_first_matrix_is_as_wide_as_its_widest_part(
    booted: list[memory.MemoryPlan], capsys: pytest.CaptureFixture[str], tmp_path: Path, odd: int
) -> None:
    tensors = tiny.tensors(tiny.CONFIGS["llama"], dtype=torch.bfloat16)
    tensors[memory.FIRST_MATRIX_NAMES[odd]] = tensors[memory.FIRST_MATRIX_NAMES[odd]].float()
    directory = tiny.write_tensors(tmp_path / "mixed", tiny.CONFIGS["llama"], tensors)
    serve(directory, {})
    ask(capsys, directory, {})
    assert booted[0] == booted[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("files", ["plain", "packed"])
@pytest.mark.parametrize("weights", ["auto", "plain", "packed", "both"])
def test_packed_weights(
    booted: list[memory.MemoryPlan],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: torch.dtype,
    files: str,
    weights: str,
) -> None:
    """In 12 bits where the files are packed or someone asks for it; never float32."""
    config = tiny.config("llama", vocab_size=128, hidden_size=64, intermediate_size=128, head_dim=32)
    directory = tiny.write(tmp_path / "plain", config, dtype=dtype)
    if files == "packed":
        unweight.pack(directory, tmp_path / "packed", select_weight_codec(find_library()), lambda _: None)
        directory = tmp_path / "packed"
    settled: list[int] = []
    beside: list[int] = []

    def keep_packed(weight: ops.PackedWeight) -> int:
        beside.append(memory.packed_bytes(weight.n, weight.k))
        return beside[-1]

    def settle(empty: ops.PackedWeight, values: torch.Tensor) -> int:
        settled.append(memory.packed_bytes(empty.n, empty.k))
        return settled[-1]

    monkeypatch.setattr(ops, "fill_weight", settle)
    monkeypatch.setattr(ops, "add_packed_copy", keep_packed)
    options: dict[str, object] = {"weights": weights}
    if weights in ("packed", "both") and dtype is torch.float32:
        with pytest.raises(EmberlineError, match="only bfloat16"):
            serve(directory, options)
        code, output = ask(capsys, directory, options)
        assert code == 1 and "only bfloat16" in output
        return
    loaded = serve(directory, options)
    code, output = ask(capsys, directory, options)
    packed = dtype is torch.bfloat16 and (weights == "packed" or (weights == "auto" and files == "packed"))
    assert code == 0 and booted[0] == booted[1]
    assert bool(settled) is packed and ("bfloat16 packed" in output) is packed
    assert bool(beside) is ("bfloat16 both plain and packed" in output) is (weights == "both")
    assert loaded.weight_bytes == booted[0].weights
    plan = memory.weight_bytes(ModelConfig.from_hf(config), dtype.itemsize, packed=packed)
    assert booted[0].weights == plan + sum(beside)


def test_a_cpu_refuses_packed_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = model(tmp_path, torch.bfloat16)
    with pytest.raises(EmberlineError, match="on a CPU it must be auto or plain"):
        boot(EngineConfig(model=str(directory), device="cpu", weights="packed"))
    assert main(["doctor", "--model", str(directory), "--weights", "packed"]) == 1
    assert "on a CPU it must be auto or plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [{"max_context": 65}, {"kv_memory": 8 << 30}, {"max_batch_tokens": 1 << 24}, {"block_size": 48}], ids=str
)
def test_they_refuse_the_same(
    booted: list[memory.MemoryPlan], capsys: pytest.CaptureFixture[str], tmp_path: Path, options: dict[str, object]
) -> None:
    directory = model(tmp_path, torch.bfloat16)
    with pytest.raises(EmberlineError) as refused:
        serve(directory, options)
    code, output = ask(capsys, directory, options)
    assert code == 1 and refused.value.message in output


def test_names_mean_the_same() -> None:
    assert {name: dtype.itemsize for name, dtype in gpu_boot.KV_DTYPES.items()} == memory.DTYPE_BYTES


def test_the_plan_knows_how_much_of_a_head_is_unpacked_at_a_time() -> None:
    assert memory.MAX_UNPACKED_WEIGHTS == gpu.MAX_UNPACKED_WEIGHTS


def test_blocks_on_their_way_elsewhere_have_their_place(
    booted: list[memory.MemoryPlan], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = model(tmp_path, torch.bfloat16)
    serve(directory, {"kv_host_memory": 64 << 20}).engine.close()
    for flags in ((), ("--tiers",), ("--tiers", "--transfer")):
        assert main(["doctor", "--model", str(directory), "--gpu-memory", str(MEMORY), *flags]) == 0
    done, plain, tiers, both = booted
    assert tiers == done
    assert plain.scratch < tiers.scratch < both.scratch and plain.kv_tokens > tiers.kv_tokens > both.kv_tokens
