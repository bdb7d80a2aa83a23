"""DescriptorWatch: keeps some file descriptors of the process free while clients open connections.

Without a free descriptor, new connections are closed without a log line, and the process can reach
neither its files nor other servers.
"""

from __future__ import annotations

import logging
import os
import resource

from emberline.core.log_throttle import LogThrottle

log = logging.getLogger("emberline.net")

MAX_RESERVED_DESCRIPTORS = 64  # for files, and for connections to other servers
RESERVED_SHARE = 8  # one of so many descriptors, if that is fewer
CHECK_INTERVAL_S = 1.0
HINT = "(hint: raise `ulimit -n`, or LimitNOFILE of the service)"


class DescriptorWatch:
    def __init__(self) -> None:
        self.closed_connections = 0  # idle ones that were closed to make room, since the start
        self.rejected_connections = 0  # that were answered 503, since the start
        self.exhausted_checks = 0  # checks, one each second, that found no free descriptor, since the start
        self._throttle = LogThrottle(log)

    def count_missing(self, descriptor: int) -> int:
        """Return how many of the descriptors to be kept free are in use. `descriptor`: the lowest that was free."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reserved = min(MAX_RESERVED_DESCRIPTORS, limit // RESERVED_SHARE)
        return max(0, descriptor + 1 - (limit - reserved)) if limit >= 0 else 0

    def record_shortage(self, num_connections: int, *, rejected: bool) -> None:
        """Count and log that an idle connection was closed to make room, or that the new one was `rejected`."""
        self.rejected_connections += rejected
        self.closed_connections += not rejected
        self._throttle.write(
            logging.WARNING,
            f"File descriptors are scarce: connections=%d limit=%d action=%s {HINT}",
            num_connections,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "answered 503" if rejected else "closed an idle connection",
        )

    def check(self, descriptor: int) -> int:
        """Return how many of the descriptors to be kept free are in use. Log an error if none is free.

        `descriptor` is any open one."""
        try:
            os.close(lowest := os.dup(descriptor))
        except OSError as error:
            self.exhausted_checks += 1
            self._throttle.write(logging.ERROR, f"Cannot accept connections: error=%s {HINT}", error)
            return MAX_RESERVED_DESCRIPTORS
        return self.count_missing(lowest)


descriptor_watch = DescriptorWatch()  # the one instance of this process
