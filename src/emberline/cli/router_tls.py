"""TLS options of commands that call a router: emberline drain and emberline autoscale."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Iterable

from emberline.cli.options import parse_comma_list
from emberline.core.errors import InvalidRequest
from emberline.core.tls import open_identity
from emberline.core.tls_config import TLSConfig


def add_router_tls_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="PEM file with the CAs of an https router. (default: the system's CAs)"
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM file with a client certificate. (default: none)")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM file with its private key. (default: none)")
    parser.add_argument(
        "--tls-names",
        metavar="NAME,...",
        type=parse_comma_list,
        default=(),
        help="Names, one of which the router's certificate must have. (default: the host of its URL)",
    )


def make_router_tls(args: argparse.Namespace, urls: Iterable[str]) -> ssl.SSLContext | None:
    """Return the context for calls to the routers at these URLs; None if no option is set.

    Raises InvalidRequest if a file is unusable, or if the options would have no effect for a URL."""
    identity = open_identity(TLSConfig.from_options(args.tls_cert, args.tls_key, args.tls_ca, args.tls_names))
    for url in urls:
        if identity is not None and not url.startswith("https://"):
            message = f"router is {url!r}; with --tls-ca or --tls-cert it must be an https URL"
            raise InvalidRequest(message, param="router", hint="write --router https://HOST:PORT")
    return identity.peer_client_context() if identity is not None else None
