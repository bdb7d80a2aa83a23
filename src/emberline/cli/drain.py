"""`emberline drain`: stops new requests to a worker and waits until the worker has finished.

A worker has finished when it has no open requests and no other worker still has to copy its KV blocks."""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from emberline.cli.router_tls import add_router_tls_options, make_router_tls
from emberline.core.config import RouterConfig
from emberline.core.errors import EmberlineError, WrongClusterKey
from emberline.core.keys import read_cluster_keys
from emberline.core.router_urls import parse_router_urls

POLL_INTERVAL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = RouterConfig()
    parser.add_argument("worker", help="Name of the worker, as on the router's status page.")
    parser.add_argument(
        "--router",
        dest="routers",
        metavar="URL",
        action="append",
        help=f"URL of the router; may be repeated, once for each router. (default: http://{default.host}:{default.port})",
    )
    parser.add_argument("--cluster-key", help="Cluster key of the router. (default: EMBERLINE_CLUSTER_KEY)")
    parser.add_argument(
        "--move",
        action="store_true",
        help="Move the worker's streams to other workers instead of waiting for their end.",
    )
    add_router_tls_options(parser)
    parser.add_argument("--undo", action="store_true", help="Send requests to the worker again.")
    parser.add_argument("--no-wait", action="store_true", help="Do not wait until the worker has finished.")


def run(args: argparse.Namespace) -> int:
    keys = read_cluster_keys(args.cluster_key)
    headers = {
        "content-type": "application/json",
        **({"authorization": f"Bearer {keys[0]}"} if keys else {}),
    }
    default = RouterConfig()
    urls = parse_router_urls(args.routers or (f"http://{default.host}:{default.port}",))
    tls = make_router_tls(args, urls)
    order = {"name": args.worker, "on": not args.undo, "move": args.move}
    routers = [Router(url, headers, tls) for url in urls]
    with ThreadPoolExecutor(len(routers)) as threads:  # one that does not answer must not delay the others
        calls = {router.url: threads.submit(router.call, "/cluster/drain", order) for router in routers}
    routers, errors = _for_each_router(routers, lambda router: calls[router.url].result())
    waits = not (args.undo or args.no_wait)
    if waits:
        routers, later_errors = _for_each_router(routers, lambda router: _wait_until_drained(router, args.worker))
        errors += later_errors
    if not routers:
        raise errors[0]
    done = "accepts requests again" if args.undo else "is drained" if waits else "is draining"
    print(f"{args.worker} {done}" + (f" at {len(routers)} of {len(urls)} routers" if errors else ""))
    for error in errors:
        print(f"emberline: {error}", file=sys.stderr)
    return 1 if errors else 0


def _for_each_router(
    routers: Sequence[Router], action: Callable[[Router], object]
) -> tuple[list[Router], list[EmberlineError]]:
    """Do the action for each router. Return the routers for which it succeeded, and the errors of the others."""
    succeeded: list[Router] = []
    errors: list[EmberlineError] = []
    for router in routers:
        try:
            action(router)
            succeeded.append(router)
        except EmberlineError as e:
            errors.append(e)
    return succeeded, errors


def _wait_until_drained(router: Router, worker: str) -> None:
    """Wait until the worker has no requests of this router, and no other worker has to copy its KV blocks."""
    printed, idle_since = None, time.monotonic()
    incarnation = _find_worker_row(router.call("/cluster/status"), worker).get("incarnation")
    while True:
        remaining = _remaining_work(router.call("/cluster/status"), worker, incarnation)
        idle_since = time.monotonic() if remaining.open_requests else idle_since
        if not any(remaining[:2]) and remaining.report_age_s < time.monotonic() - idle_since:
            break
        if remaining[:2] not in (printed, (0, 0)):
            print(
                f"{worker}: {remaining.open_requests} open requests,"
                f" {remaining.leased_prompts} prompts held for other workers",
                flush=True,
            )
            printed = remaining[:2]
        time.sleep(POLL_INTERVAL_S)


class RemainingWork(NamedTuple):
    open_requests: int
    leased_prompts: int  # prompts whose blocks other workers have not fetched yet, as of the last heartbeat
    report_age_s: float  # age of that heartbeat


def _find_worker_row(status: Any, worker_name: str) -> dict[str, Any]:
    return next((row for row in status["workers"] if row["name"] == worker_name), {})


def _remaining_work(status: Any, worker_name: str, incarnation: str | None) -> RemainingWork:
    """Return the open requests of a worker, and the prompts whose KV blocks it keeps for other workers.

    Both numbers are 0 if the worker is gone or was restarted. A lost worker, whose heartbeats stopped, keeps no KV
    blocks for other workers."""
    row = _find_worker_row(status, worker_name)
    if row.get("incarnation") != incarnation or not row:
        return RemainingWork(0, 0, -1.0)
    if row["health"] == "lost":
        return RemainingWork(row["open"], 0, -1.0)
    return RemainingWork(row["open"], (row["transfer"] or {}).get("leases", 0), row["seconds_since_beat"])


@dataclass(frozen=True, slots=True)
class Router:
    """A router to which this command sends requests, with the headers and the TLS context for them."""

    url: str
    headers: dict[str, str] = field(repr=False)
    tls: ssl.SSLContext | None = None  # None: the system's CAs, if the URL is an https URL

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, self.headers)
        try:
            with urllib.request.urlopen(request, timeout=10, context=self.tls) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as e:
            if e.code == 401:
                raise WrongClusterKey(
                    f"the router at {self.url} refused the call: the cluster key is missing or wrong",
                    hint="set --cluster-key or EMBERLINE_CLUSTER_KEY to the router's key",
                ) from e
            raise self._drain_error(e) from e
        except (OSError, ValueError, http.client.HTTPException) as e:
            raise EmberlineError(
                f"no router answers at {self.url}: {e}",
                hint="set --router to the router's URL, and --tls-ca to its CA if that is an https URL",
            ) from e

    def _drain_error(self, reply: urllib.error.HTTPError) -> EmberlineError:
        if not self._is_router():
            return EmberlineError(
                f"{self.url} is not a router: it answered {reply.code} to a drain",
                hint="set --router to the router's URL; a server without a router is stopped with Ctrl-C or SIGTERM",
            )
        try:
            return EmberlineError(str(json.load(reply)["error"]["message"]))
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
            return EmberlineError(f"the router at {self.url} refused the drain: {reply.code} {reply.reason}")

    def _is_router(self) -> bool:
        try:
            url = f"{self.url.rstrip('/')}/cluster/status"
            with urllib.request.urlopen(url, timeout=10, context=self.tls) as reply:
                return "workers" in json.load(reply)
        except urllib.error.HTTPError as e:
            return e.code in (401, 403)
        except (OSError, ValueError, TypeError, http.client.HTTPException):
            return False
