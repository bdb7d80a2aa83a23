"""`emberline doctor`: the plan of a GPU's memory before anything is loaded, and what it says of the GPU itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from emberline.bench.gpu.model import LLAMA_8B
from emberline.cli import doctor
from emberline.cli.__main__ import main
from emberline.cli.doctor_gpu import DetectedGPU
from emberline.engine import memory
from emberline.engine.memory import kv_token_bytes, plan_memory, weight_bytes
from emberline.engine.ranks.layout import Layout
from emberline.hub.pull import checkpoint_path
from emberline.hub.tensorfile import DTYPE_BYTES, write_tensors
from emberline.kernels.cuda import nvrtc
from emberline.kv import mooncake
from emberline.models.config import ModelConfig
from emberline.models.shard import Shard
from emberline.models.weight_dtype import FIRST_MATRIX_NAMES

H200 = DetectedGPU("NVIDIA H200", 150_123_642_880, (9, 0))
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
Run = Callable[..., tuple[int, str]]


def write_model(directory: Path, dtype: str = "BF16") -> Path:
    """Its config is an 8B's; of its files, doctor reads sizes and dtypes only."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_8B))
    data = os.urandom(6 * DTYPE_BYTES[dtype])
    write_tensors(directory / "model.safetensors", {FIRST_MATRIX_NAMES[0]: (dtype, (2, 3))}, [data])
    return directory


def write_fp8_model(directory: Path) -> Path:
    """Like the other one, with its matrices in fp8."""
    write_model(directory)
    (directory / "config.json").write_text(json.dumps({**LLAMA_8B, "quantization_config": FP8}))
    name, file = FIRST_MATRIX_NAMES[0], directory / "model.safetensors"
    file.unlink()
    write_tensors(file, {f"{name}_scale_inv": ("F32", (1, 1)), name: ("F8_E4M3", (2, 3))}, [bytes(10)])
    return directory


def write_whole_model(directory: Path, is_fp8: bool) -> Path:
    """All tensors of an 8B model, with their real shapes, in a sparse file without data."""
    config = LLAMA_8B | ({"quantization_config": FP8} if is_fp8 else {})
    hidden, width, kv = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"] * 128
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (config["vocab_size"], hidden))
    matrices = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    matrices |= {"self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    matrices |= {"mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width)}
    header: dict[str, Any] = {}
    end = 0

    def add(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        nonlocal end
        begin, end = end, end + prod(shape) * {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}

    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (hidden,)
        for name, (rows, columns) in matrices.items():
            add(f"model.layers.{layer}.{name}.weight", "F8_E4M3" if is_fp8 else "BF16", (rows, columns))
            if is_fp8:
                add(f"model.layers.{layer}.{name}.weight_scale_inv", "F32", (rows // 128, columns // 128))
    for name, shape in shapes.items():
        add(name, "BF16", shape)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """On a machine with the given GPU, or with none."""

    monkeypatch.setattr(mooncake, "check_mooncake_usable", lambda: None)  # starts a process

    def go(*arguments: object, gpu: DetectedGPU | None = None, num_gpus: int = 1) -> tuple[int, str]:
        monkeypatch.setattr(doctor, "detect_gpus", lambda: [] if gpu is None else [gpu] * num_gpus)
        monkeypatch.setattr(doctor, "_check_kernels", lambda: iter(()))  # builds; not what is tested here
        monkeypatch.setattr(doctor, "_check_software", lambda: iter(()))
        code = main(["doctor", *map(str, arguments)])
        return code, capsys.readouterr().out

    return go


def kv_tokens(output: str) -> int:
    found = re.search(r"^ok    kv cache .*: (\d+) tokens", output, re.MULTILINE)
    assert found, output
    return int(found[1])


def test_memory_plan_equals_engine_plan(run: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    code, output = run("--model", model, "--gpu-memory", "141G")
    expected = plan_memory(
        ModelConfig.from_hf(LLAMA_8B), 141 << 30, dtype_bytes=2, kv_dtype_bytes=2, block_size=64, max_running=256,
        max_batch_tokens=8192, max_context=131072,
    )  # fmt: skip
    assert code == 0 and "!!" not in output
    for name, size in expected.named_sizes():
        assert re.search(rf"^ok    {name} +{size / 2**30:.2f} GiB", output, re.MULTILINE), name
    assert kv_tokens(output) == expected.kv_tokens


def test_quantised_weights_are_planned_as_they_are_kept(run: Run, tmp_path: Path) -> None:
    code, output = run("--model", write_fp8_model(tmp_path / "m"))
    size = weight_bytes(ModelConfig.from_hf(LLAMA_8B), 2) / 1e6
    assert code == 0 and f"fp8 in the files, kept as bfloat16 in memory: {size:.0f} MB" in output
    plain, quantised = (
        run("--model", model, "--gpu-memory", "80G") for model in (write_model(tmp_path / "n"), tmp_path / "m")
    )
    part = 2 * 8192 * 4096  # of a matrix, which portable kernels dequantise for many rows
    # Tokens in place of the packed copy of the head, and of that part.
    head = (128256 * 4096 * 12.2 / 8 + part) / (2 * 32 * 8 * 128 * 2)
    assert kv_tokens(plain[1]) - kv_tokens(quantised[1]) == pytest.approx(head, rel=0.02)
    assert "kept as" not in plain[1] and ", fp8 0 MB" in quantised[1]
    assert kv_tokens(run("--model", tmp_path / "m", "--gpu-memory", "80G", "--weights", "plain")[1]) == kv_tokens(
        plain[1]
    )
    int4 = kv_tokens(run("--model", tmp_path / "n", "--gpu-memory", "80G", "--weights", "int4")[1])
    saved = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096) * (16 - 4.125) / 8
    unpacked = 2 * 2 * 2 * 14336 * 4096  # two matrices of gates and ups, which the Hopper kernels unpack for many rows
    saved -= unpacked
    assert int4 - kv_tokens(plain[1]) == pytest.approx(saved / (2 * 32 * 8 * 128 * 2) - head, rel=0.02)


@pytest.mark.parametrize("name", ["hf:org/name", "smollm2"])
def test_missing_model_is_not_downloaded(run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path))
    code, output = run("--model", name)
    assert code == 0 and f"{name} is not in the local cache" in output and f"emberline pull {name}" in output
    assert not list(tmp_path.rglob("*.safetensors"))


def test_embedder_that_is_downloaded_later_is_reported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path))
    code, output = run("--model", write_model(tmp_path / "m"))
    assert code == 0 and "the first embeddings request downloads its 83.5 MB" in output
    checkpoint_path("minilm", tmp_path).mkdir(parents=True)
    assert "minilm: sentence embedder MiniLM-L6" in run("--model", tmp_path / "m")[1]


def test_every_option_changes_plan(run: Run, tmp_path: Path) -> None:
    ask = ("--model", write_model(tmp_path / "m"), "--gpu-memory", "80G")
    base = kv_tokens(run(*ask)[1])
    for more in (("--max-running", 512), ("--max-batch-tokens", 32768), ("--dtype", "float32"), ("--transfer",)):
        assert kv_tokens(run(*ask, *more)[1]) < base, more
    assert kv_tokens(run(*ask, "--max-context", 4096)[1]) > base
    assert 2 * base * 0.98 < kv_tokens(run(*ask, "--kv-dtype", "float8")[1]) < 2 * base, "some is for chunks, as bf16"
    output = run(*ask, "--kv-dtype", "float8", "--max-context", 1000)[1]
    token = kv_token_bytes(ModelConfig.from_hf(LLAMA_8B), 1)
    assert f"{token / 1e3:.1f} kB per token, {token * 1000 / 1e6:.0f} MB per context of 1000 tokens (float8)" in output


def test_dtype_follows_files_and_float16_is_rounded(run: Run, tmp_path: Path) -> None:
    narrow = kv_tokens(run("--model", write_model(tmp_path / "bf16"), "--gpu-memory", "80G")[1])
    wide = write_model(tmp_path / "f32", "F32")
    assert kv_tokens(run("--model", wide, "--gpu-memory", "80G")[1]) < narrow / 2
    half = write_model(tmp_path / "f16", "F16")
    rounded = run("--model", half, "--gpu-memory", "80G")[1]
    assert kv_tokens(rounded) == narrow and "bfloat16 (rounded from float16) plain" in rounded
    exact = run("--model", half, "--gpu-memory", "80G", "--dtype", "float32")[1]
    assert kv_tokens(exact) < narrow / 2 and "float32 plain" in exact


@pytest.mark.parametrize("more", [(), ("--gpu-memory", "80G"), ("--dtype", "bfloat16")])
def test_unsupported_dtype_is_reported(run: Run, tmp_path: Path, more: tuple[str, ...]) -> None:
    code, output = run("--model", write_model(tmp_path / "m", "F8_E4M3"), *more)
    assert code == 1 and "has weights of dtype F8_E4M3" in output and "hint: supported dtypes: BF16 F16 F32" in output


def test_model_that_does_not_fit_fails_with_numbers(run: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    code, output = run("--model", model, "--gpu-memory", "16G")
    assert code == 1
    assert re.search(r"!!  gpu memory +the model does not fit .* 15.68 of 16.00 GiB .* weights 14.96", output)
    assert "hint: use a smaller model" in output
    code, output = run("--model", model, "--gpu-memory", "24G", "--max-batch-tokens", 65536)
    assert code == 1 and "hint: lower --max-batch-tokens" in output
    code, output = run("--model", model, "--gpu-memory", "141G", "--max-context", 200_000)
    assert code == 1 and "max_context must be from 1 to 131072 for this model, not 200000" in output


def test_limited_context_is_reported(run: Run, tmp_path: Path) -> None:
    code, output = run("--model", write_model(tmp_path / "m"), "--gpu-memory", "24G")
    assert code == 0
    assert re.search(rf"^--    context +limited to {kv_tokens(output)} tokens", output, re.MULTILINE)


def test_local_gpu_is_planned_by_default(run: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    code, here = run("--model", model, gpu=H200)
    assert code == 0
    assert re.search(r"^ok  gpu +NVIDIA H200, 139.81 GiB, compute capability 9.0: hopper kernels", here, re.M)
    requested = "--model", model, "--gpu-memory", H200.memory_bytes
    assert kv_tokens(here) == kv_tokens(run(*requested, "--kernels", "hopper", gpu=None)[1])
    # If the GPU is not known, the plan is enough for all kernels.
    assert kv_tokens(here) > kv_tokens(run(*requested, gpu=None)[1])
    assert kv_tokens(run(*requested, gpu=None)[1]) == kv_tokens(run(*requested, "--kernels", "portable")[1])
    _, other = run("--model", model, "--gpu-memory", "80G", gpu=H200)
    assert kv_tokens(other) < kv_tokens(here)


def test_missing_and_unsupported_gpu(run: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    code, output = run("--model", model)
    assert code == 0 and "gpu memory" not in output and "kB per token" in output
    code, output = run("--model", model, gpu=DetectedGPU("Tesla T4", 15 << 30, (7, 5)))
    assert code == 0 and "gpu memory" not in output
    reason = r"not supported, the CPU is used \(compute capability 7.5 is below 8.0\)"
    assert re.search(rf"^--  gpu +Tesla T4, .* capability 7.5: {reason}", output, re.M)


def test_each_gpu_is_named_with_its_kernels(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "m")
    _, output = run("--model", model, gpu=DetectedGPU("NVIDIA B200", 180 << 30, (10, 0)))
    assert re.search(r"^ok  gpu +NVIDIA B200, .* portable kernels \(.* the Hopper kernels need 9.0\)", output, re.M)
    assert re.search(r"^ok  gpu memory", output, re.M)
    monkeypatch.setattr(doctor, "_check_transports", lambda gpu: [])
    findings = list(doctor._check_gpus([DetectedGPU("NVIDIA L4", 22 << 30, (8, 9)), H200]))
    assert [(f.subject, f.detail.split(",")[0]) for f in findings[:2]] == [
        ("gpu 0", "NVIDIA L4"),
        ("gpu 1", "NVIDIA H200"),
    ]
    monkeypatch.setenv("EMBERLINE_KERNELS", "portable")
    assert "portable kernels (EMBERLINE_KERNELS is portable)" in run("--model", model, gpu=H200)[1]


def test_gpu_needs_compilers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise nvrtc.KernelCompileError("there is no libnvrtc")

    monkeypatch.setattr(nvrtc, "_library", nothing)
    monkeypatch.setitem(sys.modules, "triton", None)
    model = write_model(tmp_path / "m")
    code, output = run("--model", model, gpu=H200)
    assert code == 1
    assert re.search(r"^!!  triton +missing", output, re.M) and re.search(r"^!!  nvrtc +missing", output, re.M)
    code, output = run("--model", model)
    assert code == 0 and re.search(r"^--  triton +missing", output, re.M)


def test_findings_as_json(run: Run, tmp_path: Path) -> None:
    code, output = run("--model", write_model(tmp_path / "m"), "--gpu-memory", "80G", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(output)["findings"]}
    assert code == 0 and findings["weights"]["detail"].strip() == "14.96 GiB" and findings["model"]["is_ok"]
    code, output = run("--model", tmp_path / "m", "--gpu-memory", "16G", "--json")
    assert code == 1 and not json.loads(output)["findings"][-1]["is_ok"]


def test_transports_are_listed_and_broken_one_is_no_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "m")
    code, output = run("--model", model)
    assert code == 0 and re.search(r"^ok  transport tcp", output, re.M) and re.search(r"mooncake.* works", output)
    assert re.search(r"^--  transport cuda +needs a supported GPU", output, re.M)
    assert re.search(
        r"^ok  transport cuda +built in, for GPU workers on this machine", run("--model", model, gpu=H200)[1], re.M
    )
    _, output = run("--model", model, gpu=replace(H200, unreachable_gpus=(1, 3)))
    assert re.search(r"^--  transport cuda +GPU 0 cannot read the memory of GPU 1, 3$", output, re.M)
    monkeypatch.setattr(mooncake, "check_mooncake_usable", lambda: "it died of signal 11")
    code, output = run("--model", model)
    assert code == 0 and re.search(r"^--  transport mooncake .*does not work: it died of signal 11", output, re.M)
    monkeypatch.setattr(mooncake, "installed_distribution", lambda: None)
    code, output = run("--model", model)
    assert code == 0 and re.search(r"^--  transport mooncake +not installed", output, re.M)


def test_ranks_of_a_layout(run: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    code, output = run("--model", model, "--tp", "4", "--pp", "2")
    assert code == 0 and re.search(r"^--    ranks +can be divided on a CPU with --tp 1, 2, 4, 8", output, re.M)
    ranks = re.findall(r"^ok    (ranks \S+ to \S+) +(layers \d+ to \d+), each with (.*)$", output, re.M)
    heads = "8 of 32 heads and 2 of 8 KV heads"
    assert ranks == [("ranks 0 to 3", "layers 0 to 16", heads), ("ranks 4 to 7", "layers 17 to 31", heads)]
    code, output = run("--model", model, "--tp", "3")
    assert code == 1 and re.search(r"^!!    layout +tp is 3, but 32 attention heads", output, re.M)
    code, output = run("--model", model, "--pp", "2", "--gpus", "2xH200")
    assert code == 1 and "plans for all of these GPUs, so --tp and --pp cannot be set too" in output


def test_each_rank_is_planned_with_its_part_of_the_model(run: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    code, output = run("--model", model, "--tp", "2", "--pp", "2", gpu=H200, num_gpus=4)
    ranks = re.findall(r"^ok    (ranks \d to \d) +(\S+) GiB on each GPU$", output, re.M)
    assert code == 0 and [name for name, _ in ranks] == ["ranks 0 to 1", "ranks 2 to 3"]
    weights = [float(size) for size in re.findall(r"^ok      weights +(\S+) GiB$", output, re.M)]
    config = ModelConfig.from_hf(LLAMA_8B)
    stages = [Layout(2, 2).stage(rank, config).select_config(Shard(0, 2).shard_config(config)) for rank in (0, 2)]
    assert weights == pytest.approx([weight_bytes(stage, 2) / 2**30 for stage in stages], abs=0.01)
    counts = re.findall(r"^ok      kv cache +\S+ GiB: (\d+) tokens", output, re.M)
    spare = [float(size) for size in re.findall(r"^ok      spare +(\S+) GiB$", output, re.M)]
    kept_free = (1 - memory.DEFAULT_UTILIZATION) * H200.memory_bytes / 2**30
    assert min(spare) == pytest.approx(kept_free, abs=0.1) and max(spare) > kept_free + 0.1
    alone = kv_tokens(run("--model", model, gpu=H200)[1])
    assert len(set(counts)) == 1 and int(counts[0]) > 4 * alone  # all ranks have the same blocks
    requested = "--model", model, "--tp", "2", "--pp", "2", "--gpu-memory", H200.memory_bytes
    assert run(*requested, "--kernels", "hopper")[1].count(counts[0]) == 2
    assert run(*requested)[1].count(counts[0]) == 0  # the plan is enough for all kernels
    code, output = run("--model", model, "--tp", "2", gpu=H200)
    assert code == 1 and "2 ranks (tp 2, pp 1) need 2 GPUs, and this machine has 1" in output
    assert re.search(r"^ok    ranks 0 to 1 +\S+ GiB on each GPU$", output, re.M)
    code, output = run("--model", model, "--tp", "3", gpu=H200, num_gpus=4)
    assert code == 1 and "gpu memory" not in output  # the model cannot be divided so
    code, output = run("--model", model, "--pp", "2", "--gpu-memory", "8G")
    assert code == 1 and re.search(r"^!!  gpu memory +the model does not fit into GPU memory", output, re.M)


def test_draft_model_is_planned_on_the_first_rank(run: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    options = "--model", model, "--tp", "4", "--gpu-memory", H200.memory_bytes
    plain, (code, output) = run(*options)[1], run(*options, "--speculate", f"draft:{model}")
    assert code == 0 and re.findall(r"^ok    (ranks? .*?) +\S+ GiB on each GPU$", output, re.M) == [
        "rank 0",
        "ranks 1 to 3",
    ]
    first, others = (float(size) for size in re.findall(r"^ok      weights +(\S+) GiB$", output, re.M))
    whole = weight_bytes(ModelConfig.from_hf(LLAMA_8B), 2) / 2**30
    assert first - others == pytest.approx(whole, abs=0.02)
    counts = re.findall(r"^ok      kv cache +\S+ GiB: (\d+) tokens", output, re.M)
    (most,) = re.findall(r"^ok      kv cache +\S+ GiB: (\d+) tokens", plain, re.M)
    assert len(counts) == 2 and len(set(counts)) == 1 and int(counts[0]) < int(most)
    alone = "--model", model, "--gpu-memory", H200.memory_bytes
    (one,) = re.findall(r"^ok    weights +(\S+) GiB$", run(*alone, "--speculate", f"draft:{model}")[1], re.M)
    assert float(one) == pytest.approx(2 * whole, abs=0.02)
    for more, message in (
        (("--pp", "2", "--speculate", f"draft:{model}"), "speculate does not work with 2 ranks"),
        (("--tp", "2", "--speculate", "mtp"), "no head for multi-token prediction is known for llama"),
    ):
        code, output = run(*alone, *more)
        assert code == 1 and re.search(rf"^!!  gpu memory +.*{message}", output, re.M)
    code, output = run("--model", model, "--gpus", "2xH200", "--speculate", f"draft:{model}")
    assert code == 1 and f"so it cannot count draft:{model}" in output


@pytest.mark.parametrize("weights", ["auto", "fp8"])
def test_quantised_ranks_need_their_share_of_the_weights(run: Run, tmp_path: Path, weights: str) -> None:
    model = write_whole_model(tmp_path / "m", is_fp8=weights == "auto")
    _, output = run("--model", model, "--tp", "2", "--weights", weights, "--gpu-memory", "141G", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(output)["findings"]}
    config = ModelConfig.from_hf(LLAMA_8B)
    plain = weight_bytes(Shard(0, 2).shard_config(config), 2) / 2**30
    assert 0.5 * plain < float(findings["weights"]["detail"].split()[0]) < 0.75 * plain


@pytest.mark.parametrize(
    "wrong", [("--gpu-memory", "much"), ("--gpu-memory", "inf"), ("--gpu-memory", "-3G"), ("--max-running", "0")]
)
def test_invalid_options_are_refused(run: Run, wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run(*wrong)
    assert refused.value.code == 2


def test_memory_plan_needs_no_torch(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None
from emberline.cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", code, "doctor", "--model", str(write_model(tmp_path / "m")), "--gpu-memory", "80G"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1, done.stderr  # torch is missing, after all
    assert re.search(r"^!!  torch +missing", done.stdout, re.M)
    assert kv_tokens(done.stdout) > 400_000
