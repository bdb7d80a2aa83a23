"""emberline doctor: what this machine can do, what is missing, and what serving a model would take."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emberline import __version__
from emberline.cli import service
from emberline.core.config import DEFAULT_MODEL, WEIGHTS, GPUConfig, cache_dir, core_count
from emberline.core.errors import EmberlineError
from emberline.core.freememory import free_memory, physical_memory

if TYPE_CHECKING:
    from emberline.hub.checkpoint import Checkpoint
    from emberline.models.config import ModelConfig

PROC = Path("/proc")
MARKS = {True: "ok", None: "--", False: "!!"}
FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve2", "sve", "bf16", "i8mm", "asimddp", "asimdhp", "asimd")
SERVED = (9, 0)  # our kernels use what came with Hopper, in the form that only it has
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    says: str
    good: bool | None = True  # None: worth knowing, nothing wrong
    hint: str = ""


@dataclass(frozen=True, slots=True)
class GPU:
    name: str
    memory: int
    capability: tuple[int, int]
    out_of_reach: tuple[int, ...] = ()  # others whose memory it cannot read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gpu = GPUConfig()
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the one to plan for (default: %(default)s)")
    parser.add_argument("--pull", action="store_true", help="fetch the model if it is not here")
    parser.add_argument(
        "--gpu-memory", type=service.size, help="plan for a GPU with so much, e.g. 141G (default: the one here)"
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--weights", default=gpu.weights, choices=WEIGHTS, help="in a GPU's memory")
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "bfloat16", "float32", "float8"])
    parser.add_argument(
        "--kv-memory", type=service.size, help="bytes of keys and values, e.g. 2G (default: all that fit)"
    )
    parser.add_argument("--block-size", type=count, default=gpu.block_size, help="tokens of a KV block")
    parser.add_argument("--max-context", type=count, help="tokens (default: the model's)")
    parser.add_argument("--max-batch-tokens", type=count, default=gpu.max_batch_tokens, help="computed in one step")
    parser.add_argument("--max-running", type=count, default=gpu.max_running, help="requests in one batch")
    parser.add_argument("--tiers", action="store_true", help="keys and values go to other tiers, by way of GPU memory")
    parser.add_argument("--transfer", action="store_true", help="the same to other workers")


def run(args: argparse.Namespace) -> int:
    gpu = _gpu()
    findings = [*_machine(), *_software(), *_gpu_kernels(gpu), *_kernels(), *_transports(gpu), *_model(args, gpu)]
    width = max(len(f.what) for f in findings)
    for f in findings:
        print(f"{MARKS[f.good]}  {f.what:<{width}}  {f.says}")
        if f.hint:
            print(f"    {'':<{width}}  hint: {f.hint}")
    return 1 if any(f.good is False for f in findings) else 0


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return int(text)


def _machine() -> Iterator[Finding]:
    flags = _cpu_flags()
    yield Finding("emberline", f"{__version__}, Python {platform.python_version()}")
    yield Finding("cpu", f"{core_count()} cores, {platform.machine()}: {' '.join(f for f in FEATURES if f in flags)}")
    total = physical_memory()
    yield Finding("memory", f"{free_memory() / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    folder = cache_dir()
    disk = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists()))
    hint = "make room for models" if disk.free < 2 << 30 else ""
    yield Finding("cache", f"{folder}, {disk.free / 2**30:.0f} GiB free on its disk", not hint, hint)


def _cpu_flags() -> set[str]:
    """As Linux lists them; none without /proc (macOS)."""
    try:
        lines = (PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}


def _software() -> Iterator[Finding]:
    for name, needed, use in (
        ("torch", True, "the engine"),
        ("tokenizers", True, "text to tokens"),
        ("llguidance", True, "structured output"),
        ("httptools", True, "the server"),
        ("huggingface_hub", False, "pulling hf:org/name"),
        ("gguf", False, "tests of GGUF files"),
    ):
        yield _package(name, needed, use)


def _package(name: str, needed: bool, use: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, f"missing ({use})", False if needed else None, f"pip install {name}")
    return Finding(name, f"{importlib.metadata.version(name)} ({use})")


def _gpu() -> GPU | None:
    """The first one, asked of the driver itself: no torch, and no memory of it is taken."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    capability = [ctypes.c_int(), ctypes.c_int()]
    refused = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
    refused = refused or driver.cuDeviceGetName(name, len(name), device)
    refused = refused or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    for value, attribute in zip(capability, (MAJOR, MINOR), strict=True):
        refused = refused or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    if refused:
        return None
    known = name.value.decode(errors="replace"), memory.value, (capability[0].value, capability[1].value)
    return GPU(*known, tuple(_out_of_reach(driver)))


def _out_of_reach(driver: ctypes.CDLL) -> Iterator[int]:
    count, reaches = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    for other in range(1, count.value):
        if driver.cuDeviceCanAccessPeer(ctypes.byref(reaches), 0, other) or not reaches.value:
            yield other


def _gpu_kernels(gpu: GPU | None) -> Iterator[Finding]:
    from emberline.kernels.cuda import nvrtc

    if gpu is None:
        driver = Path("/proc/driver/nvidia/version").exists()
        hint = "see nvidia-smi, and CUDA_VISIBLE_DEVICES" if driver else ""
        yield Finding("gpu", "an NVIDIA driver is here, but no GPU that it gives us" if driver else "none", None, hint)
    else:
        served = gpu.capability == SERVED
        says = "our kernels serve it" if served else "our kernels are made for 9.0 (H100, H200), so the CPU computes"
        about = f"{gpu.name}, {_gib(gpu.memory)}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        yield Finding("gpu", f"{about}: {says}", True if served else None)
    needed = gpu is not None and gpu.capability == SERVED
    yield _package("triton", needed, "kernels on a GPU")
    try:
        yield Finding("nvrtc", f"{nvrtc.version()} (kernels on a GPU)")
    except nvrtc.CompileError as e:
        yield Finding("nvrtc", f"missing (kernels on a GPU): {e}", False if needed else None)


def _kernels() -> Iterator[Finding]:
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    hint = "" if compiler else "install g++: kernels run several times faster"
    yield Finding("compiler", compiler or "none", not hint, hint)
    if importlib.util.find_spec("torch") is None:
        return
    from emberline.kernels import ops

    backend = ops.start()
    hint = "" if backend.library else "plain torch is used: correct, but slow"
    yield Finding("kernels", str(backend), not hint, hint)


def _transports(gpu: GPU | None) -> Iterator[Finding]:
    """How keys and values can travel between workers; one that is broken is left out by them too."""
    from emberline.kv.mooncake import distribution, probe, protocol

    yield Finding("transport tcp", "built in")
    yield Finding("transport shm", "CPU workers on this machine")
    yield _between_gpus(gpu)
    if (found := distribution()) is None:
        hint = "pip install mooncake-transfer-engine (or -non-cuda), and libibverbs1"
        yield Finding("transport mooncake", "not installed (RDMA; prefixes shared by a cluster)", None, hint)
    elif (reason := probe()) is not None:
        yield Finding("transport mooncake", f"{found} is broken: {reason}", None, "workers go on without it")
    else:
        over = "rdma" if protocol() == "rdma" else "tcp: there is no RDMA device"
        yield Finding("transport mooncake", f"{found} works, over {over}")


def _between_gpus(gpu: GPU | None) -> Finding:
    """Whether workers here can copy blocks out of each other's GPU."""
    if gpu is None or gpu.capability != SERVED:
        return Finding("transport cuda", "needs a GPU that our kernels serve", None)
    if gpu.out_of_reach:
        others = ", ".join(map(str, gpu.out_of_reach))
        hint = "blocks between their workers go through main memory, over TCP"
        return Finding("transport cuda", f"the first GPU cannot reach GPU {others}", None, hint)
    return Finding("transport cuda", "GPU workers on this machine that see each other's GPU")


def _model(args: argparse.Namespace, gpu: GPU | None) -> Iterator[Finding]:
    from emberline.hub.checkpoint import Checkpoint
    from emberline.hub.source import NotPulled, resolve
    from emberline.models.config import ModelConfig

    name = args.model
    try:
        checkpoint = Checkpoint.open(resolve(name, fetch=args.pull))
        config = ModelConfig.of(checkpoint)
    except NotPulled as e:
        yield Finding("model", e.message, None, e.hint or "")
        return
    except EmberlineError as e:
        yield Finding("model", e.message, False, e.hint or "")
        return
    yield Finding("model", f"{name}: {config.model_type}, {config.layers} layers, context {config.max_context}")
    yield Finding("  files", f"{sum(t.nbytes for t in checkpoint.tensors.values()) / 1e6:.0f} MB of weights")
    total = args.gpu_memory or (gpu.memory if gpu is not None and gpu.capability == SERVED else None)
    try:
        yield from _memory(args, checkpoint, config, total)
    except EmberlineError as e:
        yield Finding("  engine" if total is None else "gpu memory", e.message, False, e.hint or "")


def _memory(
    args: argparse.Namespace, checkpoint: Checkpoint, config: ModelConfig, total: int | None
) -> Iterator[Finding]:
    """Where a GPU's memory would go: by the functions that the engine itself plans with."""
    from emberline.engine import memory

    names = ("weights", "kv_dtype", "kv_memory", "block_size", "max_running", "max_batch_tokens", "max_context",
             "tiers", "transfer")  # fmt: skip
    settings = GPUConfig(**{name: getattr(args, name) for name in names})
    dtype = memory.weight_dtype(checkpoint, args.dtype)
    kv_dtype, context = memory.kv_dtype(settings, dtype), memory.context(config, settings)
    token = memory.kv_token_bytes(config, memory.DTYPE_BYTES[kv_dtype])
    full = f"{token * context / 1e6:.0f} MB a context of {context}"
    yield Finding("  kv cache", f"{token / 1e3:.1f} kB a token, {full} ({kv_dtype})")
    if total is None:
        memory.refuse_packed(settings.weights)
        return
    packed = memory.packs(checkpoint, settings, dtype)
    plan = memory.plan_for(config, settings, total, dtype, packed=packed)
    kept = "packed" if packed else "both plain and packed" if settings.weights == "both" else "plain"
    weights = f"{dtype} {kept}"
    batch = f"{args.max_running} requests and {args.max_batch_tokens} tokens a step"
    yield Finding("gpu memory", f"{_gib(total)}: {weights}, keys and values {kv_dtype}, {batch}, context {context}")
    for name, part in plan.rows():
        tokens = f": {plan.kv_tokens} tokens, {plan.kv_tokens / context:.1f} full contexts"
        yield Finding(f"  {name}", f"{_gib(part):>10}{tokens if name == 'kv cache' else ''}")
    if plan.kv_tokens < context:
        hint = "raise --kv-memory" if args.kv_memory else "lower --max-batch-tokens or --max-running"
        hint += ", or --kv-dtype float8"
        yield Finding("  context", f"cut to {plan.kv_tokens} tokens: no more keys and values fit", None, hint)


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.2f} GiB"
