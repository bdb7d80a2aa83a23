"""RankProcesses: the rank processes that one process starts, and the memory that it shares with them.

This module does not import torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from emberline.engine.engine_child import STDERR_FD
from emberline.engine.ranks.control import ControlSocket, StartRank
from emberline.engine.ranks.group_memory import GroupMemory

RANK_COMMAND = (sys.executable, "-m", "emberline.engine.ranks.process")
REAP_TIMEOUT_S = 5.0  # for killed processes to end
EXIT_TIMEOUT_S = 1.0  # for a process to end after it has closed its connection


@dataclass(slots=True)
class RankChild:
    """A rank's process, and this side's end of the connection to it."""

    rank: int
    process: subprocess.Popen[bytes]
    control: ControlSocket

    def wait_for_status(self) -> int | None:
        """Return the exit status of a process that has closed its connection; None if it is still running."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(EXIT_TIMEOUT_S)
        return None


class RankProcesses:
    """The operating system kills the processes when the thread that started them ends."""

    def __init__(self, num_ranks: int, command: tuple[str, ...] = RANK_COMMAND) -> None:
        """`num_ranks`: the number of ranks of the whole group, on all machines."""
        self.memory = GroupMemory.create(num_ranks)
        self.notice_fds: dict[int, int] = {}  # by rank, where notices of plans are written; their user closes them
        self.children: dict[int, RankChild] = {}
        self._num_ranks, self._command = num_ranks, command

    def spawn(self, start: StartRank) -> None:
        """Start the process of a rank, and send it this message. Raises OSError."""
        ours, theirs = socket.socketpair()
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        fds = theirs.fileno(), self.memory.fd, read_fd
        shared = (start.rendezvous.store_fd,) if start.rendezvous.store_fd >= 0 else ()
        try:
            process = subprocess.Popen(
                [*self._command, str(self._num_ranks), str(start.rank), *map(str, fds)],
                stdin=subprocess.PIPE,  # it ends when this is closed: core/parent_death.py
                stdout=STDERR_FD,
                pass_fds=(*fds, *shared),
            )
        except OSError:
            ours.close()
            os.close(write_fd)
            raise
        finally:
            theirs.close()
            os.close(read_fd)
        self.notice_fds[start.rank] = write_fd
        child = self.children[start.rank] = RankChild(start.rank, process, ControlSocket(ours))
        with contextlib.suppress(OSError):  # it has ended already
            child.control.send(start)

    def kill_all(self) -> None:
        for child in self.children.values():
            child.process.kill()
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(REAP_TIMEOUT_S)
            if child.process.stdin is not None:
                child.process.stdin.close()

    def close(self) -> None:
        """Close the connections and the shared memory. Call `kill_all` before."""
        for child in self.children.values():
            child.control.connection.close()
        self.memory.close()


def describe_status(status: int | None) -> str:
    """Return what happened to a process. `status`: its exit status; None: it runs, but has closed its connection."""
    if status is None:
        return "closed its connection"
    return f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"


def hint_at_cause(status: int | None) -> str | None:
    """Return what to do about a process that ended with this status; None if that is not known."""
    is_killed = status == -signal.SIGKILL  # by the kernel, if memory ran out
    return "check whether memory ran out (dmesg), and lower --kv-memory" if is_killed else None
