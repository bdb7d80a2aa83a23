"""A model's chat template: messages and tools to the prompt text it was trained on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, meta
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

from emberline.core.errors import InvalidRequest, ModelFileError, UnsupportedModel
from emberline.core.jsonfile import read_optional
from emberline.tokens.fuel import Fuel
from emberline.tokens.guards import FUEL_KEY
from emberline.tokens.sandbox import Sandbox

MAX_SOURCE = 256 << 10
SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Not for a request to set: what a template is given anyway, and documents, which nobody serves.
OWN_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", *SPECIALS}
)


class Refused(TemplateError):
    """The template called raise_exception: these messages are not ones that its model understands."""


class _Compiled(NamedTuple):
    template: Template
    arguments: frozenset[str]


class ChatTemplate:
    def __init__(
        self, sources: dict[str, str], specials: dict[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`sources` by name; of several, `tool_use` serves requests with tools and `default` the others."""
        self.sources, self._specials, self._now = sources, specials, now
        environment = Sandbox()
        self._templates = {name: _compiled(environment, source) for name, source in sources.items()}

    @staticmethod
    def load(directory: Path, override: Path | None = None) -> ChatTemplate:
        config = read_optional(directory / "tokenizer_config.json")
        own = directory / "chat_template.jinja"
        if override is not None:
            sources = {"default": _read(override)}
        elif own.exists():
            sources = {"default": _read(own)}
        else:
            beside = read_optional(directory / "chat_template.json")
            sources = _named(config.get("chat_template") or beside.get("chat_template"))
        if not sources:
            raise UnsupportedModel(f"{directory} has no chat template", hint="give one: --chat-template FILE")
        return ChatTemplate(sources, {name: text for name in SPECIALS if (text := _text(config.get(name))) is not None})

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        variables = {
            **self._specials,
            "raise_exception": _refuse,
            "strftime_now": lambda format_: self._now().strftime(format_),
            **extra,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
            FUEL_KEY: Fuel(),
        }
        return _rendered(self._choose(bool(tools)).template, variables)

    def arguments(self, with_tools: bool) -> frozenset[str]:
        """The variables it reads beside its own: what else it is given leaves no trace in the prompt."""
        return self._choose(with_tools).arguments

    def _choose(self, with_tools: bool) -> _Compiled:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))


def _rendered(template: Template, variables: dict[str, Any]) -> str:
    try:
        return template.render(variables)
    except SecurityError as e:
        raise ModelFileError(
            f"the chat template may not do this: {e}", hint="give another: --chat-template FILE"
        ) from e
    except Refused as e:
        raise InvalidRequest(f"the model's chat template refuses these messages: {e}", param="messages") from e
    except (UndefinedError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
        raise InvalidRequest(f"the model's chat template cannot render these messages: {e}", param="messages") from e
    except (TemplateError, RecursionError, MemoryError) as e:
        raise ModelFileError(f"the chat template failed: {type(e).__name__}: {e}") from e


def _compiled(environment: Sandbox, source: str) -> _Compiled:
    if len(source) > MAX_SOURCE:
        raise ModelFileError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are read")
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
        return _Compiled(environment.from_string(source), frozenset(names) - OWN_NAMES)
    except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as e:
        raise ModelFileError(
            f"the chat template does not compile: {e}", hint="give another: --chat-template FILE"
        ) from e


def _refuse(message: Any = "") -> None:
    raise Refused(str(message))


def _named(value: Any) -> dict[str, str]:
    """One template, or a list of {"name", "template"}."""
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    named = {e.get("name"): e.get("template") for e in entries if isinstance(e, dict)}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ModelFileError(f"cannot read the chat template {path}: {e}") from e


def _text(value: Any) -> str | None:
    """A special token is written as text, or as an object with its content."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
