"""Fuzz the API from its OpenAPI document: the server replies as documented and stays up."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.errors import InvalidSchema
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from emberline.api.openapi import build_document

OPERATIONS = [result.ok() for result in schemathesis.openapi.from_dict(build_document("test")).get_all_operations()]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


PAIRS = [(o, m) for o in OPERATIONS for m in GenerationMode if o.method != "get" or m is GenerationMode.POSITIVE]
EXAMPLES = 25
MIN_CASES = 5  # negative cases of a POST must reach the server; a plain GET has only one form
LENGTH = {"/v1/responses": "max_output_tokens"}
OLLAMA_GENERATES = ("/api/chat", "/api/generate")
EMBEDS = ("/v1/embeddings", "/api/embed", "/api/embeddings")
GENERATES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize(
    ("operation", "mode"), PAIRS, ids=lambda part: getattr(part, "label", None) or part.name.lower()
)
def test_api_answers_as_documented(operation: Any, mode: GenerationMode, server: str) -> None:
    answered = 0

    @given(case=valid_cases(operation.as_strategy(generation_mode=mode)))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def fuzz(case: schemathesis.Case) -> None:
        nonlocal answered
        if isinstance(case.body, dict):
            if mode is GenerationMode.POSITIVE:
                _use_served_model(case.path, case.body)
            elif case.path in GENERATES and case.path != "/v1/messages":  # where a missing max_tokens is an error
                case.body.setdefault(LENGTH.get(case.path, "max_tokens"), 3)  # the invalid part may be outside the body
            elif case.path in OLLAMA_GENERATES:
                case.body.setdefault("options", {"num_predict": 3})
        case.call_and_validate(base_url=server, checks=CHECKS, timeout=60)
        answered += 1

    fuzz()
    assert answered >= (MIN_CASES if operation.method == "post" else 1)


@st.composite
def valid_cases(draw: st.DrawFn, generated: st.SearchStrategy[schemathesis.Case]) -> schemathesis.Case:
    """Return the generated cases without those for a negated schema that no value satisfies."""
    try:
        return draw(generated)
    except InvalidSchema:
        reject()


def _use_served_model(path: str, body: dict[str, Any]) -> None:
    """Use the served model and few tokens: an unknown model gives a 404 before any other check."""
    body["model"] = "minilm" if path in EMBEDS else "smollm2"
    if path in OLLAMA_GENERATES:
        body["options"] = {"num_predict": 3}
    if path in GENERATES:
        body.pop("max_completion_tokens", None)
        body[LENGTH.get(path, "max_tokens")] = 3
        for many in ("n", "best_of"):
            body.pop(many, None)
