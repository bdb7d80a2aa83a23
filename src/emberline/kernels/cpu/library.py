"""The native library as Python sees it: every entry with the types of its arguments."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_long, c_uint32, c_void_p
from pathlib import Path

from emberline.core.config import kernel_dir
from emberline.kernels.cpu.build import BuildError, build

POINTER, INT, LONG, FLOAT = c_void_p, c_int, c_long, c_float


class NativeLayer(ctypes.Structure):
    """`Layer` of entries.h; stack.DenseLayer fills it."""

    _fields_ = (
        *((name, POINTER) for name in ("qkv", "o", "gate_up", "down")),
        *((name, POINTER) for name in ("qkv_bias", "o_bias", "attention_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, INT) for name in ("layout", "window")),
    )


class NativeStep(ctypes.Structure):
    """`Step` of entries.h."""

    _fields_ = (
        *((name, POINTER) for name in ("cos_sin", "positions", "slots", "tables", "query_start", "context")),
        *((name, POINTER) for name in ("rows", "keys", "values")),
        *((name, LONG) for name in ("key_layer_bytes", "value_layer_bytes", "key_stride", "value_stride")),
        *((name, INT) for name in ("wanted", "tokens", "sequences", "table_stride", "wide", "rotary", "block_size")),
        *((name, INT) for name in ("hidden", "ffn", "q_heads", "kv_heads", "dim")),
        *((name, FLOAT) for name in ("eps", "scale")),
    )


class NativeExpert(ctypes.Structure):
    """`Expert` of entries.h."""

    _fields_ = (
        *((name, POINTER) for name in ("gate_up", "down")),
        *((name, INT) for name in ("gate_up_layout", "down_layout")),
    )


class NativeMixture(ctypes.Structure):
    """`Mixture` of entries.h; mixture.Mixture fills it."""

    _fields_ = (
        ("experts", ctypes.POINTER(NativeExpert)),
        *((name, POINTER) for name in ("router", "norm")),
        *((name, INT) for name in ("router_layout", "count", "chosen", "renormalised", "hidden", "ffn")),
        ("eps", FLOAT),
    )


KINDS = {"p": POINTER, "i": INT, "l": LONG, "f": FLOAT}

# One letter per argument; pointers are data_ptr() integers or None. The C++ sources name them.
ENTRIES = {
    "ember_pack": "ppiiii",
    "ember_linear": "ppiiiippfpi",
    "ember_embed": "pipiiip",
    "ember_rope": "pppippfppillpiiiii",
    "ember_attention": "pppillpippifiiiiip",
    "ember_stack": "ppipp",
    "ember_mixture": "pip",
    "ember_sample": "piipppppp",
    "ember_log_probs": "piipipppp",
    "ember_bitmask": "pipipi",
    "ember_set_threads": "i",
    "ember_unweight_count": "plip",
}
COUNTING = {  # the same, for those that answer with a number
    "ember_unweight_encode": "plippp",
    "ember_unweight_decode": "plplipip",
    "ember_kv_pack": "plip",
    "ember_kv_unpack": "pllip",
}


def find_library() -> ctypes.CDLL | None:
    """The one for this machine, built if need be; None: it cannot be."""
    try:
        return load(build(kernel_dir()))
    except (BuildError, OSError):
        return None


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, letters in ENTRIES.items():
        entry = getattr(library, name)
        entry.argtypes, entry.restype = [KINDS[letter] for letter in letters], None
    for name, letters in COUNTING.items():
        entry = getattr(library, name)
        entry.argtypes, entry.restype = [KINDS[letter] for letter in letters], c_long
    library.ember_panel.restype = library.ember_threads.restype = library.ember_amx.restype = c_int
    library.ember_progress.restype = c_long
    library.ember_isa.restype = ctypes.c_char_p
    library.ember_crc32.argtypes, library.ember_crc32.restype = [POINTER, LONG, c_uint32], c_uint32
    return library
