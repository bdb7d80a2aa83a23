"""OpenSubmissions: the ids of submissions that are open, or that a running step still computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from emberline.core.errors import InvalidRequest

RunningSteps = tuple[int, int] | None  # numbers of the oldest and of the newest step that is running; None: none is


class OpenSubmissions:
    def __init__(self) -> None:
        self._request_ids: dict[str, list[str]] = {}  # by submission
        # By submission that has ended: the last step that may still compute for it. The oldest come first.
        self._last_steps: dict[str, int] = {}

    def check_id_is_free(self, submission_id: str, running: RunningSteps) -> None:
        """Raise InvalidRequest if the id belongs to an open submission, or to one that a running step computes.

        The result of that step would be mistaken for one of the new submission."""
        if submission_id in self._request_ids:
            message = f"a request with id {submission_id!r} is already open"
            raise InvalidRequest(message, param="id", hint="use a new id")
        if running is not None and self._last_steps.get(submission_id, -1) >= running[0]:
            message = f"a request with id {submission_id!r} has ended, but a running step still computes it"
            raise InvalidRequest(message, param="id", hint="use a new id")

    def add(self, submission_id: str, request_ids: Sequence[str]) -> None:
        self._request_ids[submission_id] = [*request_ids]

    def requests_of(self, submission_id: str) -> Sequence[str]:
        """Return the ids of the submission's requests that have not ended; none if it is not open."""
        return self._request_ids.get(submission_id, ())

    def end_request(self, submission_id: str, request_id: str, running: RunningSteps) -> bool:
        """Record the end of a request, and return whether it was the last one of its submission."""
        requests = self._request_ids[submission_id]
        requests.remove(request_id)
        if requests:
            return False
        del self._request_ids[submission_id]
        oldest = math.inf if running is None else running[0]
        for ended in [*itertools.takewhile(lambda each: self._last_steps[each] < oldest, self._last_steps)]:
            del self._last_steps[ended]
        if running is not None:
            self._last_steps.pop(submission_id, None)
            self._last_steps[submission_id] = running[1]
        return True

    def __len__(self) -> int:
        return len(self._request_ids)
