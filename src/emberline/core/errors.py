"""The one exception tree: everything we raise about what others did.

    EmberlineError                 status  code
    ├── InvalidRequest             400     invalid_value         a field of a request is wrong; `param` names it
    │   ├── ContextLengthExceeded  400     context_length_exceeded
    │   ├── BodyTooLarge           413     body_too_large
    │   ├── WorkTooLarge           413     request_too_complex   reading it takes more processor time than allowed
    │   └── UnsupportedMediaType   415     unsupported_media_type    the body's content-type
    ├── Unauthorized               401     invalid_api_key
    │   └── WrongClusterKey        401     invalid_cluster_key
    ├── RequestForbidden           403     forbidden             whatever key it carries
    │   ├── ClusterCallForbidden   403     cluster_call_forbidden    through a proxy, from a web page or from afar
    │   ├── HostNotAllowed         403     host_not_allowed      the Host header names another server
    │   └── OriginNotAllowed       403     origin_not_allowed    a web page of another site
    ├── NotFound                   404     not_found
    │   └── ModelNotFound          404     model_not_found
    ├── MethodNotAllowed           405     method_not_allowed
    ├── Overloaded                 429     queue_full            `retry_after` seconds
    ├── EngineUnavailable          503     engine_unavailable    starting, restarting or dead
    │   └── ShuttingDown                   shutting_down         a stream that was open at the end of the process
    ├── EngineFailed               500     engine_failed         died while the request was open
    ├── WorkerLost                 502     worker_lost           died or hung behind a router, the reply half sent
    ├── WorkersBroke               422     workers_broke         several, under one request: it is not to be sent again
    ├── Superseded                 409     superseded            a newer process has taken this worker's name
    ├── DeadlineExceeded           504     deadline_exceeded
    └── ModelError                 400     model_error           a model cannot be had or used
        ├── ModelFileError         400     model_file_error      damaged, truncated, hostile
        ├── UnsupportedModel       400     unsupported_model
        └── DownloadError          502     download_error

Each message says what and why; `hint` says what to do about it. What we ourselves promise is an assert, not one of
these.
"""

from __future__ import annotations


class EmberlineError(Exception):
    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class InvalidRequest(EmberlineError):
    status = 400
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class WorkTooLarge(InvalidRequest):
    status = 413
    code = "request_too_complex"


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

    def __init__(self, message: str, *, retry_after: int = 1, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class EngineUnavailable(EmberlineError):
    status = 503
    code = "engine_unavailable"


class Loading(EngineUnavailable):
    code = "loading"

    def __init__(
        self, message: str = "the server is loading its model", *, hint: str = "retry in a few seconds"
    ) -> None:
        super().__init__(message, hint=hint)


class ShuttingDown(EngineUnavailable):
    code = "shutting_down"

    def __init__(
        self,
        message: str = "the server shuts down and this stream was not finished in time",
        *,
        hint: str = "send it again",
    ) -> None:
        super().__init__(message, hint=hint)


class EngineFailed(EmberlineError):
    status = 500
    code = "engine_failed"


class WorkerLost(EmberlineError):
    status = 502
    code = "worker_lost"


class WorkersBroke(EmberlineError):
    status = 422
    code = "workers_broke"


class Superseded(EmberlineError):
    status = 409
    code = "superseded"


class DeadlineExceeded(EmberlineError):
    status = 504
    code = "deadline_exceeded"


class ModelError(EmberlineError):
    status = 400
    code = "model_error"


class ModelFileError(ModelError):
    code = "model_file_error"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class DownloadError(ModelError):
    status = 502
    code = "download_error"
