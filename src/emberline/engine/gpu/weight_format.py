"""The format in which a GPU has a model's weights: how it is chosen, its name, its size compared with the plan."""

from __future__ import annotations

import torch

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import ModelError
from emberline.engine.memory_plan import MemoryPlan
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.comm.communicator import Communicator
from emberline.models.device_weights import DeviceWeights
from emberline.models.quantisation_config import check_kv_scheme
from emberline.models.reader import FileReader
from emberline.models.shard import Shard
from emberline.models.textmodel import select_text_config
from emberline.models.weights import Weights


def open_device_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    device: torch.device,
    reader: FileReader | None,
    settings: EngineConfig,
    *,
    packed: bool,
    shard: Shard | None = None,
    comm: Communicator | None = None,
) -> DeviceWeights:
    """Return the weights of a checkpoint, not loaded yet, in the format that the settings choose.

    `reader`: a process that already reads the checkpoint's files. `packed`: whether bf16 matrices are kept in 12 bits.
    `shard`: this rank's part of the weights; None: all. `comm`: connects the ranks with the other parts. Raises
    UnsupportedModel if a float8 KV cache is set and the checkpoint describes another kind of quantised cache."""
    gpu, uses_kv_scales = settings.gpu, settings.kv_cache.kv_dtype == "float8"
    if uses_kv_scales:
        check_kv_scheme(select_text_config(checkpoint.config))
    return DeviceWeights(
        checkpoint,
        dtype,
        device,
        reader,
        packed=packed,
        online=gpu.online_format,
        keeps_quantised=gpu.weights != "plain" and not gpu.exact,
        kv_scales=uses_kv_scales,
        shard=shard,
        comm=comm,
    )


def name_weight_format(weights: Weights, settings: EngineConfig) -> str:
    """Return plain, packed or both; with quantised matrices their format, such as int4 or int4+packed."""
    form = "both" if settings.gpu.weights == "both" else "packed" if weights.packed else "plain"
    if not weights.quantised_sizes:
        return form
    narrow = settings.gpu.online_format or "quantised"
    return narrow if form == "plain" else f"{narrow}+{form}"


def check_packed_size(loaded_bytes: int, plan: MemoryPlan) -> None:
    """Raise ModelError if packed weights take clearly more memory than was planned for them."""
    if loaded_bytes > plan.weights + plan.spare_bytes // 2:
        message = f"packed weights take {loaded_bytes} bytes, and {plan.weights} bytes were planned for them"
        raise ModelError(message, hint="use --weights plain")
