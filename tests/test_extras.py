"""A feature whose library is not installed names the extra that installs it; floors and locks agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import api
from holdfast.errors import ExitCode, HoldfastError, require_extra
from holdfast.train.data.tokenizers import make_tokenizer

ROOT = Path(__file__).parents[1]
LIFTED = {"protobuf"}
"""Floors that another package lifts: OpenTelemetry, which TorchFT needs, asks for a later protobuf."""
TARGET = "kind: kubernetes\nvolume: {claim: shared}\n"


def check_replicas(folder: Path) -> None:
    loaded = api.load(None, command=("true",), overrides=("nodes=2", "recovery.replicas=2"))
    raise HoldfastError(api.check(loaded, "local", base=folder), ExitCode.CANNOT_RUN_HERE)


def check_monarch(folder: Path) -> None:
    loaded = api.load(None, command=("true",), overrides=("orchestrator=monarch",))
    raise HoldfastError(api.check(loaded, "local", base=folder), ExitCode.CANNOT_RUN_HERE)


def check_cluster(folder: Path) -> None:
    targets = folder / ".holdfast/targets"
    targets.mkdir(parents=True)
    (targets / "cluster.yaml").write_text(TARGET)
    api.check_target(None, "cluster", base=folder)


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("grpc", "ft", check_replicas),
        ("kr8s", "kubernetes", check_cluster),
        ("monarch", "monarch", check_monarch),
        ("transformers", "hf", lambda _: make_tokenizer("gpt2")),
    ],
)
@pytest.mark.usefixtures("home")
def test_feature_without_its_library_names_the_extra(
    module: str, extra: str, use: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HoldfastError) as raised:
        use(tmp_path)
    assert raised.value.exit_code == ExitCode.CANNOT_RUN_HERE
    found = [finding for finding in raised.value.findings if finding.code == "missing-extra"]
    assert [finding.where for finding in found] == [sys.executable]
    assert f"`{module}`" in found[0].what
    assert f"pip install 'holdfast[{extra}]'" in found[0].remedy


def test_rank_without_torch_is_told_which_extra_has_it() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom holdfast.train import Session"
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False)
    assert ended.stderr.startswith(
        "holdfast: error [missing-extra]: there is no Python module `torch`, which `holdfast.train.Session` needs\n"
    )
    assert "pip install 'holdfast[train]'" in ended.stderr
    assert ended.returncode == ExitCode.CANNOT_RUN_HERE


def test_installed_library_is_not_asked_for() -> None:
    require_extra("train", "json", "nobody needs")


def test_lowest_lock_pins_every_floor_of_what_ranks_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = dict(re.findall(r"^([a-z0-9-]+)==([0-9.]+)", (ROOT / ".ci/torch-lowest.txt").read_text(), re.MULTILINE))
    for line in (*project["dependencies"], *extras["train"], *extras["ft"], *extras["hf"]):
        name, floor = re.match(r"([a-z0-9-]+)(?:\[[a-z]+\]|>=([0-9.]+))", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
        if floor and name not in LIFTED:
            assert f"{pinned[name]}.".startswith(f"{floor}."), f"make lock: {name} is pinned to {pinned[name]}"
