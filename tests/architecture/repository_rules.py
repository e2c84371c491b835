"""What no file of the repository may say: paths of one machine, package hosts, notes to self without an anchor."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

# Written so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:root|home|work|tmp/bash_jobs[\w.]*)/")
PACKAGE_HOST = re.compile(
    r"pypi\.org|pythonhosted\.org|(?:download|whl)\.pytorch\.org|npmjs\.(?:org|com)|--(?:extra-)?index-url"
)
NOTE = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X]|HAC[K])\b(?!\((?:#\d+|[a-z][\w-]*[<>=]=?\d[\w.]*)\))")


def repository_files(root: Path) -> list[Path]:
    """Files that git tracks or would add, relative to `root`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in sorted(filter(None, listing.split("\0"))) if (root / name).is_file()]


def text_faults(root: Path, files: Iterable[Path]) -> list[str]:
    """Lines of text files that match a forbidden pattern; a file that is not UTF-8 text is skipped."""
    faults = []
    for file in files:
        try:
            lines = (root / file).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, start=1):
            place = f"{file.as_posix()}:{number}"
            if found := MACHINE_PATH.search(line) or PACKAGE_HOST.search(line):
                faults.append(f"{place}: names a machine path or a package host: {found.group()}")
            if found := NOTE.search(line):
                faults.append(f"{place}: {found.group()} without an anchor, (#12) or (torch>=2.15)")
    return faults
