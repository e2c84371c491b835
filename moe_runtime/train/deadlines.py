"""The [watchdog] table: how long a run waits before it says who is missing, and ends to be restarted."""

import math
from dataclasses import dataclass

from moe_runtime.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchdogConfig:
    """Deadlines in seconds: of each exchange and each phase of a step, and of the phases "save" and "validate".

    0: half of parallel.timeout_seconds, after which torch's own collectives give up, and three times that. They are
    three times as long until the first step is over.
    """

    enabled: bool = True
    seconds: float = 0.0
    save_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seconds", "save_seconds"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"watchdog.{name} must be finite and at least 0, got {value}")

    def step_deadline(self, timeout_seconds: float) -> float:
        """`seconds`, or its default for that parallel.timeout_seconds."""
        return self.seconds or timeout_seconds / 2

    def save_deadline(self, timeout_seconds: float) -> float:
        """`save_seconds`, or its default."""
        return self.save_seconds or timeout_seconds * 1.5
