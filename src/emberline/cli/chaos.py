"""emberline chaos: a cluster on this machine, requests, and faults; nothing may hang, be wrong or leak."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from emberline.core.config import DEFAULT_MODEL
from emberline.core.errors import EmberlineError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill", type=int, default=1, help="workers that compute prompts (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=2, help="workers that go on from there (default: %(default)s)")
    parser.add_argument("--kv-memory", default="48M", help="of each worker; little, so that blocks must go to disk")
    parser.add_argument(
        "--links", action="store_true", help="workers in networks of their own: unshare -rn emberline chaos --links"
    )
    parser.add_argument("--logs", type=Path, help="folder (default: a new one in the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")


def run(args: argparse.Namespace) -> int:
    from emberline.bench import machine
    from emberline.bench.report import command
    from emberline.chaos.ledger import Ledger
    from emberline.chaos.play import play
    from emberline.chaos.scene import Scene, Settings
    from emberline.hub.source import resolve

    if sys.platform != "linux":
        raise EmberlineError(f"chaos runs on Linux only, not on {sys.platform}: it uses network namespaces and prlimit")
    resolve(args.model)  # else every worker would find out, again and again
    home = args.logs or Path(tempfile.mkdtemp(prefix="emberline-chaos-"))
    home.mkdir(parents=True, exist_ok=True)

    ledger, began, told = Ledger(), time.monotonic(), 0

    async def whole() -> None:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            nonlocal told
            told = number
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):  # nothing is left behind, and what was seen is told
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        settings = Settings(args.model, args.prefill, args.decode, kv_memory=args.kv_memory, links=args.links)
        await play(Scene(settings, home), ledger, args.faults, args.seed, _say)

    _say(f"logs in {home}")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(whole())
    seconds = time.monotonic() - began
    print(ledger.table())
    total = ledger.total
    _say(f"{total['count']} faults in {seconds:.0f} s, {ledger.checks} looks for leaks")
    _say(f"the slowest request took {ledger.slowest:.1f} s")
    _say(f"errors that clients were told: {dict(ledger.codes)}, {ledger.unexcused} not because there was no router")
    for trouble in ledger.troubles[:20]:
        _say(trouble)
    if args.json is not None:
        head = {"command": command(), "commit": machine.commit(), "hardware": machine.hardware(),
                "software": machine.software(), "model": args.model, "seed": args.seed}  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**head, "seconds": round(seconds), **ledger.as_dict()}, indent=1) + "\n")
    return 1 if ledger.bad else 128 + told if told else 0


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True, file=sys.stdout)
