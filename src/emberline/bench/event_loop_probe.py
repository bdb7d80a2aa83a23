"""HealthProbe: measures the longest duration of a /health request, in a process that does nothing else.

A process that also sent or received the 30 MB of a large request would delay its own /health requests.

python -m emberline.bench.event_loop_probe PORT     requests /health until stdin ends, then prints the longest
                                                    duration in seconds
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
    """A context manager that requests /health repeatedly. `longest_delay_s` is set when the context exits."""

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

    def stop_at_end_of_input() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    print("begun", flush=True)
    print(measure_longest_delay(int(sys.argv[1]), stop), flush=True)


if __name__ == "__main__":
    main()
