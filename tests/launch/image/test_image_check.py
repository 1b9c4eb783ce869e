"""Images built by hand, as directories and as real archives: what is read of them, and what they are told to lack."""

from __future__ import annotations

import json
import os
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.launch.image.image_builder import Tree, archive, docker_files, oci_files, write_tree

from holdfast import __version__
from holdfast.errors import HoldfastError
from holdfast.fabric.catalog import CATALOG
from holdfast.launch.image.base_images import BASE_IMAGES
from holdfast.launch.image.dockerfile import ImageRequest, render_dockerfile
from holdfast.launch.image.image_checks import EXTRA_PACKAGES, TORCHES, ImageDemand, check_image, read_contents
from holdfast.launch.image.image_files import ImageFiles, read_image
from holdfast.launch.image.image_libraries import MPI, NETWORKS

SITE = "usr/local/lib/python3.12/site-packages"
PACKAGES = {
    "holdfast": __version__,
    "torch": "2.10.0+cu128",
    "nvidia_nccl_cu12": "2.27.5",
    **dict.fromkeys(("numpy", "fsspec", "kr8s", "httpx_ws", "anyio"), "1.0"),
}
CONFIG = {"User": "1000", "Env": ["PATH=/usr/local/bin:/usr/bin", "LANG=C"]}
VERBS: Tree = {
    "usr/lib/x86_64-linux-gnu/libibverbs.so.1": "libibverbs.so.1.14.50.0",
    "usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0": b"ELF",
    "usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so": "../libmlx5.so.1",
    "usr/lib/x86_64-linux-gnu/libmlx5.so.1": b"ELF",
}
EFA: Tree = {
    "opt/amazon/efa/lib/libfabric.so.1": b"ELF",
    "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so": b"ELF",
}
SSH: Tree = {"usr/sbin/sshd": b"ELF", "usr/bin/ssh": b"ELF", "usr/bin/mpirun": "orterun", "usr/bin/orterun": b"ELF"}


def installed(packages: Mapping[str, str], site: str = SITE) -> Tree:
    return {f"{site}/{name}-{version}.dist-info": None for name, version in packages.items()}


def debian(packages: Mapping[str, str] = PACKAGES) -> Tree:
    """As python:3.12-slim lays it out."""
    return {
        "bin": "usr/bin",
        "usr/bin": None,
        "usr/local/bin": None,
        "usr/local/bin/python": "python3",
        "usr/local/bin/python3": "python3.12",
        "usr/local/bin/python3.12": b"ELF",
        SITE: None,
        **installed(packages),
    }


def codes(image: ImageFiles, fabric: str = "tcp", **demand: object) -> list[str]:
    return [each.code for each in check_image(image, ImageDemand(fabric=CATALOG[fabric], **demand))]  # pyright: ignore


def read(tmp_path: Path, *layers: Tree, **config: object) -> ImageFiles:
    return read_image(archive(tmp_path / "image.tar", oci_files(layers, {**CONFIG, **config})))


@pytest.mark.parametrize("kind", ["folder", "oci", "oci-folder", "oci-zstd", "oci-plain", "docker", "docker-gz"])
def test_image_is_read_alike_from_a_directory_and_from_each_kind_of_archive(tmp_path: Path, kind: str) -> None:
    layers = [{**debian(), "usr/bin/old": b"x"}, {"usr/bin/.wh.old": b""}]
    place = tmp_path / "image"
    match kind.split("-"):
        case ["folder"]:
            write_tree(place, debian())
        case ["oci", "folder"]:
            write_tree(place, oci_files(layers, CONFIG))
        case ["oci", *packing]:
            packed = {"zstd": "+zstd", "plain": ""}.get("".join(packing), "+gzip")
            archive(place, oci_files(layers, CONFIG, packing=packed))
        case ["docker", *whole]:
            archive(place, docker_files(layers, CONFIG), "w:gz" if whole else "w")
    image = read_image(place)
    contents = read_contents(image)
    assert (contents.python, contents.python_version) == ("/usr/local/bin/python", (3, 12))
    assert contents.packages["torch"] == "2.10.0+cu128"
    assert contents.nccl == "nvidia-nccl-cu12 2.27.5"
    assert contents.user == (None if kind == "folder" else "1000")
    assert "usr/bin/old" not in image.files
    assert codes(image) == []


def test_upper_layers_hide_files_folders_and_links_of_lower_ones(tmp_path: Path) -> None:
    lower = {"a/x": b"1", "a/y": b"1", "b/c/x": b"1", "d/x": b"1", "e": "a", "f/x": b"1", "usr": None}
    upper = {"a/.wh.x": b"", "b/.wh..wh..opq": b"", "b/new": b"2", ".wh.d": b"", "f": "a", "./g": b"2"}
    image = read(tmp_path, lower, upper)
    assert set(image.files) == {"a/y", "b/new", "e", "f", "g", "usr"}
    assert image.resolve("f/y") == "a/y"


def test_links_stay_in_the_image_and_loops_end(tmp_path: Path) -> None:
    image = read_image(
        write_tree(
            tmp_path / "image",
            {
                "usr/x": b"1",
                "usr/up": "../../../usr/x",
                "usr/abs": "/usr/x",
                "usr/loop": "loop",
                "usr/out": "/etc/passwd",
            },
        )
    )
    assert image.resolve("/usr/up") == image.resolve("usr/abs") == "usr/x"
    assert image.resolve("usr/loop") is None
    assert image.resolve("usr/out") is None, "that of this machine is none of the image"


def test_python_is_the_first_on_path_and_only_its_packages_count(tmp_path: Path) -> None:
    """A virtual environment made by Python itself, beside a Python that has everything."""
    root = write_tree(tmp_path / "image", debian())
    place = root / "opt" / "venv"
    venv.create(place, symlinks=True)
    minor = f"python3.{sys.version_info.minor}"
    for name in ("python", "python3", minor):
        (place / "bin" / name).unlink(missing_ok=True)
    (place / "bin" / "python").symlink_to(f"/usr/local/bin/{minor}")
    write_tree(root, {f"usr/local/bin/{minor}": b"ELF"} if not (root / "usr/local/bin" / minor).exists() else {})
    write_tree(root, installed({"holdfast": "0.0.1"}, f"opt/venv/lib/{minor}/site-packages"))
    archived = {str(path.relative_to(root)): path for path in root.rglob("*")}
    tree = {
        name: os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
        for name, path in archived.items()
    }
    image = read(tmp_path, tree, Env=["PATH=/opt/venv/bin:/usr/local/bin"])
    contents = read_contents(image)
    assert contents.python == "/opt/venv/bin/python"
    assert contents.python_version == sys.version_info[:2]
    assert contents.packages.get("holdfast") == "0.0.1"
    assert "torch" not in contents.packages
    assert codes(image) == ["image-holdfast-version", "image-extra-missing", "image-extra-missing"]


def without(name: str) -> dict[str, str]:
    return {each: version for each, version in PACKAGES.items() if each != name}


NCCL = "nvidia_nccl_cu12"
OLD_PYTHON: Tree = {"usr/local/bin/python": "/usr/bin/python3.9", "usr/bin/python3.9": b"ELF"}
LACKS: Mapping[str, tuple[Tree, list[str]]] = {
    "no-python": ({"usr": None}, ["image-without-python"]),
    "old-python": ({**debian({}), **OLD_PYTHON}, ["image-python-version", "image-without-holdfast"]),
    "other-holdfast": (debian({**PACKAGES, "holdfast": "0.0.1"}), ["image-holdfast-version"]),
    "no-kr8s": (debian(without("kr8s")), ["image-extra-missing"]),
    "old-torch": (debian({**PACKAGES, "torch": "2.9.1"}), ["image-torch-version"]),
    "preview": (debian({**PACKAGES, "torch": "2.10.0a0+b4e4ee81d3.nv25.12"}), ["image-torch-version"]),
    "newer-preview": (debian({**PACKAGES, "torch": "2.11.0a0+eb65b36914.nv26.02"}), []),
    "no-nccl": (debian(without(NCCL)), ["image-without-nccl"]),
    "rccl": ({**debian(without(NCCL)), "opt/rocm/lib/librccl.so.1": b"ELF"}, []),
}


@pytest.mark.parametrize(("tree", "found"), LACKS.values(), ids=LACKS)
def test_lack_is_found(tmp_path: Path, tree: Tree, found: list[str]) -> None:
    assert codes(read(tmp_path, tree)) == found


@pytest.mark.parametrize(
    ("user", "found"),
    [("", "image-user-root"), ("0:0", "image-user-root"), ("root", "image-user-root"), ("ml", "image-user-by-name")],
)
def test_user_that_restricted_pod_security_refuses_is_found(tmp_path: Path, user: str, found: str) -> None:
    assert codes(read(tmp_path, debian(), User=user)) == [found]


@pytest.mark.parametrize("name", CATALOG)
def test_fabrics_libraries_are_looked_for(tmp_path: Path, name: str) -> None:
    has = {"IB": VERBS, "AWS Libfabric": EFA}.get(CATALOG[name].network, {})
    bare = codes(read(tmp_path, debian()), name)
    assert bare == ["image-library-missing"] * len(has and NETWORKS[CATALOG[name].network].needs)
    assert codes(read(tmp_path, {**debian(), **has}), name) == []


def test_link_to_a_library_that_is_not_there_is_no_library(tmp_path: Path) -> None:
    broken = {name: content for name, content in VERBS.items() if not name.endswith("libmlx5.so.1")}
    assert codes(read(tmp_path, {**debian(), **broken}), "infiniband") == ["image-library-missing"]


def test_ssh_is_needed_by_mpijobs_alone(tmp_path: Path) -> None:
    assert codes(read(tmp_path, debian()), mpi=True) == ["image-library-missing"] * len(MPI.needs)
    assert codes(read(tmp_path, {**debian(), **SSH}), mpi=True) == []


def hostile(case: str) -> dict[str, bytes]:
    files = oci_files([debian()], CONFIG)
    manifest = json.dumps([{"Config": "c", "Layers": ["l"]}]).encode()
    match case:
        case "digest":
            biggest = max(files, key=lambda name: len(files[name]) * name.startswith("blobs"))
            files[biggest] += b"x"
        case "cut":
            biggest = max(files, key=lambda name: len(files[name]) * name.startswith("blobs"))
            del files[biggest]
        case "index-path":
            files["index.json"] = json.dumps({"manifests": [{"digest": "sha256:../../etc/passwd"}]}).encode()
        case "saved-path":
            files = {"manifest.json": json.dumps([{"Config": "../../../etc/passwd", "Layers": []}]).encode()}
        case "saved-absolute":
            files = {"manifest.json": json.dumps([{"Config": "/etc/passwd", "Layers": []}]).encode()}
        case "layer-path":
            files = docker_files([{"../../etc/passwd": b"x"}], CONFIG)
        case "windows":
            files["index.json"] = json.dumps({"manifests": [{"digest": "", "platform": {"os": "windows"}}]}).encode()
        case "layer":
            files = {"manifest.json": manifest, "c": b"{}", "l": b"no tar archive at all" * 100}
        case "gzip":
            files = {"manifest.json": manifest, "c": b"{}", "l": b"\x1f\x8b\x08\x00" + b"\xff" * 64}
        case _:
            files = {"readme": b"x"}
    return files


@pytest.mark.parametrize(
    "case",
    ["digest", "cut", "index-path", "saved-path", "saved-absolute", "layer-path", "windows", "layer", "gzip", "other"],
)
def test_damaged_or_hostile_archive_is_an_error_with_a_code(tmp_path: Path, case: str) -> None:
    with pytest.raises(HoldfastError) as refused:
        read_image(archive(tmp_path / "image.tar", hostile(case)))
    (finding,) = refused.value.findings
    assert finding.code == "image-unreadable"
    assert "root:" not in str(finding.evidence)


def test_extras_and_torch_are_those_of_holdfasts_own_metadata() -> None:
    """A new extra, or another range of torch, is one of the table of the checks too."""
    from importlib.metadata import requires

    lines = [line.replace(" ", "") for line in requires("holdfast") or ()]
    torch = next(line for line in lines if line.startswith(("torch<", "torch>")))
    lowest, highest = TORCHES
    assert f">={lowest[0]}.{lowest[1]}" in torch
    assert f"<{highest[0]}.{highest[1] + 1}" in torch
    for extra, packages in EXTRA_PACKAGES.items():
        own = [line for line in lines if f"extra=='{extra}'" in line.replace('"', "'")]
        for name in (line.partition(">")[0].partition("<")[0].partition("[")[0] for line in own):
            assert name in packages or name.startswith(("holdfast", "torchft")), f"{extra} needs {name}"


@pytest.mark.parametrize("base", BASE_IMAGES)
def test_dockerfile_ends_as_a_numbered_user_and_keeps_the_images_torch(base: str) -> None:
    row = BASE_IMAGES[base]
    text = render_dockerfile(ImageRequest(base=row, fabric=CATALOG["efa"], mpi=True, extras=("ft",)))
    lines = text.splitlines()
    assert f"ARG BASE={row.image}" in lines
    assert "USER 1000" in lines
    assert lines.index("USER 1000") > max(number for number, line in enumerate(lines) if line.startswith("RUN"))
    assert ('test "$before" =' in text) == row.has_torch
    assert f"holdfast[ft,kubernetes]=={__version__}" in text
    assert text.index("ARG PIP_INDEX_URL\n") < text.index("pip install")
    for line in (*NETWORKS["AWS Libfabric"].lines, *MPI.lines):
        assert line in lines
