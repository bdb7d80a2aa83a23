"""The ctypes binding of the native library: every exported function with the types of its arguments."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_long, c_uint32, c_void_p
from pathlib import Path

from emberline.core.config import kernel_dir
from emberline.kernels.cpu.build import NativeBuildError, build_library

POINTER, INT, LONG, FLOAT = c_void_p, c_int, c_long, c_float


class NativeLayer(ctypes.Structure):
    """The C struct `Layer` of entries.h, with the fields of a dense_stack.DenseLayer."""

    _fields_ = (
        *((name, POINTER) for name in ("qkv", "o", "gate_up", "down", "qkv_tail")),
        *((name, POINTER) for name in ("qkv_bias", "o_bias", "attention_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, INT) for name in ("qkv_layout", "o_layout", "gate_up_layout", "down_layout", "window")),
        *((name, INT) for name in ("tail_layout", "tail_rows")),
    )


class NativeStep(ctypes.Structure):
    """The C struct `Step` of entries.h: the tensors of one forward pass."""

    _fields_ = (
        *((name, POINTER) for name in ("cos_sin", "positions", "slots", "tables", "query_start", "context")),
        *((name, POINTER) for name in ("rows", "keys", "values")),
        *((name, LONG) for name in ("key_layer_bytes", "value_layer_bytes", "key_stride", "value_stride")),
        *((name, INT) for name in ("row_count", "tokens", "sequences", "table_stride", "f32", "rotary", "block_size")),
        *((name, INT) for name in ("hidden", "ffn", "q_heads", "kv_heads", "dim")),
        *((name, FLOAT) for name in ("eps", "scale")),
    )


class NativeExpert(ctypes.Structure):
    """The C struct `Expert` of entries.h, with the weights of a mixture.Expert."""

    _fields_ = (
        *((name, POINTER) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, INT) for name in ("gate_up_layout", "down_layout", "gated", "ffn")),
    )


class NativeMixture(ctypes.Structure):
    """The C struct `Mixture` of entries.h, with the fields of a mixture.Mixture."""

    _fields_ = (
        *((name, ctypes.POINTER(NativeExpert)) for name in ("experts", "shared")),
        *((name, POINTER) for name in ("router", "shared_gate", "norm", "router_bias", "correction")),
        *((name, INT) for name in ("router_layout", "shared_gate_layout", "count", "top_k", "renormalize", "sigmoid")),
        *(
            (name, INT)
            for name in ("groups", "top_groups", "group_best", "scales_inputs", "hidden", "first_expert", "num_experts")
        ),
        *((name, FLOAT) for name in ("eps", "scale", "shared_scale", "swiglu_alpha", "swiglu_limit")),
    )


class NativeSequences(ctypes.Structure):
    """The C struct `Sequences` of entries.h, with the fields of a delta_rule.LayerStates."""

    _fields_ = (
        *((name, POINTER) for name in ("query_start", "context", "slots", "save_slots", "save_after")),
        *((name, POINTER) for name in ("places", "accepted", "drafted")),
        *((name, LONG) for name in ("count", "max_draft")),
    )


class NativeConvolution(ctypes.Structure):
    """The C struct `Convolution` of entries.h."""

    _fields_ = (
        ("sequences", NativeSequences),
        *((name, POINTER) for name in ("x", "weight", "states", "y", "drafts")),
        ("stride", LONG),
        *((name, INT) for name in ("kernel", "channels")),
    )


class NativeDeltaRule(ctypes.Structure):
    """The C struct `DeltaRule` of entries.h."""

    _fields_ = (
        ("sequences", NativeSequences),
        *((name, POINTER) for name in ("mixed", "steps", "times", "rates", "time_bias", "states", "gates", "out")),
        ("drafts", POINTER),
        ("gate_stride", LONG),
        *((name, INT) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
    )


ARGUMENT_TYPES = {"p": POINTER, "i": INT, "l": LONG, "f": FLOAT}

# One letter per argument, in the order of the C++ declarations. Pointers are data_ptr() integers or None.
VOID_FUNCTIONS = {
    "ember_pack": "ppiiii",
    "ember_linear": "ppiiiippfpi",
    "ember_embed": "pipiiip",
    "ember_norm": "plpfiiiipl",
    "ember_soft_cap": "plf",
    "ember_rope": "pppippfppillpiiiiii",
    "ember_attention": "pppillpippifiiiiiifpip",
    "ember_stack": "ppipp",
    "ember_mixture": "pipp",
    "ember_select_experts": "pipppp",
    "ember_experts": "pippp",
    "ember_shared_expert": "pipp",
    "ember_convolution": "p",
    "ember_delta_rule": "p",
    "ember_gated_norm": "pplpfiii",
    "ember_sigmoid_gate": "ppii",
    "ember_sample": "piipppppp",
    "ember_log_probs": "piipipppp",
    "ember_bitmask": "pipipi",
    "ember_set_threads": "i",
    "ember_unweight_count": "plip",
    "ember_suffix_free": "p",
    "ember_suffix_append": "ppl",
}
LONG_FUNCTIONS = {  # the same for functions that return a long
    "ember_blocks_bytes": "iii",
    "ember_pack_blocks": "ppiiii",
    "ember_unweight_encode": "plippp",
    "ember_unweight_decode": "plplipip",
    "ember_kv_pack": "plip",
    "ember_kv_unpack": "pllip",
    "ember_suffix_propose": "pplpp",
}


def find_library() -> ctypes.CDLL | None:
    """Return the native library for this machine, built if necessary, or None if it cannot be built."""
    try:
        return load_library(build_library(kernel_dir()))
    except (NativeBuildError, OSError):
        return None


def load_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, letters in VOID_FUNCTIONS.items():
        entry = getattr(library, name)
        entry.argtypes, entry.restype = [ARGUMENT_TYPES[letter] for letter in letters], None
    for name, letters in LONG_FUNCTIONS.items():
        entry = getattr(library, name)
        entry.argtypes, entry.restype = [ARGUMENT_TYPES[letter] for letter in letters], c_long
    library.ember_panel.restype = library.ember_threads.restype = library.ember_has_bf16.restype = c_int
    library.ember_progress.restype = c_long
    library.ember_isa.restype = ctypes.c_char_p
    library.ember_suffix_new.argtypes, library.ember_suffix_new.restype = [LONG], c_void_p
    library.ember_crc32.argtypes, library.ember_crc32.restype = [POINTER, LONG, c_uint32], c_uint32
    return library
