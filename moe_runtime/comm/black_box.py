"""A small file that says where a rank is and survives it, however it ends.

The first bytes are one line of text, kept up to date through a memory map. A fatal signal (an abort inside a collective
library, a segmentation fault) adds the Python stacks of all threads below it. A rank that ends in order removes it.
"""

import faulthandler
import mmap
import os
import sys
from pathlib import Path

from moe_runtime.comm.incident import private

_LINE_BYTES = 1024


class BlackBox:
    """The file of this process, from now until `close`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self._file = os.fdopen(private(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), "w+b")
        self._file.truncate(_LINE_BYTES)
        self._file.seek(_LINE_BYTES)
        self._map = mmap.mmap(self._file.fileno(), _LINE_BYTES)
        self._others = faulthandler.is_enabled()
        self.say("started")
        faulthandler.enable(self._file)

    def say(self, text: str) -> None:
        """The line is `text` from now on."""
        line = text.encode(errors="replace").replace(b"\n", b" ")[: _LINE_BYTES - 1]
        self._map[:] = line.ljust(_LINE_BYTES - 1) + b"\n"

    def end_unless_called_again(self, seconds: float) -> None:
        """End this process, its stacks in the file, unless this is called again before `seconds` have passed.

        It works in a process that no longer runs Python: one stuck in native code that holds the interpreter's lock.
        """
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def close(self, *, keep: bool) -> None:
        """Stop listening to signals; remove the file unless it is to be kept."""
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        if self._others and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        self._map.close()
        self._file.close()
        if not keep:
            self.path.unlink(missing_ok=True)
