"""Custom providers must be public: the URL, the resolved and the connected address are checked."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import pytest

from emberline.core.errors import InvalidRequest
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.ssrf import (
    AddressInfo,
    ResolveHost,
    is_public_address,
    resolve_host,
    resolve_public_addresses,
    validate_provider_url,
)

PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.100.100.200",
    "192.0.0.192",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "168.63.129.16",
    "192.88.99.1",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "fec0::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "5f00::1",
    "100::1",
    "nonsense",
]
PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "104.18.6.192",
    "2606:4700::6810:7c60",
    "2a00:1450:4001:82a::200e",
    "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public_address(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public_address(address)


@pytest.mark.parametrize(
    "url",
    [
        "https://api.example.com",
        "https://api.example.com/v1/",
        "https://api.example.com:8443/a/b",
        "https://8.8.8.8/v1",
        "https://[2606:4700::6810:7c60]:443/v1",
        "https://xn--bcher-kva.example",
    ],
)
def test_valid_provider_urls(url: str) -> None:
    assert validate_provider_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "api.example.com",
        "http://api.example.com",
        "ftp://api.example.com",
        "file:///etc/passwd",
        "https://",
        "https:///v1",
        "https://user@api.example.com",
        "https://user:pass@api.example.com",
        "https://api.example.com@127.0.0.1",
        "https://api.example.com?x=1",
        "https://api.example.com/#f",
        "https://api.example.com/#",
        "https://api.example.com/a/../b",
        "https://api.example.com:0",
        "https://api.example.com:99999",
        "https://api.example.com\\@127.0.0.1",
        "https://api example.com",
        "https://api.example.com/\r\nx: y",
        "https://bücher.example",
        "https://-bad-.example",
        "https://" + "a" * 64 + ".example",
        "https://localhost",
        "https://x.localhost",
        "https://metadata.google.internal",
        "https://printer.local",
        "https://127.0.0.1",
        "https://127.1",
        "https://2130706433",
        "https://0x7f000001",
        "https://0x7f.0.0.1",
        "https://0177.0.0.1",
        "https://127.0.0.1.",
        "https://1.2.3.4.5",
        "https://[::1]",
        "https://[::ffff:127.0.0.1]",
        "https://[fe80::1%25eth0]",
        "https://[zz]",
        "https://169.254.169.254/latest/meta-data",
        "https://api.example.com/" + "a" * 2048,
    ],
)
def test_invalid_provider_urls(url: str) -> None:
    with pytest.raises(InvalidRequest, match="base_url"):
        validate_provider_url(url)


def test_operator_can_allow_private_addresses() -> None:
    for url in ("http://127.0.0.1:8000/v1", "https://10.0.0.5", "http://vllm.internal:8000", "http://localhost:11434"):
        assert validate_provider_url(url, allow_private=True) == url
    for url in ("ftp://10.0.0.5", "http://u:p@10.0.0.5", "http://127.1"):
        with pytest.raises(InvalidRequest):
            validate_provider_url(url, allow_private=True)


def fake_resolver(*addresses: str) -> ResolveHost:
    async def resolve(host: str, port: int) -> list[AddressInfo]:
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (each, port)) for each in addresses]

    return resolve


def test_one_private_address_rejects_name() -> None:
    async def do() -> None:
        assert len(await resolve_public_addresses("a.example", 443, fake_resolver("8.8.8.8", "1.1.1.1"))) == 2
        for addresses in (["127.0.0.1"], ["8.8.8.8", "10.0.0.1"]):
            with pytest.raises(OSError, match="not public"):
                await resolve_public_addresses("a.example", 443, fake_resolver(*addresses))

    asyncio.run(do())


def test_connection_address_is_checked() -> None:
    """A real listener on this machine cannot be reached in any of these ways."""

    async def connect(host: str, port: int, resolve: ResolveHost) -> None:
        async with UpstreamClient(resolve=resolve) as client:
            await client.connect_to_public(host, port)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        port = listener.getsockname()[1]
        attempts = [
            ("127.0.0.1", resolve_public_addresses),
            ("127.0.0.1", resolve_host),  # only the check of the connection's address is left
            ("a.example", fake_resolver("127.0.0.1")),
            ("a.example", partial(resolve_public_addresses, resolve=fake_resolver("127.0.0.1"))),
        ]
        for host, resolve in attempts:
            with pytest.raises(OSError, match="public"):
                asyncio.run(connect(host, port, resolve))
        with pytest.raises(TimeoutError):
            listener.accept()
