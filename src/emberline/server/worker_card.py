"""What a serving process tells a router of itself."""

from __future__ import annotations

from emberline.cluster.card import Beat, Card, ModelCard
from emberline.core.events import Stats
from emberline.engine.stream import AsyncEngine, State
from emberline.server.engine_app import EngineApp


def card(name: str, incarnation: str, url: str, app: EngineApp) -> Card:
    models = []
    for served in app.served():
        facts = app.engine.ready.get(served.id)
        if facts is None:  # the embedder
            models.append(ModelCard(served.id, max_context=served.max_context))
        else:
            cache = {"kv_tokens": facts.kv_tokens, "block_size": facts.block_size}
            models.append(ModelCard(served.id, facts.layout, facts.max_context, facts.max_running, **cache))
    return Card(name, incarnation, url, tuple(models))


def beat(name: str, incarnation: str, engine: AsyncEngine) -> Beat:
    stats = Stats.total(engine.stats.values())
    return Beat(
        name,
        incarnation,
        ready=engine.state is State.READY,
        running=stats.running,
        waiting=stats.waiting,
        kv_usage=round(stats.kv_usage, 4),
        step=stats.step,
        step_seconds=stats.step_seconds,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
    )
