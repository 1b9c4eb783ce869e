"""Fabrics of cloud providers, one row each: Amazon, Google, Microsoft, Oracle, CoreWeave.

Names of devices, networks and images are those that the providers publish; a target's `fabric_device` overrides them.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.fabric.fabric import DeviceClaim, Fabric, PodAccess, Sidecar, Variable
from holdfast.fabric.verbs import SHARED_DEVICES, VERBS, only_network

# Up to 1.11 the plugin's only network name was "AWS Libfabric"; later versions accept both names, so the old name works
# with every version. libfabric's EFA provider allocates its buffers in huge pages, which a container must request. A
# machine has 1 to 32 adapters, depending on its type; a job that requests fewer wastes bandwidth.
_EFA = Fabric(
    name="efa",
    description="AWS Elastic Fabric Adapter through libfabric and the image's aws-ofi-nccl plugin.",
    variables=(
        only_network("AWS Libfabric"),
        Variable("FI_PROVIDER", "efa", "libfabric takes no other provider, such as its own TCP."),
    ),
    network="AWS Libfabric",
    expected_bandwidth="per node: p4d 400, p5 3200 Gbit/s",
    port_gbit_s=100,
    source="https://github.com/aws/aws-ofi-nccl/pull/530; "
    "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html; "
    "https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html",
    pod=PodAccess(resource="vpc.amazonaws.com/efa", huge_pages="5Gi"),
)


def _efa(machine: str, adapters: int, gbit_s: int) -> Fabric:
    return replace(
        _EFA,
        name=f"efa-{machine}",
        description=f"AWS Elastic Fabric Adapter with all {adapters} adapters of a {machine} machine.",
        expected_bandwidth=f"per node: {gbit_s} Gbit/s",
        pod=replace(_EFA.pod, per_node=adapters),
    )


_NVIDIA = ("/home/kubernetes/bin/nvidia/lib64", "/usr/local/nvidia/lib64")
_LIBRARIES = Variable(
    "LD_LIBRARY_PATH", "/usr/local/nvidia/lib64", "The installer puts NCCL and the plugin there, next to the driver."
)
_GPU_DEVICES = (*(f"/dev/nvidia{gpu}" for gpu in range(8)), "/dev/nvidiactl", "/dev/nvidia-uvm")
_CHUNKS = tuple(
    Variable(name, value, "The size that Google's profile gives its plugin's transfers.")
    for name, value in (
        ("NCCL_DYNAMIC_CHUNK_SIZE", "524288"),
        ("NCCL_P2P_NET_CHUNKSIZE", "524288"),
        ("NCCL_P2P_PCI_CHUNKSIZE", "524288"),
        ("NCCL_P2P_NVL_CHUNKSIZE", "1048576"),
    )
)
_CONTROL = "Only eth0 is on the cluster's own network; the others carry data of GPUs."
_RAILS = "Each GPU sends over the adapter next to it."
_GKE = "https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"
_GKE_MANIFESTS = "https://github.com/GoogleCloudPlatform/container-engine-accelerators/tree/master"

# The daemon must be in the ranks' network namespace, and ends with them as a sidecar container (Kubernetes 1.29).
_TCPX_DAEMON = Sidecar(
    name="tcpx-daemon",
    image="us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.15",
    command=(
        *("/tcpgpudmarxd/build/app/tcpgpudmarxd", "--gpu_nic_preset", "a3vm", "--gpu_shmem_type", "fd"),
        *("--uds_path", "/run/tcpx", "--setup_param", "--verbose 128 2 0 "),
    ),
    capabilities=("NET_ADMIN",),
    env=(("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64"),),
    mounts=(_NVIDIA, ("/run/tcpx", "/run/tcpx"), ("/sys", "/hostsysfs"), ("/proc/sys", "/hostprocsysfs")),
    devices=_GPU_DEVICES,
)
_TCPXO_DAEMON = Sidecar(
    name="tcpxo-daemon",
    image="us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.9",
    command=(
        *("/bin/sh", "-c"),
        "chmod 755 /fts/entrypoint_rxdm_container.sh && "
        "exec /fts/entrypoint_rxdm_container.sh --num_hops=2 --num_nics=8 --uid= --alsologtostderr",
    ),
    capabilities=("NET_ADMIN", "NET_BIND_SERVICE"),
    env=(("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64"),),
    mounts=(_NVIDIA, ("/sys", "/hostsysfs"), ("/proc/sys", "/hostprocsysfs")),
    devices=(*_GPU_DEVICES, "/dev/dmabuf_import_helper"),
)

# As published for Oracle's bare-metal shapes; the adapter names are those of BM.GPU.H100.8.
_OKE = (
    only_network("IB"),
    Variable("NCCL_IB_SPLIT_DATA_ON_QPS", "0", "Each message goes over one queue pair, as Oracle measured it."),
    Variable("NCCL_IB_TC", "41", "The traffic class for which the switches are lossless."),
    Variable("NCCL_IB_SL", "0", "The service level that belongs to this class."),
    Variable("NCCL_IB_TIMEOUT", "22", "A connection outlives a change of route in the fabric."),
    Variable("NCCL_SOCKET_IFNAME", "eth0", "NCCL sets up over the front-end network, which reaches every node."),
    Variable("NCCL_IGNORE_CPU_AFFINITY", "1", "The affinity that containers see is not that of GPU and adapter."),
)
_OKE_FIXED = (
    Variable("NCCL_CUMEM_ENABLE", "0", "Oracle's published setting for these shapes."),
    Variable("NCCL_IB_GID_INDEX", "3", "The index of the RoCE v2 address on these adapters."),
)
_OKE_HCAS = "=" + ",".join(f"mlx5_{port}" for port in (0, 1, *range(3, 11), *range(12, 18)))
_OKE_MANIFESTS = "https://github.com/oracle-quickstart/oci-hpc-oke/tree/main/manifests/nccl-tests"

CLOUD_FABRICS = (
    _EFA,
    _efa("p4d", 4, 400),
    _efa("p5", 32, 3200),
    _efa("p5en", 16, 3200),
    _efa("p6-b200", 8, 3200),
    Fabric(
        name="gke-tcpx",
        description="GPUDirect-TCPX of Google's A3 High machines: TCP that the adapter writes into GPU memory.",
        variables=(
            only_network("GPUDirectTCPX_v7"),
            _LIBRARIES,
            Variable("NCCL_SOCKET_IFNAME", "eth0", _CONTROL),
            Variable("NCCL_GPUDIRECTTCPX_CTRL_DEV", "eth0", _CONTROL),
            Variable("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", "eth1,eth2,eth3,eth4", _RAILS),
            Variable("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX", "/run/tcpx", "Where the daemon listens."),
            Variable("NCCL_GPUDIRECTTCPX_FORCE_ACK", "0", "Google's profile: no acknowledgement per message."),
            Variable("NCCL_CROSS_NIC", "0", _RAILS),
            Variable("NCCL_NET_GDR_LEVEL", "PIX", _RAILS),
            Variable("NCCL_P2P_PXN_LEVEL", "0", _RAILS),
            Variable("NCCL_ALGO", "Ring", "The plugin is made for rings of large messages."),
            Variable("NCCL_PROTO", "Simple", "The plugin is made for rings of large messages."),
            Variable("NCCL_NSOCKS_PERTHREAD", "4", "One connection does not fill an adapter."),
            Variable("NCCL_SOCKET_NTHREADS", "1", "One connection does not fill an adapter."),
            *_CHUNKS,
        ),
        network="GPUDirectTCPX_v7",
        expected_bandwidth="per node: 4 adapters of 200 Gbit/s",
        port_gbit_s=200,
        source=f"{_GKE}; {_GKE_MANIFESTS}/gpudirect-tcpx",
        pod=PodAccess(
            gke_interfaces=tuple((f"eth{rail}", f"vpc{rail}") for rail in range(1, 5)),
            capabilities=("IPC_LOCK",),
            mounts=(_NVIDIA, ("/run/tcpx", "/run/tcpx")),
            sidecar=_TCPX_DAEMON,
            daemon_sets=("kube-system/nccl-tcpx-installer", "kube-system/device-injector"),
            gpus=8,
        ),
    ),
    Fabric(
        name="gke-tcpxo",
        description="GPUDirect-TCPXO (FasTrak) of Google's A3 Mega machines.",
        variables=(
            only_network("FasTrak"),
            _LIBRARIES,
            Variable("NCCL_SOCKET_IFNAME", "eth0", _CONTROL),
            Variable("NCCL_FASTRAK_CTRL_DEV", "eth0", _CONTROL),
            Variable("NCCL_FASTRAK_IFNAME", ",".join(f"eth{rail}" for rail in range(1, 9)), _RAILS),
            Variable("NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY", "/dev/aperture_devices", "Where the pod has the devices."),
            Variable("NCCL_FASTRAK_USE_LLCM", "1", "Small messages go through the adapter's low-latency memory."),
            Variable("NCCL_FASTRAK_USE_SNAP", "1", "The transport of these adapters."),
            Variable("NCCL_FASTRAK_NUM_FLOWS", "2", "One flow does not fill an adapter."),
            Variable("NCCL_FASTRAK_ENABLE_CONTROL_CHANNEL", "0", "Google's profile for these machines."),
            Variable("NCCL_FASTRAK_PLUGIN_ACCEPT_TIMEOUT_MS", "600000", "Other nodes may load their code for minutes."),
            Variable("NCCL_BUFFSIZE", "8388608", "Google's profile: buffers for its plugin's transfers."),
            Variable("NCCL_CROSS_NIC", "0", _RAILS),
            Variable("NCCL_NET_GDR_LEVEL", "PIX", _RAILS),
            Variable(
                "NCCL_TUNER_PLUGIN", "libnccl-tuner.so", "The plugin needs its own choice of algorithm and protocol."
            ),
            Variable(
                "NCCL_TUNER_CONFIG_PATH", "/usr/local/nvidia/lib64/a3plus_tuner_config.textproto", "The tuner's table."
            ),
            Variable(
                "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE",
                "/usr/local/nvidia/lib64/a3plus_guest_config.textproto",
                "The plugin checks these variables against it, and warns.",
            ),
            *_CHUNKS,
        ),
        network="FasTrak",
        expected_bandwidth="per node: 8 adapters of 200 Gbit/s",
        port_gbit_s=200,
        source=f"{_GKE}; {_GKE_MANIFESTS}/gpudirect-tcpxo; "
        "https://docs.nvidia.com/aicr/integrator-guide/gke-tcpxo-networking",
        pod=PodAccess(
            gke_interfaces=tuple((f"eth{rail}", f"vpc{rail}") for rail in range(1, 9)),
            capabilities=("IPC_LOCK",),
            mounts=(_NVIDIA, ("/dev/aperture_devices", "/dev/aperture_devices")),
            sidecar=_TCPXO_DAEMON,
            daemon_sets=("kube-system/nccl-tcpxo-installer", "kube-system/device-injector"),
            gpus=8,
        ),
    ),
    Fabric(
        name="gke-rdma",
        description="RoCE of Google's A3 Ultra and A4 machines through the gIB plugin.",
        variables=(
            only_network("gIB"),
            _LIBRARIES,
            Variable("NCCL_SOCKET_IFNAME", "eth0", _CONTROL),
            Variable("NCCL_CROSS_NIC", "0", _RAILS),
            Variable("NCCL_NET_GDR_LEVEL", "PIX", _RAILS),
            Variable("NCCL_P2P_NET_CHUNKSIZE", "131072", "Google's profile for these machines."),
            Variable("NCCL_NVLS_CHUNKSIZE", "524288", "Google's profile for these machines."),
            Variable("NCCL_IB_ADAPTIVE_ROUTING", "1", "The fabric spreads packets over its paths."),
            Variable("NCCL_IB_QPS_PER_CONNECTION", "4", "Several flows per connection use several paths."),
            Variable("NCCL_IB_TC", "52", "The traffic class of data in this fabric."),
            Variable("NCCL_IB_FIFO_TC", "84", "The traffic class of control messages in this fabric."),
        ),
        network="gIB",
        expected_bandwidth="per node: 8 adapters of 400 Gbit/s",
        port_gbit_s=400,
        source=f"https://cloud.google.com/ai-hypercomputer/docs/create/gke-ai-hypercompute-custom; "
        f"{_GKE_MANIFESTS}/gpudirect-rdma",
        pod=PodAccess(
            # eth1 is the machine's second general interface, which pods do not get.
            gke_interfaces=tuple((f"eth{rail + 2}", f"rdma-{rail}") for rail in range(8)),
            capabilities=("IPC_LOCK",),
            mounts=(
                ("/home/kubernetes/bin/nvidia", "/usr/local/nvidia"),
                ("/home/kubernetes/bin/gib", "/usr/local/gib"),
            ),
            daemon_sets=("kube-system/nccl-rdma-installer",),
        ),
    ),
    Fabric(
        name="aks-infiniband",
        description="InfiniBand of Azure's ND machines (AKS), from the network operator's shared device plugin.",
        variables=(
            *VERBS,
            Variable("NCCL_IB_PCI_RELAXED_ORDERING", "1", "Virtual machines reach the line rate only with it."),
            Variable(
                "NCCL_SOCKET_IFNAME", "eth0", "NCCL sets up over the front-end network, which reaches every node."
            ),
        ),
        network="IB",
        expected_bandwidth="per node: ND A100 v4 8 ports of 200, ND H100 v5 8 ports of 400 Gbit/s",
        port_gbit_s=200,
        source="https://github.com/Azure/aks-rdma-infiniband; "
        "https://github.com/JonShelley/azure/tree/master/benchmarking/NDv4",
        pod=replace(SHARED_DEVICES, resource="rdma/hca_shared_devices_a"),
    ),
    Fabric(
        name="oke-roce",
        description="RoCE of Oracle's bare-metal GPU shapes (OKE) on the host network; the adapters are those of H100.",
        variables=(
            *_OKE,
            *_OKE_FIXED,
            Variable("NCCL_IB_HCA", _OKE_HCAS, "All adapters of the fabric, and not those of the front-end network."),
        ),
        network="IB",
        expected_bandwidth="per node: 16 ports of 200 Gbit/s",
        port_gbit_s=200,
        source=f"{_OKE_MANIFESTS}/host-network",
        pod=PodAccess(
            capabilities=("IPC_LOCK",),
            host_network=True,
            privileged=True,
            mounts=(("/dev/infiniband", "/dev/infiniband"),),
        ),
    ),
    Fabric(
        name="oke-sriov",
        description="RoCE of Oracle's bare-metal GPU shapes (OKE) through virtual functions; 16 as on H100.",
        variables=(
            *_OKE,
            *_OKE_FIXED,
            Variable("NCCL_IB_HCA", "mlx5", "The functions that the pod has, whatever their numbers."),
        ),
        network="IB",
        expected_bandwidth="per node: 16 ports of 200 Gbit/s",
        port_gbit_s=200,
        source=f"{_OKE_MANIFESTS}/virtual-functions",
        pod=PodAccess(
            resource="nvidia.com/rdma-vf",
            per_node=16,
            multus_attached=True,
            capabilities=("IPC_LOCK",),
            privileged=True,
            mounts=(("/dev/infiniband", "/dev/infiniband"),),
        ),
    ),
    Fabric(
        # NCCL finds the address of each interface itself, so no GID index is set.
        name="oke-dranet",
        description="RoCE of Oracle's bare-metal GPU shapes (OKE), allocated by DRANET; 16 as on A100 and H100.",
        variables=(
            *_OKE,
            Variable("NCCL_IB_QPS_PER_CONNECTION", "4", "Several flows per connection use several paths."),
        ),
        network="IB",
        expected_bandwidth="per node: 16 ports of 100 (A100) or 200 Gbit/s (H100)",
        port_gbit_s=100,
        source=f"{_OKE_MANIFESTS}/dranet; https://github.com/kubernetes-sigs/dranet",
        pod=PodAccess(
            claim=DeviceClaim(
                device_class="dra.net",
                count=16,
                selector='has(device.attributes["dra.net"].ifName) && '
                'device.attributes["dra.net"].ifName.startsWith("rdma")',
            ),
            capabilities=("IPC_LOCK",),
        ),
    ),
    Fabric(
        name="coreweave",
        description="InfiniBand of CoreWeave's machines; one device gives a pod all adapters.",
        variables=(
            *VERBS,
            Variable("NCCL_SOCKET_IFNAME", "eth0", "NCCL sets up over the pod network, which reaches every node."),
        ),
        network="IB",
        expected_bandwidth="per port: HDR 200, NDR 400, XDR 800 Gbit/s",
        port_gbit_s=200,
        source="https://docs.coreweave.com/products/networking/hpc-interconnect/use-gpudirect-rdma",
        pod=replace(SHARED_DEVICES, resource="rdma/ib"),
    ),
)
