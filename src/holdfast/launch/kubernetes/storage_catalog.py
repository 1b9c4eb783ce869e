"""The catalogue of storage drivers: what a claim of each can be for runs.

Figures are those that the providers publish, read in November 2026; measure yours with `holdfast check --full`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct, field

from holdfast.launch.kubernetes.client.api_paths import KubeObject

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
"""Annotation of the StorageClass of claims that name none."""

GIB, TIB = 1 << 30, 1 << 40


class StorageKind(StrEnum):
    """What a driver's volumes are."""

    FILES = "files"
    """A file system that many machines mount for writing (ReadWriteMany)."""
    DISK = "disk"
    """A disk, whose file system one machine mounts at a time."""
    OBJECTS = "objects"
    """An object store that looks like files, without the renames that commit checkpoints."""

    @property
    def meaning(self) -> str:
        """What this means for the shared volume of a run."""
        return _MEANINGS[self]


_MEANINGS = {
    StorageKind.FILES: "many machines mount them for writing",
    StorageKind.DISK: "one machine mounts them at a time",
    StorageKind.OBJECTS: "an object store, where no rename commits a checkpoint",
}


class StorageDriver(Struct, frozen=True, kw_only=True):
    """A CSI driver, and what its volumes are good for."""

    provisioner: str
    """In a StorageClass; with a leading dot if each cluster puts a prefix before it."""
    name: str
    kind: StorageKind
    advice: str
    """What it is good and bad at, for checkpoints."""
    source: str
    throughput: str = ""
    """As published; empty if clusters differ."""
    zonal: bool = False
    """Whether a volume is in one zone, and machines elsewhere cannot mount it or pay for the traffic."""
    snapshots: bool = False
    """Whether it takes VolumeSnapshots."""
    mount_options: tuple[str, ...] = ()
    """Options that its StorageClass should have."""
    size_parameter: str = ""
    """The parameter of the class on which the smallest size depends."""
    smallest: Mapping[str, int] = field(default_factory=dict[str, int])
    """Smallest volume in bytes by the value of `size_parameter`; the empty value is that of a class without it."""
    former: str = ""
    """Name of the provisioner that was built into Kubernetes, which classes may still use."""
    is_csi: bool = True
    """Whether a CSIDriver object of this name shows that it is installed."""

    def smallest_of(self, storage_class: KubeObject) -> int:
        """Smallest volume of a class, in bytes; 0 if it is small, or not known."""
        given = {key.lower(): value for key, value in storage_class.get("parameters", {}).items()}
        value = given.get(self.size_parameter.lower(), "")
        return self.smallest.get(value.lower(), 0)

    def csi_driver_of(self, storage_class: KubeObject) -> str:
        """Name of the CSIDriver object of a class; empty if there is none."""
        provisioner = storage_class["provisioner"]
        if not self.is_csi:
            return ""
        return self.provisioner if provisioner == self.former else provisioner


_LOCKS = "Without `flock` runs cannot lock a checkpoint folder against each other."
_DISK = "For the first tier (`pod.volumes` with `ephemeral`, and `checkpoint.local`); never for `volume`."
_OBJECTS = (
    "For datasets, read-only. Checkpoints: the URL itself as `checkpoint.path`, because a rename here copies, or fails."
)
_AWS = "https://docs.aws.amazon.com"
_GOOGLE = "https://docs.cloud.google.com"
_AZURE = "https://learn.microsoft.com/en-us/azure"
_ORACLE = "https://docs.oracle.com/en-us/iaas/Content/ContEng/Tasks"

_ROWS = (
    StorageDriver(
        provisioner="fsx.csi.aws.com",
        name="FSx for Lustre",
        kind=StorageKind.FILES,
        throughput="125 to 1000 MB/s per TiB (`perUnitStorageThroughput`)",
        advice="Good for large checkpoints of many nodes. `deploymentType: SCRATCH_…`, the default, has no replicas: "
        f"use PERSISTENT_2. {_LOCKS}",
        zonal=True,
        mount_options=("flock",),
        size_parameter="storageType",
        smallest={"": 1200 * GIB, "ssd": 1200 * GIB},
        source=f"{_AWS}/fsx/latest/LustreGuide/ssd-storage.html; https://github.com/kubernetes-sigs/aws-fsx-csi-driver",
    ),
    StorageDriver(
        provisioner="efs.csi.aws.com",
        name="EFS",
        kind=StorageKind.FILES,
        throughput="elastic: writes 1 to 5 GiB/s per file system, 1.5 GiB/s per machine",
        advice="Grows by itself; in all zones. Milliseconds per file operation: few large files, no dataset of small "
        "ones. Access points map all users to one: `user` must be theirs.",
        source=f"{_AWS}/efs/latest/ug/performance.html",
    ),
    StorageDriver(
        provisioner="s3.csi.aws.com",
        name="Mountpoint for S3",
        kind=StorageKind.OBJECTS,
        advice=_OBJECTS,
        source="https://github.com/awslabs/mountpoint-s3/blob/main/doc/SEMANTICS.md",
    ),
    StorageDriver(
        provisioner="ebs.csi.aws.com",
        former="kubernetes.io/aws-ebs",
        name="EBS",
        kind=StorageKind.DISK,
        advice=_DISK,
        zonal=True,
        snapshots=True,
        source="https://github.com/kubernetes-sigs/aws-ebs-csi-driver",
    ),
    StorageDriver(
        provisioner="filestore.csi.storage.gke.io",
        name="Filestore",
        kind=StorageKind.FILES,
        throughput="`tier: zonal`: writes 88, reads 260 MiB/s per TiB",
        advice="Zonal and regional tiers suit small checkpoints. The default, basic HDD, writes about 100 MB/s at "
        "1 TiB: too slow for more than a test.",
        zonal=True,
        snapshots=True,
        size_parameter="tier",
        smallest={
            **dict.fromkeys(("", "standard", "basic_hdd", "regional"), 100 * GIB),
            **dict.fromkeys(("enterprise", "zonal"), TIB),
            **dict.fromkeys(("premium", "basic_ssd"), 2560 * GIB),
            "high_scale_ssd": 10 * TIB,
        },
        source=f"{_GOOGLE}/filestore/docs/service-tiers-zonal; {_GOOGLE}/filestore/docs/csi-driver",
    ),
    StorageDriver(
        provisioner="lustre.csi.storage.gke.io",
        name="Managed Lustre (Google)",
        kind=StorageKind.FILES,
        throughput="125 to 1000 MB/s per TiB (`perUnitStorageThroughput`)",
        advice=f"Good for large checkpoints of many nodes. {_LOCKS}",
        zonal=True,
        mount_options=("flock",),
        size_parameter="perUnitStorageThroughput",
        smallest={"": 9000 * GIB, "1000": 9000 * GIB, "500": 18_000 * GIB, "250": 36_000 * GIB, "125": 72_000 * GIB},
        source=f"{_GOOGLE}/managed-lustre/docs/performance-tiers",
    ),
    StorageDriver(
        provisioner="gcsfuse.csi.storage.gke.io",
        name="Cloud Storage FUSE",
        kind=StorageKind.OBJECTS,
        advice=_OBJECTS,
        source=f"{_GOOGLE}/storage/docs/cloud-storage-fuse/overview",
    ),
    StorageDriver(
        provisioner="pd.csi.storage.gke.io",
        former="kubernetes.io/gce-pd",
        name="Persistent Disk, Hyperdisk",
        kind=StorageKind.DISK,
        advice=f"{_DISK} Hyperdisk ML is ReadOnlyMany: for datasets.",
        zonal=True,
        snapshots=True,
        source=f"{_GOOGLE}/kubernetes-engine/docs/how-to/persistent-volumes/gce-pd-csi-driver",
    ),
    StorageDriver(
        provisioner="azurelustre.csi.azure.com",
        name="Azure Managed Lustre",
        kind=StorageKind.FILES,
        throughput="40 to 500 MB/s per TiB (`sku-name`)",
        advice=f"Good for large checkpoints of many nodes; Ubuntu nodes only. {_LOCKS}",
        zonal=True,
        mount_options=("noatime", "flock"),
        size_parameter="sku-name",
        smallest={
            f"amlfs-durable-premium-{rate}": size * TIB for rate, size in ((40, 48), (125, 16), (250, 8), (500, 4))
        },
        source=f"{_AZURE}/aks/azure-managed-lustre-dynamic-provisioning-reference",
    ),
    StorageDriver(
        provisioner="file.csi.azure.com",
        former="kubernetes.io/azure-file",
        name="Azure Files",
        kind=StorageKind.FILES,
        throughput="premium: 100 MiB/s, and 0.1 MiB/s per GiB more",
        advice="`protocol: nfs` on a premium share, for small checkpoints. With SMB, the default, all files belong to "
        "one user, and every file operation is slow.",
        mount_options=("nconnect=4", "noresvport"),
        size_parameter="skuname",
        snapshots=True,
        smallest=dict.fromkeys(("premium_lrs", "premium_zrs"), 100 * GIB),
        source=f"{_AZURE}/aks/create-volume-azure-files; {_AZURE}/storage/files/understanding-billing",
    ),
    StorageDriver(
        provisioner="disk.csi.azure.com",
        former="kubernetes.io/azure-disk",
        name="Azure Disk",
        kind=StorageKind.DISK,
        advice=f"{_DISK} ReadWriteMany exists for raw blocks only.",
        zonal=True,
        snapshots=True,
        source="https://github.com/kubernetes-sigs/azuredisk-csi-driver",
    ),
    StorageDriver(
        provisioner="fss.csi.oraclecloud.com",
        name="File Storage (Oracle)",
        kind=StorageKind.FILES,
        advice="NFS; its mount target limits the rate. For small checkpoints.",
        source=f"{_ORACLE}/contengcreatingpersistentvolumeclaim_Provisioning_PVCs_on_FSS.htm",
    ),
    StorageDriver(
        provisioner="lustre.csi.oraclecloud.com",
        name="File Storage with Lustre (Oracle)",
        kind=StorageKind.FILES,
        advice=f"Good for large checkpoints of many nodes; machines need Lustre's client. {_LOCKS}",
        zonal=True,
        mount_options=("flock",),
        source=f"{_ORACLE}/contengcreatingpersistentvolumeclaim_Provisioning_PVCs_on_Lustre.htm",
    ),
    StorageDriver(
        provisioner="blockvolume.csi.oraclecloud.com",
        name="Block Volume (Oracle)",
        kind=StorageKind.DISK,
        advice=_DISK,
        zonal=True,
        snapshots=True,
        source="https://github.com/oracle/oci-cloud-controller-manager",
    ),
    StorageDriver(
        provisioner=".cephfs.csi.ceph.com",
        name="CephFS (Rook)",
        kind=StorageKind.FILES,
        advice="Its rate is that of its disks and network. Datasets of many small files need several metadata servers.",
        snapshots=True,
        source="https://rook.io/docs/rook/latest/Storage-Configuration/Shared-Filesystem-CephFS/filesystem-storage",
    ),
    StorageDriver(
        provisioner=".rbd.csi.ceph.com",
        name="Ceph RBD (Rook)",
        kind=StorageKind.DISK,
        advice=f"{_DISK} ReadWriteMany exists for raw blocks only.",
        snapshots=True,
        source="https://rook.io/docs/rook/latest/Storage-Configuration/Block-Storage-RBD/block-storage",
    ),
    StorageDriver(
        provisioner="csi.juicefs.com",
        name="JuiceFS",
        kind=StorageKind.FILES,
        advice="Files in an object store, names in a database. Good for datasets, with its cache on local disks. For "
        "checkpoints without `writeback`: that option commits before the store has the data.",
        source="https://juicefs.com/docs/csi/introduction; https://juicefs.com/docs/community/guide/cache",
    ),
    StorageDriver(
        provisioner="csi.weka.io",
        name="WEKA",
        kind=StorageKind.FILES,
        advice="Good for large checkpoints of many nodes, and for datasets of small files.",
        snapshots=True,
        source="https://docs.weka.io/appendices/weka-csi-plugin; https://github.com/weka/csi-wekafs",
    ),
    StorageDriver(
        provisioner="nfs.csi.k8s.io",
        name="NFS server",
        kind=StorageKind.FILES,
        advice="Its rate is that of one server. Not with `nolock`, nor with an export that is `async`: the server "
        "would confirm what it has not written.",
        snapshots=True,
        mount_options=("nfsvers=4.1", "hard"),
        source="https://github.com/kubernetes-csi/csi-driver-nfs",
    ),
    StorageDriver(
        provisioner="rancher.io/local-path",
        name="Local path (Rancher)",
        kind=StorageKind.DISK,
        is_csi=False,
        advice=_DISK,
        source="https://github.com/rancher/local-path-provisioner",
    ),
    StorageDriver(
        provisioner="kubernetes.io/no-provisioner",
        name="Local volumes",
        kind=StorageKind.DISK,
        is_csi=False,
        advice=_DISK,
        source="https://kubernetes.io/docs/concepts/storage/volumes/#local",
    ),
)

CATALOG: Mapping[str, StorageDriver] = MappingProxyType({row.provisioner: row for row in _ROWS})
"""All drivers by the name of their provisioner."""


def find_driver(provisioner: str) -> StorageDriver | None:
    """The driver of a StorageClass's provisioner; None if the catalogue does not have it."""
    named = (row for row in _ROWS if provisioner in (row.provisioner, row.former))
    prefixed = (row for row in _ROWS if row.provisioner.startswith(".") and f".{provisioner}".endswith(row.provisioner))
    return next(named, next(prefixed, None))


def class_of(classes: Sequence[KubeObject], name: str | None) -> KubeObject | None:
    """The class with a name, or without a name the default one; None if there is none."""
    for each in classes:
        metadata = each["metadata"]
        if metadata["name"] == name or (name is None and metadata.get("annotations", {}).get(DEFAULT_CLASS) == "true"):
            return each
    return None


def shared_driver(storage_class: KubeObject) -> StorageDriver | None:
    """The driver of a class whose volumes many machines mount for writing; None if it is another, or unknown."""
    driver = find_driver(storage_class["provisioner"])
    return driver if driver is not None and driver.kind is StorageKind.FILES else None
