"""ChaosReport: the outcomes of all faults and requests, as a table by fault and stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from emberline.chaos.client import Ending, Verdict

COLUMNS = ("count", "answered", "moved", "noticed", "left", "errors", "cut", "hung", "wrong", "leaked")
BAD = ("hung", "wrong", "leaked")


@dataclass(slots=True)
class Ledger:
    rows: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)  # requests at which no fault was aimed, by verdict
    codes: Counter[str] = field(default_factory=Counter)  # errors that clients received
    troubles: list[str] = field(default_factory=list)
    checks: int = 0
    missed: int = 0  # faults for which no request reached the stage
    unrecovered: int = 0  # times that the cluster did not become healthy again
    unexcused: int = 0  # errors or cut connections while a router was running
    slowest: float = 0.0

    def struck(self, fault: str, stage: str, ending: Ending, *, moved: int, noticed: int, excused: bool) -> None:
        row = self.rows.setdefault((fault, stage), Counter())
        row["count"] += 1
        row["moved"] += moved
        row["noticed"] += noticed
        row[ending.verdict] += 1
        self._ended(f"{fault}, {stage}", ending)
        self._complain(f"{fault}, {stage}", ending, excused)

    def passed(self, ending: Ending, during: str, *, excused: bool) -> None:
        self.others["count"] += 1
        self.others[ending.verdict] += 1
        self._ended(f"other request during {during}", ending)
        self._complain(f"other request during {during}", ending, excused)

    def _complain(self, where: str, ending: Ending, excused: bool) -> None:
        if ending.verdict in (Verdict.ERROR, Verdict.CUT) and not excused:
            self.unexcused += 1
            self.troubles.append(f"{where}: {ending.verdict} {ending.why}")

    def leaked(self, fault: str, stage: str, what: str) -> None:
        self.rows[fault, stage]["leaked"] += 1
        self.troubles.append(f"leak found after {fault}: {what}")

    def gave_up(self, why: str) -> None:
        self.unrecovered += 1
        self.troubles.append(f"the cluster did not recover: {why}")

    def _ended(self, where: str, ending: Ending) -> None:
        self.slowest = max(self.slowest, ending.seconds)
        if ending.verdict is Verdict.ERROR:
            self.codes[ending.why] += 1
        if ending.verdict in (Verdict.HUNG, Verdict.WRONG):
            self.troubles.append(f"{where}: {ending.verdict}: {ending.why}")

    @property
    def total(self) -> Counter[str]:
        return sum(self.rows.values(), Counter())

    @property
    def bad(self) -> int:
        return self.unrecovered + sum(self.total[name] + self.others[name] for name in BAD)

    def summary(self) -> str:
        faults, others = (
            ", ".join(f"{counts[name]} {name}" for name in COLUMNS[1:] if counts[name])
            for counts in (self.total, self.others)
        )
        return f"{self.total['count']} faults: {faults}; other requests: {others}"

    def table(self) -> str:
        lines: list[tuple[str, ...]] = [("fault", "stage", *COLUMNS)]
        for (fault, stage), row in sorted(self.rows.items()):
            lines.append((fault, stage, *(str(row[name] or ".") for name in COLUMNS)))
        lines.append(("all", "", *(str(self.total[name]) for name in COLUMNS)))
        lines.append(("other requests", "", *(str(self.others[name]) for name in COLUMNS)))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "faults": [{"fault": f, "stage": s, **row} for (f, s), row in sorted(self.rows.items())],
            "all": dict(self.total),
            "beside": dict(self.others),
            "error_codes": dict(self.codes),
            "unexcused_errors": self.unexcused,
            "unrecovered": self.unrecovered,
            "leak_checks": self.checks,
            "slowest_request_seconds": round(self.slowest, 2),
            "troubles": self.troubles[:50],
        }
