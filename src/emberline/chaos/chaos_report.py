"""ChaosReport: counts of request outcomes, as a table with a row for each kind of fault and stage of the request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from emberline.chaos.client import RequestOutcome, Verdict

RESULT_COLUMNS = (
    "count",
    "answered",
    "moved",
    "resumed",
    "noticed",
    "left",
    "errors",
    "cut",
    "hung",
    "wrong",
    "leaked",
)
FAILURE_COLUMNS = ("hung", "wrong", "leaked")


@dataclass(slots=True)
class ChaosReport:
    rows: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    # Requests at which no fault was aimed, by verdict.
    background_requests: Counter[str] = field(default_factory=Counter)
    error_codes: Counter[str] = field(default_factory=Counter)  # errors that clients received
    problems: list[str] = field(default_factory=list)
    leak_check_count: int = 0
    missed_faults: int = 0  # faults for which no request reached the stage
    unrecovered: int = 0  # times that the cluster did not become healthy again
    unexcused_errors: int = 0  # errors or cut connections while a router was running
    slowest_request_s: float = 0.0

    def record_fault(
        self,
        fault_name: str,
        stage: str,
        outcome: RequestOutcome,
        *,
        migration_count: int,
        detection_count: int,
        is_error_expected: bool,
    ) -> None:
        row = self.rows.setdefault((fault_name, stage), Counter())
        row["count"] += 1
        row["moved"] += migration_count
        row["resumed"] += outcome.resumptions
        row["noticed"] += detection_count
        row[outcome.verdict] += 1
        self._record_outcome(f"{fault_name}, {stage}", outcome)
        self._record_error_unless_expected(f"{fault_name}, {stage}", outcome, is_error_expected)

    def record_background_request(
        self, outcome: RequestOutcome, fault_description: str, *, is_error_expected: bool
    ) -> None:
        self.background_requests["count"] += 1
        self.background_requests[outcome.verdict] += 1
        self.background_requests["resumed"] += outcome.resumptions
        self._record_outcome(f"other request during {fault_description}", outcome)
        self._record_error_unless_expected(f"other request during {fault_description}", outcome, is_error_expected)

    def _record_error_unless_expected(
        self, request_description: str, outcome: RequestOutcome, is_error_expected: bool
    ) -> None:
        if outcome.verdict in (Verdict.ERROR, Verdict.CUT) and not is_error_expected:
            self.unexcused_errors += 1
            self.problems.append(f"{request_description}: {outcome.verdict} {outcome.detail}")

    def record_leak(self, fault_name: str, stage: str, held_resources: str) -> None:
        self.rows[fault_name, stage]["leaked"] += 1
        self.problems.append(f"leak found after {fault_name}: {held_resources}")

    def record_failed_recovery(self, problem: str) -> None:
        self.unrecovered += 1
        self.problems.append(f"the cluster did not recover: {problem}")

    def _record_outcome(self, request_description: str, outcome: RequestOutcome) -> None:
        self.slowest_request_s = max(self.slowest_request_s, outcome.duration_s)
        if outcome.verdict is Verdict.ERROR:
            self.error_codes[outcome.detail] += 1
        if outcome.verdict in (Verdict.HUNG, Verdict.WRONG):
            self.problems.append(f"{request_description}: {outcome.verdict}: {outcome.detail}")

    @property
    def total_counts(self) -> Counter[str]:
        return sum(self.rows.values(), Counter())

    @property
    def failure_count(self) -> int:
        return self.unrecovered + sum(
            self.total_counts[name] + self.background_requests[name] for name in FAILURE_COLUMNS
        )

    def format_summary(self) -> str:
        faults, others = (
            ", ".join(f"{counts[name]} {name}" for name in RESULT_COLUMNS[1:] if counts[name])
            for counts in (self.total_counts, self.background_requests)
        )
        return f"{self.total_counts['count']} faults: {faults}; other requests: {others}"

    def format_table(self) -> str:
        lines: list[tuple[str, ...]] = [("fault", "stage", *RESULT_COLUMNS)]
        for (fault, stage), row in sorted(self.rows.items()):
            lines.append((fault, stage, *(str(row[name] or ".") for name in RESULT_COLUMNS)))
        lines.append(("all", "", *(str(self.total_counts[name]) for name in RESULT_COLUMNS)))
        lines.append(("other requests", "", *(str(self.background_requests[name]) for name in RESULT_COLUMNS)))
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
            "all": dict(self.total_counts),
            "beside": dict(self.background_requests),
            "error_codes": dict(self.error_codes),
            "unexcused_errors": self.unexcused_errors,
            "unrecovered": self.unrecovered,
            "leak_checks": self.leak_check_count,
            "slowest_request_seconds": round(self.slowest_request_s, 2),
            "troubles": self.problems[:50],
        }
