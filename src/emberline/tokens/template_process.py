"""TemplateProcess: renders a chat template in a child process, which can be killed.

A template comes with a checkpoint, so its author may be hostile. `RenderBudget` charges for the work that jinja2 does,
but one operation that it misses could hold the interpreter's lock for ever, and with it the whole server.
"""

from __future__ import annotations

import signal
from functools import lru_cache
from typing import Any

from emberline.core.errors import EmberlineError, EngineUnavailable, ModelFileError
from emberline.core.offload import OffloadProcess
from emberline.tokens.template import ChatTemplate

MAX_CPU_SECONDS = 3.0  # a render that spends its whole budget takes about half a second
MAX_WALL_SECONDS = 30.0
MEMORY_BYTES = 1 << 30  # address space
HINT = "pass another one with --chat-template FILE"


class TemplateProcess:
    """Has the method `render` of ChatTemplate. It blocks, so call it in a thread."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = (tuple(template.sources.items()), tuple(template.special_tokens.items()))
        self._process = OffloadProcess(
            "template",
            MAX_CPU_SECONDS,
            MAX_WALL_SECONDS,
            niceness=0,  # every chat waits for it
            memory_bytes=MEMORY_BYTES,
            exit_error=_rendering_error,
        )

    def start(self) -> None:
        """Start the child process and let it compile the template."""
        self._process.call(_load_template, *self._template)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        return self._process.call(_render_in_child, self._template, messages, tools, add_generation_prompt, extra)

    def close(self) -> None:
        self._process.close()


Pairs = tuple[tuple[str, str], ...]


@lru_cache(maxsize=1)
def _compile_template(sources: Pairs, special_tokens: Pairs) -> ChatTemplate:
    return ChatTemplate(dict(sources), dict(special_tokens))


def _load_template(sources: Pairs, special_tokens: Pairs) -> None:
    _compile_template(sources, special_tokens)


def _render_in_child(
    template: tuple[Pairs, Pairs],
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    extra: dict[str, Any],
) -> str:
    return _compile_template(*template).render(messages, tools, add_generation_prompt, **extra)


def _rendering_error(status: int, cpu_seconds: float) -> EmberlineError:
    if status == -signal.SIGPROF:
        return ModelFileError(
            f"rendering the chat template took more than the limit of {cpu_seconds:g} s of CPU time", hint=HINT
        )
    if status in (-signal.SIGKILL, -signal.SIGTERM):  # not the template's fault, or no CPU time for too long
        return EngineUnavailable("the process that renders chat templates was killed", hint="send the request again")
    return ModelFileError(f"rendering the chat template ended its process with exit status {status}", hint=HINT)
