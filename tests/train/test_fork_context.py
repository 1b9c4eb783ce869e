"""Ranks of tests find imported what they need: the import of a module that is missing fails silently there."""

from __future__ import annotations

import pytest
from tests.train.fork_context import PRELOADED, forks


@pytest.mark.slow
def test_forks_have_imported_all_modules() -> None:
    code = f"import os, sys\nos._exit(len(set({PRELOADED}) - set(sys.modules)))"
    fork = forks.Process(target=exec, args=(code,))
    fork.start()
    fork.join()
    assert fork.exitcode == 0
