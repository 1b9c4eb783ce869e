"""Judges what an image contains: Python, holdfast and its extras, torch and NCCL, the fabric's libraries, the user."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from holdfast import __version__
from holdfast.fabric.fabric import Fabric
from holdfast.findings import Finding, Severity
from holdfast.launch.image.dockerfile import REQUIRED_EXTRA
from holdfast.launch.image.image_files import FileKind, ImageFiles
from holdfast.launch.image.image_libraries import MPI, NETWORKS, ImageNeed

PYTHONS = ((3, 11), (3, 13))
"""The lowest and highest version of Python that holdfast supports."""
TORCHES = ((2, 10), (2, 15))
"""The same of torch, for `holdfast.train`."""
EXTRA_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "train": ("torch", "numpy", "fsspec"),
    "ft": ("torch", "numpy", "fsspec", "grpcio", "protobuf"),
    "hf": ("torch", "numpy", "fsspec", "accelerate", "transformers"),
    "kubernetes": ("kr8s", "httpx-ws", "anyio"),
    "diagnose": ("hyperscan", "detect-secrets"),
}
"""The packages of each extra, without the versions; TorchFT has no wheel for some platforms, and is not asked for."""
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FOLDER_PATH = f"/opt/venv/bin:/opt/conda/bin:{_DEFAULT_PATH}"
"""PATH of a directory, which has no configuration: with the folders where base images have their Python."""
_DIST_INFO = re.compile(r"(?P<site>.*)/(?P<name>[^/]+)-(?P<version>[^/-]+)\.dist-info")
_NCCL_FILE = re.compile(r"(.+/)?lib(nccl|rccl)\.so\.[0-9.]+")
_NCCL_PACKAGE = re.compile(r"nvidia-nccl-cu\d+")


class ImageDemand(Struct, frozen=True, kw_only=True):
    """What an image is checked for."""

    fabric: Fabric
    extras: Sequence[str] = ("train",)
    """Extras of holdfast, besides `kubernetes`."""
    mpi: bool = False


class ImageContents(Struct, frozen=True, kw_only=True):
    """What an image contains, as far as the checks need it."""

    path: str
    """The value of PATH."""
    python: str = ""
    """Path of the `python` that a pod's command finds; empty if there is none."""
    python_version: tuple[int, int] | None = None
    packages: Mapping[str, str]
    """Versions of the packages of this Python, by normalised name."""
    nccl: str = ""
    """Version or path of NCCL or RCCL; empty if none was found."""
    user: str | None = None
    """The user of its configuration; None for a directory, which has none."""
    platform: str = ""


def read_contents(image: ImageFiles) -> ImageContents:
    """What the checks need of an image's files."""
    config = image.config
    path = config.env.get("PATH", _DEFAULT_PATH) if config else _FOLDER_PATH
    python, version, sites = _python(image, path)
    packages = _packages(image, sites)
    wheel = next((f"{name} {packages[name]}" for name in packages if _NCCL_PACKAGE.fullmatch(name)), "")
    return ImageContents(
        path=path,
        python=python,
        python_version=version,
        packages=packages,
        nccl=wheel or next((f"/{file}" for file in sorted(image.files) if _NCCL_FILE.fullmatch(file)), ""),
        user=config.user if config else None,
        platform=config.platform if config else "",
    )


def check_image(image: ImageFiles, demand: ImageDemand) -> tuple[Finding, ...]:
    """What an image lacks for a demand."""
    contents = read_contents(image)
    return (
        *(finding for check in _CHECKS for finding in check(contents, demand)),
        *_missing_files(image, demand),
    )


def _python(image: ImageFiles, path: str) -> tuple[str, tuple[int, int] | None, tuple[str, ...]]:
    """Path and version of the first `python` on PATH, and its folders of packages."""
    for folder in path.split(":"):
        found = image.resolve(f"{folder}/python")
        if found is None or not image.files[found].executable:
            continue
        prefix = image.resolve(posixpath.dirname(folder)) or ""
        settings = image.texts.get(f"{prefix}/pyvenv.cfg")
        base = posixpath.dirname(posixpath.dirname(found))
        version = _python_version(image, found, prefix)
        if version is None:
            return f"{folder}/python", None, ()
        name = f"python{version[0]}.{version[1]}"
        own = (f"{prefix}/lib/{name}/site-packages",)
        shared = (
            f"{base}/lib/{name}/site-packages",
            f"usr/local/lib/{name}/dist-packages",  # Debian's Python has these two
            f"usr/lib/python{version[0]}/dist-packages",
        )
        alone = settings is not None and not re.search(r"include-system-site-packages\s*=\s*true", settings)
        return f"{folder}/python", version, own if alone else (*own, *shared)
    return "", None, ()


def _python_version(image: ImageFiles, executable: str, prefix: str) -> tuple[int, int] | None:
    """The version in the program's name, else in the name of its library folder."""
    named = re.fullmatch(r".*/python(\d+)\.(\d+)", executable)
    base = posixpath.dirname(posixpath.dirname(executable))
    pattern = re.compile(rf"({re.escape(prefix)}|{re.escape(base)})/lib/python(\d+)\.(\d+)")
    folders = () if named else (pattern.fullmatch(path) for path in image.files)
    found = named or next((each for each in folders if each), None)
    return (int(found.groups()[-2]), int(found.groups()[-1])) if found else None


def _packages(image: ImageFiles, sites: Sequence[str]) -> Mapping[str, str]:
    """Versions of the packages in some folders; the first folder that has a package counts, as for an import."""
    places = [real for site in sites if (real := image.resolve(site))]
    found = dict[str, tuple[int, str]]()
    for path, file in image.files.items():
        known = _DIST_INFO.fullmatch(path) if file.kind is FileKind.FOLDER else None
        if known and known["site"] in places:
            name = re.sub(r"[-_.]+", "-", known["name"]).lower()
            rank = places.index(known["site"])
            if name not in found or rank < found[name][0]:
                found[name] = (rank, known["version"])
    return {name: version for name, (_, version) in found.items()}


def _check_python(contents: ImageContents, _: ImageDemand) -> Iterator[Finding]:
    lowest, highest = (".".join(map(str, each)) for each in PYTHONS)
    if not contents.python:
        yield Finding(
            code="image-without-python",
            what="no folder on the image's PATH has a program `python`, which starts holdfast in pods",
            evidence=(f"PATH={contents.path}",),
            remedy="Install Python as `python`, or add its folder to PATH with `ENV PATH=`.",
        )
    elif contents.python_version is None or not PYTHONS[0] <= contents.python_version <= PYTHONS[1]:
        found = contents.python_version
        yield Finding(
            code="image-python-version",
            what=f"holdfast runs on Python {lowest} to {highest}",
            where=contents.python,
            evidence=(f"Python {'.'.join(map(str, found))}" if found else "its version is in no name of a file",),
            remedy=f"Use a base image with Python {lowest} to {highest}.",
        )


def _check_holdfast(contents: ImageContents, demand: ImageDemand) -> Iterator[Finding]:
    if not contents.python:
        return
    version = contents.packages.get("holdfast")
    if version is None:
        yield Finding(
            code="image-without-holdfast",
            what="the image's Python lacks holdfast, which starts and supervises the ranks",
            where=contents.python,
            remedy=f"Run `{contents.python} -m pip install 'holdfast[{REQUIRED_EXTRA}]'` in the Dockerfile; `holdfast "
            "image build` prints one.",
        )
        return
    if version != __version__:
        yield Finding(
            code="image-holdfast-version",
            severity=Severity.WARNING,
            what=f"the image has holdfast {version}, and this machine {__version__}",
            where=contents.python,
            remedy=f"Install `holdfast=={__version__}` in the image, or the image's version here.",
        )
    for extra in dict.fromkeys((REQUIRED_EXTRA, *demand.extras)):
        missing = [name for name in EXTRA_PACKAGES[extra] if name not in contents.packages]
        if missing:
            yield Finding(
                code="image-extra-missing",
                what=f"the image's Python lacks packages of `holdfast[{extra}]`: {', '.join(missing)}",
                where=contents.python,
                remedy=f"Run `{contents.python} -m pip install 'holdfast[{extra}]'` in the Dockerfile.",
            )


def _check_torch(contents: ImageContents, demand: ImageDemand) -> Iterator[Finding]:
    version = contents.packages.get("torch")
    if version is None:
        return
    release = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(release[1]), int(release[2])) if release else (0, 0)
    preview = re.match(r"[\d.]+(a|b|rc|\.dev)\d", version) is not None
    lowest, highest = (".".join(map(str, each)) for each in TORCHES)
    needs_torch = any("torch" in EXTRA_PACKAGES[extra] for extra in demand.extras)
    if needs_torch and (not TORCHES[0] <= numbers <= TORCHES[1] or (preview and numbers == TORCHES[0])):
        yield Finding(
            code="image-torch-version",
            what=f"holdfast.train needs torch {lowest} to {highest}; a preview of {lowest} is older than {lowest}",
            where=contents.python,
            evidence=(f"torch {version}",),
            remedy="Take a base image with such a torch. Without holdfast.train, pass `--extra kubernetes`.",
        )
    if not contents.nccl and "+cpu" not in version:
        yield Finding(
            code="image-without-nccl",
            severity=Severity.WARNING,
            what="the image has torch, but no separate file of NCCL or RCCL",
            evidence=(f"torch {version}",),
            remedy="Nothing if torch contains it or the machines mount it, as GKE does; else install a CUDA or ROCm "
            "build of torch.",
        )


def _check_user(contents: ImageContents, _: ImageDemand) -> Iterator[Finding]:
    if contents.user is None:
        return
    name = contents.user.partition(":")[0]
    if name in ("", "0", "root"):
        yield Finding(
            code="image-user-root",
            severity=Severity.WARNING,
            what="the image runs as root, which namespaces with restricted Pod Security refuse",
            evidence=(f"USER {contents.user or '(none)'}",),
            remedy="Write `USER 1000` in the Dockerfile, or `user: 1000` in the target.",
        )
    elif not name.isdecimal():
        yield Finding(
            code="image-user-by-name",
            severity=Severity.WARNING,
            what="the image's user is a name; a kubelet cannot tell whether it is root, and refuses it where it must",
            evidence=(f"USER {contents.user}",),
            remedy="Write its number in the Dockerfile, such as `USER 1000`, or `user: 1000` in the target.",
        )


_CHECKS: tuple[Callable[[ImageContents, ImageDemand], Iterator[Finding]], ...] = (
    _check_python,
    _check_holdfast,
    _check_torch,
    _check_user,
)


def _missing_files(image: ImageFiles, demand: ImageDemand) -> Iterator[Finding]:
    """One finding for each file that the fabric or the launcher needs, and the image lacks."""
    network = NETWORKS.get(demand.fabric.network)
    purposes = [*([(f"fabric {demand.fabric.name}", network)] if network else ())]
    purposes += [("workload mpijob", MPI)] if demand.mpi else []
    for purpose, wanted in purposes:
        for need in wanted.needs:
            if not _has(image, need):
                yield Finding(
                    code="image-library-missing",
                    what=f"the image has no {need.what}, which {purpose} needs",
                    where=purpose,
                    evidence=(f"no file or link matches /{need.file}",),
                    remedy=f"Install {need.package} in the Dockerfile; `holdfast image build` prints the lines.",
                )


def _has(image: ImageFiles, need: ImageNeed) -> bool:
    """Whether the image has the file; a link counts if it leads to a file of the image."""
    pattern = re.compile(need.file)
    return any(pattern.fullmatch(path) and image.resolve(path) is not None for path in image.files)
