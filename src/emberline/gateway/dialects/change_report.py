"""Records what a translation dropped or changed. Every dropped field has an entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.anthropic import field_names as anthropic
from emberline.gateway.dialects.chat import field_names as chat
from emberline.gateway.dialects.field_names import FieldNames
from emberline.gateway.dialects.gemini import field_names as gemini
from emberline.gateway.dialects.responses import field_names as responses
from emberline.wire.deltas import ChatDialect

# Request fields with the same name and meaning in Chat Completions and Responses.
SHARED_OPENAI_FIELDS = frozenset(
    {
        "service_tier",
        "store",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prompt_cache_breakpoint",
        "safety_identifier",
        "moderation",
    }
)
OPENAI_DIALECTS: tuple[ChatDialect, ...] = ("openai-chat", "openai-responses")

# Fields of returned items that carry no information for a model (ids, states): dropped without a report.
_IGNORED_FIELDS = frozenset(
    {"id", "status", "type", "role", "logprobs", "caller", "index", "phase", "summary", "content"}
)

_FIELD_NAMES: Mapping[ChatDialect, FieldNames] = {
    "openai-chat": chat.FIELD_NAMES,
    "openai-responses": responses.FIELD_NAMES,
    "anthropic": anthropic.FIELD_NAMES,
    "gemini": gemini.FIELD_NAMES,
}


@dataclass(frozen=True, slots=True)
class FieldChange:
    field: str  # path in the client's wire format
    reason: str

    def __str__(self) -> str:
        return f"{self.field}={self.reason}"


class ChangeReport:
    """The fields that one translation changed or dropped, by their path in the wire format `source`.

    Each change is listed once.
    """

    def __init__(self, source: ChatDialect) -> None:
        self._field_names = _FIELD_NAMES[source]
        self._changes: dict[FieldChange, None] = {}

    @property
    def changes(self) -> list[FieldChange]:
        return list(self._changes)

    def report(self, name: str, reason: str, *, subfield: str = "") -> None:
        """Record that the canonical field `name`, or its subfield at path `subfield`, was changed."""
        self.report_path(self._field_names.path_of(name) + subfield, reason)

    def report_path(self, field: str, reason: str) -> None:
        self._changes[FieldChange(field, reason)] = None

    def report_unsupported(self, value: object, name: str, target: str) -> None:
        if value is not None:
            self.report(name, f"{target} has no such field")

    def report_reply_fields(self, fields: canonical.Json, ignored: Iterable[str]) -> None:
        """Report each field in `fields`, except those in `ignored`, as missing in the client's wire format."""
        for name, value in fields.items():
            if value and name not in ignored:
                self.report_path(f"reply.{name}", "the client's API has no such field")

    def remove_untranslated_fields(self, parts: list[canonical.Part], target: ChatDialect) -> list[canonical.Part]:
        """Return a reply's parts without the fields that `target` does not have, and report those fields."""
        result: list[canonical.Part] = []
        for part in parts:
            if isinstance(part, canonical.OpaqueContent):
                self.report_path(f"reply.{part.kind}", "the client's API has no such field")
                continue
            self.report_reply_fields(part.extra, _IGNORED_FIELDS)
            if (
                isinstance(part, canonical.TextContent)
                and target != "anthropic"
                and any(citation.quote for citation in part.citations)
            ):
                self.report_path("reply.citations.cited_text", "the client's API has no such field")
            part.extra = {}
            result.append(part)
        return result

    def report_request_fields(self, request: canonical.CanonicalRequest, target: ChatDialect) -> None:
        """Report the request fields that the client's wire format has and `target` does not.

        Raises InvalidRequest for a field that cannot be dropped without changing the request's meaning."""
        names = self._field_names
        shared = (
            SHARED_OPENAI_FIELDS if request.dialect in OPENAI_DIALECTS and target in OPENAI_DIALECTS else frozenset()
        )
        for name, value in request.extra.items():
            if value:
                self._reject_if_essential(name)
        self._report_extra(request.extra | request.unmapped_fields, "", target, shared)
        self._report_parts(request.system, names.system_path, target, shared)
        for message in request.messages:
            self._report_extra(message.extra, f"{names.message_path}.", target, shared | _IGNORED_FIELDS)
            self._report_parts(message.parts, f"{names.message_path}.{names.part_path}", target, shared)
        for tool in request.tools:
            if isinstance(tool, canonical.CanonicalTool):
                self._report_extra(tool.extra, "tools[].", target, shared | {"type"})
            else:
                self.report_path(f"tools[].{tool.kind}", f"{target} has no such tool")

    def _report_parts(
        self, parts: Iterable[canonical.Part], path: str, target: ChatDialect, shared_fields: frozenset[str]
    ) -> None:
        for part in parts:
            if isinstance(part, canonical.OpaqueContent):
                self._reject_if_essential(part.kind)
                self.report_path(f"{path}.{part.kind}", f"{target} has no such part")
                continue
            self._report_extra(part.extra, f"{path}.", target, shared_fields | _IGNORED_FIELDS)
            if isinstance(part, canonical.ToolResultContent):
                self._report_parts(part.parts, f"{path}.content[]", target, shared_fields)

    def _reject_if_essential(self, name: str) -> None:
        if (hint := self._field_names.essential.get(name)) is not None:
            raise InvalidRequest(f"{name} is not supported by this model's provider", param=name, hint=hint)

    def _report_extra(
        self, extra: canonical.Json, path: str, target: ChatDialect, translated_fields: frozenset[str]
    ) -> None:
        for name, value in extra.items():
            if value and name not in translated_fields and (name, target) != ("extra_content", "gemini"):
                self.report_path(path + name, f"{target} has no such field")
