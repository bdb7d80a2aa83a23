"""The data types of matrices: in a checkpoint's files, and in memory.

By default float16 is rounded to bfloat16, which has 8 significant bits instead of 11 and a wider range: the kernels of
a GPU, and AMX on a CPU, read bfloat16. If float16 is requested, other kernels of the CPU read it without rounding.

This module does not import torch.
"""

from __future__ import annotations

from emberline.core.errors import InvalidRequest, UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.models.quantised_tensors import read_loaded_quantisation, select_model_tensors
from emberline.models.textmodel import select_text_config
from emberline.models.weight_form import find_block_type

STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # by their names in safetensors files
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
REQUESTED_DTYPES = ("auto", *DTYPE_BYTES)
# Tensors from which the first matrix may be stacked.
FIRST_MATRIX_NAMES = tuple(
    f"model.layers.0.self_attn.{name}.weight"
    for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa")
)


def stored_weight_dtype(checkpoint: Checkpoint) -> str:
    """Return the stored dtype of the model's first matrix, or the widest of the tensors from which it is stacked.

    Raises UnsupportedModel for other dtypes than those of STORED_DTYPES."""
    tensors = select_model_tensors(checkpoint).tensors
    dtypes = {tensors[name].dtype for name in FIRST_MATRIX_NAMES if name in tensors}
    if unsupported := dtypes - STORED_DTYPES.keys():
        hint = f"supported dtypes: {' '.join(sorted(STORED_DTYPES))}"
        message = f"{checkpoint.directory} has weights of dtype {min(unsupported)}, which is not supported"
        raise UnsupportedModel(message, hint=hint)
    return next((STORED_DTYPES[dtype] for dtype in ("F32", "F16") if dtype in dtypes), "bfloat16")


def stored_weight_format(checkpoint: Checkpoint) -> str:
    """Return the format of the quantised matrices in the files, or the dtype of the first matrix if there are none."""
    found = read_loaded_quantisation(select_text_config(checkpoint.config))
    if found is not None:
        return "+".join(found.names)
    return find_block_type(checkpoint) or stored_weight_dtype(checkpoint)


def choose_weight_dtype(checkpoint: Checkpoint, requested: str = "auto", *, on_gpu: bool) -> str:
    """Return the dtype of the weights in memory. For `auto`, it is that of the files, but bfloat16 for float16.

    Raises InvalidRequest if the device or the model does not support `requested`, UnsupportedModel if the files have an
    unsupported dtype."""
    check_requested_dtype(requested, on_gpu=on_gpu)
    stored = stored_weight_dtype(checkpoint)
    if requested == "float16" and stored != "float16":
        raise InvalidRequest(
            f"dtype is float16, but the weights in {checkpoint.directory} are {stored}, which has a wider range",
            param="dtype",
            hint="use --dtype auto or --dtype bfloat16",
        )
    if requested != "auto":
        return requested
    return "bfloat16" if stored == "float16" else stored


def check_requested_dtype(requested: str, *, on_gpu: bool) -> None:
    """Raise InvalidRequest if the name is unknown, or if no kernel of the device reads the dtype."""
    if requested not in REQUESTED_DTYPES:
        raise InvalidRequest(
            f"dtype must be one of {', '.join(REQUESTED_DTYPES)}, not {requested[:80]!r}", param="dtype"
        )
    if requested == "float16" and on_gpu:
        raise InvalidRequest(
            "dtype is float16, which the kernels of a GPU do not read",
            param="dtype",
            hint="use --dtype bfloat16, which rounds the weights, --dtype float32, or --device cpu",
        )


def default_kv_dtype(weight_dtype: str) -> str:
    """Return the dtype of the KV cache if none is requested. No kernel reads a cache in float16."""
    return "bfloat16" if weight_dtype == "float16" else weight_dtype
