from collections.abc import Iterator
from pathlib import Path

import pytest
import re2
from tests.diagnose.log_lines import diagnose_lines

from holdfast.diagnose.failure_classes import FAILURE_CLASS_INFO, Confidence, FailureClass
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.evidence_requests import EVIDENCE_REQUESTS
from holdfast.diagnose.rules.rule import Role, Rule

PAIRS = [(rule, pattern, line) for rule in RULES.values() for pattern, line in rule.matches.items()]
LINES = [row.split("\t", 1) for row in Path(__file__).with_name("rule_lines.tsv").read_text().splitlines()[1:]]


def test_every_pattern_matches_the_line_beside_it():
    assert [(rule.code, pattern) for rule, pattern, line in PAIRS if not re2.search(pattern, line)] == []


def test_line_beside_a_pattern_is_one_of_a_log_and_not_a_pattern():
    quoted = [(rule.code, line) for rule, _, line in PAIRS if any(f"|{other}" in line for other in rule.matches)]
    assert quoted == []


def test_rules_match_the_same_lines_of_other_versions():
    assert [(code, line) for code, line in LINES if not re2.search(RULES[code].pattern, line)] == []


def test_every_rule_names_facts_and_classes_that_fit_its_role():
    assert {code: wrong for code, rule in RULES.items() if (wrong := list(misfits(rule)))} == {}


def misfits(rule: Rule) -> Iterator[str]:
    """What of a rule does not fit its role."""
    fits = {
        "needs": set(rule.needs) <= set(EVIDENCE_REQUESTS),
        "classes": (bool(rule.classes) or rule.role is not Role.CAUSE) and FailureClass.UNKNOWN not in rule.classes,
    }
    if rule.role is Role.CAUSE:
        fits["remedy"] = bool(rule.remedy) or rule.confidence is Confidence.UNSURE
        fits["needs of what is not certain"] = bool(rule.needs) or rule.confidence is Confidence.CERTAIN
    else:
        fits["confidence"] = rule.confidence is Confidence.UNSURE
    return (name for name, well in fits.items() if not well)


def test_every_class_has_words():
    assert set(FAILURE_CLASS_INFO) == set(FailureClass)


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
        "detected NVSwitch non-fatal error 10003 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 3",
        "        Double Bit ECC              : 0",
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
    answer = diagnose_lines(line)
    assert (answer.failure_class, answer.evidence) == (FailureClass.UNKNOWN, ())


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        ("Taints:             node.kubernetes.io/unreachable:NoExecute", FailureClass.NODE_LOST),
        ("nvvs: DCGM diagnostic memtest: Fail on GPU 0", FailureClass.GPU_XID),
        ("NVRM: GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", FailureClass.GPU_XID),
        ("NVSwitch fatal error on link 0", FailureClass.GPU_XID),
        ("mlx5_0 port 1 symbol_error 12", FailureClass.NETWORK_LOSS),
        ("Stragglers detected: rank 5 on node n0", FailureClass.STRAGGLER),
    ],
)
def test_fault_that_a_line_says_is_there_is_one(line: str, failure_class: FailureClass):
    assert diagnose_lines(line).failure_class is failure_class


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        ("srun: unrecognized option '--container-image'", FailureClass.NOT_STARTED),
        ("sbatch: unrecognized option '--gpus-per-taks=1'", FailureClass.NOT_STARTED),
        ('admission webhook "vjob.kb.io" denied the request: spec.queue: not found', FailureClass.NOT_STARTED),
        ("ssh: Could not resolve hostname gpu-7:4: Name or service not known", FailureClass.VERSION_MISMATCH),
        ("ssh: Could not resolve hostname gpu-7: Name or service not known", FailureClass.RENDEZVOUS),
        ("Error: No available node types can fulfill resource request {'GPU': 16.0}.", FailureClass.NOT_STARTED),
        (
            "Error: No available node types can fulfill resource request {'node:192.0.2.7': 0.001, 'GPU': 1.0}.",
            FailureClass.WRONG_INTERFACE,
        ),
        ("THDiskFile.c:356: write error: wrote 1 blocks instead of 20", FailureClass.STORAGE),
        ("(raylet) System memory low at node with IP 192.0.2.7. Used memory (30.1GB)", FailureClass.OOM_HOST),
        ("ibgda.cpp:nvshmemt_init:3626: neither nv_peer_mem, or nvidia_peermem detected", FailureClass.DRIVER),
        ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", FailureClass.GPU_XID),
        ("NVRM: Timeout after 45s of waiting for RPC response from GPU0 GSP!", FailureClass.GPU_XID),
        ("OVERFLOW! Rank 3 Skipping step. Attempted loss scale: 1.0, reducing to 1.0", FailureClass.NAN_DATA),
    ],
)
def test_fault_is_known_in_the_words_of_who_writes_it(line: str, failure_class: FailureClass):
    answer = diagnose_lines(line)
    assert answer.failure_class is failure_class
    assert answer.confidence is not Confidence.CERTAIN


@pytest.mark.parametrize(
    ("line", "code", "failure_class"),
    [
        ("init failed for transport: IBRC", "nvshmem-no-transport", FailureClass.RDMA_DEVICE_MISSING),
        ("transport.cpp: nvshmem initialization failed, exiting", "nvshmem-init-failed", FailureClass.DRIVER),
        ("DeepEP dispatch NVL receiver timeout, channel: 1", "deepep-timeout", FailureClass.NETWORK_LOSS),
        (
            "NCCL WARN Call to ibv_reg_dmabuf_mr failed with error Operation not supported",
            "dmabuf-refused",
            FailureClass.DRIVER,
        ),
        ("Couldn't allocate MR", "gpu-memory-region", FailureClass.GDR_MISSING),
        ("RuntimeError: DataLoader timed out after 600 seconds", "dataloader-timeout", FailureClass.STORAGE),
        ("                Physical state: Polling", "rdma-port-down", FailureClass.NETWORK_LOSS),
        (
            "RuntimeError: DataLoader worker (pid xxx) is killed by signal: Killed",
            "data-worker-killed",
            FailureClass.OOM_HOST,
        ),
    ],
)
def test_line_of_several_causes_is_a_question(line: str, code: str, failure_class: FailureClass):
    answer = diagnose_lines(line)
    assert (answer.failure_class, answer.code) == (FailureClass.UNKNOWN, code)
    assert any(failure_class in missing.distinguishes for missing in answer.next_evidence)


def test_port_that_nobody_plugged_in_or_turned_off_is_no_fault():
    answer = diagnose_lines(
        "Physical state: Disabled", "state DOWN physical_state DISABLED", "state ACTIVE physical_state LINK_UP"
    )
    assert (answer.failure_class, answer.evidence) == (FailureClass.UNKNOWN, ())


def test_image_without_verbs_is_no_fault_where_the_node_has_no_rdma():
    answer = diagnose_lines("n1:8:9 [0] NCCL INFO Failed to open libibverbs.so[.1]")
    assert answer.failure_class is FailureClass.UNKNOWN
    assert any("/sys/class/infiniband" in each.how for each in answer.next_evidence)


def test_bridge_in_a_list_of_interfaces_is_a_question_and_a_link_local_address_an_answer():
    listed = "n1:8:9 [0] NCCL INFO NET/Socket : Using [0]eno1:10.0.0.1<0> [1]virbr0:192.168.122.1<0>"
    answer = diagnose_lines(listed)
    assert answer.failure_class is FailureClass.UNKNOWN
    assert any(FailureClass.WRONG_INTERFACE in each.distinguishes for each in answer.next_evidence)
    answer = diagnose_lines(listed.replace("192.168.122.1", "fe80::5c1:aff:fe05:1%virbr0"))
    assert (answer.failure_class, answer.confidence) == (FailureClass.WRONG_INTERFACE, Confidence.LIKELY)


NO_DEVICE = "n1:8:9 [0] NCCL INFO NET/IB : No device found."


def test_node_without_rdma_is_no_fault_of_a_job_that_was_not_told_to_use_it():
    answer = diagnose_lines(NO_DEVICE)
    assert answer.failure_class is FailureClass.UNKNOWN
    assert any("/sys/class/infiniband" in each.how for each in answer.next_evidence)


@pytest.mark.parametrize(
    "line",
    [
        "n1:8:9 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.",
        "n1:8:9 [0] NCCL INFO NCCL_IB_HCA set to mlx5_0",
        "n1:8:9 [0] misc/ibvwrap.cc:212 NCCL WARN Call to ibv_open_device failed",
    ],
)
def test_node_without_rdma_is_one_of_a_job_that_was(line: str):
    answer = diagnose_lines(line, NO_DEVICE)
    assert (answer.failure_class, answer.confidence) == (FailureClass.RDMA_DEVICE_MISSING, Confidence.LIKELY)


def test_health_check_of_a_gpu_is_not_certain():
    answer = diagnose_lines("'nvidia.com/gpu' device marked unhealthy: GPU-8c1e2b52-0000-0000-0000-000000000000")
    assert (answer.failure_class, answer.confidence) == (FailureClass.GPU_XID, Confidence.LIKELY)


@pytest.mark.parametrize(
    "line",
    [
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "    Reason: CrashLoopBackOff",
    ],
)
def test_end_that_another_process_tells_of_is_a_consequence(line: str):
    answer = diagnose_lines(line)
    assert answer.failure_class is FailureClass.UNKNOWN
    assert answer.next_evidence


def test_message_too_long_for_its_receiver_may_be_of_calls_that_differ():
    answer = diagnose_lines(
        "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> with status=1 "
        "opcode=0 len=0 vendor err 105 (Recv)"
    )
    assert (answer.failure_class, answer.confidence) == (FailureClass.NETWORK_LOSS, Confidence.LIKELY)
    assert any(FailureClass.COLLECTIVE_MISMATCH in each.distinguishes for each in answer.next_evidence)
