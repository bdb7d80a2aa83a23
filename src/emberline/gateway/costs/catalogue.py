"""Catalogue: prices and token limits of models, each with its source and the source's date.

    [openai]
    source = "https://..."          # of the rows below, unless a row has its own
    as_of = 2026-08-08
    like = "other-provider"         # rows that are missing here are looked up there

    [openai.chat]                   # the kind: chat, embedding, ...
    "gpt-4o-mini" = { input = 0.15, cached_read = 0.075, output = 0.6, context = 128_000, max_output = 16_384 }

Prices in the file are dollars per million tokens, read as decimals and not as floats. Unknown values are left out.
Emberline contains a catalogue file; rows of a user's files override its rows. If a model name that ends with a date has
no row, it is looked up without the date. The row "*" applies to all names that have no row.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.cost import LongContextPrice, Price

BUILTIN_FILE = Path(__file__).with_name("catalogue.toml")
PRICE_FIELDS = ("input", "output", "cached_read", "cache_write", "cache_write_long", "audio", "image")
SIZE_FIELDS = ("context", "max_output")
OTHER_FIELDS = ("aliases", "source", "as_of", "long")
MAX_CACHED_LOOKUPS = 4096
DATE_SUFFIX = re.compile(r"[-@](\d{4}-\d{2}-\d{2}|\d{8})$")


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    provider: str
    name: str
    kind: str
    price: Price | None
    context: int | None  # maximum input tokens
    max_output: int | None  # tokens
    aliases: tuple[str, ...]
    source: str
    as_of: date


class Catalogue:
    def __init__(self, models: Iterable[CatalogueModel], like: Mapping[str, str] | None = None) -> None:
        """Create a catalogue. If two models have the same name, the later one is used.

        `like` maps a provider to a second provider. A model that the first one lacks is looked up in the second one.
        """
        self._like = dict(like or {})
        self._models: dict[tuple[str, str], CatalogueModel] = {}
        self._names: dict[tuple[str, str], CatalogueModel] = {}
        for model in models:
            self._models[model.provider, model.name] = model
        for model in self._models.values():
            for name in model.aliases:
                self._names[model.provider, name] = model
        self._names.update(self._models)
        self._lookups: dict[tuple[str, str], CatalogueModel | None] = {}  # cache of `model`

    @staticmethod
    def load(*files: Path) -> Catalogue:
        """Return the built-in catalogue, overridden by the rows of `files`.

        Raise InvalidRequest if a file cannot be read or a row is invalid.
        """
        models: list[CatalogueModel] = []
        like: dict[str, str] = {}
        for file in (BUILTIN_FILE, *files):
            found, found_like = _read_builtin_file(_file_stamp(file)) if file == BUILTIN_FILE else _read_file(file)
            models += found
            like |= found_like
        return Catalogue(models, like)

    def model(self, provider: str, name: str) -> CatalogueModel | None:
        """Return the catalogue's entry for a model name that a client sent, or None if there is none."""
        key = (provider, name)
        if key not in self._lookups:
            if len(self._lookups) >= MAX_CACHED_LOOKUPS:  # clients choose names, so the cache must be bounded
                self._lookups.clear()
            self._lookups[key] = self._find_model(provider, name)
        return self._lookups[key]

    def _find_model(self, provider: str, name: str) -> CatalogueModel | None:
        return (
            self._names.get((provider, name))
            or self._names.get((provider, DATE_SUFFIX.sub("", name)))
            or (self.model(self._like[provider], name) if provider in self._like else None)
            or self._names.get((provider, "*"))
        )

    def price(self, provider: str, name: str) -> Price | None:
        model = self.model(provider, name)
        return model.price if model else None

    def models(self, provider: str | None = None) -> list[CatalogueModel]:
        return [model for model in self._models.values() if provider in (None, model.provider)]


class CatalogueFiles:
    """A catalogue that is read again when its files change.

    An invalid file leaves the previous catalogue in use.
    """

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._stamps = self._file_stamps()
        self.current = Catalogue.load(*files)

    def model(self, provider: str, name: str) -> CatalogueModel | None:
        return self.current.model(provider, name)

    def refresh(self) -> bool:
        """Read the catalogue again if a file has changed. Return whether it was read again.

        Raise InvalidRequest if a file is invalid.
        """
        if (stamps := self._file_stamps()) == self._stamps:
            return False
        self._stamps = stamps  # set first: an invalid file is reported once, not at every poll
        self.current = Catalogue.load(*self._files)
        return True

    def _file_stamps(self) -> list[tuple[int, int]]:
        return [_file_stamp(file) for file in (BUILTIN_FILE, *self._files)]


@lru_cache(maxsize=1)
def _read_builtin_file(stamp: tuple[int, int]) -> tuple[list[CatalogueModel], dict[str, str]]:
    """Return the content of the built-in file, cached by its `stamp`, because reading it takes 25 ms."""
    return _read_file(BUILTIN_FILE)


def _read_file(file: Path) -> tuple[list[CatalogueModel], dict[str, str]]:
    """Return a file's models, and {provider: second provider, in which missing models are looked up}."""
    try:
        with file.open("rb") as opened:
            found = tomllib.load(opened, parse_float=Decimal)
    except (OSError, ValueError) as e:
        raise InvalidRequest(
            f"catalogue file {file} cannot be read: {e}", hint="the file must exist and be valid TOML"
        ) from e
    models: list[CatalogueModel] = []
    like: dict[str, str] = {}
    for provider, rows in found.items():
        if isinstance(rows, Mapping) and "like" in rows:
            like[provider] = str(rows["like"])
        models += _read_provider(provider, rows)
    return models, like


def _file_stamp(file: Path) -> tuple[int, int]:
    """Return the file's modification time and size. A change of either shows that the file was changed."""
    try:
        stat = file.stat()
    except OSError:  # missing, or just being replaced
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def _read_provider(provider: str, rows: object) -> Iterable[CatalogueModel]:
    if not isinstance(rows, Mapping):
        raise InvalidRequest(f"catalogue entry {provider} must be a table", param=provider)
    for kind, models in rows.items():
        if isinstance(models, Mapping):
            for name, row in models.items():
                yield _read_model(provider, kind, name, row, rows)
        elif kind not in ("source", "as_of", "like"):
            raise InvalidRequest(f"catalogue entry {provider}.{kind} must be a table of models", param=provider)


def _read_model(provider: str, kind: str, name: str, row: object, defaults: Mapping[str, Any]) -> CatalogueModel:
    id = f"{provider}/{name}"
    fields = (*PRICE_FIELDS, *SIZE_FIELDS, *OTHER_FIELDS)
    if not isinstance(row, Mapping) or not set(row) <= {*fields}:
        raise InvalidRequest(
            f"catalogue entry {id} must be a table of known fields, not {row!r:.80}",
            param=id,
            hint=f"known fields: {', '.join(fields)}",
        )
    source, as_of = row.get("source", defaults.get("source")), row.get("as_of", defaults.get("as_of"))
    if not isinstance(source, str) or not isinstance(as_of, date):
        raise InvalidRequest(f"catalogue entry {id} must have source (a string) and as_of (a date)", param=id)
    aliases = row.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise InvalidRequest(f"catalogue entry {id}: aliases must be a list of names, not {aliases!r:.80}", param=id)
    for size in SIZE_FIELDS:
        if size in row and (not isinstance(row[size], int) or row[size] < 1):
            raise InvalidRequest(
                f"catalogue entry {id}: {size} must be an integer above 0, not {row[size]!r:.80}", param=id
            )
    return CatalogueModel(
        provider=provider,
        name=name,
        kind=kind,
        price=_read_price(id, row),
        context=row.get("context"),
        max_output=row.get("max_output"),
        aliases=tuple(aliases),
        source=source,
        as_of=as_of,
    )


def _read_price(entry_id: str, row: Mapping[str, Any]) -> Price | None:
    if "input" not in row:
        if fields := [name for name in (*PRICE_FIELDS, "long") if name in row]:
            raise InvalidRequest(
                f"catalogue entry {entry_id} must have a price for input, because it has one for {fields[0]}",
                param=entry_id,
            )
        return None
    prices: dict[str, Any] = {name: _parse_micros(entry_id, name, row[name]) for name in PRICE_FIELDS if name in row}
    long = _read_long_context_price(entry_id, row["long"]) if "long" in row else None
    return Price(prices.pop("input"), prices.pop("output", 0), **prices, long=long)


def _read_long_context_price(entry_id: str, long_price: object) -> LongContextPrice:
    if not isinstance(long_price, Mapping) or not isinstance(long_price.get("above"), int):
        raise InvalidRequest(
            f"catalogue entry {entry_id}: long must be a table of prices with `above` (a number of tokens),"
            f" not {long_price!r:.80}",
            param=entry_id,
        )
    price = _read_price(entry_id, {name: value for name, value in long_price.items() if name != "above"})
    if price is None:
        raise InvalidRequest(f"catalogue entry {entry_id}: table `long` must have the price `input`", param=entry_id)
    return LongContextPrice(long_price["above"], price)


def _parse_micros(entry_id: str, field: str, dollars: object) -> int:
    """Convert dollars per million tokens to micro-dollars per million tokens.

    Raise InvalidRequest if `dollars` is not a number, is negative, or has too many decimal places.
    """
    exact = Decimal(dollars) * 1_000_000 if isinstance(dollars, Decimal | int) else Decimal(-1)
    if isinstance(dollars, bool) or not exact.is_finite() or exact < 0 or exact != int(exact):
        raise InvalidRequest(
            f"catalogue entry {entry_id}: {field} must be dollars per million tokens, 0 or more, with at most 6 decimal"
            f" places, not {dollars!r}",
            param=entry_id,
        )
    return int(exact)
