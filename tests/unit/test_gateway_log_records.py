"""Fields of log records."""

from __future__ import annotations

from gateway_requests import call

from emberline.gateway.admin.logs import build_record_view
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.request import GatewayReply
from emberline.gateway.costs.billing import set_cost
from emberline.gateway.costs.catalogue import CatalogueFiles
from emberline.gateway.costs.price_list import PriceList
from emberline.gateway.layers.call_logging import make_record
from emberline.gateway.store.rollup import COUNTERS, count_records
from emberline.gateway.streams.meter import RawReplyMeter, check_reply


def test_metadata_of_key_and_gateway_overrides_the_request() -> None:
    caller = Identity("k", "k", "virtual", metadata={"team": "core"})
    headers = {"cf-aig-metadata": '{"team": "forged", "stage": "forged", "age": 7}'}
    request = call(headers=headers, identity=caller, settings={"metadata": {"stage": "live"}})
    request.id = "0" * 32
    assert make_record(request, GatewayReply(200, {}, b""), 1.0).metadata == {
        "team": "core",
        "stage": "live",
        "age": 7,
    }


def test_turn_id_is_searchable() -> None:
    request = call(headers={"cf-aig-turn-id": "t7", "cf-aig-session-id": "s1"})
    request.id = "0" * 32
    made = make_record(request, GatewayReply(200, {}, b""), 1.0)
    assert made.metadata == {"turn_id": "t7"} and made.session_id == "s1"


def test_key_in_query_is_not_logged() -> None:
    request = call()
    request.id, request.endpoint = "0" * 32, "v1beta/models/m:generateContent?key=a-secret"
    assert make_record(request, GatewayReply(200, {}, b""), 1.0).path == "v1beta/models/m:generateContent"


def test_reply_without_usage_has_no_cost() -> None:
    request, prices = call(dialect="raw"), PriceList(CatalogueFiles())
    request.id = "0" * 32
    assert prices.price(request.settings, request.provider, request.model) is not None
    for usage in (check_reply("raw", b'{"ok": true}')[0], RawReplyMeter().usage(b"{}")[0]):
        reply = GatewayReply(200, {}, b"", usage=usage, provider=request.provider, ended="complete")
        set_cost(request, reply, prices)
        made = make_record(request, reply, 1.0)
        assert made.micros is None and build_record_view(made)["cost"] is None
        for counts in count_records([made]).values():
            assert (counts[COUNTERS.index("unpriced")], counts[COUNTERS.index("micros")]) == (1, 0)
