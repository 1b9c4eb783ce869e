"""What strangers see of an answer, and what they do not."""

from __future__ import annotations

from tests.diagnose.logs import told

from holdfast.diagnose.redact import Redactor, redacted

LINE = (
    "gpu-a7.corp.example.com:77:91 [3] NCCL WARN Cuda failure 'out of memory' in /home/alice/secret/train.py "
    "peer 10.20.30.40<51159> token=hunter2secret bob@example.com"
)


def test_names_are_replaced_and_what_happened_stays() -> None:
    answer = redacted(told(LINE))
    shown = repr(answer)
    for name in ("gpu-a7", "alice", "10.20.30.40", "hunter2", "bob@", "corp.example"):
        assert name not in shown
    assert "out of memory" in shown


def test_same_name_has_the_same_stand_in() -> None:
    redactor = Redactor()
    first, second = redactor.text("from 10.0.0.1 to 10.0.0.2"), redactor.text("from 10.0.0.2")
    assert first == "from <address-1> to <address-2>"
    assert second == "from <address-2>"
