"""ChatTemplate: renders messages and tools to the prompt text that a model was trained on."""

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
# Variables that a request may not set: those that every template gets, and documents, which are not supported.
OWN_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", *SPECIALS}
)


class Refused(TemplateError):
    """The template called raise_exception: its model does not support these messages."""


class _Compiled(NamedTuple):
    template: Template
    arguments: frozenset[str]


class ChatTemplate:
    def __init__(
        self, sources: dict[str, str], specials: dict[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`sources`: templates by name; `tool_use` is used for requests with tools, `default` for the others."""
        self.sources, self._specials, self._now = sources, specials, now
        environment = Sandbox()
        self._templates = {name: _compiled(environment, source) for name, source in sources.items()}

    @staticmethod
    def load(directory: Path, override: Path | None = None) -> ChatTemplate:
        config = read_optional(directory / "tokenizer_config.json")
        separate_file = directory / "chat_template.jinja"
        if override is not None:
            sources = {"default": _read(override)}
        elif separate_file.exists():
            sources = {"default": _read(separate_file)}
        else:
            json_file = read_optional(directory / "chat_template.json")
            sources = _named(config.get("chat_template") or json_file.get("chat_template"))
        if not sources:
            raise UnsupportedModel(f"{directory} has no chat template", hint="pass one with --chat-template FILE")
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
        """Return the variables that a request may set and the template reads."""
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
            f"the chat template is not allowed to do this: {e}", hint="pass another one with --chat-template FILE"
        ) from e
    except Refused as e:
        raise InvalidRequest(f"the model's chat template rejects these messages: {e}", param="messages") from e
    except (UndefinedError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
        raise InvalidRequest(f"the model's chat template cannot render these messages: {e}", param="messages") from e
    except (TemplateError, RecursionError, MemoryError) as e:
        raise ModelFileError(f"the chat template failed: {type(e).__name__}: {e}") from e


def _compiled(environment: Sandbox, source: str) -> _Compiled:
    if len(source) > MAX_SOURCE:
        raise ModelFileError(f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE}")
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
        return _Compiled(environment.from_string(source), frozenset(names) - OWN_NAMES)
    except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as e:
        raise ModelFileError(
            f"the chat template does not compile: {e}", hint="pass another one with --chat-template FILE"
        ) from e


def _refuse(message: Any = "") -> None:
    raise Refused(str(message))


def _named(value: Any) -> dict[str, str]:
    """Return templates by name from one template, or from a list of {"name", "template"}."""
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    templates = {e.get("name"): e.get("template") for e in entries if isinstance(e, dict)}
    return {name: text for name, text in templates.items() if isinstance(name, str) and isinstance(text, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ModelFileError(f"cannot read the chat template {path}: {e}") from e


def _text(value: Any) -> str | None:
    """Return the text of a special token, given as a string or as an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
