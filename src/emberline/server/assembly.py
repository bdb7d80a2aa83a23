"""assemble: the application of a serving process, from what was read from disk and an engine that is ready."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from emberline import __version__
from emberline.api import reasoning, toolstyle
from emberline.core.config import ServerConfig, core_count
from emberline.core.errors import UnsupportedModel
from emberline.engine.grammar_guard import GrammarGuard
from emberline.engine.messages import Ready
from emberline.engine.stream import AsyncEngine
from emberline.hub.source import resolve
from emberline.server.embeddings import Embeddings
from emberline.server.engine_app import EngineApp
from emberline.server.generator import Generator
from emberline.server.metrics import Metrics
from emberline.server.pages import load_pages
from emberline.server.prompts import Prompts
from emberline.tokens.template import ChatTemplate
from emberline.tokens.tokenizer import Tokenizer

log = logging.getLogger("emberline.server")


@dataclass(frozen=True, slots=True)
class Parts:
    """What needs no engine, and so is read while the engine loads."""

    directory: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    embeddings: Embeddings | None


def read_parts(config: ServerConfig, directory: Path) -> Parts:
    embeddings = None
    if config.embedder is not None:
        embeddings = Embeddings(config.embedder, resolve(config.embedder), core_count())
    return Parts(directory, Tokenizer.load(directory), _template(directory, config), embeddings)


@dataclass(frozen=True, slots=True)
class Assembled:
    app: EngineApp
    guard: GrammarGuard
    embeddings: Embeddings | None

    def close(self) -> None:
        self.guard.close()
        if self.embeddings is not None:
            self.embeddings.stop()


def assemble(config: ServerConfig, parts: Parts, engine: AsyncEngine, ready: Ready) -> Assembled:
    name = config.served_name or config.model
    sources = "".join(parts.template.sources.values()) if parts.template else ""
    tool_style = toolstyle.style_for(sources, config.tool_style)
    tokenizer_file = parts.directory / "tokenizer.json"
    guard = GrammarGuard(tokenizer_file, ready.vocab_size, sorted(parts.tokenizer.eos_ids))
    metrics = Metrics(name)
    generator = Generator(
        engine,
        Prompts(parts.tokenizer, parts.template, tool_style, ready.max_context),
        guard,
        metrics,
        served_name=name,
        tool_style=tool_style,
        reasoning=reasoning.style_for(sources),
        timeout=config.request_timeout,
    )
    fingerprint = "fp_" + hashlib.sha256(f"{__version__}/{parts.directory.name}".encode()).hexdigest()[:12]
    app = EngineApp(config, generator, parts.embeddings, metrics, load_pages(), fingerprint)
    return Assembled(app, guard, parts.embeddings)


def _template(directory: Path, config: ServerConfig) -> ChatTemplate | None:
    try:
        return ChatTemplate.load(directory, Path(config.chat_template) if config.chat_template else None)
    except UnsupportedModel as e:
        log.warning("%s", e)
        return None  # completions work without
