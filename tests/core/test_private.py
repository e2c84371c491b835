"""Files of the package are their owner's alone, and the process's own mask comes back."""

import os
from pathlib import Path

import pytest

from moe_runtime.core.private import private_files


def test_files_are_private_meanwhile(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with pytest.raises(KeyError), private_files():
            (tmp_path / "file").write_text("")
            (tmp_path / "folder").mkdir()
            raise KeyError
        (tmp_path / "after").write_text("")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"file": 0o600, "folder": 0o700, "after": 0o644}
