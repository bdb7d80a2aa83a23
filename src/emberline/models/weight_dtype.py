"""The data types of matrices: in a checkpoint's files, and in memory.

Kernels read bfloat16 and float32. float16 is rounded to bfloat16, which has 8 significant bits instead of 11 and a
wider range, unless another dtype is requested. This module does not import torch.
"""

from __future__ import annotations

from emberline.core.errors import InvalidRequest, UnsupportedModel
from emberline.hub.checkpoint import Checkpoint

STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # by their names in safetensors files
REQUESTED_DTYPES = ("auto", "bfloat16", "float32")
# Stacked to the first matrix.
FIRST_MATRIX_NAMES = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")


def stored_weight_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype of the first matrix in the files, or the widest of its parts. Raises UnsupportedModel."""
    dtypes = {checkpoint.tensors[name].dtype for name in FIRST_MATRIX_NAMES if name in checkpoint.tensors}
    if unsupported := dtypes - STORED_DTYPES.keys():
        hint = f"supported dtypes: {' '.join(sorted(STORED_DTYPES))}"
        raise UnsupportedModel(f"{checkpoint.directory} has weights of dtype {min(unsupported)}", hint=hint)
    return next((STORED_DTYPES[dtype] for dtype in ("F32", "F16") if dtype in dtypes), "bfloat16")


def choose_weight_dtype(checkpoint: Checkpoint, requested: str = "auto") -> str:
    """Return the dtype of the weights in memory: the requested one, or that of the files, with bfloat16 for float16.

    Raises InvalidRequest if no kernel reads the requested dtype, UnsupportedModel for other dtypes in the files."""
    check_requested_dtype(requested)
    stored = stored_weight_dtype(checkpoint)
    if requested != "auto":
        return requested
    return "bfloat16" if stored == "float16" else stored


def check_requested_dtype(requested: str) -> None:
    """Raise InvalidRequest if the name is unknown, or no kernel reads the dtype."""
    if requested == "float16":
        raise InvalidRequest(
            "dtype is float16, which no kernel reads",
            param="dtype",
            hint="use --dtype bfloat16, which rounds the weights, or --dtype float32, which keeps their exact values",
        )
    if requested not in REQUESTED_DTYPES:
        raise InvalidRequest(
            f"dtype must be one of {', '.join(REQUESTED_DTYPES)}, not {requested[:80]!r}", param="dtype"
        )
