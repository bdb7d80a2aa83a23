"""HealthProbe measures the longest time of /health requests in a process that does nothing else.

Sending and receiving 30 MB in the same process would delay the probe itself.

    python -m emberline.bench.event_loop_probe PORT     probes until its input ends, then prints seconds
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from types import TracebackType

PROBE_SECONDS = 0.005  # seconds between two probes
TIMEOUT_S = 300.0


class HealthProbe:
    """A context manager; `longest` is set when it exits."""

    def __init__(self, port: int) -> None:
        self.longest_delay_s = 0.0  # seconds
        command = [sys.executable, "-m", "emberline.bench.event_loop_probe", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> HealthProbe:
        assert self._process.stdout is not None
        self._process.stdout.readline()  # the probe has started
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        output, _ = self._process.communicate(timeout=TIMEOUT_S)
        self.longest_delay_s = float(output)


def measure_longest_delay(port: int, stop: threading.Event) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    found = 0.0
    while not stop.is_set():
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        found = max(found, time.perf_counter() - began)
        time.sleep(PROBE_SECONDS)
    connection.close()
    return found


def main() -> None:
    stop = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    print("begun", flush=True)
    print(measure_longest_delay(int(sys.argv[1]), stop), flush=True)


if __name__ == "__main__":
    main()
