"""The commands of container images: image build, image check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import OutputOption
from holdfast.cli.output import Output, print_json, print_result, print_rich, print_text, working
from holdfast.errors import ExitCode, failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.fabric.fabric import Fabric

ExtraOption = Annotated[
    list[str] | None,
    typer.Option("--extra", metavar="NAME", help="Extra of holdfast; repeatable (default: train)."),
]
FabricOption = Annotated[
    str, typer.Option("--fabric", metavar="NAME", help="Fabric whose libraries it needs; `holdfast fabric` lists them.")
]
MpiOption = Annotated[bool, typer.Option("--mpi", help="Include what `workload: mpijob` needs: ssh and mpirun.")]


def image_build(
    base: Annotated[str, typer.Argument(metavar="BASE", help="pytorch, nvidia, rocm, python or ubuntu.")],
    extras: ExtraOption = None,
    fabric: FabricOption = "tcp",
    mpi: MpiOption = False,
    user: Annotated[int, typer.Option("--user", metavar="UID", min=1, help="Number of the user.")] = 1000,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print a Dockerfile with holdfast for a base image.

    Builds nothing: `holdfast image build pytorch | docker build -t IMAGE -`.
    """
    from holdfast.launch.image.base_images import BASE_IMAGES
    from holdfast.launch.image.dockerfile import ImageRequest, render_dockerfile

    if base not in BASE_IMAGES:
        raise failure(
            "unknown-base-image",
            f"there is no base image `{base}`",
            exit_code=ExitCode.NOT_FOUND,
            remedy=f"Use one of {', '.join(BASE_IMAGES)}; `--build-arg BASE=` of docker names any other image.",
        )
    row = BASE_IMAGES[base]
    request = ImageRequest(base=row, extras=_extras(extras), fabric=_fabric(fabric), mpi=mpi, user=user)
    text = render_dockerfile(request)
    print_result(output, {"base": base, "image": row.image, "dockerfile": text}, text.rstrip("\n"))


def image_check(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="`docker save` or OCI archive, OCI layout, or root directory.")
    ],
    extras: ExtraOption = None,
    fabric: FabricOption = "tcp",
    mpi: MpiOption = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List what an image lacks, from its files alone.

    Starts no container and unpacks nothing.
    """
    from holdfast.cli.finding_text import render_findings
    from holdfast.findings import Severity
    from holdfast.launch.image.image_checks import ImageDemand, check_image, read_contents
    from holdfast.launch.image.image_files import read_image

    demand = ImageDemand(fabric=_fabric(fabric), extras=_extras(extras), mpi=mpi)
    with working(f"reading {path}"):
        image = read_image(path)
        contents, findings = read_contents(image), check_image(image, demand)
    lacking = any(finding.severity is Severity.ERROR for finding in findings)
    summary = {
        "platform": contents.platform,
        "user": contents.user,
        "python": contents.python,
        "python_version": ".".join(map(str, contents.python_version or ())),
        "holdfast": contents.packages.get("holdfast", ""),
        "torch": contents.packages.get("torch", ""),
        "nccl": contents.nccl,
    }
    if output is Output.JSON:
        print_json({"image": str(path), "can_run": not lacking, **summary, "findings": findings})
    else:
        for name, value in summary.items():
            print_text(f"{name.replace('_', ' '):<16}{value or '-'}")
        if findings:
            print_rich(render_findings(findings))
        print_text(f"{path}: {'cannot run' if lacking else 'can run'} a job")
    raise typer.Exit(ExitCode.CANNOT_RUN_HERE if lacking else ExitCode.OK)


def _extras(names: Sequence[str] | None) -> Sequence[str]:
    from holdfast.launch.image.dockerfile import EXTRAS

    for name in names or ():
        if name not in EXTRAS:
            raise failure(
                "unknown-extra",
                f"holdfast has no extra `{name}`",
                exit_code=ExitCode.NOT_FOUND,
                remedy=f"Use one of {', '.join(EXTRAS)}.",
            )
    return ("train",) if names is None else names


def _fabric(name: str) -> Fabric:
    from holdfast.cli.look_up import unknown_fabric
    from holdfast.fabric.catalog import CATALOG

    if name not in CATALOG:
        raise unknown_fabric(name)
    return CATALOG[name]
