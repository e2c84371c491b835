"""Logging: standard library loggers, one line a fact, warnings that are worth saying once said once.

Only rank 0 of a launch logs below WARNING; the launchers' RANK variable is read when a process configures its logging.
"""

import functools
import logging


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; pass `__name__`."""
    return logging.getLogger(name)


@functools.cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Log `message` as a warning the first time it is seen in this process."""
    logger.warning(message)


def configure(rank: int) -> None:
    """Send records to standard error: INFO and above on rank 0, WARNING and above elsewhere."""
    logging.basicConfig(format=f"%(asctime)s rank{rank} %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("moe_runtime").setLevel(logging.INFO if rank == 0 else logging.WARNING)
