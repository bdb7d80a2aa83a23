"""InferencePaths: the paths of a provider's own API that run a model and do nothing else.

Callers that share the operator's provider key (virtual keys, and callers without a key) reach only these paths, with
POST. Files, stored responses, batches, fine-tuning and administration are therefore out of their reach, whatever the
request's body says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

import msgspec

# A part of a template -> regex. Neither admits an empty segment.
_PLACEHOLDERS = {
    "{model}": r"(?P<model>[^/]+)",
    "{model...}": r"(?P<model>[^/]+(?:/[^/]+)*)",
    "{}": r"[A-Za-z0-9_.-]+",
}
_MODEL_NAME = re.compile(r"[A-Za-z0-9_.@:+~/-]+")  # nothing that could begin a query or another path
UNKNOWN_MODEL = ""


class InferencePath(msgspec.Struct, frozen=True):
    """A path template. `{model}` is one segment, `{model...}` one or more, `{}` any other single segment."""

    template: str
    names_model: bool = True  # the path or the body's field `model` names the model; False: only other fields do


class InferencePaths:
    """The inference paths of one provider."""

    def __init__(self, paths: Iterable[InferencePath | str]) -> None:
        listed = [InferencePath(path) if isinstance(path, str) else path for path in paths]
        self._patterns = [(_compile_template(path.template), path.names_model) for path in listed]

    def find_model(self, path: str, body_model: str) -> str | None:
        """Return the model that a request to `path` runs, or None if `path` is not an inference path.

        The model is UNKNOWN_MODEL if neither the path nor the body's field `model` decides it.
        """
        for pattern, names_model in self._patterns:
            if (match := pattern.fullmatch(path)) is not None:
                if not names_model:
                    return UNKNOWN_MODEL
                if "model" not in pattern.groupindex:
                    return body_model or UNKNOWN_MODEL
                model = unquote(match["model"])
                return model if _MODEL_NAME.fullmatch(model) else None
        return None


def _compile_template(template: str) -> re.Pattern[str]:
    parts = re.split(r"(\{model\}|\{model\.\.\.\}|\{\})", template)
    return re.compile("".join(_PLACEHOLDERS.get(part) or re.escape(part) for part in parts))


def without_model_name(*templates: str) -> tuple[InferencePath, ...]:
    """Return paths whose model is named by neither the path nor the body's field `model`."""
    return tuple(InferencePath(template, names_model=False) for template in templates)


# The inference paths of OpenAI's API and of servers that follow it, below /v1.
OPENAI_INFERENCE = (
    "chat/completions",
    "completions",
    "responses",
    "responses/compact",
    "responses/input_tokens",
    "embeddings",
    "moderations",
    "audio/speech",
    "audio/transcriptions",
    "audio/translations",
    "images/generations",
    "images/edits",
    "images/variations",
    "messages",
    "messages/count_tokens",
    "rerank",
)

AUDIO = frozenset({"audio/speech", "audio/transcriptions", "audio/translations"})
IMAGES = frozenset({"images/generations", "images/edits", "images/variations"})
TEXT = frozenset({"completions"})
STORAGE = frozenset({"files", "batches"})
RESPONSES = frozenset({"responses", "responses/input_tokens", "responses/compact"})
OPENAI_FAMILIES = AUDIO | IMAGES | TEXT | STORAGE | RESPONSES | {"moderations", "conversations"}
