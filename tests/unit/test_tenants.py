"""Cached blocks are shared within one API key, where keys are configured, and within one cache_salt. A prompt_cache_key
is a hint, and parts nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scripted_engine import WorkerHarness

from emberline.core.handoff import Handoff
from emberline.core.tenants import TENANT_SALT_HEADER
from emberline.router.native import NativeDialect
from emberline.router.request_summary import RequestSummary
from emberline.router.upstream_request import UpstreamRequest
from emberline.worker.engine_app import EngineApp
from emberline.worker.request_context import TENANT_HEADER

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def house(*keys: str) -> WorkerHarness:
    made = WorkerHarness(lambda before, index: before + "abc")
    config = replace(made.app._config, api_keys=keys)
    made.app = EngineApp(config, made.app.engine, made.catalog, None, {})
    return made


def salt(made: WorkerHarness, headers: dict[str, str], **fields: Any) -> str:
    assert made.post("/v1/chat/completions", {**CHAT, **fields}, **headers).status == 200
    return made.engine.submissions[-1].salt


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_and_salts_separate_caches() -> None:
    made = house("a", "b")
    ours = salt(made, bearer("a"))
    assert ours and "a" != ours != salt(made, bearer("b"))
    assert ours == salt(made, {"x_api_key": "a"}) == salt(made, bearer("a"), prompt_cache_key="k")
    assert salt(made, bearer("a"), cache_salt="s") not in (ours, salt(made, bearer("b"), cache_salt="s"))


def test_cache_is_shared_without_keys() -> None:
    made = house()
    assert salt(made, bearer("a")) == salt(made, {}) == salt(made, {}, prompt_cache_key="k") == ""
    assert salt(made, {}, cache_salt="s") == "s"


def test_router_with_keys_sets_checked_tenant() -> None:
    made, name = house(), TENANT_HEADER.replace("-", "_")
    assert salt(made, {name: "checked t"}) == salt(house(), {name: "checked t"}) != ""
    assert salt(made, {name: "presented t"}) == ""


def test_a_gateways_salt_divides_the_tenant_of_its_key() -> None:
    for made, key in ((house(), {}), (house("a"), bearer("a"))):
        ann, bob = ({TENANT_SALT_HEADER.replace("-", "_"): name} for name in ("ann", "bob"))
        assert "" != salt(made, key | ann) == salt(made, key | ann), "a caller keeps its own prefix cache"
        assert len({salt(made, key), salt(made, key | ann), salt(made, key | bob)}) == 3
        combined = salt(made, key | ann, cache_salt="s")
        assert combined not in (salt(made, key | bob, cache_salt="s"), salt(made, key | ann), salt(made, key))
    keyed = house("a", "b")
    assert salt(keyed, bearer("a") | ann) != salt(keyed, bearer("b") | ann), "another key cannot claim this tenant"
    router = {TENANT_HEADER.replace("-", "_"): "presented t"}
    assert salt(house(), router | ann) == salt(house(), ann)


def test_resumed_reply_keeps_the_gateways_salt() -> None:
    plain = UpstreamRequest("POST", "/v1/chat/completions", {TENANT_SALT_HEADER: "ann"}, b"{}")
    dialect = NativeDialect(plain, 1, None)
    assert dialect.build_resume_request(Handoff(), 1.0, None, None).headers[TENANT_SALT_HEADER] == "ann"
    assert dialect.build_prefill_request({}, 1.0)[0].headers[TENANT_SALT_HEADER] == "ann"
    envelope = {"path": "/v1/chat/completions", "body": {**CHAT, "stream": True}}
    resumed, name = house(), TENANT_SALT_HEADER.replace("-", "_")
    assert resumed.post("/cluster/resume", envelope, **{name: "ann"}).status == 200
    assert resumed.engine.submissions[0].salt == salt(house(), {name: "ann"})


def test_resumed_reply_keeps_tenant() -> None:
    plain = UpstreamRequest("POST", "/v1/chat/completions", {TENANT_HEADER: "checked t"}, b"{}")
    dialect = NativeDialect(plain, 1, None)
    assert dialect.build_resume_request(Handoff(), 1.0, None, None).headers[TENANT_HEADER] == "checked t"
    assert dialect.build_prefill_request({}, 1.0)[0].headers[TENANT_HEADER] == "checked t"
    envelope = {"path": "/v1/chat/completions", "body": {**CHAT, "stream": True}}
    resumed, name = house(), TENANT_HEADER.replace("-", "_")
    assert resumed.post("/cluster/resume", envelope, **{name: "checked t"}).status == 200
    assert resumed.engine.submissions[0].salt == salt(house(), {name: "checked t"})


def test_prefixes_are_separate_per_tenant() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 600)
    hinted = body[:-1] + b', "prompt_cache_key": "k"}'
    assert RequestSummary.parse(body).prefixes == RequestSummary.parse(hinted).prefixes != ()
    assert {p.digest for p in RequestSummary.parse(body).prefixes}.isdisjoint(
        p.digest for p in RequestSummary.parse(body, "", "t").prefixes
    )
