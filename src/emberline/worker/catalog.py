"""ModelCatalog: the models that a server serves, by the names that requests use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest, ModelNotFound
from emberline.server.metrics import ModelMetrics
from emberline.worker.generator import Generator
from emberline.worker.grammar_checker import GrammarChecker


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str
    generator: Generator
    grammar_checker: GrammarChecker
    metrics: ModelMetrics
    fingerprint: str  # `system_fingerprint` of replies
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # values for requests that do not set them
    directory: Path = Path()  # of the checkpoint

    def close(self) -> None:
        self.grammar_checker.close()
        self.generator.prompt_builder.close()


class ModelCatalog:
    def __init__(self, models: Iterable[LoadedModel]) -> None:
        self._models = {model.name: model for model in models}
        assert self._models

    def __iter__(self) -> Iterator[LoadedModel]:
        return iter(self._models.values())

    def __getitem__(self, name: str) -> LoadedModel:
        """Return the model with this name, also if Ollama's tag `:latest` is added to it. Raises ModelNotFound."""
        if (model := self._models.get(name) or self._models.get(name.removesuffix(":latest"))) is None:
            raise ModelNotFound(f"model {name[:200]!r} not found", param="model", hint=self._models_hint())
        return model

    def select(self, name: str | None) -> LoadedModel:
        """Return the model with this name. For None, return the server's only model.

        Raises ModelNotFound, or InvalidRequest if the name is None and the server has several models.
        """
        if name is not None:
            return self[name]
        if len(self._models) > 1:
            raise InvalidRequest(
                "model is required, because this server has several models", param="model", hint=self._models_hint()
            )
        return next(iter(self))

    def add(self, model: LoadedModel) -> None:
        assert model.name not in self._models
        self._models = {**self._models, model.name: model}

    def remove(self, name: str) -> None:
        self._models = {other: model for other, model in self._models.items() if other != name}

    def _models_hint(self) -> str:
        return f"models of this server: {', '.join(map(repr, self._models))}"
