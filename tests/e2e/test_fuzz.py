"""The API fuzzed from its own OpenAPI document: the server answers as it says and stays up."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance
from servers import Server


@pytest.fixture(scope="module")
def api_schema(running: Server) -> schemathesis.schemas.BaseSchema:
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api_schema")


@schema.parametrize()
@settings(
    max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_api(case: schemathesis.Case) -> None:
    _keep_short(case)
    case.call_and_validate(checks=[not_a_server_error, status_code_conformance, content_type_conformance], timeout=60)


def _keep_short(case: schemathesis.Case) -> None:
    """Valid requests generate: a few tokens are enough."""
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(case.body.get(name), int) and case.body[name] > 4:
                case.body[name] = 4
