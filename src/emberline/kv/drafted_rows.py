"""DraftedRows: where recurrent layers keep their inputs for each request's drafted tokens.

A step does not advance the states over drafted tokens (kernels/delta_rule.py). It keeps the inputs (rows) of these
tokens in a draft slot of the StateCache, which belongs to the request. The request's next step first advances the
states over the rows of the accepted tokens. So a step starts with the states as they were after the known tokens of the
previous step. This module does not import torch."""

from __future__ import annotations

from emberline.core.plan import WorkItem


class DraftedRows:
    def __init__(self) -> None:
        self._slots: dict[str, int] = {}  # by request that had a draft; numbers as small as possible
        self._newest: dict[str, WorkItem] = {}  # by request

    def plan_step(self, item: WorkItem) -> tuple[int, int]:
        """Return the draft slot of a request's rows, and how many drafted tokens of its previous step were accepted.

        If `item.max_shift` is set, the previous step still runs, and the device must add the tokens accepted in it."""
        previous, self._newest[item.id] = self._newest.get(item.id), item
        if item.num_draft and item.id not in self._slots:
            used = set(self._slots.values())
            self._slots[item.id] = next(slot for slot in range(len(used) + 1) if slot not in used)
        # The scheduler corrects the start of the previous step if that was planned before its own was known.
        accepted = 0 if previous is None else item.start - _known_end(previous)
        assert 0 <= accepted <= (0 if previous is None else previous.num_draft), "not the step after the previous one"
        return self._slots.get(item.id, 0), accepted

    def free(self, request_id: str) -> None:
        self._newest.pop(request_id, None)
        self._slots.pop(request_id, None)


def _known_end(item: WorkItem) -> int:
    return item.start + len(item.tokens) - item.num_draft
