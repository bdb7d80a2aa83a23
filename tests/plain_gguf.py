"""write_gguf: writes a small Llama as a GGUF file without the gguf package, which machines with GPUs need not have."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from torch import Tensor

from emberline.kernels.quantise_blocks import quantise_blocks

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 256, 4, 2, 512, 2
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
TOKENS = ["<|end|>", "<|start|>", *map(chr, PRINTABLE), *(chr(256 + i) for i in range(256 - len(PRINTABLE))), "he"]
ALIGNMENT = 32
TENSOR_TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 8}
Value = str | int | float | list[str] | list[int]


def write_gguf(path: Path, quant: str) -> None:
    """Write random weights, with matrices of type `quant`, Q4_0 or Q8_0."""
    sizes: dict[str, Value] = {"block_count": LAYERS, "context_length": 512, "embedding_length": HIDDEN}
    sizes |= {"feed_forward_length": FFN, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}
    sizes |= {"rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-5}
    vocabulary: dict[str, Value] = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": ["h e"]}
    vocabulary |= {"token_type": [3, 3] + [1] * (len(TOKENS) - 2), "bos_token_id": 1, "eos_token_id": 0}
    fields: dict[str, Value] = {"general.architecture": "llama"}
    fields |= {f"llama.{key}": value for key, value in sizes.items()}
    fields |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    infos, data = b"", b""
    tensors = make_tensors()
    for name, tensor in tensors.items():
        kind = quant if tensor.ndim == 2 else "F32"
        stored = quantise_blocks(tensor, quant) if tensor.ndim == 2 else tensor
        shape = tuple(reversed(tensor.shape))
        infos += pack_string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        infos += struct.pack("<IQ", TENSOR_TYPES[kind], len(data))
        data += pad(stored.numpy().tobytes())
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields))
    header += b"".join(pack_string(key) + pack_value(value) for key, value in fields.items())
    path.write_bytes(pad(header + infos) + data)


def make_tensors() -> dict[str, Tensor]:
    head = HIDDEN // HEADS
    matrices = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_HEADS * head, HIDDEN), "attn_v": (KV_HEADS * head, HIDDEN)}
    matrices |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN)}
    matrices |= {"ffn_down": (HIDDEN, FFN)}
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in matrices.items()}
    shapes |= {"token_embd.weight": (len(TOKENS), HIDDEN), "output.weight": (len(TOKENS), HIDDEN)}
    norms = ["output_norm", *(f"blk.{i}.{name}_norm" for i in range(LAYERS) for name in ("attn", "ffn"))]
    generator = torch.Generator().manual_seed(7)
    drawn = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    return drawn | {f"{name}.weight": torch.rand(HIDDEN, generator=generator) + 0.5 for name in norms}


def pack_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def pack_value(value: Value) -> bytes:
    """Return the number of the value's type and the value."""
    if isinstance(value, list):
        number = 8 if isinstance(value[0], str) else 4
        return struct.pack("<IIQ", 9, number, len(value)) + b"".join(pack_value(each)[4:] for each in value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + pack_string(value)
    return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
