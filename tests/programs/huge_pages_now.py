"""The last module that a fork server imports: it will be forked often."""

from __future__ import annotations

from holdfast.train.zygote.huge_pages import use_huge_pages

use_huge_pages()
