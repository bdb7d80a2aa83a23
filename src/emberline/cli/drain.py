"""emberline drain: a worker finishes what it has and gets nothing new; returns when it has nothing left."""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from typing import Any

from emberline.core.config import RouterConfig, cluster_key
from emberline.core.errors import EmberlineError

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
    key = {"authorization": f"Bearer {given}"} if given else {}
    _ask(args.router, "/cluster/drain", {"name": args.worker, "on": not args.undo, "move": args.move}, key)
    if args.undo:
        print(f"{args.worker} takes requests again")
        return 0
    told = None
    while not args.no_wait:
        open_ = _open(_ask(args.router, "/cluster/status"), args.worker)
        if not open_:
            break
        if open_ != told:
            print(f"{args.worker}: {open_} requests still open", flush=True)
            told = open_
        time.sleep(POLL)
    print(f"{args.worker} {'drains' if args.no_wait else 'is drained'}")
    return 0


def _open(status: Any, name: str) -> int:
    """None left is also true of a worker that has gone meanwhile."""
    return sum(worker["open"] for worker in status["workers"] if worker["name"] == name)


def _ask(router: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(router.rstrip("/") + path, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as e:
        raise EmberlineError(json.load(e)["error"]["message"]) from e
    except (OSError, ValueError) as e:
        raise EmberlineError(f"no router at {router}: {e}", hint="give --router URL") from e
