"""How an engine on a CPU keeps the matrices of a model: plain, in the blocks of its GGUF files, or quantised at load.

This module does not import torch.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from emberline.core.engine_config import ONLINE_FORMATS
from emberline.core.errors import InvalidRequest
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.gguf_tensors import GGUFTensorInfo
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of
from emberline.models.weight_matrices import list_weight_matrices

WeightForm = Literal["plain", "gguf", "q4", "q8"]
CPU_WEIGHTS: tuple[WeightForm, ...] = ("q4", "q8")  # formats that only a CPU's kernels read
GPU_WEIGHTS = ("packed", "both", *ONLINE_FORMATS)
# Block types of matrices, and of the embedding and the output head, whose errors change the output most.
BLOCK_TYPES: dict[str, tuple[str, str]] = {"q4": ("Q4_0", "Q8_0"), "q8": ("Q8_0", "Q8_0")}
BLOCK_BYTES = {"Q4_0": 18, "Q8_0": 34}  # of 32 weights
BLOCK_WEIGHTS = 32
F32_BYTES, BF16_BYTES = 4, 2


def find_block_type(checkpoint: Checkpoint) -> str | None:
    """Return the quantised GGUF type that takes the most bytes; None: the checkpoint has no quantised GGUF blocks."""
    sizes = Counter[str]()
    for info in checkpoint.tensors.values():
        if isinstance(info, GGUFTensorInfo) and info.has_blocks:
            sizes[info.block_type.name] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else None


def check_requested_weights(requested: str, *, on_gpu: bool) -> None:
    """Raise InvalidRequest if no kernel of the device reads this format of weights."""
    if on_gpu and requested in CPU_WEIGHTS:
        raise InvalidRequest(
            f"weights is {requested}, which only the kernels of a CPU read",
            param="weights",
            hint="use --weights auto, or --device cpu",
        )
    if not on_gpu and requested in GPU_WEIGHTS:
        is_packed = requested in ("packed", "both")
        hint = "use --weights auto, which also reads packed files" if is_packed else "use --weights q4 or q8, or a GPU"
        choices = ", ".join(CPU_WEIGHTS)
        raise InvalidRequest(
            f"weights is {requested}, which only a GPU supports; on a CPU it must be auto, plain, {choices}",
            param="weights",
            hint=hint,
        )


def choose_weight_form(checkpoint: Checkpoint, dtype: str = "auto", requested: str = "auto") -> WeightForm:
    """Return how a CPU keeps matrices: plain, in GGUF blocks, or as q4 or q8.

    `dtype`, `requested`: the settings dtype and weights. Blocks of GGUF files are kept unless a dtype or plain weights
    are requested. Raises InvalidRequest if the settings contradict each other or the files."""
    found = find_block_type(checkpoint)
    for form in CPU_WEIGHTS:
        if form == requested and (found is not None or dtype != "auto"):
            reason = f"dtype is {dtype}" if found is None else f"{checkpoint.directory} has weights of type {found}"
            hint = "use --weights auto, which keeps quantised files as they are" if found else "drop --dtype"
            raise InvalidRequest(f"weights is {form}, but {reason}", param="weights", hint=hint)
        if form == requested:
            return form
    return "gguf" if requested == "auto" and dtype == "auto" and found is not None else "plain"


def kept_weight_bytes(checkpoint: Checkpoint, config: ModelConfig, form: WeightForm) -> int:
    """Return about how many bytes the weights of a model take in the memory of a CPU if they are not plain."""
    if form == "gguf":
        return sum(info.nbytes for info in checkpoint.tensors.values())
    size, (matrices, ends) = 0, BLOCK_TYPES[form]
    for part in list_weight_matrices(outline_of(config)):
        if part.kind in ("norms", "router"):
            size += part.num_weights * (F32_BYTES if part.kind == "norms" else BF16_BYTES)
        else:
            kind = ends if part.kind in ("embedding", "head") else matrices
            size += part.num_weights * BLOCK_BYTES[kind] // BLOCK_WEIGHTS
    return size
