"""Catalog: the models of a server, by their names in the API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from emberline.core.errors import InvalidRequest, ModelNotFound
from emberline.engine.grammar_guard import GrammarGuard
from emberline.server.metrics import Metrics
from emberline.server.worker.generator import Generator


@dataclass(frozen=True, slots=True)
class Served:
    name: str
    generator: Generator
    guard: GrammarGuard
    metrics: Metrics
    fingerprint: str  # as replies tell it
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling settings that a request may leave out


class Catalog:
    def __init__(self, models: Iterable[Served]) -> None:
        self._models = {model.name: model for model in models}
        assert self._models

    def __iter__(self) -> Iterator[Served]:
        return iter(self._models.values())

    def __getitem__(self, name: str) -> Served:
        """The one that a request names."""
        if (model := self._models.get(name)) is None:
            raise ModelNotFound(f"there is no model {name[:200]!r} here", param="model", hint=self._known())
        return model

    def chosen(self, name: str | None) -> Served:
        """Where a request need not name one if there is no other."""
        if name is not None:
            return self[name]
        if len(self._models) > 1:
            raise InvalidRequest("model is missing, and there are several", param="model", hint=self._known())
        return next(iter(self))

    def _known(self) -> str:
        return f"this server has {', '.join(map(repr, self._models))}"
