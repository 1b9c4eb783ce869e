"""Which commands are Python programs that can be prewarmed."""

from __future__ import annotations

import pytest

from holdfast.agent.python_command import PythonCommand, parse_python_command


@pytest.mark.parametrize(
    ("command", "python", "kind", "text"),
    [
        ("python train.py --lr 1", "python", "script", "train.py"),
        ("/venv/bin/python3.12 -u train.py -m x", "/venv/bin/python3.12 -u", "script", "train.py"),
        ("python3 -m pkg.train -c y", "python3", "module", "pkg.train"),
        ("python -um pkg", "python -u", "module", "pkg"),
        ("python -mpkg", "python", "module", "pkg"),
        ("python -X dev -W error -Wdefault -O train.py", "python -X dev -W error -Wdefault -O", "script", "train.py"),
        ("python -c pass -m x", "python", "code", "pass"),
        ("python -B -- -odd.py", "python -B --", "script", "-odd.py"),
        ("python3.14t train.py", "python3.14t", "script", "train.py"),
    ],
)
def test_python_command_is_taken_apart(command: str, python: str, kind: str, text: str) -> None:
    assert parse_python_command(command.split()) == PythonCommand(python=tuple(python.split()), kind=kind, text=text)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("torchrun train.py", "torchrun is no Python"),
        ("./train.sh", "./train.sh is no Python"),
        ("bash -c python", "bash is no Python"),
        ("python", "standard input"),
        ("python -", "standard input"),
        ("python -u", "standard input"),
        ("python -I train.py", "-I has Python ignore PYTHONPATH"),
        ("python -uE train.py", "-E has Python ignore PYTHONPATH"),
        ("python -S train.py", "-S has Python import no site"),
        ("python -i train.py", "-i waits for somebody to type"),
        ("python --check-hash-based-pycs always train.py", "nothing is known of"),
        ("python -Z train.py", "nothing is known of"),
    ],
)
def test_command_that_cannot_be_prewarmed_reports_the_reason(command: str, why: str) -> None:
    found = parse_python_command(command.split())
    assert isinstance(found, str)
    assert why in found
