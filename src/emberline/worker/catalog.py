"""ModelCatalog: the models of a server, by their names in the API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from emberline.core.errors import InvalidRequest, ModelNotFound
from emberline.engine.grammar_guard import GrammarGuard
from emberline.server.metrics import ModelMetrics
from emberline.worker.generator import Generator


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str
    generator: Generator
    guard: GrammarGuard
    metrics: ModelMetrics
    fingerprint: str  # `system_fingerprint` of replies
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # values for requests that do not set them


class ModelCatalog:
    def __init__(self, models: Iterable[LoadedModel]) -> None:
        self._models = {model.name: model for model in models}
        assert self._models

    def __iter__(self) -> Iterator[LoadedModel]:
        return iter(self._models.values())

    def __getitem__(self, name: str) -> LoadedModel:
        """Return the model of this name. Raises ModelNotFound."""
        if (model := self._models.get(name)) is None:
            raise ModelNotFound(f"model {name[:200]!r} not found", param="model", hint=self._models_hint())
        return model

    def select(self, name: str | None) -> LoadedModel:
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
