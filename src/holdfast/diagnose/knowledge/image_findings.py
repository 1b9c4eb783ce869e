"""Explains the findings in container images."""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "unknown-base-image",
        "`image build` has no row for this base image.",
        "`holdfast image build --help` lists them.",
        "Take the nearest one, and name the image with `docker build --build-arg BASE=IMAGE`.",
    ),
    (
        "unknown-extra",
        "holdfast has no extra of this name.",
        "The page on installing holdfast lists them.",
        "Correct the name.",
    ),
    (
        "image-not-found",
        "`image check` reads files of this machine, and the path names none. It does not ask a registry.",
        "`ls -l PATH`.",
        "`docker save IMAGE -o FILE`, or `skopeo copy docker://IMAGE oci-archive:FILE`.",
    ),
    (
        "image-unreadable",
        "The path is neither an image nor an unpacked root file system, or its content does not match its digests.",
        "`tar tf FILE` shows manifest.json or index.json.",
        "Write the archive again.",
    ),
    (
        "image-without-python",
        "The command of controllers and agents is `python`, which is in no folder of the image's PATH.",
        "`docker run IMAGE which python`.",
        "Debian's package is `python-is-python3`; a virtual environment has both names.",
    ),
    (
        "image-python-version",
        "holdfast supports Python 3.11 to 3.13.",
        "`docker run IMAGE python --version`.",
        "Use a base image with such a Python.",
    ),
    (
        "image-without-holdfast",
        "Pods run holdfast from the image; it is not in the packages of the `python` that comes first on PATH.",
        "`docker run IMAGE python -m pip show holdfast`.",
        "Install it with that Python. An image may have several.",
    ),
    (
        "image-holdfast-version",
        "The client renders commands that another version in the image may not know.",
        "`docker run IMAGE python -m pip show holdfast`, and `holdfast --version` here.",
        "Use the same version on both sides.",
    ),
    (
        "image-extra-missing",
        "The image lacks packages of an extra. Every image needs `kubernetes`, because the controller runs in it.",
        "`docker run IMAGE python -m pip list`.",
        "Install the extra, or leave `--extra` out if no program uses it.",
    ),
    (
        "image-torch-version",
        "holdfast.train is tested with torch 2.10 to 2.15. 2.10.0a0 is a preview, and older than 2.10.",
        "`docker run IMAGE python -c 'import torch; print(torch.__version__)'`.",
        "Take a newer base image; pip would replace a vendor's build of torch.",
    ),
    (
        "image-without-nccl",
        "Collectives on GPUs need NCCL or RCCL. Some builds contain it, and some machines mount it.",
        "`torch.cuda.nccl.version()` in the image.",
        "Install a CUDA or ROCm build of torch.",
    ),
    (
        "image-library-missing",
        "The fabric's network module, or mpi-operator, opens a file that the image lacks. NCCL then reports no device "
        "of that network.",
        "`find / -name 'libibverbs.so*'` or the name in the finding, in the image.",
        "Add the lines that `holdfast image build BASE --fabric NAME` prints.",
    ),
    (
        "image-user-root",
        "The image's user is root. Restricted Pod Security refuses such pods unless the pod names another user.",
        "`docker inspect IMAGE`: Config.User.",
        "`USER 1000` in the Dockerfile, or `user: 1000` in the target.",
    ),
    (
        "image-user-by-name",
        "With `runAsNonRoot` a kubelet starts no container whose user is a name: it may be root.",
        "`kubectl describe pod`: image has non-numeric user.",
        "Write the user's number.",
    ),
)
