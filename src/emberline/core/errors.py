"""Exceptions for errors caused by clients, operators, models or workers, with HTTP status and code.

    EmberlineError                 status  code
    ├── InvalidRequest             400     invalid_value         a field of a request is wrong; `param` names it
    │   ├── ContextLengthExceeded  400     context_length_exceeded
    │   ├── BodyTooLarge           413     body_too_large
    │   ├── WorkTooLarge           413     request_too_complex   parsing it takes more CPU time than allowed
    │   └── UnsupportedMediaType   415     unsupported_media_type    the body's content-type
    ├── Unauthorized               401     invalid_api_key
    │   └── WrongClusterKey        401     invalid_cluster_key
    ├── RequestForbidden           403     forbidden             no API key allows this request
    │   ├── ClusterCallForbidden   403     cluster_call_forbidden    via a proxy or web page, or not from a peer
    │   ├── HostNotAllowed         403     host_not_allowed      the Host header names another server
    │   └── OriginNotAllowed       403     origin_not_allowed    from a web page of another site
    ├── NotFound                   404     not_found
    │   ├── ModelNotFound          404     model_not_found
    │   └── ThreadNotFound         404     thread_not_found      Anthropic's `thread`: clients send all messages again
    ├── MethodNotAllowed           405     method_not_allowed
    ├── RequestBodyTimeout         408     request_body_timeout  the body arrived too slowly
    ├── Overloaded                 429     queue_full            `retry_after` seconds
    │   └── BodyMemoryFull         503     body_memory_full      the bodies of all clients use up the memory for them
    │       └── BodyShareFull      429     body_share_full       most of them are of this client
    ├── EngineUnavailable          503     engine_unavailable    starting, restarting or dead
    │   ├── EngineLoading          503     loading               the model is being loaded
    │   └── ShuttingDown           503     shutting_down         the stream was open when the server shut down
    ├── EngineFailed               500     engine_failed         the engine process died while the request was open
    ├── WorkerLost                 502     worker_lost           a worker died or hung after part of the reply was sent
    ├── WorkersCrashed             422     workers_broke         several workers died serving this request: do not retry
    ├── StreamNotResumable         410     stream_not_resumable  no worker has the stream that Last-Event-ID names
    ├── Superseded                 409     superseded            a newer process has taken this worker's name
    ├── NodeRankTaken              409     node_rank_taken       another process has this node rank of the engine
    ├── DeadlineExceeded           504     deadline_exceeded
    └── ModelError                 400     model_error           a model cannot be found, loaded or used
        ├── ModelFileError         400     model_file_error      a file is damaged, truncated or malicious
        ├── UnsupportedModel       400     unsupported_model
        └── DownloadError          502     download_error

A message names what failed and why; `hint` names what to do about it. Violations of our own invariants raise
AssertionError instead.
"""

from __future__ import annotations


class EmberlineError(Exception):
    status = 500
    code = "internal_error"
    default_hint: str | None = None  # for errors that are raised without a hint

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class InvalidRequest(EmberlineError):
    status = 400
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        hint: str | None = None,
        num_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`num_tokens`: tokens of the prompt, if they were counted; `max_tokens`: those of the model's context."""
        super().__init__(message, param=param, hint=hint)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"
    default_hint = "send a smaller body, or raise the server's setting max_body"


class WorkTooLarge(InvalidRequest):
    status = 413
    code = "request_too_complex"
    default_hint = "send a smaller or simpler request"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class Unauthorized(EmberlineError):
    status = 401
    code = "invalid_api_key"


class WrongClusterKey(Unauthorized):
    code = "invalid_cluster_key"


class RequestForbidden(EmberlineError):
    status = 403
    code = "forbidden"


class ClusterCallForbidden(RequestForbidden):
    code = "cluster_call_forbidden"


class HostNotAllowed(RequestForbidden):
    code = "host_not_allowed"


class OriginNotAllowed(RequestForbidden):
    code = "origin_not_allowed"


class NotFound(EmberlineError):
    status = 404
    code = "not_found"


class ThreadNotFound(NotFound):
    code = "thread_not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(EmberlineError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.allowed = allowed


class Overloaded(EmberlineError):
    status = 429
    code = "queue_full"
    default_hint = "send the request again after the time in the Retry-After header"

    def __init__(self, message: str, *, retry_after: int = 1, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class RequestBodyTimeout(EmberlineError):
    status = 408
    code = "request_body_timeout"
    default_hint = "send the request again over a faster connection"


class BodyMemoryFull(Overloaded):
    status = 503
    code = "body_memory_full"


class BodyShareFull(BodyMemoryFull):
    status = 429
    code = "body_share_full"


class EngineUnavailable(EmberlineError):
    status = 503
    code = "engine_unavailable"


class EngineLoading(EngineUnavailable):
    code = "loading"
    default_hint = "retry in a few seconds"

    def __init__(self, message: str = "the server is loading its model", *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)


class ShuttingDown(EngineUnavailable):
    code = "shutting_down"
    default_hint = "send the request again"

    def __init__(
        self, message: str = "the server shut down before this stream was finished", *, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)


class EngineFailed(EmberlineError):
    status = 500
    code = "engine_failed"


class WorkerLost(EmberlineError):
    status = 502
    code = "worker_lost"


class WorkersCrashed(EmberlineError):
    status = 422
    code = "workers_broke"


class StreamNotResumable(EmberlineError):
    status = 410
    code = "stream_not_resumable"


class Superseded(EmberlineError):
    status = 409
    code = "superseded"


class NodeRankTaken(EmberlineError):
    status = 409
    code = "node_rank_taken"


class DeadlineExceeded(EmberlineError):
    status = 504
    code = "deadline_exceeded"


class ModelError(EmberlineError):
    status = 400
    code = "model_error"


class ModelFileError(ModelError):
    code = "model_file_error"
    default_hint = "check the path, or download the model again"


class UnsupportedModel(ModelError):
    code = "unsupported_model"
    default_hint = "use a different model"


class DownloadError(ModelError):
    status = 502
    code = "download_error"
    default_hint = "check the network and the name of the model, and try again"
