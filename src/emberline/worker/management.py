"""open_management: adds the endpoints that change the served models to a server."""

from __future__ import annotations

from emberline.core.config import ServerConfig, cache_dir
from emberline.core.engine_config import EngineConfig
from emberline.worker.assembly import AssembledServer
from emberline.worker.management_handler import ManagementHandler
from emberline.worker.model_loader import ModelLoader
from emberline.worker.model_manager import ModelManager
from emberline.worker.model_puller import ModelPuller


def open_management(config: ServerConfig, engine_config: EngineConfig, server: AssembledServer) -> ModelManager:
    """Add the endpoints, and return the manager of the models, which must be stopped before the server ends.

    Without an admin key, all requests to these endpoints are refused. A worker of a router only pulls and removes
    models: its router knows the models from its registration.
    """
    loader = ModelLoader(config, engine_config)
    embedders = [server.embedding_model.name] if server.embedding_model is not None else []
    manager = ModelManager(
        server.catalog,
        config.models | {name: name for name in embedders},
        loader,
        ModelPuller(),
        cache_dir(),
        can_load=config.worker is None,
    )
    server.app.add_routes(ManagementHandler(manager).routes())
    return manager
