"""RequestState: the states of a client's request in the router, and the table of all transitions between them.

Suspicion: whether a request is suspected of crashing the workers that serve it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum

# This many workers that crashed while serving one request make the request a suspect. One more crash blocks it.
SUSPECT_AFTER_CRASHES = 2


class IllegalTransition(RuntimeError):
    """An event occurred that the table of transitions does not allow in the request's state: a bug."""


# StrEnum, because a str is hashed three times as fast as a plain Enum member.
class RequestState(StrEnum):
    # Open states before the client has received anything.
    CHOOSING = "choosing"  # the router is choosing a worker for the next attempt
    WAITING = "waiting"  # no worker is available; the request waits for one
    ATTEMPTING = "attempting"  # a worker has the request and has sent no output yet
    # Open states after the client has received the start of the reply.
    RELAYING = "relaying"  # a worker's reply is being passed to the client
    INTERRUPTED = "interrupted"  # that worker failed or drained; the router is choosing a worker to continue the stream
    WAITING_TO_RESUME = "waiting_to_resume"  # no worker is available to continue the stream
    RESUMING = "resuming"  # the next worker has the stream and has sent no output yet
    # Terminal states.
    DONE = "done"  # the client has the complete reply of a worker
    ABANDONED = "abandoned"  # no worker could serve the request or continue its stream; the client got an error
    TIMED_OUT = "timed_out"  # the deadline of the request or of its next token passed
    SHUT_DOWN = "shut_down"  # the router stopped
    DISCONNECTED = "disconnected"  # the client closed its connection
    FAILED = "failed"  # an exception that no other worker can mend

    @property
    def has_reply_started(self) -> bool:
        """Whether the client has received the start of the reply, and the request is still open."""
        return self in _STARTED_STATES

    @property
    def is_between_attempts(self) -> bool:
        """Whether the request is open, but not assigned to a worker."""
        return RequestEvent.WORKER_CHOSEN in TRANSITIONS[self]

    @property
    def is_terminal(self) -> bool:
        """Whether the request has ended, so that no event may follow."""
        return not TRANSITIONS[self]


class RequestEvent(StrEnum):
    WORKER_CHOSEN = "worker_chosen"  # a worker gets the request, or the rest of its stream
    NO_WORKER_YET = "no_worker_yet"  # no worker is available, and the request may wait for one
    FIRST_OUTPUT = "first_output"  # the chosen worker has sent the first part of its reply for the client
    ATTEMPT_FAILED = "attempt_failed"  # the chosen worker did not complete the reply
    REPLY_COMPLETED = "reply_completed"  # the client has the end of the worker's reply
    GAVE_UP = "gave_up"  # no worker is available, and the request may not wait (any longer) or be tried again
    TIMED_OUT = "timed_out"
    ROUTER_STOPPED = "router_stopped"
    CLIENT_DISCONNECTED = "client_disconnected"
    EXCEPTION_RAISED = "exception_raised"


# These events end a request in every open state.
_ENDINGS: Mapping[RequestEvent, RequestState] = {
    RequestEvent.TIMED_OUT: RequestState.TIMED_OUT,
    RequestEvent.ROUTER_STOPPED: RequestState.SHUT_DOWN,
    RequestEvent.CLIENT_DISCONNECTED: RequestState.DISCONNECTED,
    RequestEvent.EXCEPTION_RAISED: RequestState.FAILED,
}

TRANSITIONS: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    RequestState.CHOOSING: {
        RequestEvent.WORKER_CHOSEN: RequestState.ATTEMPTING,
        RequestEvent.NO_WORKER_YET: RequestState.WAITING,
        RequestEvent.GAVE_UP: RequestState.ABANDONED,
        **_ENDINGS,
    },
    RequestState.WAITING: {
        RequestEvent.WORKER_CHOSEN: RequestState.ATTEMPTING,
        RequestEvent.NO_WORKER_YET: RequestState.WAITING,
        RequestEvent.GAVE_UP: RequestState.ABANDONED,
        **_ENDINGS,
    },
    RequestState.ATTEMPTING: {
        RequestEvent.FIRST_OUTPUT: RequestState.RELAYING,
        RequestEvent.ATTEMPT_FAILED: RequestState.CHOOSING,
        **_ENDINGS,
    },
    RequestState.RELAYING: {
        RequestEvent.REPLY_COMPLETED: RequestState.DONE,
        RequestEvent.ATTEMPT_FAILED: RequestState.INTERRUPTED,
        **_ENDINGS,
    },
    RequestState.INTERRUPTED: {
        RequestEvent.WORKER_CHOSEN: RequestState.RESUMING,
        RequestEvent.NO_WORKER_YET: RequestState.WAITING_TO_RESUME,
        RequestEvent.GAVE_UP: RequestState.ABANDONED,
        **_ENDINGS,
    },
    RequestState.WAITING_TO_RESUME: {
        RequestEvent.WORKER_CHOSEN: RequestState.RESUMING,
        RequestEvent.NO_WORKER_YET: RequestState.WAITING_TO_RESUME,
        RequestEvent.GAVE_UP: RequestState.ABANDONED,
        **_ENDINGS,
    },
    RequestState.RESUMING: {
        RequestEvent.FIRST_OUTPUT: RequestState.RELAYING,
        RequestEvent.ATTEMPT_FAILED: RequestState.INTERRUPTED,
        **_ENDINGS,
    },
    RequestState.DONE: {},
    RequestState.ABANDONED: {},
    RequestState.TIMED_OUT: {},
    RequestState.SHUT_DOWN: {},
    RequestState.DISCONNECTED: {},
    RequestState.FAILED: {},
}

_STARTED_STATES = frozenset(
    {
        RequestState.RELAYING,
        RequestState.INTERRUPTED,
        RequestState.WAITING_TO_RESUME,
        RequestState.RESUMING,
    }
)


def next_state(state: RequestState, event: RequestEvent) -> RequestState:
    """Return the next state. Raises IllegalTransition if the table does not list this event for this state."""
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise IllegalTransition(f"a routed request in state {state.value!r} cannot handle the event {event.value!r}")
    return following


class Suspicion(Enum):
    CLEAR = "clear"  # too few workers crashed while serving the request to suspect it
    SUSPECT = "suspect"  # may only be sent to a worker that serves no other suspect
    BLOCKED = "blocked"  # must not be sent to any worker


def assess_suspicion(crash_count: int, *, is_known_suspect: bool) -> Suspicion:
    """Return how strongly a request is suspected after `crash_count` workers crashed while serving it.

    `is_known_suspect`: an earlier request with the same prompt was abandoned as a suspect, so that one crash is enough
    to block this request."""
    allowed_crashes = 0 if is_known_suspect else SUSPECT_AFTER_CRASHES
    if crash_count > allowed_crashes:
        return Suspicion.BLOCKED
    return Suspicion.SUSPECT if crash_count == allowed_crashes else Suspicion.CLEAR
