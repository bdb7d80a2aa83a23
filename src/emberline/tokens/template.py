"""ChatTemplate: renders messages and tools to a prompt, in the format that the model was trained on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, meta
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

from emberline.core.errors import InvalidRequest, ModelFileError, UnsupportedModel
from emberline.core.jsonfile import read_object_if_exists
from emberline.tokens.cost_guards import BUDGET_KEY
from emberline.tokens.render_budget import RenderBudget
from emberline.tokens.sandbox import TemplateSandbox

MAX_SOURCE_CHARS = 128 << 10  # compiling some sources takes seconds, and grows with the square of the length
MAX_ERROR_CHARS = 1000  # of a message that the template made
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Variables that a request may not set: those that every template gets, and documents, which are not supported.
RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", *SPECIAL_TOKEN_NAMES}
)


class MessagesRejected(TemplateError):
    """The template called raise_exception, because its model does not support these messages."""


class _CompiledTemplate(NamedTuple):
    template: Template
    extra_variables: frozenset[str]


class ChatTemplate:
    def __init__(
        self, sources: dict[str, str], special_tokens: dict[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`sources` has the templates by name: `tool_use` for requests with tools, and `default`."""
        self.sources, self.special_tokens, self._now = sources, special_tokens, now
        environment = TemplateSandbox()
        self._templates = {name: _compile_template(environment, source) for name, source in sources.items()}

    @staticmethod
    def load(directory: Path, override: Path | None = None) -> ChatTemplate:
        config = read_object_if_exists(directory / "tokenizer_config.json")
        separate_file = directory / "chat_template.jinja"
        if override is not None:
            sources = {"default": _read_template_source(override)}
        elif separate_file.exists():
            sources = {"default": _read_template_source(separate_file)}
        else:
            json_file = read_object_if_exists(directory / "chat_template.json")
            sources = _parse_sources_by_name(config.get("chat_template") or json_file.get("chat_template"))
        if not sources:
            raise UnsupportedModel(
                f"the model directory {directory} has no chat template", hint="pass one with --chat-template FILE"
            )
        return ChatTemplate(
            sources,
            {
                name: text
                for name in SPECIAL_TOKEN_NAMES
                if (text := _parse_special_token(config.get(name))) is not None
            },
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        variables = {
            **self.special_tokens,
            "raise_exception": _reject_messages,
            "strftime_now": lambda format_: self._now().strftime(format_),
            **extra,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
            BUDGET_KEY: RenderBudget(),
        }
        return _render_template(self._template_for(bool(tools)).template, variables)

    def extra_variables(self, with_tools: bool) -> frozenset[str]:
        """Return the names of the variables that the model's template reads and that a request may set.

        `with_tools`: the request has tools, for which some models have a separate template."""
        return self._template_for(with_tools).extra_variables

    def _template_for(self, with_tools: bool) -> _CompiledTemplate:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))


def _render_template(template: Template, variables: dict[str, Any]) -> str:
    try:
        return template.render(variables)
    except SecurityError as e:
        raise ModelFileError(
            f"the chat template did something that is not allowed: {_shorten(e)}",
            hint="pass another one with --chat-template FILE",
        ) from e
    except MessagesRejected as e:
        raise InvalidRequest(f"the model's chat template rejects these messages: {e}", param="messages") from e
    except (UndefinedError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
        raise InvalidRequest(
            f"the model's chat template cannot render these messages: {_shorten(e)}",
            param="messages",
            hint="change the roles or the content of the messages, or pass another template with --chat-template FILE",
        ) from e
    except (TemplateError, RecursionError, MemoryError) as e:
        raise ModelFileError(f"the chat template failed: {type(e).__name__}: {_shorten(e)}") from e


def _compile_template(environment: TemplateSandbox, source: str) -> _CompiledTemplate:
    if len(source) > MAX_SOURCE_CHARS:
        raise ModelFileError(f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}")
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
        return _CompiledTemplate(environment.from_string(source), frozenset(names) - RESERVED_NAMES)
    except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as e:
        raise ModelFileError(
            f"the chat template does not compile: {_shorten(e)}", hint="pass another one with --chat-template FILE"
        ) from e


def _shorten(error: Exception) -> str:
    return str(error)[:MAX_ERROR_CHARS]


def _reject_messages(message: Any = "") -> None:
    raise MessagesRejected(str(message)[:MAX_ERROR_CHARS])


def _parse_sources_by_name(value: Any) -> dict[str, str]:
    """Return templates by name. `value` is one template, or a list of objects with `name` and `template`."""
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    templates = {e.get("name"): e.get("template") for e in entries if isinstance(e, dict)}
    return {name: text for name, text in templates.items() if isinstance(name, str) and isinstance(text, str)}


def _read_template_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ModelFileError(f"cannot read the chat template {path}: {e}") from e


def _parse_special_token(value: Any) -> str | None:
    """Return the text of a special token. `value` is the text, or an object with the text as `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
