import pytest
import re2
from tests.diagnose.logs import told

from holdfast.diagnose.classes import MEANINGS, Class
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.deciding import DECIDING
from holdfast.diagnose.rules.row import Role, Rule, Sureness

ROWS = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@ROWS
def test_rule_recognises_the_lines_it_quotes(rule: Rule):
    assert bool(rule.lines) == bool(rule.pattern)
    for line in rule.lines:
        assert re2.search(rule.pattern, line), line


@ROWS
def test_rule_names_facts_and_classes_that_fit_its_role(rule: Rule):
    assert not set(rule.decides) - set(DECIDING)
    if rule.role is Role.PRIMARY:
        assert rule.classes
        assert rule.remedy or rule.sure is Sureness.UNSURE
        assert rule.decides or rule.sure is Sureness.CERTAIN
    else:
        assert rule.sure is Sureness.UNSURE
    assert Class.UNKNOWN not in rule.classes


def test_every_class_has_words():
    assert set(MEANINGS) == set(Class)


@pytest.mark.parametrize(
    "line",
    [
        "Tolerations:                 node.kubernetes.io/not-ready:NoExecute op=Exists for 300s",
        "                             node.kubernetes.io/unreachable:NoExecute for 300s",
        "    key: node.kubernetes.io/not-ready",
        "Normal  TaintManagerEviction  pod/worker-3  Cancelling deletion of Pod train/worker-3",
        "creating security group sg-0a1 with a rule to allow all from itself",
        "check that the security group allows all traffic to itself",
        "dcgm-exporter: Failed to watch metrics: Error watching fields: the GPU does not support profiling",
        "DCGM diagnostics: 0 failed, 12 passed on GPU 3",
        "fail_early=false dcgm: no error on GPU 0",
        "nvidia-device-plugin: no unhealthy GPU found",
        "health: 0 unhealthy GPUs",
        "NVRM: GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
        "GPU recovery action is None",
        "NVLink 3: link is inactive",
        "NVLink CRC error count: 0",
        "Double-bit ECC: 0",
        "row remapping failure: No",
        "NVSwitch: 0 Fatal errors",
        "port_rcv_errors: 0",
        "link_downed 0 symbol_error 0 port_rcv_errors 0 out_of_sequence 0",
        "Stragglers detected: none",
        "        HW Thermal Slowdown               : Not Active",
        "timestamp, clocks_throttle_reasons.hw_thermal_slowdown",
        "checkpoint manager: no corrupt checkpoint found",
        "nvme0n1: timeout set to 30s",
        "metadata instance-action endpoint polled: 404",
        "n1:8:9 [0] NCCL INFO NET/IB : mlx5_3:1 Got async event : port active",
        "libibverbs: Warning: couldn't load driver 'libipathverbs-rdmav25.so': libipathverbs-rdmav25.so: cannot open",
    ],
)
def test_fault_that_a_line_says_is_not_there_is_no_cause(line: str):
    answer = told(line)
    assert (answer.klass, answer.evidence) == (Class.UNKNOWN, ())


@pytest.mark.parametrize(
    ("line", "klass"),
    [
        ("Taints:             node.kubernetes.io/unreachable:NoExecute", Class.NODE_LOST),
        ("nvvs: DCGM diagnostic memtest: Fail on GPU 0", Class.GPU_XID),
        ("NVRM: GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", Class.GPU_XID),
        ("NVSwitch fatal error on link 0", Class.GPU_XID),
        ("mlx5_0 port 1 symbol_error 12", Class.NETWORK_LOSS),
        ("Stragglers detected: rank 5 on node n0", Class.STRAGGLER),
    ],
)
def test_fault_that_a_line_says_is_there_is_one(line: str, klass: Class):
    assert told(line).klass is klass


@pytest.mark.parametrize(
    ("line", "klass"),
    [
        ("srun: unrecognized option '--container-image'", Class.NOT_STARTED),
        ("sbatch: unrecognized option '--gpus-per-taks=1'", Class.NOT_STARTED),
        ('admission webhook "vjob.kb.io" denied the request: spec.queue: not found', Class.NOT_STARTED),
        ("ssh: Could not resolve hostname gpu-7:4: Name or service not known", Class.VERSION_MISMATCH),
        ("ssh: Could not resolve hostname gpu-7: Name or service not known", Class.RENDEZVOUS),
        ("Error: No available node types can fulfill resource request {'GPU': 16.0}.", Class.NOT_STARTED),
        (
            "Error: No available node types can fulfill resource request {'node:192.0.2.7': 0.001, 'GPU': 1.0}.",
            Class.WRONG_INTERFACE,
        ),
        ("THDiskFile.c:356: write error: wrote 1 blocks instead of 20", Class.STORAGE),
        ("(raylet) System memory low at node with IP 192.0.2.7. Used memory (30.1GB)", Class.OOM_HOST),
        ("ibgda.cpp:nvshmemt_init:3626: neither nv_peer_mem, or nvidia_peermem detected", Class.DRIVER),
        ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", Class.GPU_XID),
        ("NVRM: Timeout after 45s of waiting for RPC response from GPU0 GSP!", Class.GPU_XID),
        ("OVERFLOW! Rank 3 Skipping step. Attempted loss scale: 1.0, reducing to 1.0", Class.NAN_DATA),
    ],
)
def test_fault_is_known_in_the_words_of_who_writes_it(line: str, klass: Class):
    answer = told(line)
    assert answer.klass is klass
    assert answer.sure is not Sureness.CERTAIN


@pytest.mark.parametrize(
    ("line", "code", "klass"),
    [
        ("init failed for transport: IBRC", "nvshmem-no-transport", Class.RDMA_DEVICE_MISSING),
        ("transport.cpp: nvshmem initialization failed, exiting", "nvshmem-not-begun", Class.DRIVER),
        ("DeepEP dispatch NVL receiver timeout, channel: 1", "deepep-timeout", Class.NETWORK_LOSS),
        (
            "NCCL WARN Call to ibv_reg_dmabuf_mr failed with error Operation not supported",
            "dmabuf-refused",
            Class.DRIVER,
        ),
        ("Couldn't allocate MR", "gpu-memory-region", Class.GDR_MISSING),
        ("RuntimeError: DataLoader timed out after 600 seconds", "loader-waits", Class.STORAGE),
        ("                Physical state: Polling", "rdma-port-down", Class.NETWORK_LOSS),
        ("RuntimeError: DataLoader worker (pid xxx) is killed by signal: Killed", "data-worker-killed", Class.OOM_HOST),
    ],
)
def test_line_of_several_causes_is_a_question(line: str, code: str, klass: Class):
    answer = told(line)
    assert (answer.klass, answer.code) == (Class.UNKNOWN, code)
    assert any(klass in missing.decides for missing in answer.missing)


def test_port_that_nobody_plugged_in_or_turned_off_is_no_fault():
    answer = told(
        "Physical state: Disabled", "state DOWN physical_state DISABLED", "state ACTIVE physical_state LINK_UP"
    )
    assert (answer.klass, answer.evidence) == (Class.UNKNOWN, ())


def test_image_without_verbs_is_no_fault_where_the_node_has_no_rdma():
    answer = told("n1:8:9 [0] NCCL INFO Failed to open libibverbs.so[.1]")
    assert answer.klass is Class.UNKNOWN
    assert any("/sys/class/infiniband" in each.get for each in answer.missing)


def test_bridge_in_a_list_of_interfaces_is_a_question_and_a_link_local_address_an_answer():
    listed = "n1:8:9 [0] NCCL INFO NET/Socket : Using [0]eno1:10.0.0.1<0> [1]virbr0:192.168.122.1<0>"
    answer = told(listed)
    assert answer.klass is Class.UNKNOWN
    assert any(Class.WRONG_INTERFACE in each.decides for each in answer.missing)
    answer = told(listed.replace("192.168.122.1", "fe80::5c1:aff:fe05:1%virbr0"))
    assert (answer.klass, answer.sure) == (Class.WRONG_INTERFACE, Sureness.LIKELY)


NO_DEVICE = "n1:8:9 [0] NCCL INFO NET/IB : No device found."


def test_node_without_rdma_is_no_fault_of_a_job_that_was_not_told_to_use_it():
    answer = told(NO_DEVICE)
    assert answer.klass is Class.UNKNOWN
    assert any("/sys/class/infiniband" in each.get for each in answer.missing)


@pytest.mark.parametrize(
    "line",
    [
        "n1:8:9 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.",
        "n1:8:9 [0] NCCL INFO NCCL_IB_HCA set to mlx5_0",
        "n1:8:9 [0] misc/ibvwrap.cc:212 NCCL WARN Call to ibv_open_device failed",
    ],
)
def test_node_without_rdma_is_one_of_a_job_that_was(line: str):
    answer = told(line, NO_DEVICE)
    assert (answer.klass, answer.sure) == (Class.RDMA_DEVICE_MISSING, Sureness.LIKELY)


def test_health_check_of_a_gpu_is_not_certain():
    answer = told("'nvidia.com/gpu' device marked unhealthy: GPU-8c1e2b52-0000-0000-0000-000000000000")
    assert (answer.klass, answer.sure) == (Class.GPU_XID, Sureness.LIKELY)


@pytest.mark.parametrize(
    "line",
    [
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "    Reason: CrashLoopBackOff",
    ],
)
def test_end_that_another_process_tells_of_is_a_consequence(line: str):
    answer = told(line)
    assert answer.klass is Class.UNKNOWN
    assert answer.missing


def test_message_too_long_for_its_receiver_may_be_of_calls_that_differ():
    answer = told(
        "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> with status=1 "
        "opcode=0 len=0 vendor err 105 (Recv)"
    )
    assert (answer.klass, answer.sure) == (Class.NETWORK_LOSS, Sureness.LIKELY)
    assert any(Class.COLLECTIVE_MISMATCH in each.decides for each in answer.missing)
