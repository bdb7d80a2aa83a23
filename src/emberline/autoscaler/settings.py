"""PoolSettings and AutoscalerSettings: the latency targets, limits and times by which the autoscaler scales pools."""

from __future__ import annotations

import math
from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.core.foreign_config import ROLES
from emberline.core.options import option
from emberline.core.slo import LatencyTargets

POOL_HINT = "write for example --pool decode:min=1,max=8"
POOL_KEYS = ("min", "max", "gpus", "capacity", "target", "sleep")
MAX_POOL_WORKERS = 10_000
# Routers forget a worker 600 s after its last heartbeat, and count it as lost some seconds after that heartbeat.
MAX_LOST_TIMEOUT_S = 540.0


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The limits of one pool: all workers of one role."""

    role: str  # what its workers do: prefill, decode or both
    min_workers: int = 1  # 0: the pool may be empty while there are no requests
    max_workers: int = 8
    gpus: int = 1  # GPUs of one worker; they count towards max_gpus
    capacity: float | None = None  # work per second that a worker serves within the SLO; None: learned
    target: str = ""  # Kubernetes: the object to scale, such as deployment/decode
    sleep: int = 0  # workers that are put to sleep instead of being stopped

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            roles = ", ".join(ROLES)
            message = f"pool {self.role[:100]!r} does not exist; a pool is one of the roles of workers: {roles}"
            raise InvalidRequest(message, param="pool", hint=POOL_HINT)
        if not 0 <= self.min_workers <= MAX_POOL_WORKERS or not 1 <= self.max_workers <= MAX_POOL_WORKERS:
            raise InvalidRequest(
                f"pool {self.role} has min={self.min_workers}, max={self.max_workers}; min must be at least 0, max at "
                f"least 1, and both at most {MAX_POOL_WORKERS}",
                param="pool",
            )
        if self.min_workers > self.max_workers:
            message = f"pool {self.role} has min={self.min_workers}, max={self.max_workers}; min must be at most max"
            raise InvalidRequest(message, param="pool", hint=POOL_HINT)
        if not 0 <= self.sleep <= self.max_workers:
            message = f"pool {self.role} has sleep={self.sleep}; it must be from 0 to max={self.max_workers}"
            raise InvalidRequest(message, param="pool", hint=POOL_HINT)
        if self.sleep and self.role != "both":
            message = f"pool {self.role} has sleep={self.sleep}, but its workers cannot sleep: they exchange KV blocks"
            raise InvalidRequest(message, param="pool", hint="use sleep with the pool both only")
        if self.gpus < 0:
            raise InvalidRequest(f"pool {self.role} has gpus={self.gpus}; it must be at least 0", param="pool")
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            message = f"pool {self.role} has capacity={self.capacity}; it must be above 0"
            raise InvalidRequest(message, param="pool")

    @staticmethod
    def parse(text: str, default_min: int = 1, default_max: int = 8) -> PoolSettings:
        """Return the pool that `text` describes: ROLE, or ROLE:KEY=VALUE,..., with the keys in POOL_KEYS.

        Raises InvalidRequest if the role or a key is unknown, or a value is not valid."""
        role, _, rest = text.partition(":")
        values: dict[str, str] = {}
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            if key not in POOL_KEYS or not equals or key in values:
                message = f"pool {role!r} has the part {part[:100]!r}; each part must be of the form KEY=VALUE"
                hint = f"keys: {', '.join(POOL_KEYS)}, each once; {POOL_HINT}"
                raise InvalidRequest(message, param="pool", hint=hint)
            values[key] = value
        try:
            return PoolSettings(
                role,
                int(values.get("min", default_min)),
                int(values.get("max", default_max)),
                int(values.get("gpus", 1)),
                float(values["capacity"]) if "capacity" in values else None,
                values.get("target", ""),
                int(values.get("sleep", 0)),
            )
        except ValueError as e:
            raise InvalidRequest(f"pool {text[:200]!r} is not valid: {e}", param="pool", hint=POOL_HINT) from e


@dataclass(frozen=True, slots=True)
class AutoscalerSettings:
    slo: LatencyTargets
    pools: tuple[PoolSettings, ...]
    interval: float = option(5.0, "Seconds between two decisions.", unit="s")
    start_seconds: float = option(
        30.0, "Seconds from the start of a worker until it is ready. Measured starts replace this value.", unit="s"
    )
    cool_down: float = option(
        120.0, "Seconds for which fewer workers must have been enough before one is removed.", unit="s"
    )
    idle_time: float = option(300.0, "Seconds without requests after which a pool with min=0 is emptied.", unit="s")
    utilisation: float = option(0.99, "Share of a worker's capacity that is used on average; the rest is reserve.")
    decode_weight: float = option(4.0, "Cost of a generated token, in prompt tokens, as of the router.", unit="tokens")
    period: float = option(
        86400.0, "Seconds after which the load repeats, for forecasts; 0: forecasts by trend only.", unit="s"
    )
    drain_timeout: float = option(
        120.0, "Seconds that a drained worker may take to finish its requests before it is stopped.", unit="s"
    )
    lost_timeout: float = option(
        30.0,
        "Seconds after which a worker that a router has lost is replaced, if it answers no call either.",
        unit="s",
    )
    max_gpus: int | None = option(None, "Most GPUs that all pools together may use.", default_text="no limit")

    def __post_init__(self) -> None:
        for name in ("interval", "start_seconds", "drain_timeout", "lost_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be above 0", param=name)
        if self.lost_timeout > MAX_LOST_TIMEOUT_S:
            message = f"lost_timeout is {self.lost_timeout}; it must be at most {MAX_LOST_TIMEOUT_S}"
            raise InvalidRequest(message, param="lost_timeout", hint="routers forget a lost worker after 600 s")
        for name in ("cool_down", "idle_time", "decode_weight", "period"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 0", param=name)
        if not 0 < self.utilisation <= 1:
            message = f"utilisation is {self.utilisation}; it must be above 0 and at most 1"
            raise InvalidRequest(message, param="utilisation")
        self._check_pools()
        self._check_max_gpus()

    def pool(self, role: str) -> PoolSettings:
        return next(each for each in self.pools if each.role == role)

    def _check_pools(self) -> None:
        roles = [pool.role for pool in self.pools]
        if not roles:
            raise InvalidRequest("pool is missing: there is nothing to scale", param="pool", hint=POOL_HINT)
        if len(roles) != len(set(roles)):
            raise InvalidRequest(f"pool is given twice for one role: {', '.join(roles)}", param="pool", hint=POOL_HINT)
        if roles == ["prefill"]:
            # Prefill workers without a decode pool also generate, but the policy plans them for prompts only.
            message = "pool is prefill only, but no pool would generate tokens"
            raise InvalidRequest(message, param="pool", hint="add --pool decode")

    def _check_max_gpus(self) -> None:
        if self.max_gpus is None:
            return
        # A pool that can never have a worker would leave its requests without an answer.
        needed = sum(max(pool.min_workers, 1) * pool.gpus for pool in self.pools)
        if self.max_gpus < needed:
            raise InvalidRequest(
                f"max_gpus is {self.max_gpus}; it must be at least {needed}, for the minimum of each pool, or one"
                " worker",
                param="max_gpus",
                hint="raise --max-gpus, or lower min and gpus of the pools",
            )
