"""ModelLoader: starts a model in an engine process of its own, while the server runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from emberline.core.config import ServerConfig
from emberline.core.engine_config import (
    EngineConfig,
    KVNetworkConfig,
    KVTierConfig,
    SpeculationConfig,
    TimeSharingConfig,
)
from emberline.engine.async_engine import AsyncEngine
from emberline.worker.assembly import assemble_model, load_tokenizer_and_template
from emberline.worker.catalog import LoadedModel


class ModelLoader:
    def __init__(self, config: ServerConfig, engine_config: EngineConfig) -> None:
        """Options of the server that name files or formats of its first model do not apply to models loaded later."""
        self._config = replace(config, tool_style="auto", reasoning_style="auto", chat_template=None)
        self._engine_config = replace(
            engine_config,
            speculation=SpeculationConfig(),
            tiers=KVTierConfig(),
            network=KVNetworkConfig(),
            transfer=None,
        )

    async def load(self, name: str, directory: Path) -> LoadedModel:
        """Start the engine and return the model when it accepts requests.

        Raises EmberlineError if the model cannot be loaded, for example for lack of memory.
        """
        text = await asyncio.to_thread(load_tokenizer_and_template, directory, self._config)
        engine_config = replace(self._engine_config, model=str(directory))
        engine = AsyncEngine({name: engine_config}, TimeSharingConfig(), stall_timeout=self._config.stall_timeout)
        try:
            await engine.start()
            model = assemble_model(self._config, name, text, engine, engine.model_info[name])
        except BaseException:
            await engine.stop()
            text.close()
            raise
        engine.on_stats = lambda _, stats: model.metrics.record_step(stats)
        return model
