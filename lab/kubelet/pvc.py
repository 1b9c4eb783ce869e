"""Storage: a claim of the class `lab` becomes a folder, bound immediately and removed when it is released."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from lab.kubelet.api import KubeletApi, KubeObject, retry_until_done

CLASS = "lab"
_PROVISIONER = "lab.holdfast/folders"


async def create_storage_class(api: KubeletApi) -> None:
    """Create the default storage class."""
    metadata = {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    kind = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass"}
    rest = {"provisioner": _PROVISIONER, "reclaimPolicy": "Delete", "volumeBindingMode": "Immediate"}
    await api.create("/apis/storage.k8s.io/v1/storageclasses", kind | {"metadata": metadata} | rest)


async def provision(api: KubeletApi, folder: Path) -> None:
    """Create a folder for each claim of the class, forever."""
    async for there, claim in api.watch("/api/v1/persistentvolumeclaims"):
        ours = claim["spec"].get("storageClassName") == CLASS
        if there and ours and claim.get("status", {}).get("phase") == "Pending":
            volume = _volume(claim, folder)
            await retry_until_done(partial(api.create, "/api/v1/persistentvolumes", volume), volume["metadata"]["name"])


async def reclaim(api: KubeletApi) -> None:
    """Remove folders whose claim is gone, forever."""
    async for there, volume in api.watch("/api/v1/persistentvolumes"):
        ours = volume["spec"].get("storageClassName") == CLASS and "hostPath" in volume["spec"]
        if there and ours and volume.get("status", {}).get("phase") == "Released":
            shutil.rmtree(volume["spec"]["hostPath"]["path"], ignore_errors=True)
            name, uid = volume["metadata"]["name"], volume["metadata"]["uid"]
            await retry_until_done(partial(api.delete, f"/api/v1/persistentvolumes/{name}", uid), name)


def _volume(claim: KubeObject, folder: Path) -> KubeObject:
    metadata, spec = claim["metadata"], claim["spec"]
    name = f"lab-{metadata['uid']}"
    path = folder / f"{metadata['namespace']}-{metadata['name']}-{metadata['uid'][:8]}"
    path.mkdir(parents=True, exist_ok=True)
    reference = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    reference |= {key: metadata[key] for key in ("name", "namespace", "uid")}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": _PROVISIONER}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            # With `Delete`, Kubernetes would look for a deletion plugin.
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": CLASS,
            "claimRef": reference,
            "hostPath": {"path": str(path)},
        },
    }
