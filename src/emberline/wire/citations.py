"""Renders a citation in each wire format that has citations."""

from __future__ import annotations

from emberline.wire.deltas import Citation, Json


def _render_url_citation(citation: Citation) -> Json:
    segment = {"start_index": citation.start, "end_index": citation.end}
    return {**segment, "url": citation.url, "title": citation.title}


def render_chat_citation(citation: Citation) -> Json:
    return {"type": "url_citation", "url_citation": _render_url_citation(citation)}


def render_responses_citation(citation: Citation) -> Json:
    return {"type": "url_citation", **_render_url_citation(citation)}


def render_anthropic_citation(citation: Citation) -> Json:
    """Render a citation for Anthropic's clients. Fields that its provider did not send are empty."""
    fields = {"url": citation.url, "title": citation.title or None, "cited_text": citation.quote}
    return {"type": "web_search_result_location", **fields, "encrypted_index": citation.encrypted_index}
