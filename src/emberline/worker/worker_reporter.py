"""WorkerReporter: creates the registration and heartbeats for the router, and handles the router's list of peers.

Peers are the other workers with which this worker exchanges KV blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emberline.api.openai.models import ServedModel
from emberline.cluster.registration import Heartbeat, ModelRegistration, WorkerRegistration
from emberline.core.config import Role
from emberline.core.events import Stats
from emberline.engine.async_engine import AsyncEngine, EngineState

PAIRING_TIMEOUT_S = 5.0  # for which a new worker is not ready while it connects to the first peers


class WorkerReporter:
    def __init__(
        self,
        name: str,
        incarnation: str,
        url: str,
        role: Role,
        engine: AsyncEngine,
        served_models: Callable[[], list[ServedModel]],
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._url = url
        self._role = role
        self._engine = engine
        self._served_models = served_models
        self._peers: dict[str, list[dict[str, Any]]] | None = None  # None before the router's first reply
        self._awaited_peers: set[str] = set()  # incarnations of the peers to pair with before this worker is ready
        self._pairing_deadline = 0.0  # time after which it is ready without them

    def build_registration(self) -> WorkerRegistration:
        return WorkerRegistration(
            self._name,
            self._incarnation,
            self._url,
            tuple(map(self._build_model_registration, self._served_models())),
            self._role,
        )

    def _build_model_registration(self, model: ServedModel) -> ModelRegistration:
        info = self._engine.model_info.get(model.id)
        if info is None:  # the embedding model
            return ModelRegistration(model.id, max_context=model.max_context)
        return ModelRegistration(
            model.id,
            info.layout,
            info.max_context,
            info.max_running,
            kv_tokens=info.kv_tokens,
            block_size=info.block_size,
            peer=info.peer,
            sampling=dict(model.sampling_defaults),
            numerics=info.numerics,
            ranks=max(1, len(info.ranks)),
        )

    def build_heartbeat(self) -> Heartbeat:
        stats = Stats.total(self._engine.stats.values())
        pairs = self._engine.pairing_states.values()
        return Heartbeat(
            self._name,
            self._incarnation,
            ready=self._engine.state is EngineState.READY and self._is_paired(),
            running=stats.running,
            waiting=stats.waiting,
            loading=stats.loading,
            kv_usage=round(stats.kv_usage, 4),
            step=stats.step + self._engine.progress_reports,  # progress within a long step counts too
            step_seconds=stats.step_seconds,
            busy_seconds=stats.busy_seconds,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            paired=tuple(peer for pair in pairs for peer in pair.paired),
            refused={peer: why for pair in pairs for peer, why in pair.refused.items()},
            transfer=stats.transfer,
            asleep=self._engine.is_asleep,
        )

    def update_peers(self, peers: dict[str, list[dict[str, Any]]]) -> None:
        """Pass the list of current peers to the engine, for each model whose list has changed.

        `peers`: the lists by model, as the router sent them."""
        if self._peers is None:
            self._awaited_peers = {str(peer.get("incarnation")) for listed in peers.values() for peer in listed}
            self._pairing_deadline = self._engine.now() + PAIRING_TIMEOUT_S
        known = self._peers or {}
        for model, info in self._engine.model_info.items():
            listed = peers.get(model, [])
            if info.peer is not None and listed != known.get(model, []):
                self._engine.set_peers(model, listed)
        self._peers = peers

    def _is_paired(self) -> bool:
        """Return whether the worker has finished connecting to its first peers.

        It has finished when each of them is connected or was rejected, or a time limit has passed. After that, the
        result stays True.
        """
        for pair in self._engine.pairing_states.values():
            self._awaited_peers -= {*pair.paired, *pair.refused}
        if self._engine.now() >= self._pairing_deadline:
            self._awaited_peers.clear()
        return not self._awaited_peers
