"""TensorDescription: the metadata of a tensor in a packed file: its codec, prefix code and checksums."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from math import prod
from typing import Any

from emberline.core.errors import ModelFileError
from emberline.hub.tensorfile import TensorInfo
from emberline.unweight.format import ELEMENT_BYTES
from emberline.unweight.prefix_code import PrefixCode

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorDescription:
    dtype: str
    shape: tuple[int, ...]
    sha256: str  # of the tensor's original bytes
    crc32: int  # of the index; of all bytes for a raw tensor
    code: PrefixCode | None = None  # None: the tensor is stored raw
    entropy: float = 0.0  # bits per symbol, for reports only

    @staticmethod
    def from_info(info: TensorInfo) -> TensorDescription:
        """Read the description of a packed file's tensor. Raises ModelFileError if it is invalid."""
        values = info.packing
        assert values is not None
        sha256, crc32, codec, entropy = (values.get(key) for key in ("sha256", "crc32", "codec", "entropy"))
        if not isinstance(sha256, str) or not SHA256.fullmatch(sha256) or type(crc32) is not int:
            raise ModelFileError(f"{info.file} has a packed tensor without checksums", hint="pack the model again")
        if codec == "raw":
            if info.nbytes != info.logical_bytes:
                raise ModelFileError(
                    f"{info.file} stores {info.nbytes} bytes for an uncompressed tensor of {info.logical_bytes} bytes"
                )
            return TensorDescription(info.dtype, info.shape, sha256, crc32)
        if codec != "huffman" or info.dtype not in ELEMENT_BYTES:
            raise ModelFileError(
                f"{info.file} has a tensor of dtype {info.dtype} in the unknown codec {str(codec)[:40]!r}"
            )
        code = PrefixCode.parse(values.get("first"), values.get("lengths"))
        finite_entropy = entropy if isinstance(entropy, float) and math.isfinite(entropy) else 0.0
        return TensorDescription(info.dtype, info.shape, sha256, crc32, code, finite_entropy)

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "codec": "raw"}
        if self.code is not None:
            out |= {"codec": "huffman", "first": self.code.first_coded_symbol, "lengths": str(self.code)}
            out |= {"entropy": round(self.entropy, 4)}
        return out | {"crc32": self.crc32, "sha256": self.sha256}

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def min_bits_per_element(self) -> float:
        """Lower bound of the coded bits per element: the entropy of the exponents plus the other bits."""
        return 8 * (ELEMENT_BYTES[self.dtype] - 1) + self.entropy
