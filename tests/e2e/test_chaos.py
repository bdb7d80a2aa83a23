"""Every kind of fault once, on a cluster of real processes: clients notice nothing but the death of the router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from routers import SRC, tiny_model

from emberline.chaos.faults import FAULTS
from emberline.chaos.play import play
from emberline.chaos.scene import Scene, Settings

SEED = 7
IMPATIENT = ("--split-tokens", "64", "--stuck-after", "4", "--lost-after", "2", "--ticket-timeout", "3")


def test_every_fault_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    model = str(tiny_model(tmp_path / "tiny", 1024))
    settings = Settings(model, kv_memory="512K", router=IMPATIENT)

    async def whole() -> None:
        ledger, _ = await play(Scene(settings, tmp_path), len(FAULTS), SEED, print)
        print(ledger.table())
        assert not ledger.bad and not ledger.troubles, ledger.troubles
        assert {fault for fault, _ in ledger.rows} == {fault.name for fault in FAULTS}
        assert ledger.total["count"] == len(FAULTS) and ledger.others["answered"] > 50
        assert ledger.total["moved"] and ledger.total["noticed"]  # something did happen to them

    asyncio.run(whole())
    logs = [path for path in tmp_path.glob("*.log") if "Traceback" in path.read_text()]
    assert not logs, [path.read_text()[-2000:] for path in logs]
