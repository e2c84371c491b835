"""The checkpoints of a run: where they go, which stay, and who waits for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from moe_runtime import checkpoint
from moe_runtime.train.config import CheckpointConfig
from moe_runtime.train.setup import Trainee


class Saver:
    """Saves a trainee under `root` by the configuration; every rank makes one and calls it at the same points.

    CheckpointError of a save that went wrong is raised on all ranks, by `save` itself or, where it is asynchronous, by
    the next `save` or `wait`.
    """

    def __init__(self, root: Path, trainee: Trainee, config: CheckpointConfig, *, timeout_seconds: float) -> None:
        self._root, self._trainee, self._config = root, trainee, config
        self._background = checkpoint.AsyncSaver(timeout_seconds=timeout_seconds) if config.asynchronous else None

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that `wait` will raise."""
        return self._background is not None and self._background.has_failed

    def save(self, step: int, facts: Mapping[str, Any]) -> None:
        """Save the state after `step` steps, or begin to."""
        save = checkpoint.save if self._background is None else self._background.save
        config, trainee = self._config, self._trainee
        save(self._root, step, trainee.model, trainee.optimizer, facts, keep=config.keep, keep_every=config.keep_every)

    def wait(self) -> None:
        """Until what was saved is whole on disk."""
        if self._background is not None:
            self._background.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._background is not None:
            self._background.close()
