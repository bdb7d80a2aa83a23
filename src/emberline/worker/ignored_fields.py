"""What the server does about request fields that have no effect: it lists and counts them, or refuses them."""

from __future__ import annotations

from collections import Counter

from emberline.api.fields import IGNORED_FIELDS_HEADER, IgnoredFields
from emberline.core.errors import InvalidRequest
from emberline.server.metrics import MetricFamily

OTHER = "other"  # one label for all unknown names, because clients choose them


class IgnoredFieldPolicy:
    """Makes the reply header that lists the ignored fields of a request, and counts them by name."""

    def __init__(self, *, refuses_unknown: bool = False) -> None:
        self._refuses_unknown = refuses_unknown
        self._counts: Counter[str] = Counter()

    def apply(self, ignored: IgnoredFields) -> dict[str, str]:
        """Return the header fields to add to the reply. Raises InvalidRequest for unknown fields in strict mode."""
        if ignored.unknown and self._refuses_unknown:
            name = ignored.unknown[0]
            hint = "check its spelling or remove it, or start the server without --strict"
            raise InvalidRequest(f"{name} is an unknown field", param=name, hint=hint)
        self._counts.update(ignored.known)
        self._counts[OTHER] += len(ignored.unknown)
        value = ignored.to_header_value()
        return {IGNORED_FIELDS_HEADER: value} if value else {}

    def family(self) -> MetricFamily:
        samples = [(f'field="{name}"', count) for name, count in sorted(self._counts.items()) if count]
        help_text = "Request fields without effect, by name; other: fields that the server does not know."
        return MetricFamily.from_samples("emberline:ignored_fields_total", help_text, "counter", samples)
