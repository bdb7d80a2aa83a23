"""GGUFMetadata: typed access to the metadata of a GGUF model."""

from __future__ import annotations

import math
from array import array
from typing import Any

from emberline.core.errors import ModelFileError


class GGUFMetadata:
    """Typed access to the metadata of a GGUF file.

    Raise ModelFileError if a value is missing or has the wrong type.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.arch = self.get_text("general.architecture")

    def get_text(self, key: str, default: str | None = None) -> str:
        return self._get(key, (str,), default)  # type: ignore[no-any-return]

    def get_integer(self, key: str, default: int | None = None) -> int:
        return self._get(f"{self.arch}.{key}", (int,), default)  # type: ignore[no-any-return]

    def get_number(self, key: str, default: float | None = None) -> float:
        return float(self._get(f"{self.arch}.{key}", (int, float), default))

    def get_decimal(self, key: str, default: float | None = None) -> float:
        """Return the decimal number that a float32 was rounded from: 1e-05 instead of 9.99999974e-06."""
        return float(f"{self.get_number(key, default):.7g}")

    def get_flag(self, key: str, default: bool) -> bool:
        return self._get(f"{self.arch}.{key}", (bool,), default)  # type: ignore[no-any-return]

    def get_flags(self, key: str) -> list[bool]:
        """Return a list of flags; empty if the key is missing or has another type."""
        value = self.metadata.get(f"{self.arch}.{key}")
        return [bool(item) for item in value] if isinstance(value, list | array) else []

    def special_token_id(self, key: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if type(value) is int else None

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def _get(self, key: str, allowed_types: tuple[type, ...], default: Any) -> Any:
        value = self.metadata.get(key, default)
        if type(value) not in allowed_types or (isinstance(value, float) and not math.isfinite(value)):
            raise ModelFileError(
                f"the GGUF key {key!r} must have a value of type {allowed_types[-1].__name__}, not {str(value)[:80]!r}"
            )
        return value
