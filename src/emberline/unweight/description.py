"""Description: what a packed file says of a tensor, besides its dtype and shape; checked when read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from math import prod
from typing import Any

from emberline.core.errors import ModelFileError
from emberline.hub.tensorfile import TensorInfo
from emberline.unweight.code import Code
from emberline.unweight.format import WIDTHS

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Description:
    dtype: str
    shape: tuple[int, ...]
    sha256: str  # of the tensor's bytes as they were
    crc32: int  # of the index; of all bytes where there is no code
    code: Code | None = None  # None: its bytes are in the file as they were
    entropy: float = 0.0  # bits of a symbol, for people

    @staticmethod
    def of(info: TensorInfo) -> Description:
        said = info.packed
        assert said is not None
        sha256, crc32, codec, entropy = (said.get(key) for key in ("sha256", "crc32", "codec", "entropy"))
        if not isinstance(sha256, str) or not SHA256.fullmatch(sha256) or type(crc32) is not int:
            raise ModelFileError(f"{info.file} says nothing of a tensor's bytes", hint="pack the model again")
        if codec == "raw":
            if info.nbytes != info.logical_bytes:
                raise ModelFileError(f"{info.file} has {info.nbytes} bytes of a tensor of {info.logical_bytes}")
            return Description(info.dtype, info.shape, sha256, crc32)
        if codec != "huffman" or info.dtype not in WIDTHS:
            raise ModelFileError(f"{info.file} has a tensor of dtype {info.dtype} in the codec {str(codec)[:40]!r}")
        code = Code.parse(said.get("first"), said.get("lengths"))
        known = entropy if isinstance(entropy, float) and math.isfinite(entropy) else 0.0
        return Description(info.dtype, info.shape, sha256, crc32, code, known)

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "codec": "raw"}
        if self.code is not None:
            out |= {"codec": "huffman", "first": self.code.first, "lengths": str(self.code)}
            out |= {"entropy": round(self.entropy, 4)}
        return out | {"crc32": self.crc32, "sha256": self.sha256}

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def bound(self) -> float:
        """Bits an element that this way of coding cannot go below."""
        return 8 * (WIDTHS[self.dtype] - 1) + self.entropy
