"""Every kind of fault once, on a cluster of real processes: clients notice nothing but the death of the router."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from routers import SRC, tiny_model

from emberline.chaos.fault_table import FAULTS

ALONE = ("unshare", "-rn")  # in a network of its own
LINKS = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root tbf rate 8bit burst 1b limit 1b"


def has_network_namespaces() -> bool:
    try:
        return subprocess.run([*ALONE, "sh", "-c", LINKS], capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


def test_cluster_survives_every_fault(tmp_path: Path) -> None:
    linked = has_network_namespaces()
    kinds = {fault.name for fault in FAULTS if linked or not fault.needs_links}
    model, told = tiny_model(tmp_path / "tiny", 1024), tmp_path / "told.json"
    command = [sys.executable, "-m", "emberline.cli", "chaos", str(model), "--faults", str(len(kinds)), "--seed", "7",
               "--kv-memory", "512K", "--logs", str(tmp_path), "--json", str(told)]  # fmt: skip
    if linked:
        command = [*ALONE, *command, "--links"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SRC)}, timeout=300)
    ledger = json.loads(told.read_text())
    assert done.returncode == 0 and not ledger["troubles"], ledger["troubles"]
    assert {row["fault"] for row in ledger["faults"]} == kinds and ledger["all"]["count"] == len(kinds)
    assert ledger["beside"]["answered"] > 50
    assert ledger["all"]["moved"] and ledger["all"]["noticed"]  # something did happen to them
    logs = [path for path in tmp_path.glob("*.log") if "Traceback" in path.read_text()]
    assert not logs, [path.read_text()[-2000:] for path in logs]
