"""Makes a diagnosis fit to be shared: the same name becomes the same placeholder wherever it appears.

It replaces hosts, addresses, paths except their last part, users, mail addresses, and what looks like a secret. The
rest says what happened, not where.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import msgspec
import re2
from msgspec.structs import replace

from holdfast.diagnose import secret_patterns
from holdfast.diagnose.diagnosis import Diagnosis, Evidence, OtherRun, Symptom
from holdfast.diagnose.fact import ProcessRef
from holdfast.diagnose.nccl_transport import TransportReport

_PATH_PART = r"[^\s/:'\"<>()\[\]{},;=|]"
"""Characters that a part of a path may contain."""
_HOST = r"[A-Za-z][\w-]*(?:\.[\w-]+)*"
_HOST_KEYS = r"(?:node|remote|endpoint)"
"""What precedes a host name or a sentence."""
_BEFORE_HOST = r"['\"\[]?(?:[a-z]\w*://)?"
_USER = r"(?:user(?:[_-]?name)?|login|logname)"
_KINDS: tuple[tuple[str, Any], ...] = tuple(
    (kind, re2.compile(pattern))
    for kind, pattern in (
        # bob@example.com      alice@gpu17
        ("mail", r"(?P<hidden>[A-Za-z][\w.+-]*@[\w-]+\.[\w.-]*[A-Za-z])\b"),
        ("user", r"\b(?P<hidden>[A-Za-z][\w.+-]*)@[A-Za-z][\w-]*\b"),
        ("host", r"[\w>]@(?P<hidden>[A-Za-z][\w-]*)\b"),
        # user=alice      "username": "alice"      --user alice      user 'alice'      for user alice
        ("user", rf"(?i)\b{_USER}(?:\\?['\"])?\s?[=:]\s?(?:\\?['\"])?(?P<hidden>[a-z][\w.+-]*)"),
        ("user", rf"(?i)(?:^|[\s'\"\[(,])--?{_USER}['\"]?,?\s+['\"]?(?P<hidden>[a-z][\w.+-]*)"),
        ("user", rf"(?i)\b{_USER}\s['\"](?P<hidden>[a-z][\w.+-]*)"),
        ("user", rf"(?i)\b(?:as|by|for|invalid|unknown)\s{_USER}\s(?P<hidden>[a-z][\w.+-]*)"),
        # uid=1000(alice)
        ("user", r"(?i)\b[ug]id=\d+\((?P<hidden>[\w.+-]+)\)"),
        # '/data/of ada/train.py'
        ("path", r"['\"](?P<hidden>~?/(?:[^'\"/]+/)+)[^'\"/]*['\"]"),
        # /home/alice/run/train.py      home/alice/train.py      /home/alice
        (
            "path",
            rf"(?:^|[^\w.<>/~-])(?P<hidden>(?:{_PATH_PART}*/)*(?:home|[Uu]sers)/{_PATH_PART}+(?:/(?:{_PATH_PART}+/)*)?)",
        ),
        # /data/run/train.py      ~alice/run/train.py      ~alice
        ("path", rf"(?:^|[^\w.<>/~-])(?P<hidden>~?/(?:{_PATH_PART}+/)+){_PATH_PART}"),
        ("path", rf"(?:^|[^\w.<>/-])(?P<hidden>~{_PATH_PART}*/(?:{_PATH_PART}+/)*){_PATH_PART}"),
        ("path", r"(?:^|[^\w.<>/-])(?P<hidden>~[A-Za-z][\w.-]*)"),
        # gpu-a7.corp.example.com
        ("host", r"(?:^|[^\w./-])(?P<hidden>[A-Za-z][\w-]*(?:\.[\w-]+){2,})(?:[\s:,<\])/'\"]|$)"),
        # n1:77:91 [3]      n1<51159>      srun: error: n1: task 3
        ("host", r"(?:^|[^\w./-])(?P<hidden>[A-Za-z][\w-]*\d[\w.-]*)(?::\d+:\d+ \[|<\d+>|: task )"),
        # MASTER_ADDR=gpu17      --rdzv-endpoint gpu17:29500      remote=[gpu17]:29500      tcp://gpu17:29500
        (
            "host",
            rf"(?i)\b(?:host(?:name)?|nodename|master_addr|addr|rdzv[_-]endpoint)['\"]?\s?[=:]\s?{_BEFORE_HOST}(?P<hidden>{_HOST})\b",
        ),
        ("host", rf"(?i)\b{_HOST_KEYS}['\"]?(?:\s?=\s?|:){_BEFORE_HOST}(?P<hidden>{_HOST})\b"),
        # node: ada1      remote: "ada"      endpoint: https://ada:443      node: ada, and not: node: not ready
        ("host", rf"(?i)\b{_HOST_KEYS}['\"]?\s?:\s{_BEFORE_HOST}(?P<hidden>[a-z]\w*(?:\d|[.-]\w)(?:[\w.-]*\w)?)\b"),
        ("host", rf"(?i)\b{_HOST_KEYS}['\"]?\s?:\s(?:['\"\[]|[a-z]\w*://)(?P<hidden>{_HOST})\b"),
        ("host", rf"(?i)\b{_HOST_KEYS}['\"]?\s?:\s(?P<hidden>[a-z]\w*)(?:$|[^\s\w]|\s[^a-z])"),
        (
            "host",
            rf"(?i)(?:^|[\s'\"])--?(?:rdzv[_-]endpoint|master[_-]addr)(?:=|['\"]?,?\s+['\"]?)(?P<hidden>{_HOST})\b",
        ),
        ("host", rf"(?i)\b(?:tcp|grpc|ucx)://(?P<hidden>{_HOST})\b"),
    )
)
_ADDRESSES = (
    # Bounded repetitions, so that it takes no longer than RE2, which has no lookahead
    re.compile(r"(?<![\w.:])[0-9A-Fa-f:]{2,39}(?:\.\d{1,3}){0,3}(?![\w:])"),
    re2.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"),
)
_KEPT_VALUES = frozenset({"yes", "no", "true", "false", "none", "null", "not", "required"})
"""Words that report whether a secret is set, and are none."""
_KEPT_PATHS = ("/bin/", "/dev/", "/proc/", "/sys/", "/usr/", "/opt/conda/", "/etc/")
_KEPT_NAMES = frozenset(
    {
        *("root", "nobody", "localhost", "not", "none", "null", "unknown", "http", "https", "file", "s3", "gs", "tcp"),
        *("error", "errors", "code", "space", "defined", "specified", "input", "request", "requests", "interrupt"),
    }
)
"""User and host names that everyone has, and words that appear in their place in a sentence."""
_MODULES = sys.stdlib_module_names | {
    *("torch", "transformers", "datasets", "accelerate", "deepspeed", "lightning", "pytorch_lightning", "megatron"),
    *("nemo", "jax", "jaxlib", "numpy", "google", "botocore", "requests", "urllib3", "huggingface_hub", "torchvision"),
    *("hydra", "omegaconf", "tyro", "wandb", "mlflow", "model", "module", "self"),
}
_FILE_SUFFIXES = frozenset(
    ("py", "so", "cc", "cpp", "cu", "h", "json", "yaml", "yml", "log", "txt", "pt", "gz", "sh", "weight", "bias")
)
_STAND_IN = re.compile(r"<(?:secret|mail|user|host|path|address)-\d+>")
_PUBLIC = ("huggingface.co", "github.com", "pypi.org", "pytorch.org", "googleapis.com", "amazonaws.com", "nvidia.com")
"""Suffixes of hosts that are not private."""


class Redactor:
    """Placeholders for names, alike for all texts that one redactor processes."""

    def __init__(self) -> None:
        self._stand_ins: dict[tuple[str, str], str] = {}
        self._numbers: Counter[str] = Counter()
        """Placeholders so far, by kind."""
        self._hosts: Any = None
        self._secret_patterns = secret_patterns.patterns()

    def text(self, text: str) -> str:
        """One text with every name in it replaced."""
        text = self.secrets(text)
        for pattern in _ADDRESSES:
            text = _sub(pattern, text, self._address)
        for kind, pattern in _KINDS:
            text = _sub(pattern, text, lambda name, kind=kind: self._stand_in(kind, name))
        return _sub(self._hosts, text, lambda name: self._stand_in("host", name)) if self._hosts else text

    def secrets(self, text: str) -> str:
        """A text with every secret in it replaced; this runs first, before anything is cut."""
        text = text.encode("utf-8", "replace").decode()
        for pattern in self._secret_patterns:
            text = _replace_spans(
                text, secret_patterns.secret_spans(pattern, text), lambda name: self._stand_in("secret", name)
            )
        return _replace_spans(text, secret_patterns.random_words(text), lambda name: self._stand_in("secret", name))

    def learn(self, texts: Iterable[str], hosts: set[str]) -> None:
        """Learns these hosts, and those that the texts name as such, so that they are replaced wherever they appear."""
        for text in texts:
            self.text(text)
        self._learn_hosts(hosts | {name for kind, name in self._stand_ins if kind == "host" and not name.isalpha()})

    def _learn_hosts(self, hosts: set[str]) -> None:
        known = "|".join(re2.escape(host) for host in sorted(hosts, key=len, reverse=True))
        if known:
            self._hosts = re2.compile(rf"(?:^|[^\w<-])(?P<hidden>{known})\b")

    def _address(self, name: str) -> str:
        try:
            address = ipaddress.ip_address(name)  # which matches no time of day, and no version with a leading zero
        except ValueError:
            return name
        kept = address.is_loopback or address.is_unspecified
        return name if kept else self._stand_in("address", name)

    def _stand_in(self, kind: str, name: str) -> str:
        if _STAND_IN.search(name) or _is_kept(kind, name):
            return name
        if (kind, name) not in self._stand_ins:
            self._numbers[kind] += 1
            ending = "/" if kind == "path" and name.endswith("/") else ""
            self._stand_ins[kind, name] = f"<{kind}-{self._numbers[kind]}>{ending}"
        return self._stand_ins[kind, name]


def _is_kept(kind: str, name: str) -> bool:
    """Whether a name identifies no one, or is not a name."""
    if kind == "path":
        return name.startswith(_KEPT_PATHS)
    if kind == "secret":
        return name.lower() in _KEPT_VALUES
    if kind not in {"host", "user"}:
        return False
    return name.lower() in _KEPT_NAMES or name.lower().endswith(_PUBLIC) or _is_dotted_name(name.split("."))


def _is_dotted_name(parts: list[str]) -> bool:
    """Whether a dotted name is a Python module, a class in it, a model parameter, or a file."""
    if len(parts) < 3:
        return False
    numbered = any(map(str.isdecimal, parts))
    return parts[0] in _MODULES or numbered or parts[-1] != parts[-1].lower() or parts[-1] in _FILE_SUFFIXES


def _sub(pattern: Any, text: str, stand_in: Callable[[str], str]) -> str:
    """The text with every match of the pattern, or of its group `hidden`, replaced; placeholders stay."""
    group = pattern.groupindex.get("hidden", 0)
    return _replace_spans(text, (found.span(group) for found in pattern.finditer(text)), stand_in)


def _replace_spans(text: str, spans: Iterator[tuple[int, int]], stand_in: Callable[[str], str]) -> str:
    parts: list[str] = []
    done = 0
    for start, end in spans:
        if start >= done:
            parts += [text[done:start], stand_in(text[start:end])]
            done = end
    return "".join([*parts, text[done:]]) if parts else text


def redact_diagnosis(answer: Diagnosis, redactor: Redactor | None = None) -> Diagnosis:
    """The diagnosis with every name in it replaced; `redactor` already hid secrets before lines were cut."""
    culprit = answer.first_failure
    hosts = {name for name in (culprit.host, culprit.node) if name} if culprit else set[str]()
    if answer.transport is not None:
        hosts |= {name for process in answer.transport.processes for name in (process.host, process.node)}
    redactor = redactor or Redactor()
    redactor.learn(_texts(answer), hosts)

    def shown(evidence: Evidence) -> Evidence:
        return replace(evidence, where=redactor.text(evidence.where), text=redactor.text(evidence.text))

    def followed(consequence: Symptom) -> Symptom:
        return replace(consequence, message=redactor.text(consequence.message), first=shown(consequence.first))

    def other(each: OtherRun) -> OtherRun:
        return replace(each, what=redactor.text(each.what), first=shown(each.first))

    return replace(
        answer,
        transport=_redact_transport(answer.transport, redactor) if answer.transport else None,
        what=redactor.text(answer.what),
        first_failure=_redact_first_failure(culprit, redactor) if culprit else None,
        evidence=tuple(map(shown, answer.evidence)),
        last_lines=tuple(map(shown, answer.last_lines)),
        symptoms=tuple(map(followed, answer.symptoms)),
        remedy=tuple(map(redactor.text, answer.remedy)),
        also_seen=tuple(map(shown, answer.also_seen)),
        other_runs=tuple(map(other, answer.other_runs)),
        notes=tuple(map(redactor.text, answer.notes)),
    )


def _texts(answer: Diagnosis) -> Iterator[str]:
    """Text in logs that names hosts."""
    yield answer.what
    for each in (
        *answer.evidence,
        *answer.last_lines,
        *answer.also_seen,
        *(each.first for each in (*answer.symptoms, *answer.other_runs)),
    ):
        yield each.text


def _redact_transport(transport: TransportReport, redactor: Redactor) -> TransportReport:
    """The same with every text in it replaced, except names of fields."""

    def walked(value: Any) -> Any:
        if isinstance(value, str):
            return redactor.text(value)
        if isinstance(value, dict):
            return {name: walked(each) for name, each in cast("dict[Any, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [walked(each) for each in cast("list[Any]", value)]
        return value

    return msgspec.convert(walked(msgspec.to_builtins(transport)), TransportReport)


def _redact_first_failure(culprit: ProcessRef, redactor: Redactor) -> ProcessRef:
    host = redactor.text(culprit.host) if culprit.host else None
    node = redactor.text(culprit.node) if culprit.node else None
    return replace(culprit, host=host, node=node)
