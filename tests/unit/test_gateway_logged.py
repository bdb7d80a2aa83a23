"""What the log says of a call."""

from __future__ import annotations

from gateway_calls import call

from emberline.gateway.call import Reply
from emberline.gateway.keys.identity import Identity
from emberline.gateway.layers.logged import record


def test_a_request_cannot_say_otherwise_what_its_key_or_gateway_says() -> None:
    who = Identity("k", "k", "virtual", metadata={"team": "core"})
    said = {"cf-aig-metadata": '{"team": "forged", "stage": "forged", "age": 7}'}
    asked = call(headers=said, identity=who, settings={"metadata": {"stage": "live"}})
    asked.id = "0" * 32
    assert record(asked, Reply(200, {}, b""), 1.0).metadata == {"team": "core", "stage": "live", "age": 7}
