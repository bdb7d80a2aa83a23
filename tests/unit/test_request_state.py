"""Every pair of state and event of a routed request is either listed in the table or refused, and each request ends
once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.router.request_state import (
    TRANSITIONS,
    IllegalTransition,
    RequestEvent,
    RequestState,
    Suspicion,
    assess_suspicion,
    next_state,
)

# All legal transitions: state, event, next state. `open` is every state that is not terminal.
EXPECTED = """
choosing           worker_chosen        attempting
choosing           no_worker_yet        waiting
choosing           gave_up              abandoned
waiting            worker_chosen        attempting
waiting            no_worker_yet        waiting
waiting            gave_up              abandoned
attempting         first_output         relaying
attempting         attempt_failed       choosing
relaying           reply_completed      done
relaying           attempt_failed       interrupted
interrupted        worker_chosen        resuming
interrupted        no_worker_yet        waiting_to_resume
interrupted        gave_up              abandoned
waiting_to_resume  worker_chosen        resuming
waiting_to_resume  no_worker_yet        waiting_to_resume
waiting_to_resume  gave_up              abandoned
resuming           first_output         relaying
resuming           attempt_failed       interrupted
open               timed_out            timed_out
open               router_stopped       shut_down
open               client_disconnected  disconnected
open               exception_raised     failed
"""
OPEN = ("choosing", "waiting", "attempting", "relaying", "interrupted", "waiting_to_resume", "resuming")
STARTED = ("relaying", "interrupted", "waiting_to_resume", "resuming")
BETWEEN_ATTEMPTS = ("choosing", "waiting", "interrupted", "waiting_to_resume")
ENDING_EVENTS = ("timed_out", "router_stopped", "client_disconnected", "exception_raised")


def legal_transitions() -> dict[tuple[str, str], str]:
    legal = {}
    for line in EXPECTED.split("\n")[1:-1]:
        state, event, following = line.split()
        for each in OPEN if state == "open" else (state,):
            legal[each, event] = following
    return legal


@pytest.mark.parametrize(
    ("state", "event"),
    list(itertools.product(RequestState, RequestEvent)),
    ids=lambda each: each.value,
)
def test_each_event_changes_state_as_listed_or_raises(state: RequestState, event: RequestEvent) -> None:
    following = legal_transitions().get((state.value, event.value))
    if following is None:
        with pytest.raises(IllegalTransition, match=f"'{state.value}' cannot handle the event '{event.value}'"):
            next_state(state, event)
    else:
        assert next_state(state, event).value == following


def test_predicates_follow_from_state() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    for state in RequestState:
        assert state.is_terminal == (state.value not in OPEN)
        assert state.has_reply_started == (state.value in STARTED)
        assert state.is_between_attempts == (state.value in BETWEEN_ATTEMPTS)


@given(st.lists(st.sampled_from(RequestEvent)), st.sampled_from(ENDING_EVENTS))
def test_random_events_end_in_one_terminal_state(events: list[RequestEvent], ending: str) -> None:
    """Illegal events change nothing. A request that is still open ends with any of the four ending events."""
    state, endings, has_started = RequestState.CHOOSING, 0, False
    for event in (*events, RequestEvent(ending)):
        was_open = not state.is_terminal
        try:
            state = next_state(state, event)
        except IllegalTransition:
            continue
        assert was_open, "no event follows a terminal state"
        endings += state.is_terminal
        has_started |= event is RequestEvent.FIRST_OUTPUT
        assert state.is_terminal or state.has_reply_started == has_started
    assert state.is_terminal and endings == 1


@given(st.data())
def test_random_legal_events_reach_each_ending_once(data: st.DataObject) -> None:
    """A request may take any path through the table, and each open state has a way to a terminal one."""
    state, visited = RequestState.CHOOSING, [RequestState.CHOOSING]
    for _ in range(data.draw(st.integers(0, 30))):
        if state.is_terminal:
            break
        state = TRANSITIONS[state][data.draw(st.sampled_from(sorted(TRANSITIONS[state], key=lambda e: e.value)))]
        visited.append(state)
    if not state.is_terminal:
        visited.append(next_state(state, RequestEvent.TIMED_OUT))
    assert [each.is_terminal for each in visited] == [False] * (len(visited) - 1) + [True]
    assert RequestState.DONE not in visited or visited[-2] is RequestState.RELAYING


@pytest.mark.parametrize(
    ("known", "levels"),
    [(False, ["clear", "clear", "suspect", "blocked", "blocked"]), (True, ["suspect", "blocked", "blocked"])],
)
def test_suspicion_rises_and_falls_with_crashes(known: bool, levels: list[str]) -> None:
    assert [assess_suspicion(n, is_known_suspect=known).value for n in range(len(levels))] == levels
    assert {each.value for each in Suspicion} == {"clear", "suspect", "blocked"}


def test_docs_describe_all_states() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    assert [state.value for state in RequestState if f"`{state.value}`" not in page] == []
