"""Maps API server errors to findings and exit codes.

Imports no Kubernetes client: cluster.py raises these errors, and commands convert them with `to_holdfast_error`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Owner, Severity
from holdfast.launch.kubernetes.client.message_rules import ADMISSION_RULES, MessageRule, match_rule


class ClusterError(Exception):
    """A failed request (`POST /api/v1/...`) and the reason."""

    def __init__(self, message: str, *, request: str = "") -> None:
        super().__init__(message)
        self.message, self.request = message, request


class KubeconfigError(ClusterError):
    """No request was sent: the kubeconfig gives no server or credentials."""


class ApiUnavailable(ClusterError):
    """The API server was unreachable or could not answer; a retry may succeed."""


class ApiError(ClusterError):
    """The API server refused the request; `status` is the HTTP status, `message` the server's message."""

    def __init__(self, status: int, message: str, *, request: str = "") -> None:
        super().__init__(message, request=request)
        self.status = status

    def __str__(self) -> str:
        return f"{self.status} {self.message}"


class GatewayUnreachable(ClusterError):
    """The cluster's Gateway did not connect to the run's controller; `request` is the name of the run's route."""


def to_dict(error: ClusterError) -> dict[str, str | int]:
    """Serialize an error for another process."""
    status = {"status": error.status} if isinstance(error, ApiError) else {}
    return {"kind": type(error).__name__, "message": error.message, "request": error.request, **status}


def from_dict(fields: Mapping[str, Any]) -> ClusterError:
    """Deserialize an error."""
    message, asked = fields["message"], fields["request"]
    if "status" in fields:
        return ApiError(fields["status"], message, request=asked)
    return {kind.__name__: kind for kind in (KubeconfigError, ApiUnavailable)}[fields["kind"]](message, request=asked)


@contextmanager
def as_holdfast_error() -> Generator[None]:
    """Convert a ClusterError raised inside into a HoldfastError."""
    try:
        yield
    except ClusterError as error:
        raise to_holdfast_error(error) from error


def to_holdfast_error(error: ClusterError) -> HoldfastError:
    """The HoldfastError of a cluster error: one finding, and the command's exit code."""
    finding = match_rule(ERROR_RULES[type(error)], error.request or _kubeconfig(), str(error))
    assert finding is not None, "the last row matches any text"
    return HoldfastError((finding,), EXIT_CODES.get(finding.code, ExitCode.CANNOT_RUN_HERE))


def _kubeconfig() -> str:
    """Paths of the kubeconfig."""
    return os.environ.get("KUBECONFIG") or "~/.kube/config"


def _rule(pattern: str, code: str, message: str, remedy: str, owner: Owner = Owner.USER) -> MessageRule:
    return MessageRule(pattern=pattern, code=code, message=message, remedy=remedy, severity=Severity.ERROR, owner=owner)


_NO_KUBERNETES = _rule(
    r"(?P<why>JSONDecodeError.*|KeyError: '(?:gitVersion|message)')",
    "not-kubernetes",
    "what answers is no Kubernetes API server: {why}",
    "See `server` in the kubeconfig, and whether a proxy stands before it.",
)
_KUBECONFIG_RULES = (
    _NO_KUBERNETES,
    # No such context far
    _rule(
        r"No such context (?P<name>.+)|Context (?P<other>.+) not found",
        "unknown-context",
        "the kubeconfig has no context {name}{other}",
        "`kubectl config get-contexts` lists those there are; `context` of the target names one.",
    ),
    # Unable to find valid credentials
    _rule(
        "Unable to find valid credentials",
        "no-kubeconfig",
        "there is no kubeconfig to say where the cluster is",
        "Get one from the cluster's administrator, and name it in KUBECONFIG or put it at ~/.kube/config.",
    ),
    # RuntimeError: Process exited with non-zero code 1: token expired, log in again
    _rule(
        r"Process exited with non-zero code -?\d+:\s*(?P<why>.*)|(?:FileNotFound|Permission)Error: (?P<gone>.+)",
        "no-credentials",
        "what the kubeconfig has for getting or reading credentials fails: {why}{gone}",
        "Log in again as your cluster has it, or fix what the kubeconfig names; `kubectl get pods` must work.",
    ),
    _rule(
        "(?P<why>.+)",
        "kubeconfig-broken",
        "the kubeconfig cannot be used: {why}",
        "`kubectl config view` must show a complete one; fetch it again.",
    ),
)

_UNAVAILABLE_RULES = (
    ADMISSION_RULES[0],
    # [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1010)
    _rule(
        r"CERTIFICATE_VERIFY_FAILED\] (?P<why>[^(]+)|(?P<other>\[SSL[^(]+|[Hh]ostname .+mismatch.+)",
        "cluster-cert-untrusted",
        "who answers is not the cluster that the kubeconfig knows: {why}{other}",
        "Fetch the kubeconfig again: its certificate-authority is another cluster's, or another server answers.",
        Owner.CLUSTER,
    ),
    _rule(
        "[Tt]imed? ?out|^$",
        "cluster-timeout",
        "the cluster's API server takes connections, or drops them, and does not answer in time",
        "Try again; see that the VPN or bastion is up, and that `server` in the kubeconfig is right.",
        Owner.CLUSTER,
    ),
    # Too many requests, please try again later.
    _rule(
        "[Tt]oo many requests",
        "cluster-throttling",
        "the API server has too much to do and puts requests off",
        "Try again in a minute.",
        Owner.CLUSTER,
    ),
    _NO_KUBERNETES,
    _rule(
        "(?P<why>.+)",
        "cluster-unreachable",
        "the cluster's API server cannot be reached, or does not work: {why}",
        "See that it runs, that the VPN or bastion is up, and that `server` in the kubeconfig is right.",
        Owner.CLUSTER,
    ),
)

_API_ERROR_RULES = (
    # 401 Unauthorized
    _rule(
        "^401 ",
        "credentials-refused",
        "the cluster does not take these credentials: they have expired, or are another cluster's",
        "Log in again as your cluster has it, or fetch the kubeconfig again.",
    ),
    # 403 ... unable to create new content in namespace ml because it is being terminated
    _rule(
        r"^40[39] .*namespace (?P<name>\S+) because it is being terminated",
        "namespace-terminating",
        "namespace {name} is being deleted",
        "Use another `namespace`, or wait until it is gone and create it again.",
    ),
    # 403 jobsets.jobset.x-k8s.io is forbidden: User "ann" cannot create resource "jobsets" in API group
    # "jobset.x-k8s.io" in the namespace "ml"
    _rule(
        r'^403 .*User "(?P<user>[^"]+)" cannot (?P<verb>\S+) resource "(?P<what>[^"]+)"'
        r'(?: in API group "[^"]*")?(?P<where>.*)',
        "not-permitted",
        "{user} may not {verb} {what}{where}",
        "Have a role bound that allows it, or use another `context` or `namespace`; `holdfast check --on` lists all.",
    ),
    # 403 roles... is forbidden: user "ann" (groups=[...]) is attempting to grant RBAC permissions not currently held:
    _rule(
        r'^403 .*user "(?P<user>[^"]+)".* is attempting to grant RBAC permissions not currently held:\s*(?P<what>.+)',
        "not-permitted",
        "{user} may not give the run's controller what it may not do itself: {what}",
        "Have a role bound that allows it, or use another `context` or `namespace`.",
    ),
    # 403 pods "x" is forbidden: error looking up service account ml/train: serviceaccount "train" not found
    _rule(
        r"error looking up service account (?P<name>\S+): .*not found",
        "referenced-object-missing",
        "there is no service account {name}",
        "Have it made with its Role (docs/kubernetes.md), or leave `service_account` out of the target.",
    ),
    # 403 pods "x" is forbidden: no PriorityClass with name urgent was found
    _rule(
        r"no PriorityClass with name (?P<name>\S+) was found",
        "referenced-object-missing",
        "there is no priority class {name}, and without it no pod is made",
        "`kubectl get priorityclasses` lists them.",
    ),
    # 403 jobsets "x" is forbidden: exceeded quota: q, requested: ..., used: ..., limited: ...
    _rule(
        r"^403 .*exceeded quota: (?P<why>.+)",
        "quota-exceeded",
        "the namespace's quota does not allow it: {why}",
        "Remove what is over, ask for less, or have the ResourceQuota raised.",
        Owner.CLUSTER,
    ),
    # 404 namespaces "ml" not found
    _rule(
        r'^404 namespaces "(?P<name>[^"]+)" not found',
        "namespace-missing",
        "there is no namespace {name}",
        "Write another `namespace` in the target, or have it made: `kubectl create namespace`.",
    ),
    # 404 404 page not found; 404 the server could not find the requested resource
    _rule(
        "^404 (?:404 page not found|the server could not find)",
        "operator-missing",
        "the cluster does not know this kind of object",
        "Install its operator in a version that serves it, or use another `workload` in the target.",
        Owner.CLUSTER,
    ),
    _rule("^404 (?P<why>.+)", "workload-deleted", "it is not there: {why}", "Somebody removed it; `holdfast ps`."),
    # 422 ... must be no more than 63 characters; JobSet name is too long, job names ... will exceed 63 characters
    _rule(
        r"(?P<why>must be no more than \d+ \w+|[Nn]ame is too long.*|Too long: .+)",
        "name-too-long",
        "a name is too long for the cluster: {why}",
        "Give the job a shorter `name`.",
    ),
    *ADMISSION_RULES[1:],
    # 409 jobsets.jobset.x-k8s.io "x" already exists
    _rule(
        "^409 (?P<why>.+already exists)",
        "object-exists",
        "something of this name is there already: {why}",
        "Remove it, or start the run again: it gets another id.",
    ),
    _rule(
        r"^(?:\d+ )?(?P<why>.*)",
        "manifest-refused",
        "the API server would not do it: {why}",
        "Fix what it names.",
        Owner.HOLDFAST,
    ),
)

_GATEWAY_RULES = (
    _rule(
        "(?P<why>.+)",
        "gateway-unreachable",
        "the cluster's Gateway does not lead to the run's controller: {why}",
        "See that the name leads to the Gateway (`controller.gateway` in the target), and `kubectl describe tlsroute`.",
        Owner.CLUSTER,
    ),
)

REJECTION_RULES = (ADMISSION_RULES[0], *_API_ERROR_RULES)
"""Rules for rejections of submitted objects."""

ERROR_RULES: Mapping[type[ClusterError], tuple[MessageRule, ...]] = {
    KubeconfigError: _KUBECONFIG_RULES,
    ApiUnavailable: _UNAVAILABLE_RULES,
    ApiError: _API_ERROR_RULES,
    GatewayUnreachable: _GATEWAY_RULES,
}
"""Rules for the messages of kr8s 0.20, httpx and Kubernetes 1.37; the first match decides."""

EXIT_CODES: Mapping[str, ExitCode] = {
    "unknown-context": ExitCode.NOT_FOUND,
    "no-kubeconfig": ExitCode.NOT_FOUND,
    "kubeconfig-broken": ExitCode.NOT_FOUND,
    "workload-deleted": ExitCode.NOT_FOUND,
    "no-credentials": ExitCode.NOT_PERMITTED,
    "credentials-refused": ExitCode.NOT_PERMITTED,
    "not-permitted": ExitCode.NOT_PERMITTED,
    "webhook-down": ExitCode.UNAVAILABLE,
    "cluster-cert-untrusted": ExitCode.UNAVAILABLE,
    "cluster-timeout": ExitCode.UNAVAILABLE,
    "not-kubernetes": ExitCode.UNAVAILABLE,
    "cluster-unreachable": ExitCode.UNAVAILABLE,
    "cluster-throttling": ExitCode.UNAVAILABLE,
    "gateway-unreachable": ExitCode.UNAVAILABLE,
}
"""Exit codes other than CANNOT_RUN_HERE."""
