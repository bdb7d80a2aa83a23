"""ModelCatalog: the models of a server, by their names in the API."""

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
    fingerprint: str  # `system_fingerprint` of replies
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values for requests that do not set them


class Catalog:
    def __init__(self, models: Iterable[Served]) -> None:
        self._models = {model.name: model for model in models}
        assert self._models

    def __iter__(self) -> Iterator[Served]:
        return iter(self._models.values())

    def __getitem__(self, name: str) -> Served:
        """Return the model of this name. Raises ModelNotFound."""
        if (model := self._models.get(name)) is None:
            raise ModelNotFound(f"model {name[:200]!r} not found", param="model", hint=self._models_hint())
        return model

    def chosen(self, name: str | None) -> Served:
        """Return the model of this name or, for None, the only model. Raises InvalidRequest if there are several."""
        if name is not None:
            return self[name]
        if len(self._models) > 1:
            raise InvalidRequest(
                "model is required, as the server has several", param="model", hint=self._models_hint()
            )
        return next(iter(self))

    def _models_hint(self) -> str:
        return f"models of this server: {', '.join(map(repr, self._models))}"
