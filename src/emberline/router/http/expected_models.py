"""ExpectedModels: models whose workers an autoscaler starts when they are needed.

Requests for such a model wait for a worker instead of getting a 404. The autoscaler announces its models again and
again; those of an autoscaler that is gone are forgotten. A router that has just started knows neither the models of
announcements nor those of workers, so for a short time it expects every model."""

from __future__ import annotations

from collections.abc import Iterable

from emberline.cluster.registration import ModelRegistration

MAX_MODELS = 1024
START_GRACE_S = 6.0  # for workers to register, and for an autoscaler with the default interval to announce its models


class ExpectedModels:
    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._expiry: dict[str, float] = {}  # by name of an announced model
        self._registrations: dict[str, ModelRegistration] = {}  # the last one of each announced model

    def announce(self, names: Iterable[str], until: float, now: float) -> None:
        """Expect workers of these models until the time `until`."""
        self._forget_expired(now)
        self._expiry |= dict.fromkeys(names, until)
        while len(self._expiry) > MAX_MODELS:
            del self._expiry[next(iter(self._expiry))]

    def record_registration(self, models: Iterable[ModelRegistration]) -> None:
        """Store the properties of announced models, for `list_announced` while they have no worker."""
        self._registrations |= {model.name: model for model in models if model.name in self._expiry}

    def list_announced(self, now: float) -> dict[str, ModelRegistration]:
        """Return the announced models by name. Of those that have had no worker yet, only the name is known."""
        self._forget_expired(now)
        return {name: self._registrations.get(name, ModelRegistration(name, max_running=1)) for name in self._expiry}

    def expects(self, name: str, now: float) -> bool:
        return now - self._started_at < START_GRACE_S or self._expiry.get(name, now) > now

    def _forget_expired(self, now: float) -> None:
        self._expiry = {name: until for name, until in self._expiry.items() if until > now}
        self._registrations = {name: each for name, each in self._registrations.items() if name in self._expiry}
