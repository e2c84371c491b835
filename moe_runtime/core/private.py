"""What this package writes belongs to the user who runs it: weights, data and configurations are nobody else's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def private_files() -> Iterator[None]:
    """Files and folders that this process makes meanwhile have mode 0600 and 0700, or less, whoever makes them."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
