"""Presence: what a serving process tells a router of itself, and what it does about its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emberline.api.openai.models import ServedModel
from emberline.cluster.card import Beat, Card, ModelCard
from emberline.core.config import Role
from emberline.core.events import Stats
from emberline.engine.stream import AsyncEngine, State

PAIRING = 5.0  # seconds in which a worker waits to be paired with those it was told of first


class Presence:
    def __init__(
        self,
        name: str,
        incarnation: str,
        url: str,
        role: Role,
        engine: AsyncEngine,
        served: Callable[[], list[ServedModel]],
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._url = url
        self._role = role
        self._engine = engine
        self._served = served
        self._peers: dict[str, list[dict[str, Any]]] | None = None  # None: the router has not answered yet
        self._awaited: set[str] = set()  # incarnations of engines without which we are not ready
        self._patience = 0.0  # until when

    def card(self) -> Card:
        return Card(self._name, self._incarnation, self._url, tuple(map(self._model, self._served())), self._role)

    def _model(self, served: ServedModel) -> ModelCard:
        facts = self._engine.ready.get(served.id)
        if facts is None:  # the embedder
            return ModelCard(served.id, max_context=served.max_context)
        return ModelCard(
            served.id,
            facts.layout,
            facts.max_context,
            facts.max_running,
            kv_tokens=facts.kv_tokens,
            block_size=facts.block_size,
            peer=facts.peer,
            sampling=dict(served.sampling),
            numerics=facts.numerics,
        )

    def beat(self) -> Beat:
        stats = Stats.total(self._engine.stats.values())
        pairs = self._engine.paired.values()
        return Beat(
            self._name,
            self._incarnation,
            ready=self._engine.state is State.READY and self._settled(),
            running=stats.running,
            waiting=stats.waiting,
            loading=stats.loading,
            kv_usage=round(stats.kv_usage, 4),
            step=stats.step + self._engine.progress_reports,  # progress within a long step is progress too
            step_seconds=stats.step_seconds,
            busy_seconds=stats.busy_seconds,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            paired=tuple(peer for pair in pairs for peer in pair.paired),
            refused={peer: why for pair in pairs for peer, why in pair.refused.items()},
            transfer=stats.transfer,
        )

    def meet(self, peers: dict[str, list[dict[str, Any]]]) -> None:
        """Those to be paired with: what changes is passed on to the engine."""
        if self._peers is None:
            self._awaited = {str(peer.get("incarnation")) for listed in peers.values() for peer in listed}
            self._patience = self._engine.now() + PAIRING
        known = self._peers or {}
        for model, facts in self._engine.ready.items():
            listed = peers.get(model, [])
            if facts.peer is not None and listed != known.get(model, []):
                self._engine.pair(model, listed)
        self._peers = peers

    def _settled(self) -> bool:
        """Whether the first requests would find their connections made. Once it is so, it stays so."""
        for pair in self._engine.paired.values():
            self._awaited -= {*pair.paired, *pair.refused}
        if self._engine.now() >= self._patience:
            self._awaited.clear()
        return not self._awaited
