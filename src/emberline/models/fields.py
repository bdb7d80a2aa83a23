"""ConfigFields: typed, checked access to a JSON object such as config.json.

A null field counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emberline.core.errors import ModelFileError


class ConfigFields:
    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has_field(self, name: str) -> bool:
        return self.values.get(name) is not None

    def size(self, name: str, default: int | None = None, *, maximum: int, minimum: int = 1) -> int:
        value = self._get_field(name, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.invalid_error(name, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, name: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        value = self._get_field(name, default)
        if type(value) not in (int, float) or not minimum <= value <= 1e18:  # nan fails too
            raise self.invalid_error(name, f"a number of at least {minimum:g}")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._get_field(name, default)
        if type(value) is not bool:
            raise self.invalid_error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get_field(name, default)
        if not isinstance(value, str):
            raise self.invalid_error(name, "a string")
        return value

    def text_list(self, name: str) -> tuple[str, ...]:
        value = self._get_field(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.invalid_error(name, "a list of strings")
        return tuple(value)

    def number_list(self, name: str, count: int) -> tuple[float, ...]:
        value = self._get_field(name, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.invalid_error(name, f"a list of {count} numbers")
        return tuple(ConfigFields({name: item}, self.where).number(name) for item in value)

    def id_list(self, name: str) -> tuple[int, ...]:
        """Return the ids in a field that may be one id, a list of ids, or absent (no ids)."""
        value = self._get_field(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise self.invalid_error(name, "a whole number of at least 0, or a list of them")
        return tuple(ids)

    def section(self, name: str) -> ConfigFields:
        value = self._get_field(name, {})
        if not isinstance(value, dict):
            raise self.invalid_error(name, "an object")
        return ConfigFields(value, f"{self.where}, {name}")

    def invalid_error(self, name: str, expected: str) -> ModelFileError:
        """Return the error for a field that is missing or has an invalid value."""
        found = "missing" if not self.has_field(name) else f"{str(self.values[name])[:80]!r}"
        return ModelFileError(f"{self.where}: {name} is {found}; it must be {expected}")

    def _get_field(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value
