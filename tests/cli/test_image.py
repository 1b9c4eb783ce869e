"""The commands of container images: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.launch.image.image_builder import archive, oci_files
from tests.launch.image.test_image_check import CONFIG, debian

from holdfast.errors import ExitCode

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


def test_commands_print_a_dockerfile_and_check_an_image(cli: Cli, tmp_path: Path) -> None:
    printed = cli("image", "build", "python", "--fabric", "infiniband")
    assert printed.code == ExitCode.OK
    assert printed.out.startswith("# Debian with Python")
    image = archive(tmp_path / "image.tar", oci_files([debian()], CONFIG))
    answer = cli("image", "check", str(image))
    assert answer.code == ExitCode.OK
    assert answer.out.endswith(f"{image}: can run a job\n")
    lacking = cli("image", "check", str(image), "--fabric", "efa", "-o", "json")
    assert lacking.code == ExitCode.CANNOT_RUN_HERE
    found = json.loads(lacking.out)
    assert {each["code"] for each in found["findings"]} == {"image-library-missing"}
    assert (found["can_run"], found["torch"]) == (False, "2.10.0+cu128")
    for words, code in (
        (("build", "slackware"), ExitCode.NOT_FOUND),
        (("build", "python", "--extra", "none"), ExitCode.NOT_FOUND),
        (("check", str(tmp_path / "missing")), ExitCode.NOT_FOUND),
        (("check", str(image), "--fabric", "none"), ExitCode.NOT_FOUND),
    ):
        assert cli("image", *words).code == code
