"""Sphinx configuration. The pages are Markdown; nothing here imports the package."""

import re
from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "moe_runtime" / "__init__.py"

project = "moe_runtime"
release = re.findall(r'__version__ = "(.+)"', _SOURCE.read_text(encoding="utf-8"))[0]
copyright = "the moe_runtime authors"
extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"moe_runtime {release}"
