"""`holdfast --help` is quick because it loads next to nothing."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "torchft", "transformers", "kr8s", "numpy", "pydantic", "httpx", "rich", "yaml", "holdfast.api")


def test_help_loads_nothing_that_only_verbs_need() -> None:
    script = (
        f"import sys\nfrom holdfast.cli import main\nmain(['--help'])\nprint(sorted(set({HEAVY}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_output_that_cannot_take_every_letter_is_no_reason_to_fail() -> None:
    script = "import sys; from holdfast.cli import main; sys.exit(main(['drill', 'kill', 'ränk', '1']))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        timeout=200,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "HOME": "/"},
    )
    assert done.returncode == 2
    assert b"r\\xe4nk" in done.stderr
