"""The only module that imports Mooncake. It contains the parts of Mooncake's Transfer Engine and Store that we use.

A Mooncake wheel that does not fit the machine may crash the process that imports it. `check_mooncake_usable` therefore
tries the import in a child process.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from emberline.core.errors import EmberlineError

PROBE_TIMEOUT_S = 20.0
PORT_RANGE_VARIABLES = ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT")  # environment variables of Mooncake
PROBE_SCRIPT = """
import sys
from mooncake.engine import TransferEngine
from emberline.kv.confine import restrict_new_listeners
engine = TransferEngine()
with restrict_new_listeners(sys.argv[1]):
    if engine.initialize(sys.argv[1], "P2PHANDSHAKE", sys.argv[2], "") != 0:
        sys.exit("the Transfer Engine does not start")
source, target = (engine.allocate_managed_buffer(4096) for _ in range(2))
engine.write_bytes_to_buffer(source, b"ember", 5)
if engine.transfer_sync_read(f"{sys.argv[1]}:{engine.get_rpc_port()}", target, source, 4096) != 0:
    sys.exit("a test read of its own memory fails")
sys.exit(0 if engine.read_bytes_from_buffer(target, 5) == b"ember" else "a test read of its own memory differs")
"""


@functools.cache  # reads the file lists of all installed packages
def installed_distribution() -> str | None:
    """Return the name and version of the installed Mooncake package, or None.

    Several packages provide the module `mooncake`.
    """
    import importlib.metadata  # takes longer than this module: every engine process imports this module

    found = importlib.metadata.packages_distributions().get("mooncake", [])
    return f"{found[0]} {importlib.metadata.version(found[0])}" if found else None


def check_mooncake_usable(
    host: str = "127.0.0.1", protocol: str = "tcp", timeout_s: float = PROBE_TIMEOUT_S
) -> str | None:
    """Return why Mooncake cannot be used on this machine, or None if it can.

    Mooncake is started in a child process, because it may crash or hang.
    """
    command = [sys.executable, "-c", PROBE_SCRIPT, host, protocol]
    environment = {**os.environ, "MC_LOG_LEVEL": "ERROR"}
    for name in PORT_RANGE_VARIABLES:  # these ports are for the engine that starts after the probe
        environment.pop(name, None)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        return f"Mooncake does not start within {timeout_s:g} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1][:300] if lines and done.returncode > 0 else f"Mooncake crashed with signal {-done.returncode}"


class MooncakeMissing(EmberlineError):
    """Mooncake, or a library that it needs, is not installed."""

    status = 503
    code = "mooncake_missing"


class MooncakeTransferEngine(Protocol):
    """The methods of mooncake.engine.TransferEngine that we use."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int: ...

    def get_rpc_port(self) -> int: ...

    def register_memory(self, address: int, size: int) -> int: ...

    def unregister_memory(self, address: int) -> int: ...

    def batch_transfer_sync_read(
        self, session: str, buffers: list[int], addresses: list[int], lengths: list[int]
    ) -> int: ...


class MooncakeStore(Protocol):
    """The methods of mooncake.store.MooncakeDistributedStore that we use. A negative result is an error code."""

    def setup(
        self, host: str, metadata: str, segment_bytes: int, buffer_bytes: int, protocol: str, devices: str, master: str
    ) -> int: ...

    def register_buffer(self, address: int, size: int) -> int: ...

    def put_from(self, key: str, address: int, size: int) -> int: ...

    def get_into(self, key: str, address: int, size: int) -> int: ...

    def is_exist(self, key: str) -> int: ...

    def remove(self, key: str, force: bool) -> int: ...

    def close(self) -> int: ...


def detect_fastest_protocol() -> str:
    """Return the fastest protocol that this machine supports, "rdma" or "tcp"."""
    devices = Path("/sys/class/infiniband")
    return "rdma" if devices.is_dir() and any(devices.iterdir()) else "tcp"


def new_engine(first_port: int = 0) -> MooncakeTransferEngine:
    """Create a Transfer Engine that listens at `first_port` and the next port. With 0, it uses any free ports."""
    _set_mooncake_environment(first_port)
    try:
        from mooncake.engine import TransferEngine
    except (ImportError, OSError) as error:
        raise _missing_error(error) from error
    engine: MooncakeTransferEngine = TransferEngine()
    return engine


def new_store(first_port: int = 0) -> MooncakeStore:
    """Create a store client that listens at `first_port` and the next port. With 0, it uses any free ports."""
    _set_mooncake_environment(first_port)
    try:
        from mooncake.store import MooncakeDistributedStore
    except (ImportError, OSError) as error:
        raise _missing_error(error) from error
    store: MooncakeStore = MooncakeDistributedStore()
    return store


def _set_mooncake_environment(first_port: int) -> None:
    """Set the environment variables that Mooncake reads when it starts.

    They contain the log level, because by default Mooncake logs every call.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if first_port:
        os.environ.update(zip(PORT_RANGE_VARIABLES, (str(first_port), str(first_port + 1)), strict=True))


def _missing_error(error: Exception) -> MooncakeMissing:
    return MooncakeMissing(f"Mooncake cannot be imported: {error}", hint="emberline doctor lists what it needs")
