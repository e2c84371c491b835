"""Rules on every file of the repository, and on the pages that must keep up with the code."""

from pathlib import Path

import pytest
from repository_rules import repository_files, text_faults

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: there is no list of tracked files")
def test_no_file_names_a_machine_or_leaves_a_note():
    files = repository_files(ROOT)
    assert Path("pyproject.toml") in files
    faults = text_faults(ROOT, files)
    assert not faults, "\n".join(faults)
