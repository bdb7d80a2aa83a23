"""SwappedRankEngine: a model on several GPUs that frees the memory of all of them while it sleeps.

Its ranks keep running. Each keeps its part of the weights in pinned main memory, as a model on one GPU does. Buffers
through which ranks exchange tensors stay, since other processes have mapped them; so do compiled kernels."""

from __future__ import annotations

from collections.abc import Callable

from emberline.engine.engine import Engine
from emberline.engine.gpu.swap import free_cached_memory, reset_prefix_cache
from emberline.engine.ranks.device_boot import LoadedDeviceRanks


class SwappedRankEngine:
    """Implements SwappableEngine. An error of a rank ends the group: `wake` and `sleep` raise EngineFailed then."""

    def __init__(self, nbytes: int, load: Callable[[], LoadedDeviceRanks]) -> None:
        """`nbytes`: bytes of a GPU that the model will take. `load`: loads the engine, at the first `wake`."""
        self.nbytes, self._load = nbytes, load
        self._loaded: LoadedDeviceRanks | None = None
        self._is_awake = False

    @property
    def engine(self) -> Engine:
        assert self._loaded is not None and self._is_awake, "the model sleeps"
        return self._loaded.engine.engine

    @property
    def idle(self) -> bool:
        return self._loaded is None or self._loaded.engine.engine.idle

    def wake(self) -> int:
        assert not self._is_awake
        if self._loaded is None:
            free_cached_memory()
            self._loaded = self._load()
            self.nbytes = max(self.nbytes, self._loaded.nbytes)  # sizes of quantised weights were estimated
            copied = self._loaded.engine.weight_bytes
        else:
            copied = self._loaded.leader.wake()
        self._is_awake = True
        return copied

    def sleep(self) -> int:
        assert self._loaded is not None and self._is_awake and self.idle
        copied = self._loaded.leader.sleep()
        reset_prefix_cache(self._loaded.engine.engine)
        self._is_awake = False
        return copied
