"""The native library as Python sees it: every entry with the types of its arguments."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p
from pathlib import Path

P, I, L, F = c_void_p, c_int, c_long, c_float


class NativeLayer(ctypes.Structure):
    """`Layer` of entries.h; stack.DenseLayer fills it."""

    _fields_ = [
        *((name, P) for name in "qkv o gate_up down qkv_bias o_bias attention_norm ffn_norm".split()),
        *((name, P) for name in "q_norm k_norm keys values".split()),
        *((name, I) for name in "layout window".split()),
    ]


class NativeStep(ctypes.Structure):
    """`Step` of entries.h."""

    _fields_ = [
        *((name, P) for name in "cos_sin positions slots tables query_start context".split()),
        *((name, L) for name in "key_stride value_stride".split()),
        *((name, I) for name in "tokens sequences table_stride wide rotary block_size".split()),
        *((name, I) for name in "hidden ffn q_heads kv_heads dim".split()),
        *((name, F) for name in "eps scale".split()),
    ]


# Pointers are data_ptr() integers or None; the C++ sources name each argument.
ENTRIES: dict[str, list[type]] = {
    "ember_pack": [P, P, I, I, I, I],
    "ember_linear": [P, P, I, I, I, I, P, P, F, P, I],
    "ember_embed": [P, I, P, I, I, I, P],
    "ember_rms_norm": [P, P, F, I, I, P],
    "ember_rope": [P, P, P, I, P, P, F, P, P, I, L, L, P, I, I, I, I, I],
    "ember_attention": [P, P, P, I, L, L, P, I, P, P, I, F, I, I, I, I, I, P],
    "ember_sample": [P, I, I, P, P, P, P, P, P],
    "ember_log_probs": [P, I, I, P, I, P, P, P, P],
    "ember_bitmask": [P, I, P, I, P, I],
    "ember_stack": [P, P, I, P],
    "ember_set_threads": [I],
}


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in ENTRIES.items():
        entry = getattr(library, name)
        entry.argtypes, entry.restype = arguments, None
    library.ember_panel.restype = library.ember_threads.restype = c_int
    library.ember_isa.restype = ctypes.c_char_p
    return library
