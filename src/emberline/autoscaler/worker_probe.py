"""probe_worker: calls a worker directly, to find out if its process hangs or if only the router cannot reach it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from enum import Enum
from urllib.parse import urlsplit

PROBE_TIMEOUT_S = 5.0  # as in the Helm chart's probes; a process on a busy machine may need several
UNREACHABLE_ERRORS = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class ProbeResult(Enum):
    ANSWERED = "answered"  # the process works: it replied, or closed the connection
    REFUSED = "refused"  # no process listens at the URL, or the host name has no address; the process may be starting
    SILENT = "silent"  # the kernel may have accepted the connection, but no process reacts


async def probe_worker(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> ProbeResult:
    """Call a worker at its URL, and return how it reacts within `timeout_s`.

    The call uses no API key and no TLS, even for an https URL. A worker with TLS that does not hang then closes the
    connection or sends an alert, which is answer enough, so the caller needs no certificate."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    request = f"GET /health/live HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    results = []
    try:
        async with asyncio.timeout(timeout_s):
            found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
            for address in dict.fromkeys(str(each[4][0]) for each in found):
                results.append(await _call(address, port, request))
                if results[-1] is ProbeResult.ANSWERED:
                    return ProbeResult.ANSWERED
    except TimeoutError:
        return ProbeResult.SILENT
    except OSError:  # the name has no address
        return ProbeResult.REFUSED
    return ProbeResult.REFUSED if ProbeResult.REFUSED in results else ProbeResult.SILENT


async def _call(address: str, port: int, request: bytes) -> ProbeResult:
    try:
        reader, writer = await asyncio.open_connection(address, port)
    except TimeoutError:  # of the kernel; asyncio's own cancels this call
        return ProbeResult.SILENT
    except OSError as e:
        return ProbeResult.SILENT if e.errno in UNREACHABLE_ERRORS else ProbeResult.REFUSED
    try:
        with contextlib.suppress(ConnectionError):  # closed at once
            writer.write(request)
            await reader.read(1)
    finally:
        writer.close()
    return ProbeResult.ANSWERED
