from __future__ import annotations

import pytest
import schemathesis
from conftest import Server


@pytest.fixture(scope="session")
def api_schema(running: Server) -> schemathesis.schemas.BaseSchema:
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")
