"""What strangers see of an answer, and what they do not."""

from __future__ import annotations

import random
import string

import pytest
from tests.diagnose.log_lines import chunk, diagnose_lines

from holdfast.diagnose.redact import Redactor, redact_diagnosis
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.scanner import MAX_FACTS_PER_RULE, Scanner

LINE = (
    "gpu-a7.corp.example.com:77:91 [3] NCCL WARN Cuda failure 'out of memory' in /home/alice/secret/train.py "
    "peer 10.20.30.40<51159> token=hunter2secret bob@example.com"
)
CHANCE = random.Random(17)


def made(count: int, chars: str = string.ascii_letters + string.digits) -> str:
    """Looks like a key and is none: scanners of repositories would take a fixed one for real."""
    return "".join(CHANCE.choice(chars) for _ in range(count))


HEX, UPPER = "0123456789abcdef", string.ascii_uppercase + string.digits
K40, K32, K20, PASSWORD = made(40), made(32), made(20), "hunter2!Xy"
JWT = f"eyJ{made(20)}.eyJ{made(40)}.{made(43)}"
SECRETS = [
    (f"AWS_SECRET_ACCESS_KEY={K40}", K40),
    (f"aws_secret_access_key = {K40[:20]}/{K40[21:]}", K40[21:]),
    (f"export AWS_ACCESS_KEY_ID=AKIA{made(16, UPPER)} AWS_SESSION_TOKEN={K40}", K40),
    (f"using AKIA{(aws := made(16, UPPER))} for s3", aws),
    (f'{{"token": "{K32}", "step": 3}}', K32),
    (f'{{\\"api_key\\": \\"{K32}\\"}}', K32),
    (f"{{'hf_token': '{K20}'}}", K20),
    (f"train.py --token {K20} --lr 1e-4", K20),
    (f"['train.py', '--hub-token', '{K20}', '--lr']", K20),
    (f"--password={PASSWORD}", PASSWORD),
    (f"Authorization: Basic {K32}==", K32),
    (f"'Authorization': 'Bearer {K20}'", K20),
    (f"curl -H 'authorization: token {K20}'", K20),
    (f"passwd={PASSWORD} passwd: {PASSWORD}", PASSWORD),
    ("password='two words here'", "words here"),
    (f"POSTGRES_PASSWORD: {PASSWORD}", PASSWORD),
    (f"postgresql://ada:{PASSWORD}@db:5432/x", PASSWORD),
    (f"redis://:{PASSWORD}@cache:6379", PASSWORD),
    (f"https://{K20}@github.com/x/y.git", K20),
    (f"clone with github_pat_{(pat := made(22) + '_' + made(59))}", pat),
    (f"ghs_{(github := made(36))}", github),
    (f"glpat-{(gitlab := made(20))}", gitlab),
    (f"AIza{(google := made(35))}", google),
    (f"ya29.{(oauth := made(60))}", oauth),
    (f"login with hf_{(hub := made(34))}.", hub),
    (f"sk-proj-{(openai := made(48))}", openai),
    (f"sk-ant-api03-{(claude := made(90))}", claude),
    (f"xoxb-{made(11, string.digits)}-{made(11, string.digits)}-{(slack := made(24))}", slack),
    (f"https://hooks.slack.com/services/T{made(8, UPPER)}/B{made(8, UPPER)}/{(hook := made(24))}", hook),
    (f"sent {JWT} to it", JWT[30:]),
    (f"WANDB_API_KEY={(wandb := made(40, HEX))}", wandb),
    (f"wandb: key {wandb}", wandb),
    (f"npm_{(npm := made(36))} pypi-AgEIcHlwaS5vcmc{(pypi := made(80))}", npm),
    (f"pypi-AgEIcHlwaS5vcmc{pypi}", pypi),
    (f"SG.{made(22)}.{(grid := made(43))}", grid),
    (f"rk_live_{(stripe := made(24))}", stripe),
    (f"AccountKey={(azure := made(86))}==;EndpointSuffix=core.windows.net", azure),
    (f"https://x.blob.core.windows.net/c?sv=2022&sig={K32}%3D", K32),
    (f"https://b.s3.amazonaws.com/k?X-Amz-Credential=AKIA{aws}%2F2026&X-Amz-Signature={made(64, HEX)}", aws),
    (f"client_secret: {K32}", K32),
    (f"Set-Cookie: session={K32}; Path=/", K32),
    (f"bot{made(9, string.digits)}:{(telegram := made(35))}", telegram),
    (f"access_key_id: {(digits := made(12, string.digits))}", digits),
    (f"InvalidPassword: {PASSWORD}", PASSWORD),
    (f"key-{(mailgun := made(32, HEX))}", mailgun),
    (f"dapi{(bricks := made(32, HEX))}", bricks),
    (f"loaded {(unknown := made(44))} from the vault", unknown),
]
NAMES = [
    ("ssh alice@gpu17 true", ("alice", "gpu17")),
    ("alice@gpu17: Permission denied; gpu17 is down", ("alice", "gpu17")),
    ("bob.smith@example.com", ("bob", "example")),
    ("user=alice started it", ("alice",)),
    ('"username": "alice"', ("alice",)),
    ("uid=1000(alice) gid=1000(alice)", ("alice",)),
    ("from 2001:db8::8a2e:370:7334 to [2001:db8::1]:29500", ("2001", "370")),
    ("fe80::1ff:fe23:4567:890a%eth0", ("fe80", "4567")),
    ("from 10.20.30.40:29500", ("10.20",)),
    ("in ~/secret/train.py", ("secret",)),
    ("['--user', 'alice'] --login bob", ("alice", "bob")),
    ("denied for user alice; unknown user 'bob'", ("alice", "bob")),
    ("node: ada1 is down, remote: 'ada', endpoint: https://grace:443", ("ada", "grace")),
    ("node: ada, remote=grace:1 node:hopper is down", ("ada", "grace", "hopper")),
    ("hostname: ada is down", ("ada",)),
    ("endpoint: gpu-a.corp failed", ("gpu-a",)),
    ("in ~alice/runs/train.py", ("alice", "runs")),
    ("in home/alice/runs/train.py", ("alice", "runs")),
    ("in ../../home/alice/train.py", ("alice",)),
    ("no /home/alice there", ("alice",)),
    ("in '/data/Ångström lab/x.bin'", ("Ångström",)),
    ("MASTER_ADDR=gpu17 and --rdzv-endpoint gpu18:29500", ("gpu17", "gpu18")),
]
READABLE = [
    "[rank3]:[E1120 10:00:00.123456789 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught a timeout: "
    "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600017 milliseconds",
    "NCCL INFO comm 0x55d1c8e4a0b0 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 1b000 commId 0x8d4c7fa1e3b2c905 - Init",
    "[PG ID 0 PG GUID 0(default_pg) Rank 1] NCCL version 2.27.3+cuda12.9, torch 2.15.0+cu129, driver 575.57.08",
    "GPU-5c1f9d2e-7a43-11ee-b962-0242ac120002 Xid (PCI:0000:3b:00): 79, pid=811, name=python",
    "step 100 loss 2.31 tokens/s 81234 max_tokens=4096 num_tokens: 2048 eos_token_id=50256 pad_token='<pad>' token: 7",
    "KeyError: 'tokens'",
    "KeyError: 'password_field'",
    "ValueError: unknown key=layers.3.attention.wq.weight in DistributedDataParallelCheckpointWrapper2",
    "2026-11-20T10:00:00.123456Z stderr F Traceback (most recent call last):",
    '  File "train.py", line 42, in forward_step_with_recompute_v2',
    "frame #3: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<std::chrono::duration<long, 1000>>) + 0x2a",
    "_ZN3c104cuda20CUDACachingAllocator6Native16DeviceCachingAllocator6mallocEimP11CUstream_st",
    "../third_party/gloo/gloo/transport/tcp/pair.cc:144 and torch/csrc/distributed/c10d/TCPStore.cpp:141",
    "meta-llama/Llama-3.1-8B-Instruct and Qwen/Qwen2.5-Coder-32B-Instruct-GPTQ-Int4",
    "listening on 127.0.0.1:29500 and ::1, NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5_0:1,mlx5_1:1",
    "the user specified an invalid mesh; user code raised",
    "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
    "InvalidAccessKeyId: The AWS Access Key Id you provided does not exist in our records.",
    "client_key_size = 12",
    "private_key_bits: 4096",
    "max_session_id: 5",
    "login failed for account",
    "the user interrupted training",
    "interrupted by user request",
    "node: not ready",
    "node: failed to join",
    "remote: Repository not found",
    "endpoint: https://…",
    "endpoint: https://storage.googleapis.com/upload",
    "key-value-attention-layer failed",
    "sk-learn-pipeline",
    "dapi-handler-process",
    "region ASIA_PACIFIC_EAST",
]


def test_names_are_replaced_and_what_happened_stays() -> None:
    answer = redact_diagnosis(diagnose_lines(LINE))
    shown = repr(answer)
    for name in ("gpu-a7", "alice", "10.20.30.40", "hunter2", "bob@", "corp.example"):
        assert name not in shown
    assert "out of memory" in shown


def test_same_name_has_the_same_stand_in() -> None:
    redactor = Redactor()
    first, second = redactor.text("from 10.0.0.1 to 10.0.0.2"), redactor.text("from 10.0.0.2")
    assert first == "from <address-1> to <address-2>"
    assert second == "from <address-2>"


@pytest.mark.parametrize(("line", "secret"), SECRETS, ids=range(len(SECRETS)))
def test_secret_of_any_vendor_is_replaced(line: str, secret: str) -> None:
    shown = Redactor().text(f"RuntimeError: step 3 {line}")
    assert secret not in shown
    assert not any(secret[start : start + 8] in shown for start in range(len(secret) - 8))
    assert shown.startswith("RuntimeError: step 3 ")
    assert Redactor().text(shown) == shown


@pytest.mark.parametrize(("line", "names"), NAMES, ids=range(len(NAMES)))
def test_names_of_people_and_machines_are_replaced(line: str, names: tuple[str, ...]) -> None:
    redactor = Redactor()
    redactor.learn([line], set())
    shown = redactor.text(line)
    assert not [name for name in names if name in shown], shown


@pytest.mark.parametrize("line", READABLE, ids=range(len(READABLE)))
def test_ordinary_line_stays_as_it_is(line: str) -> None:
    assert Redactor().text(line) == line


def test_lines_that_rules_know_lose_no_secret() -> None:
    lines = [line for rule in RULES.values() for line in rule.matches.values()]
    lost = [line for line in lines if "<secret-" in Redactor().secrets(line)]
    assert lost == []


def test_random_keys_of_no_vendor_are_nearly_all_found() -> None:
    kept = sum(key in Redactor().secrets(f"got {key} there") for key in (made(32) for _ in range(500)))
    assert kept < 20


@pytest.mark.parametrize("before", range(150, 230, 5))
def test_key_is_not_cut_before_it_is_replaced(before: int) -> None:
    line = f"ValueError: {'x ' * (before // 2)}client_secret={K40} {'y ' * 900}hf_{K40} {'z ' * 900}\n"
    redactor = Redactor()
    facts = list(Scanner(hide=redactor.secrets).feed(chunk(line)))
    (fact,) = facts
    assert fact.rule.code == "python-exception"
    shown = redactor.text(repr(fact))
    assert not any(K40[start : start + 4] in shown for start in range(36)), shown


def test_lines_beyond_those_kept_of_a_rank_are_not_searched_for_secrets() -> None:
    redactor = Redactor()
    searched: list[str] = []

    def hide(line: str) -> str:
        searched.append(line)
        return redactor.secrets(line)

    facts = list(Scanner(hide=hide).feed(chunk(*["straggler: rank 3 is slow"] * (MAX_FACTS_PER_RULE + 30))))
    assert len(facts) == len(searched) == MAX_FACTS_PER_RULE


@pytest.mark.timeout(60)
def test_each_of_many_names_takes_the_same_time() -> None:
    redactor = Redactor()
    for number in range(100_000):
        assert redactor._stand_in("user", f"ada{number}") == f"<user-{number + 1}>"
    assert redactor._stand_in("user", "ada7") == "<user-8>"
