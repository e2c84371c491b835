"""The one place that reads the process environment. Every variable is listed in docs/environment.md."""

import os
from collections.abc import Mapping


def environment() -> Mapping[str, str]:
    """A snapshot of the process environment, read at the call (never at import)."""
    return dict(os.environ)


def get(name: str, default: str | None = None) -> str | None:
    """The value of one variable now, or `default`."""
    return os.environ.get(name, default)
