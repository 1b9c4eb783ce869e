"""Sphinx configuration: MyST pages, and reference pages that each build generates from the code."""

from __future__ import annotations

import sys
from pathlib import Path

import holdfast

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "holdfast"
author = "the holdfast authors"
copyright = "the holdfast authors, Apache-2.0"
version = release = holdfast.__version__

extensions = ["myst_parser", "reference"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
# Other pages include the last ones.
exclude_patterns = [
    "_build",
    *(
        f"reference/generated/{part}.md"
        for part in ("drills", "device-faults", "metrics", "devices", "models", "exported-metrics", "alerts", "storage")
    ),
]
nitpicky = True

html_theme = "furo"
html_title = "holdfast"
html_copy_source = False
html_show_sphinx = False
