"""The last module that a fork server imports: see huge_pages.py."""

from __future__ import annotations

from tests.programs.huge_pages import use_huge_pages

use_huge_pages()
