"""Spellings of a router's URL: which are the same router."""

from __future__ import annotations

import pytest

from emberline.core.errors import InvalidRequest
from emberline.core.router_urls import normalise_router_url, parse_router_urls


@pytest.mark.parametrize(
    "urls",
    [
        ("http://localhost:8000", "http://127.0.0.1:8000/", "HTTP://LocalHost.:8000", "http://[::ffff:127.0.0.1]:8000"),
        ("http://localhost", "http://localhost.localdomain", "http://0.0.0.0"),
        ("http://router", "http://router:80/", "http://ROUTER"),
        ("https://router", "https://router:443"),
        ("http://[fe80:0::1]:1", "http://[FE80::0:1]:1"),
    ],
)
def test_spellings_of_one_router_are_equal(urls: tuple[str, ...]) -> None:
    assert len({normalise_router_url(url) for url in urls}) == 1
    with pytest.raises(InvalidRequest, match="named twice"):
        parse_router_urls(urls[:2])


def test_different_routers_stay_different() -> None:
    urls = ("http://a", "https://a", "http://a:81", "http://a/x", "http://b", "http://127.0.0.2", "http://127.0.0.1")
    assert parse_router_urls([",".join(urls)]) == urls and len({normalise_router_url(url) for url in urls}) == len(urls)
