"""Catalogue: what is known of models: price, sizes, who says so and when it was read. What is not known is absent.

    [openai]
    source = "https://..."          # of the rows below, unless they say another
    as_of = 2026-08-08
    like = "other-provider"         # rows that are not here are looked up there

    [openai.chat]                   # the kind: chat, embedding, ...
    "gpt-4o-mini" = { input = 0.15, cached_read = 0.075, output = 0.6, context = 128_000, max_output = 16_384 }

Prices in the file are dollars per million tokens, read as decimals, never as floats. Our own file comes with the
package; a user's files lie over it, row by row. A name with a date at its end is the name without, unless it has a row;
the row "*" is for all names that have none.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.gateway.costs.cost import LongPrice, Price

OURS = Path(__file__).with_name("catalogue.toml")
PRICES = ("input", "output", "cached_read", "cache_write", "cache_write_long", "audio", "image")
COUNTS = ("context", "max_output")
OTHERS = ("aliases", "source", "as_of", "long")
MAX_FOUND = 4096  # names whose models are remembered
DATED = re.compile(r"[-@](\d{4}-\d{2}-\d{2}|\d{8})$")


@dataclass(frozen=True, slots=True)
class Model:
    provider: str
    name: str
    kind: str
    price: Price | None
    context: int | None  # tokens of input it takes
    max_output: int | None
    aliases: tuple[str, ...]
    source: str
    as_of: date


class Catalogue:
    def __init__(self, models: Iterable[Model], like: Mapping[str, str] | None = None) -> None:
        """Later models lie over earlier ones."""
        self._like = dict(like or {})
        self._models: dict[tuple[str, str], Model] = {}
        self._names: dict[tuple[str, str], Model] = {}
        for model in models:
            self._models[model.provider, model.name] = model
        for model in self._models.values():
            for name in model.aliases:
                self._names[model.provider, name] = model
        self._names.update(self._models)
        self._found: dict[tuple[str, str], Model | None] = {}  # by what callers asked for

    @staticmethod
    def load(*files: Path) -> Catalogue:
        """Our own file, and over it these."""
        models: list[Model] = []
        like: dict[str, str] = {}
        for file in (OURS, *files):
            try:
                with file.open("rb") as opened:
                    found = tomllib.load(opened, parse_float=Decimal)
            except (OSError, ValueError) as e:
                raise InvalidRequest(f"the catalogue {file.name} cannot be read: {e}") from e
            for provider, rows in found.items():
                if isinstance(rows, Mapping) and "like" in rows:
                    like[provider] = str(rows["like"])
                models += _provider(provider, rows)
        return Catalogue(models, like)

    def model(self, provider: str, name: str) -> Model | None:
        key = (provider, name)
        if key not in self._found:
            if len(self._found) >= MAX_FOUND:  # callers choose names
                self._found.clear()
            self._found[key] = self._find(provider, name)
        return self._found[key]

    def _find(self, provider: str, name: str) -> Model | None:
        return (
            self._names.get((provider, name))
            or self._names.get((provider, DATED.sub("", name)))
            or (self.model(self._like[provider], name) if provider in self._like else None)
            or self._names.get((provider, "*"))
        )

    def price(self, provider: str, name: str) -> Price | None:
        model = self.model(provider, name)
        return model.price if model else None

    def models(self, provider: str | None = None) -> list[Model]:
        return [model for model in self._models.values() if provider in (None, model.provider)]


class CatalogueFiles:
    """A catalogue that follows its files. A file that has become unreadable leaves the last good catalogue in force."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._stamps = self._stamp()
        self.current = Catalogue.load(*files)

    def model(self, provider: str, name: str) -> Model | None:
        return self.current.model(provider, name)

    def refresh(self) -> bool:
        """Looks at the files, and reads them if they have changed. True: there is a new catalogue."""
        if (stamps := self._stamp()) == self._stamps:
            return False
        self._stamps = stamps  # whatever is in them: a broken file is complained of once, not every time
        self.current = Catalogue.load(*self._files)
        return True

    def _stamp(self) -> list[tuple[int, int]]:
        return [_stamp(file) for file in (OURS, *self._files)]


def _stamp(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:  # it is not there, or is just being replaced
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def _provider(provider: str, rows: object) -> Iterable[Model]:
    if not isinstance(rows, Mapping):
        raise InvalidRequest(f"the catalogue's {provider} must be a table", param=provider)
    for kind, models in rows.items():
        if isinstance(models, Mapping):
            for name, row in models.items():
                yield _model(provider, kind, name, row, rows)
        elif kind not in ("source", "as_of", "like"):
            raise InvalidRequest(f"the catalogue's {provider}.{kind} must be a table of models", param=provider)


def _model(provider: str, kind: str, name: str, row: object, above: Mapping[str, Any]) -> Model:
    where = f"{provider}/{name}"
    if not isinstance(row, Mapping) or not set(row) <= {*PRICES, *COUNTS, *OTHERS}:
        raise InvalidRequest(f"the catalogue's {where} must be a table of known fields, not {row!r:.80}", param=where)
    source, as_of = row.get("source", above.get("source")), row.get("as_of", above.get("as_of"))
    if not isinstance(source, str) or not isinstance(as_of, date):
        raise InvalidRequest(f"the catalogue's {where} must say its source and as_of (a date)", param=where)
    aliases = row.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise InvalidRequest(f"the catalogue's {where}: aliases must be a list of names", param=where)
    for count in COUNTS:
        if count in row and (not isinstance(row[count], int) or row[count] < 1):
            raise InvalidRequest(f"the catalogue's {where}: {count} must be a whole number above 0", param=where)
    return Model(
        provider=provider,
        name=name,
        kind=kind,
        price=_price(where, row),
        context=row.get("context"),
        max_output=row.get("max_output"),
        aliases=tuple(aliases),
        source=source,
        as_of=as_of,
    )


def _price(where: str, row: Mapping[str, Any]) -> Price | None:
    if "input" not in row:
        if given := [name for name in (*PRICES, "long") if name in row]:
            raise InvalidRequest(f"the catalogue's {where} has {given[0]} without input", param=where)
        return None
    prices: dict[str, Any] = {name: _micros(where, row[name]) for name in PRICES if name in row}
    long = _long(where, row["long"]) if "long" in row else None
    return Price(prices.pop("input"), prices.pop("output", 0), **prices, long=long)


def _long(where: str, long: object) -> LongPrice:
    if not isinstance(long, Mapping) or not isinstance(long.get("above"), int):
        raise InvalidRequest(f"the catalogue's {where}: long must say above how many tokens", param=where)
    price = _price(where, {name: value for name, value in long.items() if name != "above"})
    if price is None:
        raise InvalidRequest(f"the catalogue's {where}: long must have a price", param=where)
    return LongPrice(long["above"], price)


def _micros(where: str, dollars: object) -> int:
    """Dollars per million tokens to micro-dollars per million tokens."""
    exact = Decimal(dollars) * 1_000_000 if isinstance(dollars, Decimal | int) else Decimal(-1)
    if isinstance(dollars, bool) or not exact.is_finite() or exact < 0 or exact != int(exact):
        raise InvalidRequest(f"the catalogue's {where}: {dollars!r} is not a price, to the micro-dollar", param=where)
    return int(exact)
