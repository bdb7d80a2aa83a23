"""The Triton kernels without a GPU: what they compute, in Triton's interpreter, and that they compile for Hopper.

The interpreter is chosen when a kernel is declared, so those tests run in a process of their own, started by one here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rope_metadata import rope_metadata

triton = pytest.importorskip("triton")

import expert_cases  # noqa: E402
import triton_cases  # noqa: E402
from fast_interpreter import quicken_interpreter  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver, interpreter, jit  # noqa: E402
from triton_cases import BF16, F32, FP8  # noqa: E402

from emberline.kernels.arguments import AttentionInputs, AttentionLayer, AttentionMetadata  # noqa: E402
from emberline.kernels.cuda import expert_layer  # noqa: E402
from emberline.kernels.cuda.collectives import choose_norm_threads  # noqa: E402
from emberline.kernels.cuda.decode import DecodeScratch  # noqa: E402
from emberline.kernels.mixture import ClampedSwiGLU, Mixture, Routing, StackedExperts  # noqa: E402
from emberline.kernels.packed_weight import PackedWeight  # noqa: E402
from emberline.kernels.reference import ReferenceBackend  # noqa: E402
from emberline.kernels.triton import norm, router, routing  # noqa: E402
from emberline.kernels.triton.activation import gelu_mul, silu_mul  # noqa: E402
from emberline.kernels.triton.attention import paged_attention  # noqa: E402
from emberline.kernels.triton.decode import split_decode_attention  # noqa: E402
from emberline.kernels.triton.experts import run_routed_experts  # noqa: E402
from emberline.kernels.triton.norm import layer_norm, rms_norm  # noqa: E402
from emberline.kernels.triton.rope import rope_and_cache  # noqa: E402
from emberline.kernels.triton.token_gather import gather_tokens  # noqa: E402
from emberline.kernels.triton.widen import widen_blocks  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
CPU = "cpu"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@compiled
def test_all_in_the_interpreter() -> None:
    """Run the interpreter's tests of all files in one process, which takes two seconds to start."""
    files = [str(file) for file in Path(__file__).parent.glob("test_*.py") if "\n@interpreted\n" in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-k", "interpreter and not all", *files]
    # Plugins take most of the time in which pytest starts.
    without_plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    environment = {**os.environ, **without_plugins, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the interpreter, which does not round, multiplies bfloat16 as integers, and fails with numpy 2.4."""
    types = {"fp64": torch.float64, "fp32": F32, "bf16": BF16, "fp16": torch.float16, "fp8e4nv": FP8}
    bits = {"fp32": torch.int32, "bf16": torch.uint16, "fp16": torch.uint16, "fp8e4nv": torch.uint8}
    bits["fp64"] = torch.int64

    def convert(data: Any, source: Any, target: Any, _: object) -> Any:
        value = torch.from_numpy(np.array(data)).view(types[str(source)])
        return value.to(types[str(target)]).view(bits[str(target)]).numpy()

    dot = interpreter.InterpreterBuilder.create_dot

    def wide_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        if a.dtype.scalar == triton.language.bfloat16:
            a, b = (self.create_fp_to_fp(x, triton.language.float32, None) for x in (a, b))
        return dot(self, a, b, *more)

    multiply = interpreter.InterpreterBuilder.create_fmul

    def wide_multiply(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != triton.language.bfloat16:
            return multiply(self, a, b)
        wide = multiply(self, *(self.create_fp_to_fp(x, triton.language.float32, None) for x in (a, b)))
        return self.create_fp_to_fp(wide, triton.language.bfloat16, None)

    patch = interpreter._patch_lang_tensor

    def patch_more(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch_language = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        language = triton.language
        modules = [module for module in function.__globals__.values() if module is language or module is language.core]
        is_patched = not any(language.core.is_builtin(module.load) for module in modules)
        return interpreter._LangPatchScope() if is_patched else patch_language(function)

    quicken_interpreter(monkeypatch)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)  # else each call of a device function patches again
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_more)
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", wide_dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fmul", wide_multiply)


@interpreted
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("rows,columns", [(1, 64), (8, 100)])
def test_norm_in_the_interpreter(
    rounding: None, dtype: torch.dtype, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm, "MAX_GRID_WARPS", 3)  # some programs have three rows, some two
    triton_cases.check_norm(CPU, dtype, rows, columns)


@interpreted
@pytest.mark.parametrize("dtype,groups,width", [(BF16, 1, 100), (F32, 3, 20)])
def test_layer_norm_in_the_interpreter(rounding: None, dtype: torch.dtype, groups: int, width: int) -> None:
    triton_cases.check_layer_norm(CPU, dtype, 5, groups, width)


@interpreted
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("columns,group", [(2064, 16), (48, 16), (33, None)])
def test_silu_in_the_interpreter(rounding: None, dtype: torch.dtype, columns: int, group: int | None) -> None:
    triton_cases.check_silu(CPU, dtype, 3, columns, group)


@interpreted
@pytest.mark.parametrize(
    "dtype,cache,heads,rotary,normed,interleaved",
    [
        (F32, F32, (4, 2, 8), 8, False, False),
        (F32, BF16, (9, 3, 20), 12, True, False),
        (BF16, BF16, (6, 1, 16), 16, True, False),
        (BF16, FP8, (3, 3, 20), 20, False, False),
        (F32, FP8, (2, 1, 10), 4, False, False),
        (F32, F32, (4, 2, 8), 8, False, True),
        (BF16, BF16, (3, 1, 20), 12, True, True),
        (BF16, BF16, (3, 1, 20), 0, False, False),
    ],
)
def test_rope_in_the_interpreter(
    rounding: None,
    dtype: torch.dtype,
    cache: torch.dtype,
    heads: tuple[int, int, int],
    rotary: int,
    normed: bool,
    interleaved: bool,
) -> None:
    triton_cases.check_rope(CPU, dtype, cache, 11, heads, rotary, normed=normed, interleaved=interleaved)


@interpreted
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype,cache", [(BF16, BF16), (F32, F32), (BF16, FP8), (F32, BF16)])
def test_nan_and_inf_in_the_interpreter(rounding: None, dtype: torch.dtype, cache: torch.dtype) -> None:
    triton_cases.check_nan_and_inf(CPU, dtype, cache)


RAGGED = [(0, 1), (70, 1), (0, 21), (31, 1), (16, 33), (100, 3)]


@interpreted
@pytest.mark.parametrize(
    "dtype,cache,heads,window,softcap,block,tile_queries,has_sinks",
    [
        (F32, F32, (6, 2, 8), 0, 0.0, 16, 16, False),
        (F32, F32, (6, 2, 8), 0, 0.0, 16, 16, True),
        (F32, BF16, (3, 1, 20), 19, 0.0, 32, 64, True),
        (F32, FP8, (2, 1, 24), 0, 0.0, 64, 2, False),
        (BF16, BF16, (8, 1, 20), 0, 0.0, 64, 128, True),
        (BF16, FP8, (4, 2, 16), 40, 0.0, 16, 4, False),
        (BF16, BF16, (2, 2, 16), 1, 0.0, 16, 16, False),
        (BF16, BF16, (2, 2, 16), 1, 0.0, 16, 16, True),
        (F32, F32, (4, 2, 16), 30, 2.0, 16, 16, True),
        (BF16, BF16, (2, 1, 256), 0, 3.0, 16, 32, False),
    ],
)
def test_attention_in_the_interpreter(
    rounding: None,
    dtype: torch.dtype,
    cache: torch.dtype,
    heads: tuple[int, int, int],
    window: int,
    softcap: float,
    block: int,
    tile_queries: int,
    has_sinks: bool,
) -> None:
    shape = {"window": window, "block": block, "tile_queries": tile_queries, "has_sinks": has_sinks}
    triton_cases.check_attention(CPU, dtype, cache, RAGGED, heads, softcap=softcap, **shape)


@interpreted
@pytest.mark.parametrize("dtype,window,has_sinks", [(F32, 16, False), (BF16, 48, True)])
def test_chunked_attention_in_the_interpreter(rounding: None, dtype: torch.dtype, window: int, has_sinks: bool) -> None:
    kind = {"window": window, "has_sinks": has_sinks, "chunked": True}
    triton_cases.check_attention(CPU, dtype, dtype, RAGGED, (4, 2, 16), block=16, **kind)


# Decode rows: keys before, and new tokens, of which padding has none.
SINGLES = [(0, 1), (70, 1), (300, 1), (63, 1), (64, 1), (0, 0)]
DRAFTED = [(0, 3), (62, 2), (0, 0), (200, 1), (127, 3), (64, 0)]


@interpreted
@pytest.mark.parametrize(
    "dtype,cache,heads,kind,num_sms",
    [
        (F32, F32, (6, 2, 8), {}, 20),  # a part for each tile of keys
        (F32, BF16, (3, 1, 20), {"window": 19, "block": 32}, 8),
        (BF16, FP8, (4, 2, 16), {"window": 150, "has_sinks": True, "block": 16}, 132),
        (BF16, BF16, (4, 2, 16), {"softcap": 3.0, "has_sinks": True, "block": 16}, 32),
        (BF16, FP8, (10, 2, 80), {}, 8),
        (F32, F32, (2, 1, 16), {"window": 64, "chunked": True, "softcap": 2.0, "block": 16}, 132),
        (BF16, BF16, (32, 1, 24), {"window": 128, "chunked": True, "has_sinks": True}, 1),
    ],
)
@pytest.mark.parametrize("lengths", [SINGLES, DRAFTED], ids=["singles", "drafted"])
def test_decode_in_the_interpreter(
    rounding: None,
    dtype: torch.dtype,
    cache: torch.dtype,
    heads: tuple[int, int, int],
    kind: dict[str, Any],
    num_sms: int,
    lengths: list[tuple[int, int]],
) -> None:
    # Programs run one after the other here, so a second launch shows only what the first leaves in memory.
    shape = {"num_sms": num_sms, "window_parts": 3 if num_sms == 132 else 0, "launches_again": num_sms == 8}
    triton_cases.check_decode(CPU, dtype, cache, lengths, heads, **shape, **kind)


@interpreted
@pytest.mark.parametrize("count", [1, 7, 130])
def test_rows_in_the_interpreter(count: int) -> None:
    triton_cases.check_rows(CPU, count)


@interpreted
@pytest.mark.parametrize("rows,heads,size,dim", [(3, 2, 4, 8), (7, 1, 8, 5)])
def test_widen_in_the_interpreter(rounding: None, rows: int, heads: int, size: int, dim: int) -> None:
    triton_cases.check_widen(CPU, rows, heads, size, dim)


@interpreted
@pytest.mark.parametrize(
    "m,n,k,split,kind,group",
    [
        (1, 128, 64, 1, "", 16),
        (3, 100, 72, 2, "bias", 0),
        (17, 64, 160, 3, "residual", 0),
        (2, 64, 32, 1, "float32", 0),
    ],
)
def test_few_rows_in_the_interpreter(rounding: None, m: int, n: int, k: int, split: int, kind: str, group: int) -> None:
    triton_cases.check_few_rows(CPU, m, n, k, split=split, kind=kind, group=group)


@interpreted
@pytest.mark.parametrize(
    "m,n,k,split,kind,group,depth",
    [(1, 64, 128, 1, "", 16, 128), (17, 128, 192, 2, "residual", 0, 64), (3, 64, 448, 3, "float32", 0, 128)],
)
def test_packed_rows_in_the_interpreter(
    rounding: None, m: int, n: int, k: int, split: int, kind: str, group: int, depth: int
) -> None:
    triton_cases.check_packed_rows(CPU, m, n, k, split=split, kind=kind, group=group, depth=depth)


class Hopper:
    """A fake Triton driver for machines without a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Make launches compile for Hopper without running, and return the compiled kernels."""
    made: list[Any] = []

    def launcher(self: Any, grid: object) -> Any:
        return lambda *a, **options: made.append(self.run(*a, grid=grid, warmup=True, **options))

    monkeypatch.setattr(jit.JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(driver, "_active", Hopper())
    yield made
    for kernel in made:
        assert "griddepcontrol.wait" in kernel.asm["ptx"]
        assert kernel.asm["ptx"].count("griddepcontrol.launch_dependents") == 1


@compiled
def test_small_kernels_compile(compiled_kernels: list[SimpleNamespace]) -> None:
    for dtype, rows in ((BF16, 1), (F32, 2)):  # Triton specialises arguments that are 1
        x = torch.zeros(rows, 4096, dtype=dtype)
        rms_norm(x, torch.zeros(4096), 1e-5, pdl=True)
        silu_mul(x, x[:, :2048].clone(), 16, pdl=True)
        gelu_mul(x, x[:, :2048].clone(), 16, pdl=True)
        layer_norm(x, torch.zeros(4096), 1e-5, x, pdl=True)
    ids = torch.zeros(1, dtype=torch.int64)
    gather_tokens(ids, ids, ids, ids, pdl=True)
    assert len(compiled_kernels) == 9
    for kernel in compiled_kernels[:4]:  # sixteen bytes at a time
        assert "ld.global.v4" in kernel.asm["ptx"] and "st.global.v4" in kernel.asm["ptx"]


@compiled
@pytest.mark.parametrize("columns", [576, 4096])
def test_order_of_squares_in_norm(compiled_kernels: list[Any], columns: int) -> None:
    """`reduce_add_norm` in collectives.cu adds the squares of a row in the same order, to compute the same bits."""
    rms_norm(torch.zeros(2, columns, dtype=BF16), torch.zeros(columns), 1e-5, pdl=True)
    threads, packs = choose_norm_threads(columns)
    code, warps = compiled_kernels[0].asm, threads // 32
    layout = f"sizePerThread = [8], threadsPerWarp = [32], warpsPerCTA = [{warps}]"
    assert layout in code["ttgir"]
    loop = code["ptx"].partition("rsqrt.approx.ftz.f32")[0]
    halves = [half for pair in re.findall(r"mov.b32 \t\{(%rs\d+), (%rs\d+)\}", loop) for half in pair]
    element = {name: halves.index(half) for name, half in re.findall(r"cvt.f32.bf16 \t(%r\d+), (%rs\d+)", loop)}
    squares = re.findall(r"(?:mul.f32|fma.rn.f32) \t%r\d+, (%r\d+), (%r\d+)[,;]", loop)
    assert [element[a] for a, b in squares if a == b] == [1, 0, *range(2, 8 * packs)]
    distances = [int(found) for found in re.findall(r"shfl.sync.bfly.b32 \t%r\d+, %r\d+, (\d+)", loop)]
    assert distances == [16, 8, 4, 2, 1, *(1 << bit for bit in reversed(range(warps.bit_length() - 1)))]
    assert "div.full.f32" in loop


@compiled
def test_widen_compiles(compiled_kernels: list[Any]) -> None:
    narrow, wide = torch.zeros(2, 8, 64, 128).to(FP8), torch.zeros(2, 8, 64, 128, dtype=BF16)
    integers = torch.zeros(2, 2, dtype=torch.int32)
    widen_blocks(narrow, narrow.clone(), wide, wide.clone(), integers, integers, integers[0], pdl=True)
    assert "st.global.v4" in compiled_kernels[0].asm["ptx"]


@compiled
@pytest.mark.parametrize("dtype,cache,normed", [(BF16, BF16, True), (BF16, FP8, False), (F32, F32, False)])
def test_rope_compiles(compiled_kernels: list[Any], dtype: torch.dtype, cache: torch.dtype, normed: bool) -> None:
    qkv, blocks = torch.zeros(2, 6144, dtype=dtype), torch.zeros(2, 8, 64, 128).to(cache)
    positions, slots, norm = torch.zeros(2).int(), torch.zeros(2).long(), torch.zeros(128) if normed else None
    layer = AttentionLayer(32, 8, 128, scale=1.0, cos_sin=torch.zeros(9, 128), q_norm=norm, k_norm=norm)
    rope_and_cache(qkv, layer, blocks, blocks.clone(), rope_metadata(positions, slots), pdl=True)
    assert "st.global.v4" in compiled_kernels[0].asm["ptx"] or cache == FP8


def attention_inputs(dtype: torch.dtype, cache: torch.dtype, heads: tuple[int, int, int], **kind: Any) -> Any:
    q_heads, kv_heads, dim = heads
    qkv, blocks = torch.zeros(2, (q_heads + 2 * kv_heads) * dim, dtype=dtype), torch.zeros(2, kv_heads, 64, dim)
    integers, blocks = torch.zeros(3, dtype=torch.int32), blocks.to(cache)
    layer = AttentionLayer(*heads, scale=0.1, cos_sin=torch.zeros(0), **kind)
    metadata = AttentionMetadata(integers, integers, integers, integers, integers[None])
    return AttentionInputs(qkv, layer, blocks, blocks.clone(), metadata)


@compiled
@pytest.mark.parametrize(
    "dtype,cache,heads,product,kind",
    [
        (BF16, BF16, (32, 8, 128), "wgmma", {}),
        (BF16, FP8, (32, 8, 128), "wgmma", {"window": 128, "chunked": True, "sinks": torch.zeros(32)}),
        (F32, F32, (32, 8, 128), "fma.rn.f32", {}),
        (BF16, BF16, (32, 8, 256), "wgmma", {"softcap": 50.0}),
    ],
)
def test_attention_compiles(
    compiled_kernels: list[Any],
    dtype: torch.dtype,
    cache: torch.dtype,
    heads: tuple[int, int, int],
    product: str,
    kind: dict[str, Any],
) -> None:
    paged_attention(attention_inputs(dtype, cache, heads, **kind), torch.zeros(1, 2, dtype=torch.int32), pdl=True)
    assert product in compiled_kernels[0].asm["ptx"]


@compiled
@pytest.mark.parametrize(
    "cache,heads,kind",
    [
        (BF16, (64, 8, 64), {"window": 128, "sinks": torch.zeros(64)}),
        (FP8, (8, 4, 256), {"softcap": 50.0}),
    ],
)
def test_decode_compiles(
    compiled_kernels: list[Any], cache: torch.dtype, heads: tuple[int, int, int], kind: dict[str, Any]
) -> None:
    inputs, work = attention_inputs(BF16, cache, heads, **kind), triton_cases.plan_rows([(9, 1)], heads[1], 132, CPU)
    scratch = DecodeScratch(1, work.capacity, *heads, torch.device(CPU))
    out = torch.zeros(2, heads[0] * heads[2], dtype=BF16)
    split_decode_attention(inputs, work, scratch, 132, out=out, pdl=True)
    assert "mma.sync" in compiled_kernels[0].asm["ptx"] and "cp.async" in compiled_kernels[0].asm["ptx"]


@interpreted
@pytest.mark.parametrize("count", [1, 7, 129])
def test_cache_slots_in_the_interpreter(count: int) -> None:
    triton_cases.check_cache_slots(CPU, count)


@interpreted
@pytest.mark.parametrize("name", expert_cases.ROUTINGS)
@pytest.mark.parametrize("kernels", ["fused", "at_once", "in_blocks"])
def test_routing_in_the_interpreter(rounding: None, name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small blocks and chunks, so that there are several of each."""
    monkeypatch.setattr(routing, "FUSED_ROWS", (8,) if kernels == "fused" else ())
    monkeypatch.setattr(routing, "ASSIGNMENTS_AT_ONCE", (4, 64) if kernels == "at_once" else ())
    monkeypatch.setattr(routing, "MAX_BLOCK_SCORES", 64)
    monkeypatch.setattr(routing, "BLOCKS_PER_SORT", 2)
    monkeypatch.setattr(routing, "COUNTED_BLOCKS", triton.language.constexpr(2))
    monkeypatch.setattr(routing, "TILE_CHUNK", triton.language.constexpr(4))
    expert_cases.check_routing(CPU, name, 7, 2)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", expert_cases.ROUTINGS)
def test_routing_of_nan_in_the_interpreter(rounding: None, name: str) -> None:
    expert_cases.check_routing_of_nan(CPU, name, 3)


@interpreted
@pytest.mark.parametrize(
    "dtype,name,sizes,biased,limit",
    [
        (F32, "mixtral", (48, 40), False, 0.0),
        (BF16, "glm4", (64, 32), False, 0.0),
        (BF16, "llama4", (40, 24), False, 0.0),
        (F32, "gpt-oss", (48, 24), True, 1.0),
    ],
)
def test_experts_in_the_interpreter(
    rounding: None, dtype: torch.dtype, name: str, sizes: tuple[int, int], biased: bool, limit: float
) -> None:
    clamp = ClampedSwiGLU(1.7, limit) if limit else None
    expert_cases.check_products(CPU, dtype, name, 7, sizes, 16, expert_cases.SMALL, biased=biased, clamp=clamp)


@interpreted
@pytest.mark.parametrize("shared", ["", "scaled", "gated"])
def test_sums_of_experts_in_the_interpreter(rounding: None, shared: str) -> None:
    expert_cases.check_sums(CPU, BF16, 3, 70, 3, shared)


@interpreted
@pytest.mark.parametrize("rows,columns,count", [(1, 64, 8), (6, 100, 13), (18, 40, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_router_in_the_interpreter(rounding: None, rows: int, columns: int, count: int, biased: bool) -> None:
    expert_cases.check_router(CPU, BF16, rows, columns, count, biased=biased)


@interpreted
@pytest.mark.parametrize("rows,dtype", [(1, F32), (5, BF16), (20, BF16)])
def test_dispatched_experts_in_the_interpreter(
    rounding: None, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = (
        (router, "norm_and_score"), (norm, "rms_norm"), (routing, "route_rows"),
        (expert_layer.experts, "run_routed_experts"), (expert_layer, "add_expert_outputs"),
    )  # fmt: skip
    triton_cases.forbid_dependent_launches(monkeypatch, functions)
    layer = expert_layer.ExpertLayer(ReferenceBackend())
    expert_cases.check_dispatch(CPU, dtype, rows, (64, 32), layer)


def test_most_tiles() -> None:
    assert routing.max_tile_count(8, 128, 16) == 8 and routing.max_tile_count(512, 128, 16) == 152
    assert routing.max_tile_count(65536, 128, 128) == 512 + 127


@compiled
@pytest.mark.parametrize("rows,product", [(1, "mma.sync"), (2048, "wgmma")])
def test_experts_compile(compiled_kernels: list[Any], rows: int, product: str) -> None:
    x, norm = torch.zeros(rows, 2048, dtype=BF16), torch.zeros(2048)
    experts = StackedExperts(torch.zeros(16, 1536, 2048, dtype=BF16), torch.zeros(16, 2048, 768, dtype=BF16))
    unused = PackedWeight(torch.zeros(16, 2048), 16, 2048, F32)
    mixture = Mixture(norm, 1e-6, unused, experts, Routing(8, renormalize=True))
    normed, logits = router.norm_and_score(x, norm, 1e-6, torch.zeros(16, 2048, dtype=BF16), pdl=True)
    run_routed_experts(normed, logits, mixture, pdl=True)
    products = [kernel.asm["ptx"] for kernel in compiled_kernels if product in kernel.asm["ptx"]]
    assert len(products) == 2 and all("cp.async" in ptx for ptx in products)
