"""A soak on the lab that resumes after an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.soak import kubernetes

from bench import lab_cluster
from holdfast.run_dir import RunDir
from lab import Lab


def test_soak_that_continues_opens_the_gates_of_what_it_has_recovered_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = kubernetes.plan(0, 4)
    out = tmp_path / "out"
    out.mkdir()
    site = lab_cluster.LabSite(lab=Lab(tmp_path / "lab"), namespace="bench", folder=tmp_path)
    done = "".join(json.dumps({"what": kill.what, "seconds": 1.0}) + "\n" for kill in kills)
    (tmp_path / "done.jsonl").write_text(done)  # interrupted after that, and before the last gate was opened
    (out / f"gate-{kills[0].gate}").touch()
    monkeypatch.setattr(kubernetes, "_started", lambda *_: (RunDir(tmp_path), out))
    for name in ("_repair", "_until_ended"):
        monkeypatch.setattr(kubernetes, name, lambda *_: None)
    kubernetes._soaked(site, kills)  # pyright: ignore[reportPrivateUsage]
    assert {path.name for path in out.iterdir()} == {f"gate-{kill.gate}" for kill in kills}
