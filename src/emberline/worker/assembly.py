"""Creates the ASGI application of a server process from the model files and the running engine."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from emberline import __version__
from emberline.api.openapi import build_document
from emberline.core.config import DEFAULT_EMBEDDER, ServerConfig, cache_dir
from emberline.core.cpus import core_count
from emberline.core.errors import UnsupportedModel
from emberline.core.jsonfile import read_object_if_exists
from emberline.core.tls import TLSIdentity
from emberline.engine.async_engine import AsyncEngine
from emberline.engine.grammar_guard import GrammarTrialProcess
from emberline.engine.messages import LoadedModelInfo
from emberline.hub.builtin_models import KNOWN_MODELS
from emberline.hub.pull import checkpoint_path
from emberline.hub.source import ModelNotPulled, resolve_model
from emberline.server.metrics import ModelMetrics
from emberline.server.pages import StaticPage, load_pages
from emberline.server.tracing import RequestTracing
from emberline.tokens.detokenizer import Detokenizer
from emberline.tokens.template import ChatTemplate
from emberline.tokens.template_process import TemplateProcess
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker import protocols
from emberline.worker.catalog import LoadedModel, ModelCatalog
from emberline.worker.embedding_model import EmbeddingModel
from emberline.worker.engine_app import EngineApp
from emberline.worker.generator import Generator
from emberline.worker.grammar_checker import GrammarChecker
from emberline.worker.on_demand_embedder import AnyEmbeddingModel, OnDemandEmbeddingModel
from emberline.worker.output_styles import select_output_styles
from emberline.worker.prompt_builder import PromptBuilder
from emberline.worker.response_store import ResponseStore
from emberline.worker.sampling_defaults import GENERATION_CONFIG_FILE, load_sampling_defaults, with_default_max_tokens

log = logging.getLogger("emberline.server")

TEMPLATE_PROCESSES = 2  # of each model; one tenant uses one of them at most
GRAMMAR_TRIAL_PROCESSES = 2  # one tenant uses one of them at most
DEFAULT_EMBEDDER_DIM, DEFAULT_EMBEDDER_MAX_TOKENS = 384, 256  # known before its files are downloaded


@dataclass(frozen=True, slots=True)
class PreloadedResources:
    """What a server needs besides the engine. It is loaded while the engine starts."""

    models: dict[str, TokenizerAndTemplate]
    embedding_model: AnyEmbeddingModel | None
    pages: dict[str, StaticPage]


@dataclass(frozen=True, slots=True)
class TokenizerAndTemplate:
    """The tokenizer and the chat template of a model, and the directory of its checkpoint."""

    directory: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    template_processes: tuple[TemplateProcess, ...]

    def close(self) -> None:
        for process in self.template_processes:
            process.close()


def preload_resources(config: ServerConfig, directories: Mapping[str, Path]) -> PreloadedResources:
    protocols.warm_up_protocols()
    models = {name: load_tokenizer_and_template(directory, config) for name, directory in directories.items()}
    for text in models.values():
        Detokenizer(text.tokenizer).push(text.tokenizer.encode("a"))  # the first use takes longer
    build_document(__version__)  # takes 50 ms; EngineApp uses it later
    return PreloadedResources(models, _open_embedding_model(config), load_pages())


def load_tokenizer_and_template(directory: Path, config: ServerConfig) -> TokenizerAndTemplate:
    template = _load_template(directory, config)
    processes = () if template is None else tuple(TemplateProcess(template) for _ in range(TEMPLATE_PROCESSES))
    if processes:
        processes[0].start()
    return TokenizerAndTemplate(directory, Tokenizer.load(directory), template, processes)


def _open_embedding_model(config: ServerConfig) -> AnyEmbeddingModel | None:
    """Return the embedding model; None if it is turned off. The default one is downloaded when it is first used."""
    name = config.embedder
    if name is None:
        return None
    description = KNOWN_MODELS[name].wheels[0].label if name in KNOWN_MODELS else "sentence embedder"
    timeout = min(config.request_timeout, config.token_timeout)

    def load(*, allow_download: bool = True) -> EmbeddingModel:
        directory = resolve_model(name, allow_download=allow_download)
        return EmbeddingModel(name, directory, core_count(), timeout, description)

    try:
        return load(allow_download=name != DEFAULT_EMBEDDER)
    except ModelNotPulled:
        directory = checkpoint_path(name, cache_dir())
        dim, max_tokens = DEFAULT_EMBEDDER_DIM, DEFAULT_EMBEDDER_MAX_TOKENS
        return OnDemandEmbeddingModel(name, description, directory, dim, max_tokens, load)


@dataclass(frozen=True, slots=True)
class AssembledServer:
    app: EngineApp
    catalog: ModelCatalog
    embedding_model: AnyEmbeddingModel | None
    response_store: ResponseStore | None = None

    def close(self) -> None:
        if self.response_store is not None:
            self.response_store.close()
        for model in self.catalog:
            model.close()
        if self.embedding_model is not None:
            self.embedding_model.stop()


def assemble_server(
    config: ServerConfig,
    preloaded: PreloadedResources,
    engine: AsyncEngine,
    tracing: RequestTracing | None,
    tls: TLSIdentity | None,
) -> AssembledServer:
    catalog = ModelCatalog(
        assemble_model(config, name, text, engine, engine.model_info[name]) for name, text in preloaded.models.items()
    )
    store = _open_response_store(config)
    app = EngineApp(config, engine, catalog, preloaded.embedding_model, preloaded.pages, tracing, store, tls)
    return AssembledServer(app, catalog, preloaded.embedding_model, store)


def _open_response_store(config: ServerConfig) -> ResponseStore | None:
    """Return the store for responses, or None if responses are not stored.

    With the setting `auto`, a server on its own uses a temporary file. A worker behind a router stores no responses,
    because the router may send the next request of the conversation to a different worker.
    """
    if config.response_store == "none" or (config.response_store == "auto" and config.worker is not None):
        return None
    path = None if config.response_store == "auto" else Path(config.response_store)
    return ResponseStore(path, config.response_store_size)


def assemble_model(
    config: ServerConfig,
    name: str,
    tokenizer_and_template: TokenizerAndTemplate,
    engine: AsyncEngine,
    info: LoadedModelInfo,
) -> LoadedModel:
    sources = "".join(tokenizer_and_template.template.sources.values()) if tokenizer_and_template.template else ""
    model_config = read_object_if_exists(tokenizer_and_template.directory / "config.json")
    styles = select_output_styles(config, name, sources, str(model_config.get("model_type", "")))
    tokenizer_file = tokenizer_and_template.directory / "tokenizer.json"
    grammar_checker = GrammarChecker(
        [GrammarTrialProcess(tokenizer_file, info.vocab_size, info.eos) for _ in range(GRAMMAR_TRIAL_PROCESSES)]
    )
    metrics = ModelMetrics(name)
    generator = Generator(
        engine,
        PromptBuilder(
            tokenizer_and_template.tokenizer,
            tokenizer_and_template.template,
            styles.tool_style,
            info.max_context,
            config.reasoning_style,
            tokenizer_and_template.template_processes,
        ),
        grammar_checker,
        metrics,
        served_name=name,
        tool_style=styles.tool_style,
        reasoning=styles.reasoning,
        timeout=config.request_timeout,
        token_timeout=config.token_timeout,
        eos_token_ids=frozenset(info.eos),
        speculates=info.speculates,
    )
    fingerprint = (
        "fp_" + hashlib.sha256(f"{__version__}/{tokenizer_and_template.directory.name}".encode()).hexdigest()[:12]
    )
    defaults = load_sampling_defaults(tokenizer_and_template.directory, config.generation_config)
    if defaults:
        log.info("Sampling defaults loaded: model=%s file=%s defaults=%s", name, GENERATION_CONFIG_FILE, defaults)
    defaults = with_default_max_tokens(defaults, config.default_max_tokens, reasons=styles.reasoning is not None)
    return LoadedModel(
        name, generator, grammar_checker, metrics, fingerprint, defaults, tokenizer_and_template.directory
    )


def _load_template(directory: Path, config: ServerConfig) -> ChatTemplate | None:
    try:
        return ChatTemplate.load(directory, Path(config.chat_template) if config.chat_template else None)
    except UnsupportedModel as e:
        log.warning("Chat template unavailable, only /v1/completions works: model=%s reason=%s", directory.name, e)
        return None
