"""Dashboards and alert rules: written from the metrics in the code, and about metrics that real processes show."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import json
import re
import sys
import urllib.request
from pathlib import Path
from types import ModuleType

import promql_parser
import pytest
import yaml
from local_gateway import LocalGateway
from local_router import LocalRouter
from servers import Server

ROOT = Path(__file__).parents[2]
# Metrics that a process shows only with these settings; the defaults have none of them.
OPTIONAL_METRICS = {
    "emberline:kv_tier_": "--kv-host-memory, --kv-disk or --kv-store",
    "vllm:nixl_": "--role",
    "emberline:tls_": "--tls-cert",
    "emberline:autoscaler_": "emberline autoscale, a process of its own",
    "emberline:gateway_limits_": "the gateway's setting redis",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("dashboards", str(ROOT / "scripts/dashboards"))
    spec = importlib.util.spec_from_loader("dashboards", loader)
    assert spec is not None
    module = sys.modules["dashboards"] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def read_rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((ROOT / "deploy/helm/emberline/rules/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def read_queries(process: str) -> list[str]:
    dashboard = json.loads((ROOT / f"deploy/helm/emberline/dashboards/{process}.json").read_text())
    panels = [inner for panel in dashboard["panels"] for inner in (panel, *panel.get("panels", ()))]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_files_are_up_to_date(script: ModuleType) -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in script.render_files().items() if path.read_text() != text]
    assert not stale, f"run .venv/bin/python scripts/dashboards: {stale}"


@pytest.mark.parametrize("process", ["engine", "cluster", "gateway"])
def test_dashboards_show_every_metric_of_the_code(script: ModuleType, process: str) -> None:
    families = script.collect_definitions()[process]
    shown = {
        script.family_name(name, families) for query in read_queries(process) for name in script.metric_names(query)
    }
    assert shown == set(families)  # None in `shown`: a metric that no process defines


def test_queries_are_promql() -> None:
    queries = [query for process in ("engine", "cluster", "gateway") for query in read_queries(process)]
    for query in [*queries, *(rule["expr"] for rule in read_rules())]:
        promql_parser.parse(query.replace("$__rate_interval", "5m"))


def test_alerts_have_known_metrics_and_a_runbook(script: ModuleType) -> None:
    families = {name: family for each in script.collect_definitions().values() for name, family in each.items()}
    sections = re.findall(r"^### (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in read_rules()]
    for rule in read_rules():
        assert all(script.family_name(name, families) for name in script.metric_names(rule["expr"])), rule


def fetch(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=headers), timeout=30) as reply:
        return str(reply.read().decode())


def exposed_families(running: Server, home: Path) -> dict[str, set[str]]:
    """Return the names of the metrics that a server, a router and a gateway show, right after their start."""

    async def fetch_from_router() -> str:
        router = await LocalRouter().start()
        try:
            return await asyncio.to_thread(fetch, f"http://127.0.0.1:{router.port}")
        finally:
            await router.stop()

    with LocalGateway(home, ["openai"], lambda urls: {"openai": {"base_url": urls["openai"], "key": "k"}}) as gateway:
        from_gateway = fetch(gateway.url, authorization="Bearer a-key-of-the-tests")
    texts = {"engine": fetch(running.url), "cluster": asyncio.run(fetch_from_router()), "gateway": from_gateway}
    return {process: set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) for process, text in texts.items()}


def test_chosen_panels_and_alerts_have_metrics_of_real_processes(
    script: ModuleType, running: Server, tmp_path: Path
) -> None:
    exposed, definitions = exposed_families(running, tmp_path), script.collect_definitions()
    for process, families in definitions.items():
        assert not exposed[process] - set(families), "scripts/dashboards does not know these metrics"
        queries = [query for panel in script.CHOSEN_PANELS[process] for query, _ in panel.queries]
        queries += [alert.expr for alert in script.ALERTS[process]]
        names = {script.family_name(name, families) for query in queries for name in script.metric_names(query)}
        assert not {name for name in names - exposed[process] if not name.startswith(tuple(OPTIONAL_METRICS))}
