"""What the scan of a program's imports takes for an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.train.zygote import import_scan
from holdfast.train.zygote.import_scan import ImportScanner, scan


@pytest.mark.parametrize("linked", ["the package", "its files"])
def test_package_that_an_installer_links_to_its_store_is_not_the_programs(
    linked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, site, project = (tmp_path / name for name in ("store", "site", "project"))
    for folder in (store / "large", site, project):
        folder.mkdir(parents=True)
    (store / "large" / "__init__.py").write_text("import os\nos.environ['LARGE'] = '1'\nimport json\n")
    if linked == "the package":
        (site / "large").symlink_to(store / "large")
    else:
        (site / "large").mkdir()
        (site / "large" / "__init__.py").symlink_to(store / "large" / "__init__.py")
    program = project / "train.py"
    program.write_text("import large\nimport csv\n")
    monkeypatch.syspath_prepend(site)
    read = ImportScanner("script", str(program))
    scan(read)
    assert read.stopped_at == "large/__init__.py:2", "without an installation folder it is the program's own"
    monkeypatch.setattr(import_scan, "_INSTALLED", (f"{site}/", *import_scan._INSTALLED))
    read = ImportScanner("script", str(program))
    assert scan(read) == ["large", "csv"]
    assert read.stopped_at == ""
