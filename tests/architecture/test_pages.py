"""Pages that must keep up with the code."""

import re
import subprocess
import sys
from pathlib import Path

from import_rules import MAY_IMPORT
from source_tree import PACKAGE

ROOT = Path(__file__).parents[2]


# What the page says -> what is planted in its place; each must show as a removed line of the report.
OUT_OF_STEP = {
    "| `run.seed` |": "| `run.seeds` |",
    "| `optim.lr` | number |": "| `optim.lr` | text |",
    "| `optim.eps` | number | `1e-08` |": "| `optim.eps` | number | `1e-06` |",
    "## [wgrad]\n": "## [gradient]\n",
}


def check_configuration(page: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docs" / "sync_configuration.py"), "--check", str(page)]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_configuration_page_is_in_step():
    done = check_configuration(ROOT / "docs" / "configuration.md")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_configuration_page_out_of_step_is_reported(tmp_path: Path):
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for old, new in OUT_OF_STEP.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    page = tmp_path / "configuration.md"
    page.write_text(text, encoding="utf-8")
    done = check_configuration(page)
    assert done.returncode == 1
    assert [new for new in OUT_OF_STEP.values() if f"-{new}" not in done.stdout] == []


def test_a_key_without_meaning_is_reported(tmp_path: Path):
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    page = tmp_path / "configuration.md"
    page.write_text(text.replace("| optimizer steps |", "|  |"), encoding="utf-8")
    done = check_configuration(page)
    assert (done.returncode, done.stdout) == (1, "train.steps: no meaning is written\n")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= set(index)


def test_the_architecture_page_states_the_import_table():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|$", text, flags=re.MULTILINE))
    existing = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    in_words = {"train", "testing", "bench", "cli"}
    stated = {name: set(re.findall(r"`(\w+)`", allowed)) for name, allowed in rows.items() if name not in in_words}
    table = {name: set(MAY_IMPORT[name].split()) & existing for name in existing - in_words}
    assert stated == table
