"""Pods as processes: each is seen through the real API server, which knows no difference."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest
from tests.lab.lab_namespace import DEADLINE_S, LabNamespace, alive
from tests.waiting import until

from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.client.pod_port import PortClosed

pytestmark = pytest.mark.slow


def test_pod_is_given_variables_from_everywhere(space: LabNamespace) -> None:
    space.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"ONE": "1", "two": "2"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"three": "3"}},
    )
    space.pod(
        "env; hostname",
        container={
            "envFrom": [{"configMapRef": {"name": "c"}, "prefix": "ALL_"}],
            "env": [
                {"name": "PLAIN", "value": "x"},
                {"name": "EXPANDED", "value": "$(PLAIN)-$$(PLAIN)-$(NONE)"},
                {"name": "TWO", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "two"}}},
                {"name": "THREE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "three"}}},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a']"}}},
                {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
                {
                    "name": "MEMORY",
                    "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}},
                },
            ],
            "resources": {"limits": {"cpu": "1500m", "memory": "1Gi"}},
        },
        metadata={"labels": {"a": "b"}},
        hostname="host",
    )
    status = space.phase("Succeeded")
    lines = space("logs", "p").splitlines()
    assert {
        "ALL_ONE=1",
        "ALL_two=2",
        "PLAIN=x",
        "EXPANDED=x-$(PLAIN)-$(NONE)",
        "TWO=2",
        "THREE=3",
        f"ADDRESS={status['podIP']}",
        "LABEL=b",
        "CPUS=2",
        "MEMORY=1024",
        "HOSTNAME=host",
        "host",
    } <= set(lines)
    assert any(line.startswith("NODE=node-") for line in lines)


def test_pod_sees_its_volumes_where_it_wants_them(
    space: LabNamespace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    host = tmp_path_factory.mktemp("host")
    (host / "file").write_text("of the host")
    space.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"key": "of the map"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"key": "of the secret"}},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "claim"},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        },
    )
    volumes = [
        {"name": "host", "hostPath": {"path": str(host)}},
        {"name": "map", "configMap": {"name": "c"}},
        {"name": "secret", "secret": {"secretName": "s", "defaultMode": 0o400}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "claim"}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        {"name": "down", "downwardAPI": {"items": [{"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]}},
    ]
    mounts = [
        {"name": "host", "mountPath": "/of-the-host", "readOnly": True},
        {"name": "map", "mountPath": "/etc/lab/map"},
        {"name": "secret", "mountPath": "/new/deep/secret"},
        {"name": "claim", "mountPath": "/checkpoints", "subPath": "part"},
        {"name": "memory", "mountPath": "/dev/shm"},
        {"name": "down", "mountPath": "/etc/lab/down"},
    ]
    script = """
    cat /of-the-host/file /etc/lab/map/key /new/deep/secret/key /etc/lab/down/n; echo
    touch /of-the-host/no 2>/dev/null || echo read-only
    echo kept > /checkpoints/kept
    df --output=size -k /dev/shm | tail -1
    echo last words > /dev/termination-log
    """
    space.pod(script, volumes=volumes, container={"volumeMounts": mounts})
    status = space.phase("Succeeded")
    assert status["containerStatuses"][0]["state"]["terminated"]["message"] == "last words\n"
    said = space("logs", "p")
    assert "of the hostof the mapof the secretp\n" in said
    assert "read-only\n" in said
    assert "8192\n" in said
    # What one pod leaves in a claim, the next one finds.
    space("delete", "pod", "p")
    space.pod(
        "cat /data/part/kept",
        volumes=volumes,
        container={"volumeMounts": [mounts[3] | {"subPath": "", "mountPath": "/data"}]},
    )
    space.phase("Succeeded")
    assert space("logs", "p") == "kept\n"


def test_pod_asks_the_api_server_as_its_account_may(space: LabNamespace) -> None:
    space("create", "role", "look", "--verb=get", "--resource=configmaps")
    space("create", "rolebinding", "look", "--role=look", f"--serviceaccount={space.name}:default")
    script = f"""
import ssl, urllib.request, urllib.error
place = "/var/run/secrets/kubernetes.io/serviceaccount/"
def ask(path):
    request = urllib.request.Request("https://kubernetes.default.svc" + path)
    request.add_header("Authorization", "Bearer " + open(place + "token").read())
    try:
        return urllib.request.urlopen(request, context=ssl.create_default_context(cafile=place + "ca.crt")).status
    except urllib.error.HTTPError as error:
        return error.code
print(ask("/api/v1/namespaces/{space.name}/configmaps/kube-root-ca.crt"), ask("/api/v1/namespaces/{space.name}/pods"))
"""
    space.pod([sys.executable, "-c", script])
    space.phase("Succeeded")
    assert space("logs", "p") == "200 403\n"


def test_exec_runs_beside_the_container_and_tells_its_code(space: LabNamespace) -> None:
    space.pod(
        "sleep 1000",
        volumes=[{"name": "v", "emptyDir": {}}],
        container={"volumeMounts": [{"name": "v", "mountPath": "/v"}]},
    )
    space.phase("Running")
    assert space("exec", "p", "--", "sh", "-c", "cd /v && hostname") == "p\n"
    assert space("exec", "-i", "p", "--", "tr", "a-z", "A-Z", document="said") == "SAID"
    command = space.lab.kubectl_command("-n", space.name, "exec", "p", "--", "sh", "-c", "echo no >&2; exit 7")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert done.stderr.startswith("no\n")
    space("delete", "pod", "p", "--grace-period=0", "--force")


def test_port_of_a_pods_loopback_address_is_forwarded(space: LabNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import socket
with socket.create_server(("127.0.0.1", 4000)) as server:
    print("up", flush=True)
    while True:
        client, _ = server.accept()
        with client:
            while data := client.recv(1 << 16):
                client.sendall(data.upper())
"""
    space.pod([sys.executable, "-c", script])
    space.says("up")
    monkeypatch.setenv("KUBECONFIG", str(space.lab.kubeconfig))
    said = bytes(range(256)) * 4096

    async def exchange() -> None:
        cluster = ClusterClient(namespace=space.name)
        async with cluster.connect_to_port("p", 4000) as port:
            sending = asyncio.ensure_future(port.send(said))
            heard = b""
            while len(heard) < len(said):
                heard += await port.receive()
            await sending
        assert heard == said.upper()
        with pytest.raises(PortClosed, match="refused"):
            async with cluster.connect_to_port("p", 4001) as port:
                await port.receive()

    asyncio.run(exchange())
    space("delete", "pod", "p", "--grace-period=0", "--force")


def test_logs_are_cut_as_asked(space: LabNamespace) -> None:
    space.pod("echo one; echo two >&2; sleep 3; echo three; sleep 1000")
    space.says("three")
    assert space("logs", "p") == "one\ntwo\nthree\n"
    assert space("logs", "p", "--tail=1") == "three\n"
    stamped = space("logs", "p", "--timestamps").splitlines()
    assert [line.split(" ")[1] for line in stamped] == ["one", "two", "three"]
    assert space("logs", "p", f"--since-time={stamped[2].split(' ')[0][:19]}Z").endswith("three\n")
    with followed(space, "one\n") as rest:
        space("delete", "pod", "p", "--grace-period=1")
        assert rest.read() == "two\nthree\n"


@contextlib.contextmanager
def followed(space: LabNamespace, first: str) -> Iterator[IO[str]]:
    """What `kubectl logs -f` tells of the pod after its first line: of a pod that is gone it would tell nothing."""
    command = space.lab.kubectl_command("-n", space.name, "logs", "-f", "p")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == first
        yield following.stdout


def test_container_that_fails_is_started_again_and_waits_longer(space: LabNamespace) -> None:
    space.pod("echo again; exit 5", restartPolicy="OnFailure")
    until(
        lambda: (
            space.get("pod", "p")["status"]["containerStatuses"][0]["state"].get("waiting", {}).get("reason")
            == "CrashLoopBackOff"
        ),
        "it waits",
    )
    status = space.get("pod", "p")["status"]["containerStatuses"][0]
    assert status["restartCount"] >= 1
    assert status["lastState"]["terminated"]["exitCode"] == 5
    assert space("logs", "p", "--previous") == "again\n"


def test_image_that_nobody_has_is_said(space: LabNamespace) -> None:
    space.pod("true", container={"image": "missing.example/none:1"})
    reason = until(
        lambda: (
            space.get("pod", "p")["status"]
            .get("containerStatuses", [{"state": {}}])[0]["state"]
            .get("waiting", {})
            .get("reason", "")
            in ("ErrImagePull", "ImagePullBackOff")
        ),
        "it says so",
    )
    assert reason
    assert space.get("pod", "p")["status"]["phase"] == "Pending"


def test_program_that_is_not_there_is_said(space: LabNamespace) -> None:
    space.pod(["/no/such/program"])
    ended = space.phase("Failed")["containerStatuses"][0]["state"]["terminated"]
    assert ended["reason"] == "StartError"
    assert "/no/such/program" in ended["message"]


def test_init_containers_go_first_and_sidecars_stay(space: LabNamespace) -> None:
    volume = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    space.pod(
        "cat /v/first; test -e /v/side && echo with a sidecar",
        volumes=[{"name": "v", "emptyDir": {}}],
        container=volume,
        initContainers=[
            {"name": "first", "image": "any", "command": ["sh", "-c", "echo first > /v/first"]} | volume,
            {
                "name": "side",
                "image": "any",
                "restartPolicy": "Always",
                "command": ["sh", "-c", "touch /v/side; sleep 1000"],
                "startupProbe": {"exec": {"command": ["test", "-e", "/v/side"]}, "periodSeconds": 1},
            }
            | volume,
        ],
        terminationGracePeriodSeconds=1,
    )
    space.phase("Succeeded")
    assert space("logs", "p", "-c", "main") == "first\nwith a sidecar\n"


def test_probes_decide_readiness_and_life(space: LabNamespace) -> None:
    space.pod(
        [sys.executable, "-u", "-m", "http.server", "8000", "--directory", "/v"],
        volumes=[{"name": "v", "emptyDir": {}}],
        container={
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            "ports": [{"name": "web", "containerPort": 8000}],
            "startupProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1, "failureThreshold": 60},
            "readinessProbe": {"httpGet": {"path": "/ready", "port": "web"}, "periodSeconds": 1, "timeoutSeconds": 20},
            "livenessProbe": {
                "exec": {"command": ["test", "!", "-e", "/v/sick"]},
                "periodSeconds": 1,
                "failureThreshold": 1,
                "timeoutSeconds": 20,
            },
        },
        restartPolicy="Always",
        terminationGracePeriodSeconds=1,
    )
    until(lambda: space.get("pod", "p")["status"].get("containerStatuses", [{}])[0].get("started"), "it has started")
    assert not space.get("pod", "p")["status"]["containerStatuses"][0]["ready"]
    space("exec", "p", "--", "touch", "/v/ready")
    space("wait", "pod/p", "--for=condition=Ready", f"--timeout={DEADLINE_S}s")
    space("exec", "p", "--", "touch", "/v/sick")
    until(lambda: space.get("pod", "p")["status"]["containerStatuses"][0]["restartCount"], "it is started again")


def test_pod_that_is_deleted_has_its_hook_and_its_grace(space: LabNamespace) -> None:
    space.pod(
        "trap 'echo asked; ls /v; sleep 1; echo done; exit 0' TERM; echo up; while :; do sleep 0.1; done",
        volumes=[{"name": "v", "emptyDir": {}}],
        container={
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            "lifecycle": {"preStop": {"exec": {"command": ["touch", "/v/hooked"]}}},
        },
    )
    space.says("up")
    with followed(space, "up\n") as rest:
        uid = space.get("pod", "p")["metadata"]["uid"]
        space("delete", "pod", "p", "--grace-period=60")
        assert "asked\nhooked\ndone\n" in rest.read()
    assert alive(uid) == []


def test_pod_that_does_not_listen_is_killed_with_all_it_started(space: LabNamespace) -> None:
    space.pod("trap '' TERM; setsid sleep 1000 & echo up; while :; do sleep 0.1; done")
    space.says("up")
    uid = space.get("pod", "p")["metadata"]["uid"]
    assert len(alive(uid)) >= 2
    space("delete", "pod", "p", "--grace-period=1")
    assert alive(uid) == []


def test_deadline_of_a_pod_ends_it(space: LabNamespace) -> None:
    space.pod("sleep 1000", activeDeadlineSeconds=1)
    assert space.phase("Failed")["reason"] == "DeadlineExceeded"
