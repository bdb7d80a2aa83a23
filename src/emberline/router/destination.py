"""The header x-gateway-destination-endpoint, in which an endpoint picker of a Kubernetes gateway names a worker."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from emberline.core.errors import InvalidRequest
from emberline.router.worker import Worker

DESTINATION_HEADER = "x-gateway-destination-endpoint"
MAX_ENDPOINTS = 16


def parse_endpoints(header: str) -> tuple[str, ...]:
    """Return the endpoints (HOST:PORT) in the header, the preferred one first.

    The protocol allows a list: the endpoints after the first are alternatives. Raises InvalidRequest if an endpoint is
    malformed, or if a header that is not empty has no endpoint or more than MAX_ENDPOINTS."""
    endpoints = tuple(part.strip().lower() for part in header.split(",") if part.strip())
    if header and not 0 < len(endpoints) <= MAX_ENDPOINTS:
        message = f"the header {DESTINATION_HEADER} has {len(endpoints)} endpoints; it must have 1 to {MAX_ENDPOINTS}"
        raise InvalidRequest(message, param=DESTINATION_HEADER)
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            message = f"the header {DESTINATION_HEADER} has {endpoint[:100]!r}, which is not of the form HOST:PORT"
            raise InvalidRequest(message, param=DESTINATION_HEADER)
    return endpoints


def endpoint_of_url(url: str) -> str:
    """Return HOST:PORT of a worker's URL; an IPv6 address is in brackets."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def select_destination(workers: Sequence[Worker], endpoints: Sequence[str], model: str, now: float) -> list[Worker]:
    """Return a list with the worker of the first endpoint whose worker accepts requests for the model.

    If none accepts requests, return all workers at these endpoints. Raises InvalidRequest if there are none."""
    named = [worker for endpoint in endpoints for worker in workers if worker.endpoint == endpoint]
    if not named:
        raise InvalidRequest(
            f"the header {DESTINATION_HEADER} names {', '.join(endpoints)}, which is not a worker of this router",
            param=DESTINATION_HEADER,
            hint="send no such header, or name a worker in the form of its --worker-url",
        )
    return [worker for worker in named if worker.accepts_requests_for(model, now)][:1] or named
