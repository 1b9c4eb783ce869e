"""Argo CD in a lab, without its API server and user interface; built with Go the first time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from lab import ports
from lab.extra_program import extra_program
from lab.install import await_established
from lab.lab import Lab
from lab.toolchain import ARGO_CD, program_folder, source_folder

NAMESPACE = "argocd"
"""Where Applications and ApplicationSets are."""
_KINDS = ("applications", "applicationsets", "appprojects")
# What Argo CD's installation and its API server create.
_SETTINGS = """
apiVersion: v1
kind: Namespace
metadata: {name: argocd}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: argocd-cm, namespace: argocd, labels: {app.kubernetes.io/part-of: argocd}}
---
apiVersion: v1
kind: Secret
metadata: {name: argocd-secret, namespace: argocd, labels: {app.kubernetes.io/part-of: argocd}}
---
apiVersion: argoproj.io/v1alpha1
kind: AppProject
metadata: {name: default, namespace: argocd}
spec:
  sourceRepos: ["*"]
  destinations: [{server: "*", namespace: "*"}]
"""


@contextlib.contextmanager
def argo_cd(lab: Lab) -> Generator[None]:
    """Have a lab serve Argo CD's kinds of objects, and run the controllers of Applications and ApplicationSets."""
    definitions = source_folder(ARGO_CD, "github.com/argoproj/argo-cd/v3") / "manifests/crds"
    lab.kubectl("apply", "--server-side", "-k", definitions)
    await_established(lab.client(), (f"{kind}.argoproj.io" for kind in _KINDS))
    lab.kubectl("apply", "--server-side", "-f", "-", input=_SETTINGS)
    folder, state = program_folder(ARGO_CD), lab.folder / NAMESPACE
    state.mkdir(exist_ok=True)
    held, first = ports.claim_block(7)
    redis, repositories, *others = (f"127.0.0.1:{first + number}" for number in range(7))
    environ = {
        "ARGOCD_FAKE_IN_CLUSTER": "true",  # https://kubernetes.default.svc is the cluster of the kubeconfig
        "ARGOCD_GPG_ENABLED": "false",
        "ARGOCD_TLS_DATA_PATH": str(state),
        "ARGOCD_SSH_DATA_PATH": str(state),
        "ARGOCD_PLUGINSOCKFILEPATH": str(state),
        "TMPDIR": str(state),
    }
    cached = ("--redis", redis)
    asks = ("--repo-server-plaintext", "--namespace", NAMESPACE)
    commands = {
        "redis": (redis,),
        "argocd-repo-server": (
            *cached,
            "--disable-tls",
            *("--address=127.0.0.1", f"--port={_port(repositories)}"),
            *("--metrics-address=127.0.0.1", f"--metrics-port={_port(others[0])}"),
        ),
        "argocd-application-controller": (
            *cached,
            *asks,
            *("--repo-server", repositories, f"--metrics-port={_port(others[1])}"),
        ),
        "argocd-applicationset-controller": (
            *asks,
            *("--argocd-repo-server", repositories, "--metrics-addr", others[2]),
            *("--probe-addr", others[3], "--webhook-addr", others[4]),
        ),
    }
    try:
        with contextlib.ExitStack() as programs:
            for name, words in commands.items():
                programs.enter_context(extra_program(lab, name, folder / name, *words, environ=environ))
            yield
    finally:
        os.close(held)


def _port(address: str) -> str:
    return address.rpartition(":")[2]
