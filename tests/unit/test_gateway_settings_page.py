"""docs/gateway-settings.md lists all settings and headers of the gateway, with a description of each."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from emberline.gateway.core.settings import GatewaySettings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("gateway_settings", str(ROOT / "scripts/gateway_settings"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_page_is_up_to_date(script: ModuleType) -> None:
    assert script.PAGE.read_text() == script.render(), "run .venv/bin/python scripts/gateway_settings"


def test_every_field_and_header_is_described(script: ModuleType) -> None:
    for title, struct in script.TABLES:
        listed = {name: description for name, _, description in script.list_fields(struct)}
        assert listed.keys() == set(struct.__struct_fields__), title
        assert all(listed.values()), (title, [name for name, text in listed.items() if not text])
    assert all(description for _, description in script.list_headers())


def test_every_struct_of_the_settings_has_a_table(script: ModuleType) -> None:
    schema = msgspec.json.schema(GatewaySettings)
    tables = {struct.__name__ for _, struct in script.TABLES}
    assert set(schema["$defs"]) - tables <= {"Guardrails", "Price", "LongContextPrice"}


def test_hint_of_invalid_settings_names_the_page(script: ModuleType) -> None:
    with pytest.raises(Exception, match=r"docs/gateway-settings\.md"):
        GatewaySettings.parse({"unknown": 1})
