"""Converts a quantised GGUF file to 16 bits per weight, so that llama.cpp uses the same weights as Emberline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

KINDS = {"bf16": "BF16", "f16": "F16"}


def widen_gguf(source: Path, target: Path, tensor_type: str) -> Path:
    """Write a copy of a GGUF file with its matrices as `tensor_type` and its vectors as float32.

    The metadata is kept. llama.cpp's converter chooses the same types.
    """
    if target.exists():
        return target
    import gguf

    wanted = gguf.GGMLQuantizationType[KINDS[tensor_type]]
    reader = gguf.GGUFReader(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    writer = gguf.GGUFWriter(part, str(reader.fields["general.architecture"].contents()))
    _copy_metadata(reader, writer, int(gguf.LlamaFileType[f"MOSTLY_{KINDS[tensor_type]}"]))
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(target)
    return target


def _copy_metadata(reader: Any, writer: Any, file_type: int) -> None:
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # written by the writer itself
        value = file_type if name == "general.file_type" else entry.contents()
        inner = entry.types[-1] if len(entry.types) > 1 else None
        writer.add_key_value(name, value, entry.types[0], sub_type=inner)
