"""`emberline doctor` and boot agree on plans and errors, on a simulated GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
import tiny_families
import torch

from emberline.cli import doctor
from emberline.cli.__main__ import main
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, InvalidRequest, UnsupportedModel
from emberline.core.gpu_kernels import GPUKernels
from emberline.engine import memory
from emberline.engine.boot import boot
from emberline.engine.engine_group_boot import WeightEstimate
from emberline.engine.gpu import boot as gpu_boot
from emberline.engine.gpu import planned_model
from emberline.engine.gpu.device import HostDevice
from emberline.engine.loaded_engine import LoadedEngine
from emberline.kernels import ops
from emberline.kernels.cpu.library import find_library
from emberline.models.config import ModelConfig
from emberline.models.weight_dtype import FIRST_MATRIX_NAMES
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
def boot_plans(monkeypatch: pytest.MonkeyPatch) -> list[memory.MemoryPlan]:
    """Return the list of memory plans of all later boots, on a simulated GPU."""
    plans: list[memory.MemoryPlan] = []
    plan = memory.plan_memory

    def record_plan(*arguments: object, **more: object) -> memory.MemoryPlan:
        plans.append(plan(*arguments, **more))  # type: ignore[arg-type]
        return plans[-1]

    monkeypatch.setattr(memory, "plan_memory", record_plan)
    monkeypatch.setattr(gpu_boot, "CudaDevice", lambda kernels: HostDevice())
    monkeypatch.setattr(gpu_boot, "measure_memory", lambda device: (MEMORY, 0))
    monkeypatch.setattr(gpu_boot, "warm_up", lambda runner: 0.0)  # no kernel of the CPU reads float8
    monkeypatch.setattr(gpu_boot.gc, "freeze", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended")
    monkeypatch.setattr(ops, "selected_gpu_kernels", lambda: GPUKernels("hopper", "pretended"))
    return plans


def model(directory: Path, dtype: torch.dtype) -> Path:
    return tiny.write(directory / str(dtype), dtype=dtype)


def serve(directory: Path, options: dict[str, object]) -> LoadedEngine:
    return boot(EngineConfig.build(model=str(directory), device="cuda", **options))  # type: ignore[arg-type]


def run_doctor(capsys: pytest.CaptureFixture[str], directory: Path, options: dict[str, object]) -> tuple[int, str]:
    words = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    code = main(["doctor", "--model", str(directory), "--gpu-memory", str(MEMORY), *words])
    return code, capsys.readouterr().out


@pytest.fixture(autouse=True)
def skip_slow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_check_kernels", lambda: iter(()))
    monkeypatch.setattr(doctor, "_check_software", lambda: iter(()))
    monkeypatch.setattr(doctor, "_check_gpus", lambda gpus: iter(()))
    monkeypatch.setattr(doctor, "_check_transports", lambda gpu: iter(()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_doctor_and_boot_make_the_same_plan(
    boot_plans: list[memory.MemoryPlan],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    dtype: torch.dtype,
    options: dict[str, object],
) -> None:
    directory = model(tmp_path, dtype)
    loaded = serve(directory, options)
    code, output = run_doctor(capsys, directory, options)
    assert code == 0, output
    boot_plan, doctor_plan = boot_plans
    assert doctor_plan == boot_plan
    assert f": {boot_plan.kv_tokens} tokens" in output
    assert loaded.kv_tokens == boot_plan.kv_tokens and loaded.kv_bytes == boot_plan.kv_bytes
    assert loaded.device == "cuda" and loaded.kv_dtype.startswith(str(options.get("kv_dtype", "")))
    cut = re.search(r"limited to (\d+) tokens", output)
    context = re.search(r"per step, context (\d+)$", output, re.MULTILINE)
    assert context is not None
    assert loaded.max_context == int(cut[1] if cut else context[1])


@pytest.mark.parametrize("options", [{}, {"kv_memory": 1 << 20, "block_size": 16}, {"kv_memory": 1 << 16}], ids=str)
def test_doctor_and_boot_count_groups_of_layers(
    boot_plans: list[memory.MemoryPlan], capsys: pytest.CaptureFixture[str], tmp_path: Path, options: dict[str, object]
) -> None:
    config = tiny_families.gemma3(max_position_embeddings=4096)
    directory = tiny.write_tensors(tmp_path, config, tiny_families.tensors(config))
    loaded = serve(directory, options | {"max_batch_tokens": 64})
    code, output = run_doctor(capsys, directory, options | {"max_batch_tokens": 64})
    assert code == 0, output
    boot_plan, doctor_plan = boot_plans
    assert doctor_plan == boot_plan and boot_plan.groups == loaded.engine.groups
    blocks, groups = loaded.engine.kv.num_blocks, len(loaded.engine.groups.windows)
    assert groups > 1 and boot_plan.kv_blocks == blocks
    assert f"{blocks} blocks in {groups} groups of layers" in output
    assert f"{loaded.kv_tokens} tokens of short requests" in output
    assert loaded.kv_tokens == blocks // groups * boot_plan.block_size
    assert loaded.max_context == min(4096, boot_plan.max_request_tokens)
    assert (f"limited to {loaded.max_context} tokens" in output) == (loaded.max_context < 4096)
    if not options:
        assert f"{loaded.engine.num_full_contexts:.1f} full contexts" in output


def test_doctor_counts_groups_of_layers_on_a_cpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a full context are those that a request of that length holds."""
    config = tiny_families.gemma3(max_position_embeddings=4096)
    directory = tiny.write_tensors(tmp_path, config, tiny_families.tensors(config))
    monkeypatch.setattr(doctor, "detect_gpus", list)
    assert main(["doctor", "--model", str(directory), "--block-size", "16"]) == 0
    bytes_per_block = 2 * 2 * 8 * 16 * 4  # keys and values, heads, head size, tokens, float32
    blocks = 256 + 3 * (1 + 1)
    text = f"{blocks * bytes_per_block / 1e6:.0f} MB per context of 4096 tokens in 4 groups of layers (float32)"
    assert text in capsys.readouterr().out


def test_experts_in_both_forms_are_rejected_before_loading(
    boot_plans: list[memory.MemoryPlan],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tiny.write(tmp_path, "mixtral", dtype=torch.bfloat16)
    monkeypatch.delattr(gpu_boot, "CudaDevice")  # the device is not opened
    with pytest.raises(UnsupportedModel, match="the experts of mixtral are kept in one form") as refused:
        serve(directory, {"weights": "both"})
    assert "--weights packed" in (refused.value.hint or "")
    code, output = run_doctor(capsys, directory, {"weights": "both"})
    assert code == 1 and "the experts of mixtral are kept in one form" in output and not boot_plans


def test_float16_is_refused_on_a_gpu_and_planned_on_a_cpu(
    boot_plans: list[memory.MemoryPlan], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = model(tmp_path, torch.float16)
    with pytest.raises(InvalidRequest, match="float16, which the kernels of a GPU do not read") as refused:
        serve(directory, {"dtype": "float16"})
    assert "--dtype bfloat16" in (refused.value.hint or "")
    code, output = run_doctor(capsys, directory, {"dtype": "float16"})
    assert code == 1 and "kernels of a GPU do not read" in output and not boot_plans
    settings = EngineConfig.build(model=str(directory), device="cpu", dtype="float16", kv_memory=1 << 20)
    loaded = boot(settings)
    assert (loaded.numerics.dtype, loaded.kv_dtype, loaded.stored_dtype) == ("float16", "bfloat16", "float16")
    assert loaded.weight_bytes == WeightEstimate.from_config(settings).weight_bytes
    loaded.engine.close()


@pytest.mark.parametrize("odd", range(3))
def test_weight_dtype_is_the_widest_part_of_the_first_matrix(
    boot_plans: list[memory.MemoryPlan], capsys: pytest.CaptureFixture[str], tmp_path: Path, odd: int
) -> None:
    tensors = tiny.tensors(tiny.CONFIGS["llama"], dtype=torch.bfloat16)
    tensors[FIRST_MATRIX_NAMES[odd]] = tensors[FIRST_MATRIX_NAMES[odd]].float()
    directory = tiny.write_tensors(tmp_path / "mixed", tiny.CONFIGS["llama"], tensors)
    serve(directory, {})
    run_doctor(capsys, directory, {})
    assert boot_plans[0] == boot_plans[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("files", ["plain", "packed"])
@pytest.mark.parametrize("weights", ["auto", "plain", "packed", "both"])
def test_packed_weights_are_planned_and_kept(
    boot_plans: list[memory.MemoryPlan],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: torch.dtype,
    files: str,
    weights: str,
) -> None:
    """Weights have 12 bits if the files are packed or it is requested; float32 is never packed."""
    config = tiny.config("llama", vocab_size=128, hidden_size=64, intermediate_size=128, head_dim=32)
    directory = tiny.write(tmp_path / "plain", config, dtype=dtype)
    if files == "packed":
        unweight.pack_model(directory, tmp_path / "packed", select_weight_codec(find_library()), lambda _: None)
        directory = tmp_path / "packed"
    settled: list[int] = []
    beside: list[int] = []

    def keep_packed(weight: ops.PackedWeight) -> int:
        beside.append(memory.max_packed_bytes(weight.n, weight.k))
        return beside[-1]

    def settle(empty: ops.PackedWeight, values: torch.Tensor) -> int:
        settled.append(memory.max_packed_bytes(empty.n, empty.k))
        return settled[-1]

    monkeypatch.setattr(ops, "fill_weight", settle)
    monkeypatch.setattr(ops, "add_packed_copy", keep_packed)
    options: dict[str, object] = {"weights": weights}
    if weights in ("packed", "both") and dtype is torch.float32:
        with pytest.raises(EmberlineError, match="only bfloat16"):
            serve(directory, options)
        code, output = run_doctor(capsys, directory, options)
        assert code == 1 and "only bfloat16" in output
        return
    loaded = serve(directory, options)
    code, output = run_doctor(capsys, directory, options)
    packed = dtype is torch.bfloat16 and (weights == "packed" or (weights == "auto" and files == "packed"))
    assert code == 0 and boot_plans[0] == boot_plans[1]
    assert bool(settled) is packed and ("bfloat16 packed" in output) is packed
    assert bool(beside) is ("bfloat16 both plain and packed" in output) is (weights == "both")
    assert loaded.weight_bytes == boot_plans[0].weights
    plan = memory.weight_bytes(ModelConfig.from_hf(config), dtype.itemsize, packed=packed)
    assert boot_plans[0].weights == plan + sum(beside)


def test_cpu_rejects_packed_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = model(tmp_path, torch.bfloat16)
    with pytest.raises(EmberlineError, match="on a CPU it must be auto, plain, q4, q8"):
        boot(EngineConfig.build(model=str(directory), device="cpu", weights="packed"))
    assert main(["doctor", "--model", str(directory), "--weights", "packed"]) == 1
    assert "on a CPU it must be auto, plain, q4, q8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [{"max_context": 65}, {"kv_memory": 8 << 30}, {"max_batch_tokens": 1 << 24}, {"block_size": 48}], ids=str
)
def test_doctor_and_boot_reject_the_same_settings(
    boot_plans: list[memory.MemoryPlan], capsys: pytest.CaptureFixture[str], tmp_path: Path, options: dict[str, object]
) -> None:
    directory = model(tmp_path, torch.bfloat16)
    with pytest.raises(EmberlineError) as refused:
        serve(directory, options)
    code, output = run_doctor(capsys, directory, options)
    assert code == 1 and refused.value.message in output


def test_dtype_names_are_the_same_everywhere() -> None:
    assert {name: dtype.itemsize for name, dtype in planned_model.KV_DTYPES.items()} == memory.DTYPE_BYTES


def test_plan_reserves_buffers_for_copied_blocks(
    boot_plans: list[memory.MemoryPlan], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = model(tmp_path, torch.bfloat16)
    serve(directory, {"kv_host_memory": 64 << 20}).engine.close()
    for flags in ((), ("--tiers",), ("--tiers", "--transfer")):
        assert main(["doctor", "--model", str(directory), "--gpu-memory", str(MEMORY), *flags]) == 0
    boot_plan, plain, tiers, both = boot_plans
    assert tiers == boot_plan
    assert plain.scratch < tiers.scratch < both.scratch and plain.kv_tokens > tiers.kv_tokens > both.kv_tokens
