"""DraftedRows: where recurrent layers keep the rows of drafted tokens, and how many of these a step applies first.

States do not advance over drafted tokens (kernels/delta_rule.py): a step keeps their rows at a place that belongs to
the request, and the request's next step advances the states over the rows of the accepted ones. So a step finds the
states behind the known tokens of the step before. This module does not import torch."""

from __future__ import annotations

from emberline.core.plan import WorkItem


class DraftedRows:
    def __init__(self) -> None:
        self._places: dict[str, int] = {}  # by request that had a draft; numbers as small as possible
        self._newest: dict[str, WorkItem] = {}  # by request

    def plan_step(self, item: WorkItem) -> tuple[int, int]:
        """Return the place of a request's rows, and how many drafted tokens of its previous step were accepted.

        If `max_shift` is set, the device has to add those that are accepted in the step which still runs."""
        previous, self._newest[item.id] = self._newest.get(item.id), item
        if item.num_draft and item.id not in self._places:
            used = set(self._places.values())
            self._places[item.id] = next(place for place in range(len(used) + 1) if place not in used)
        # The scheduler corrects the start of the previous step if that was planned before its own was known.
        accepted = 0 if previous is None else item.start - _known_end(previous)
        assert 0 <= accepted <= (0 if previous is None else previous.num_draft), "not the step after the previous one"
        return self._places.get(item.id, 0), accepted

    def free(self, request_id: str) -> None:
        self._newest.pop(request_id, None)
        self._places.pop(request_id, None)


def _known_end(item: WorkItem) -> int:
    return item.start + len(item.tokens) - item.num_draft
