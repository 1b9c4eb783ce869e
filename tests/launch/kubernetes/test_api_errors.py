"""Every way in which a real API server fails a request: one finding, one exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.launch.kubernetes.golden_cases import Case, render_context

from holdfast.errors import ExitCode, HoldfastError
from holdfast.launch.kubernetes.client import cluster
from holdfast.launch.kubernetes.client.api_errors import (
    ERROR_RULES,
    ApiError,
    ApiUnavailable,
    as_holdfast_error,
    to_holdfast_error,
)
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain
from lab import Lab

PODS = "/api/v1/namespaces/{namespace}/pods"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"
KubeconfigOf = Callable[..., Path]


@pytest.fixture
def kubeconfig(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubeconfigOf:
    """Writes the lab's kubeconfig, with its cluster or its user changed, and has it be the one that is used."""

    def write(*, cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None) -> Path:
        document = json.loads(lab.kubeconfig.read_text())
        document["clusters"][0]["cluster"] |= cluster or {}
        if user is not None:
            document["users"][0]["user"] = user
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(document))
        monkeypatch.setenv("KUBECONFIG", str(path))
        return path

    write()
    return write


def failing(ask: Callable[[ClusterClient], Any], namespace: str, **how: Any) -> HoldfastError:
    """What is said of a question that is not answered as it should be."""

    async def whole() -> None:
        with as_holdfast_error():
            await ask(ClusterClient(namespace=namespace, **how))

    with pytest.raises(HoldfastError) as caught:
        asyncio.run(whole())
    (finding,) = caught.value.findings
    assert finding.remedy
    assert finding.where
    assert finding.evidence
    assert "{" not in finding.what
    return caught.value


def listing(cluster: ClusterClient) -> Any:
    return cluster.get(PODS)


def expect(error: HoldfastError, code: str, exit_code: ExitCode, *words: str) -> None:
    (finding,) = error.findings
    assert (finding.code, error.exit_code) == (code, exit_code), finding
    for each in words:
        assert each in finding.what
    assert finding.what == finding.what.strip()


def jobset(namespace: str, name: str = "llama-000000") -> dict[str, Any]:
    owner = to_plain(render(render_context(Case(target={"namespace": namespace, "queue": None, "volume": None}))).owner)
    return {**owner, "metadata": {**owner["metadata"], "name": name}}


class FaultyProxy:
    """A proxy before the API server on a separate port: forwards, stalls, or closes."""

    def __init__(self, server: str) -> None:
        host, _, port = server.removeprefix("https://").partition(":")
        self._behind = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listening.getsockname()[1]}"
        self.silent = False
        self.swallows = False
        """Whether nothing more goes through, either way, without an error."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def met(self) -> int:
        """How many have come."""
        return len(self._open)

    def shut(self) -> None:
        """Nobody is let in, and those who are in are put out."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._open:
            each.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                before, _ = self._listening.accept()
            except OSError:
                return
            self._open.append(before)
            if not self.silent:
                behind = socket.create_connection(self._behind)
                for source, target in ((before, behind), (behind, before)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.swallows:
                    target.sendall(data)


@pytest.fixture
def door(lab: Lab) -> Iterator[FaultyProxy]:
    made = FaultyProxy(json.loads(lab.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])
    yield made
    made.silent = True


# No server, or no user


def test_no_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    error = failing(listing, "ml")
    expect(error, "no-kubeconfig", ExitCode.NOT_FOUND)
    assert error.findings[0].where == str(tmp_path / "none")


@pytest.mark.parametrize(
    "text", ["{}", "clusters: [", "[]", "apiVersion: v1\nkind: Config\ncurrent-context: a\n", "\0"]
)
def test_kubeconfig_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    code = "unknown-context" if "current-context" in text else "kubeconfig-broken"
    expect(failing(listing, "ml"), code, ExitCode.NOT_FOUND)


@pytest.mark.slow
def test_wrong_context(kubeconfig: KubeconfigOf) -> None:
    expect(failing(listing, "ml", context="far"), "unknown-context", ExitCode.NOT_FOUND, "no context far")


@pytest.mark.slow
def test_program_for_credentials_that_fails_or_is_not_there(kubeconfig: KubeconfigOf) -> None:
    words = {"apiVersion": "client.authentication.k8s.io/v1", "args": ["-c", "import sys; sys.exit('log in again')"]}
    kubeconfig(user={"exec": {"command": sys.executable, **words}})
    expect(failing(listing, "ml"), "no-credentials", ExitCode.NOT_PERMITTED, "log in again")
    kubeconfig(user={"exec": {"command": "no-such-program", **words}})
    expect(failing(listing, "ml"), "no-credentials", ExitCode.NOT_PERMITTED, "no-such-program")


@pytest.mark.slow
def test_program_for_credentials_that_does_not_end(kubeconfig: KubeconfigOf) -> None:
    words = {"apiVersion": "client.authentication.k8s.io/v1", "args": ["1000"]}
    kubeconfig(user={"exec": {"command": "sleep", **words}})
    expect(failing(listing, "ml", timeout_s=1.0), "cluster-timeout", ExitCode.UNAVAILABLE)


# Nobody answers, or not the one


@pytest.mark.slow
def test_no_cluster(kubeconfig: KubeconfigOf, door: FaultyProxy) -> None:
    door.shut()
    kubeconfig(cluster={"server": door.url})
    expect(failing(listing, "ml"), "cluster-unreachable", ExitCode.UNAVAILABLE, door.url)


@pytest.mark.slow
def test_cluster_whose_name_is_not_known(kubeconfig: KubeconfigOf) -> None:
    kubeconfig(cluster={"server": "https://cluster.invalid:6443"})
    expect(failing(listing, "ml"), "cluster-unreachable", ExitCode.UNAVAILABLE)


@pytest.mark.slow
def test_cluster_that_does_not_answer_in_time(kubeconfig: KubeconfigOf, door: FaultyProxy) -> None:
    door.silent = True
    kubeconfig(cluster={"server": door.url})
    expect(failing(listing, "ml", timeout_s=1.0), "cluster-timeout", ExitCode.UNAVAILABLE)


@pytest.mark.slow
def test_several_questions_at_once_find_out_together_that_nobody_answers(
    kubeconfig: KubeconfigOf, door: FaultyProxy
) -> None:
    door.silent = True
    kubeconfig(cluster={"server": door.url})

    async def ask(cluster: ClusterClient, times: int) -> None:
        for answer in await asyncio.gather(*(cluster.get(PODS) for _ in range(times)), return_exceptions=True):
            assert isinstance(answer, ApiUnavailable)
        raise answer

    tries: list[int] = []
    for times in (1, 5):
        before = door.met
        failing(lambda cluster, times=times: ask(cluster, times), "ml", timeout_s=1.0)
        tries.append(door.met - before)
    assert tries[0] == tries[1] > 0


@pytest.mark.slow
def test_cluster_that_goes_away_in_the_middle(kubeconfig: KubeconfigOf, door: FaultyProxy) -> None:
    kubeconfig(cluster={"server": door.url})

    async def ask(cluster: ClusterClient) -> None:
        pods = cluster.watch_pods("holdfast/run=none")
        await anext(pods)
        watching = asyncio.ensure_future(anext(pods))
        done, _ = await asyncio.wait((watching,), timeout=1)
        assert not done
        door.shut()
        await watching

    expect(failing(ask, "default"), "cluster-unreachable", ExitCode.UNAVAILABLE)


@pytest.mark.slow
def test_cluster_that_falls_silent_in_the_middle(
    kubeconfig: KubeconfigOf, door: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "WATCH_TIMEOUT_S", 4)  # long enough that it is not over before the silence
    kubeconfig(cluster={"server": door.url})

    async def ask(cluster: ClusterClient) -> None:
        pods = cluster.watch_pods("holdfast/run=none")
        await anext(pods)
        watching = asyncio.ensure_future(anext(pods))
        await asyncio.wait((watching,), timeout=0.5)
        door.swallows = True
        await watching

    expect(failing(ask, "default", timeout_s=1.0), "cluster-timeout", ExitCode.UNAVAILABLE)


@pytest.mark.slow
def test_watch_ends_by_itself(kubeconfig: KubeconfigOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WATCH_TIMEOUT_S", 1)

    async def watch() -> int:
        return len([seen async for seen in ClusterClient(namespace="default").watch_pods("holdfast/run=none")])

    assert asyncio.run(watch()) == 1


@pytest.mark.slow
def test_cluster_that_is_gone_between_two_questions(kubeconfig: KubeconfigOf, door: FaultyProxy) -> None:
    kubeconfig(cluster={"server": door.url})

    async def ask(cluster: ClusterClient) -> None:
        await cluster.get(PODS)
        door.shut()
        await cluster.get(PODS)

    expect(failing(ask, "default"), "cluster-unreachable", ExitCode.UNAVAILABLE)


@pytest.mark.slow
def test_certificate_of_another(kubeconfig: KubeconfigOf, lab: Lab, tmp_path: Path) -> None:
    other = tmp_path / "ca.crt"
    other.write_text(ssl.DER_cert_to_PEM_cert(ssl.create_default_context().get_ca_certs(binary_form=True)[0]))
    kubeconfig(cluster={"certificate-authority": str(other)})
    expect(failing(listing, "ml"), "cluster-cert-untrusted", ExitCode.UNAVAILABLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        (200, "<html>welcome</html>", "not-kubernetes"),
        (200, "{}", "not-kubernetes"),
        (403, "{}", "not-kubernetes"),
        (502, "bad", "cluster-unreachable"),
        (429, "Too many requests, please try again later.", "cluster-throttling"),
    ],
)
def test_server_that_is_no_cluster_or_too_busy_to_be_one(
    kubeconfig: KubeconfigOf, status: int, text: str, code: str
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        kubeconfig(cluster={"server": f"http://127.0.0.1:{server.server_port}"})
        expect(failing(listing, "ml"), code, ExitCode.UNAVAILABLE)
        server.shutdown()


# Refused


@pytest.mark.slow
def test_credentials_that_hold_no_more(kubeconfig: KubeconfigOf, lab: Lab, namespace: str) -> None:
    lab.kubectl("create", "serviceaccount", "ann", "-n", namespace)
    token = lab.kubectl("create", "token", "ann", "-n", namespace).strip()
    lab.kubectl("delete", "serviceaccount", "ann", "-n", namespace)
    kubeconfig(user={"token": token})
    expect(failing(listing, namespace), "credentials-refused", ExitCode.NOT_PERMITTED)


@pytest.mark.slow
def test_verb_that_is_forbidden(kubeconfig: KubeconfigOf, lab: Lab, namespace: str) -> None:
    lab.kubectl("create", "serviceaccount", "ann", "-n", namespace)
    kubeconfig(user={"token": lab.kubectl("create", "token", "ann", "-n", namespace).strip()})
    expect(
        failing(listing, namespace),
        "not-permitted",
        ExitCode.NOT_PERMITTED,
        f'{namespace}:ann may not list pods in the namespace "{namespace}"',
    )


@pytest.mark.slow
def test_kind_that_is_not_installed(kubeconfig: KubeconfigOf, namespace: str) -> None:
    path = "/apis/nobody.example/v1/namespaces/{namespace}/things"
    expect(failing(lambda cluster: cluster.get(path), namespace), "operator-missing", ExitCode.CANNOT_RUN_HERE)


@pytest.mark.slow
def test_namespace_that_is_not_there(kubeconfig: KubeconfigOf) -> None:
    error = failing(lambda cluster: cluster.create(JOBSETS, jobset("nowhere")), "nowhere")
    expect(error, "namespace-missing", ExitCode.CANNOT_RUN_HERE, "nowhere")


@pytest.mark.slow
def test_namespace_that_is_being_deleted(kubeconfig: KubeconfigOf, lab: Lab, namespace: str) -> None:
    kept = {"name": "kept", "namespace": namespace, "finalizers": ["holdfast.test/keep"]}
    document = json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": kept})
    lab.kubectl("create", "-f", "-", input=document)
    lab.kubectl("delete", "namespace", namespace, "--wait=false")
    try:
        error = failing(lambda cluster: cluster.create(JOBSETS, jobset(namespace)), namespace)
        expect(error, "namespace-terminating", ExitCode.CANNOT_RUN_HERE, namespace)
    finally:
        lab.kubectl("patch", "configmap", "kept", "-n", namespace, "-p", '{"metadata":{"finalizers":null}}')


@pytest.mark.slow
def test_webhook_that_is_down(kubeconfig: KubeconfigOf, lab: Lab, namespace: str) -> None:
    webhook = {
        "name": "gone.holdfast.test",
        "clientConfig": {"url": "https://127.0.0.1:9/gone"},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    lab.kubectl("create", "-f", "-", input=json.dumps({**kind, "metadata": {"name": namespace}, "webhooks": [webhook]}))
    one = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "a-"}}

    async def ask(cluster: ClusterClient) -> None:
        while True:  # the API server takes a moment to know its webhooks
            await cluster.create("/api/v1/namespaces/{namespace}/configmaps", one)

    try:
        expect(failing(ask, namespace), "webhook-down", ExitCode.UNAVAILABLE, "gone.holdfast.test")
    finally:
        lab.kubectl("delete", "validatingwebhookconfiguration", namespace)


@pytest.mark.slow
def test_name_that_is_too_long(kubeconfig: KubeconfigOf, namespace: str) -> None:
    error = failing(lambda cluster: cluster.create(JOBSETS, jobset(namespace, "x" * 60)), namespace)
    expect(error, "name-too-long", ExitCode.CANNOT_RUN_HERE, "63 characters")


@pytest.mark.slow
def test_quota_that_can_never_fit(kubeconfig: KubeconfigOf, lab: Lab, namespace: str) -> None:
    lab.kubectl("create", "quota", "small", "-n", namespace, "--hard=count/jobsets.jobset.x-k8s.io=0")

    async def ask(cluster: ClusterClient) -> None:
        while True:  # a quota counts once its controller has seen it
            made = await cluster.create(JOBSETS, jobset(namespace))
            await cluster.delete(f"{JOBSETS}/{made['metadata']['name']}")

    expect(failing(ask, namespace), "quota-exceeded", ExitCode.CANNOT_RUN_HERE, "small")


@pytest.mark.slow
def test_object_that_is_there_or_is_not(kubeconfig: KubeconfigOf, namespace: str) -> None:
    async def twice(cluster: ClusterClient) -> None:
        for _ in range(2):
            await cluster.create(JOBSETS, jobset(namespace))

    expect(failing(twice, namespace), "object-exists", ExitCode.CANNOT_RUN_HERE)
    error = failing(lambda cluster: cluster.get(f"{JOBSETS}/none"), namespace)
    expect(error, "workload-deleted", ExitCode.NOT_FOUND, "none")


@pytest.mark.slow
def test_manifest_that_is_wrong(kubeconfig: KubeconfigOf, namespace: str) -> None:
    wrong = jobset(namespace)
    wrong["spec"]["replicatdJobs"] = []
    error = failing(lambda cluster: cluster.create(JOBSETS, wrong, fieldValidation="Strict"), namespace)
    expect(error, "manifest-refused", ExitCode.CANNOT_RUN_HERE, "replicatdJobs")


@pytest.mark.parametrize("said", ["", "anything at all", "\n", "{0} {name} %s"])
def test_words_that_nobody_has_seen_are_said(said: str) -> None:
    assert to_holdfast_error(ApiUnavailable(said)).findings
    assert to_holdfast_error(ApiError(418, said)).findings


def test_every_row_has_a_name_for_what_it_fills_in() -> None:
    for rows in ERROR_RULES.values():
        for row in rows:
            assert row.message.format_map(dict.fromkeys(re.compile(row.pattern).groupindex, "x")), row.code
