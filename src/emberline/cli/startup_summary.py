"""Prints the URLs to open once a server and its gateway answer.

`scripts/serve` starts this as `python -m emberline.cli.startup_summary PORT [GATEWAY_PORT]`. It ends silently when
its parent process ends."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from emberline.core.gateway_config import GatewayConfig

POLL_INTERVAL_S = 0.3
REQUEST_TIMEOUT_S = 5.0
# The default model answers this question correctly; at temperature 0 the answer is always the same.
EXAMPLE_QUESTION = "Explain in one sentence what the internet is."


def main(argv: list[str]) -> int:
    parent = os.getppid()
    urls = [f"http://127.0.0.1:{port}" for port in argv]
    if all(wait_until_ready(url, lambda: os.getppid() == parent) for url in urls):
        print(build_summary(*urls), file=sys.stderr, flush=True)
    return 0


def wait_until_ready(url: str, is_needed: Callable[[], bool]) -> bool:
    """Return True as soon as the server answers, or False once `is_needed` returns False."""
    while is_needed():
        try:
            urllib.request.urlopen(f"{url}/health", timeout=REQUEST_TIMEOUT_S).close()
            return True
        except urllib.error.HTTPError as e:  # such as 401: the server runs
            if e.code != 503:  # 503: still loading
                return True
            time.sleep(POLL_INTERVAL_S)
        except OSError:
            time.sleep(POLL_INTERVAL_S)
    return False


def build_summary(engine_url: str, gateway_url: str | None = None) -> str:
    model, key = _find_chat_model_and_auth_header(engine_url)
    messages = [{"role": "user", "content": EXAMPLE_QUESTION}]
    body = json.dumps({"model": model, "temperature": 0, "messages": messages})
    lines = ["", f"  Playground   {engine_url}/"]
    if gateway_url is not None:
        key_file = GatewayConfig().admin_key_file
        lines.append(f"  Dashboard    {gateway_url}/   (sign-in link above, or the admin key in {key_file})")
    header = f" -H '{key}'" if key else ""
    lines.append(f"  Try          curl {engine_url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\")
    lines.append(f"                 -d '{body}'")
    return "\n".join([*lines, "  Stop         Ctrl-C", ""])


def _find_chat_model_and_auth_header(engine_url: str) -> tuple[str, str | None]:
    """Return the first chat model's name, and the HTTP header to send if the server requires an API key."""
    try:
        with urllib.request.urlopen(f"{engine_url}/v1/models", timeout=REQUEST_TIMEOUT_S) as reply:
            rows: list[dict[str, Any]] = json.load(reply)["data"]
            return next(str(row["id"]) for row in rows if row.get("kind", "chat") == "chat"), None
    except urllib.error.HTTPError:
        return "MODEL", "Authorization: Bearer API_KEY"
    except (OSError, ValueError, KeyError, StopIteration):
        return "MODEL", None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
