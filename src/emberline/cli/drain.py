"""emberline drain: a worker finishes what it has and gets nothing new; returns when it has nothing left, for others
either."""

from __future__ import annotations

import argparse
import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from emberline.core.config import RouterConfig, cluster_key
from emberline.core.errors import EmberlineError, WrongClusterKey

POLL = 0.2  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = RouterConfig()
    parser.add_argument("worker", help="its name, as the router's page shows it")
    parser.add_argument("--router", metavar="URL", default=f"http://{default.host}:{default.port}")
    parser.add_argument("--cluster-key", help="the router's, if it has one")
    parser.add_argument(
        "--move", action="store_true", help="streams go on at other workers instead of being waited for"
    )
    parser.add_argument("--undo", action="store_true", help="give it requests again")
    parser.add_argument("--no-wait", action="store_true", help="return at once")


def run(args: argparse.Namespace) -> int:
    given = args.cluster_key or cluster_key()
    key = {"content-type": "application/json", **({"authorization": f"Bearer {given}"} if given else {})}
    _ask(args.router, "/cluster/drain", {"name": args.worker, "on": not args.undo, "move": args.move}, key)
    if args.undo:
        print(f"{args.worker} takes requests again")
        return 0
    told, idle_since = None, time.monotonic()
    process = _row(_ask(args.router, "/cluster/status", headers=key), args.worker).get("incarnation")
    while not args.no_wait:
        left = _left(_ask(args.router, "/cluster/status", headers=key), args.worker, process)
        idle_since = time.monotonic() if left.open else idle_since
        if not any(left[:2]) and left.age < time.monotonic() - idle_since:
            break
        if left[:2] not in (told, (0, 0)):
            print(f"{args.worker}: {left.open} requests still open, {left.kept} prompts kept for others", flush=True)
            told = left[:2]
        time.sleep(POLL)
    print(f"{args.worker} {'drains' if args.no_wait else 'is drained'}")
    return 0


class Left(NamedTuple):
    open: int  # requests
    kept: int  # prompts whose blocks others have not taken yet, by its own word
    age: float  # seconds, of that word


def _row(status: Any, name: str) -> dict[str, Any]:
    return next((row for row in status["workers"] if row["name"] == name), {})


def _left(status: Any, name: str, process: str | None) -> Left:
    """Nothing of a worker that has gone, or was started again; one that is lost keeps nothing for anybody."""
    row = _row(status, name)
    if row.get("incarnation") != process or not row:
        return Left(0, 0, -1.0)
    if row["health"] == "lost":
        return Left(row["open"], 0, -1.0)
    return Left(row["open"], (row["transfer"] or {}).get("leases", 0), row["seconds_since_beat"])


def _ask(router: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(router.rstrip("/") + path, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as e:
        if e.code == 401:
            raise WrongClusterKey(
                "the cluster key is missing or wrong", hint="--cluster-key or EMBERLINE_CLUSTER_KEY"
            ) from e
        raise _refusal(router, e) from e
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise EmberlineError(f"no router at {router}: {e}", hint="give --router URL") from e


def _refusal(router: str, reply: urllib.error.HTTPError) -> EmberlineError:
    if not _is_router(router):
        return EmberlineError(
            f"{router} is not a router: it answered {reply.code} to a drain",
            hint="give --router URL; a server without a router is stopped by Ctrl-C or SIGTERM",
        )
    try:
        return EmberlineError(str(json.load(reply)["error"]["message"]))
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return EmberlineError(f"the router at {router} refused to drain: {reply.code} {reply.reason}")


def _is_router(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/cluster/status", timeout=10) as reply:
            return "workers" in json.load(reply)
    except urllib.error.HTTPError as e:
        return e.code in (401, 403)
    except (OSError, ValueError, TypeError, http.client.HTTPException):
        return False
