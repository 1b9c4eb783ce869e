"""Finds secrets in log lines: by the name before them, by their form, and by randomness.

It also uses the rules of detect-secrets, which knows the tokens of some twenty vendors; they are loaded only where a
diagnosis is redacted. Its rules for entropy and keywords are made for source code, and match too many words of a log.
All patterns are RE2's, whose time is linear in its input.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, cast

import re2

from holdfast.errors import require_extra

_NAME = (
    r"(?:secret|passw(?:or)?d|passphrase|pwd|credentials?|connection[_-]?string|session[_-]?id|cookie"
    r"|(?:api|access|account|private|auth|signing|encryption|master|license|ssh|storage|client)[_-]?key(?:[_-]?id)?)"
)
_QUOTE = r"(?:\\?['\"])?"
_VALUE = r"(?P<hidden>[^\s,;&'\"<>\\(){}\[\]][^\s,;&'\"\\]*)"
_IS = _QUOTE + r"\s?(?::=|=>|=|:)\s?"
_LONG = r"(?P<hidden>[^\s,;&'\"<>\\(){}\[\]0-9][^\s,;&'\"\\]{7,}|[0-9]+[^\s0-9,.;&'\"\\][^\s,;&'\"\\]{5,})"
"""Longer than the special tokens of a tokenizer, and not a number: logs count other tokens."""

_OWN_PATTERNS = (
    # Authorization: Basic YWxpY2U6aHVudGVyMg==      'Authorization': 'Bearer abc'      proxy-authorization: abc
    r"(?i)\bauthorization" + _IS + _QUOTE + r"(?:basic|bearer|digest|token|negotiate|apikey)\s+" + _VALUE,
    r"(?i)\bauthorization" + _IS + _QUOTE + r"(?P<hidden>[^\s,;&'\"<>\\]{10,})",
    r"(?i)\bbearer\s+(?P<hidden>[\w.~+/=-]{8,})",
    # password="two words"      "client_secret": "a b"
    r"(?i)" + _NAME + r"[\w.-]*" + _IS + r"\\?['\"](?P<hidden>[^'\"<][^'\"]*)['\"]",
    # AWS_SECRET_ACCESS_KEY=abc      passwd: abc      "api_key": "abc"
    r"(?i)(?P<name>[\w.]*" + _NAME + r"[\w.-]*)" + _IS + _QUOTE + _VALUE,
    # HF_TOKEN=abc      "token": "abcdefgh"      access_token = abcdefgh; not: max_tokens=4096, pad_token: <pad>
    r"(?i)(?:^|[^a-z])token" + _IS + _QUOTE + _LONG,
    # --token abc      ['--hf-token', 'abc']      --password=abc
    r"(?i)(?:^|[\s'\"\[,(])--?(?:[a-z]+[_-])*(?:token|" + _NAME + r")['\"]?(?:,?\s+|=)['\"]?" + _VALUE,
    # https://alice:hunter2@host/      redis://:hunter2@host
    r"://[^\s/:@'\"]*:(?P<hidden>[^\s/@'\"]+)@",
    r"://(?P<hidden>[^\s/:@'\"]{16,})@",
    # ?X-Amz-Signature=abc      &sig=abc      ?key=abc
    r"(?i)[?&](?:[\w.-]*sig(?:nature)?|key|code|sv_token|[\w.-]*credential)=(?P<hidden>[^\s&'\"]+)",
    # By their beginning: Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Slack, AWS, Google, JWT, npm, PyPI, ...
    r"\b(?P<hidden>(?:hf_|api_org_|gh[pousr]_|github_pat_|gl(?:pat|dt|rt|cbt|ptt|agent|soat|ft|imt|ffct)-|GR1348941|sk-"
    r"|[rsp]k_(?:live|test)_|xox[abeoprs][-.]|xapp-|AIza|ya29\.|GOCSPX-|eyJ|npm_|pypi-|dop_v1_|SG\.|nvapi-"
    r"|dckr_(?:pat|oat)_|tskey-|shp(?:at|ss|ca)_|lin_api_|pplx-|gsk_|r8_|ntn_|dapi|PMAK-|sq0[a-z]{3}-|key-|wandb_v1_)"
    r"[a-z_.~+/=-]*[A-Z0-9][A-Za-z0-9_.~+/=-]{7,})",  # words such as sk-learn-pipeline have only small letters
    r"\b(?P<hidden>(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{8,})",
    # W&B's keys, digests of images and commits
    r"\b(?P<hidden>[A-Fa-f0-9]{40,})\b",
)
_SENTENCE = re.compile(r".*(?:Error|Exception|Warning)|(?:.*\.)?(?:Invalid|Missing|Expired|Unknown|No)[A-Z]\w*")
"""Names of exceptions, after which a sentence follows."""
_MEASURE = re.compile(r".*[_-](?:size|bits|bytes|length|len|count|version)", re.IGNORECASE)
_LOOK_AROUND = re.compile(r"\(\?![^()]+\)|\(\?:\(\?<=\\W\)\|\(\?<=\^\)\)")
"""Constructs of detect-secrets patterns that RE2 lacks; without them, the patterns match a little more."""
_MANY = re.compile(r"\{(\d+),\d{4,}\}")
"""More repetitions than RE2 supports."""
_WORD = re2.compile(r"[A-Za-z0-9+/_=-]{24,}")
_KNOWN = re.compile(r"_Z|(?:[A-Z]{3,4}-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""Mangled names of C++, ids of GPUs."""
_MIN_ALTERNATION = 0.42
"""Minimum share of neighbouring characters of different kinds in a random word: 0.6 in base64, 0.3 in
CUDACachingAllocator.
"""


@cache
def patterns() -> tuple[Any, ...]:
    """Every pattern; its match, or the match's group `hidden`, is a secret."""
    return own_patterns() + tuple(_detect_secrets_patterns())


@cache
def own_patterns() -> tuple[Any, ...]:
    """The patterns that need no extra, and 10 ms."""
    return tuple(map(re2.compile, _OWN_PATTERNS))


def secret_spans(pattern: Any, text: str) -> Iterator[tuple[int, int]]:
    """Where one of the patterns finds secrets in a text."""
    hidden = pattern.groupindex.get("hidden", 0)
    named = "name" in pattern.groupindex
    for found in pattern.finditer(text):
        if not (named and _is_harmless(str(found["name"]), str(found[hidden]))):
            yield found.span(hidden)


def _is_harmless(name: str, value: str) -> bool:
    """Whether a value is not a secret, though the name before it suggests one."""
    if value.isdecimal():
        return len(value) < 4 or _MEASURE.fullmatch(name) is not None
    return value.isalpha() and value.istitle() and _SENTENCE.fullmatch(name) is not None


def is_random(word: str) -> bool:
    """Whether a word looks like a vendor's key: capitals, small letters and digits that alternate at random."""
    kinds = [_kind(char) for char in word]
    if not {0, 1, 2} <= set(kinds) or _KNOWN.match(word):
        return False
    pairs = [(one, other) for one, other in pairwise(kinds) if one < 3 and other < 3]
    return len(pairs) >= 16 and sum(one != other for one, other in pairs) >= _MIN_ALTERNATION * len(pairs)


def random_words(text: str) -> Iterator[tuple[int, int]]:
    """Where such words occur in a text."""
    return (found.span() for found in _WORD.finditer(text) if is_random(str(found[0])))


def _kind(char: str) -> int:
    return 0 if char.islower() else 1 if char.isupper() else 2 if char.isdigit() else 3


def _detect_secrets_patterns() -> Iterator[Any]:
    require_extra("diagnose", "detect_secrets", "`--redact` needs")
    import detect_secrets.plugins
    from detect_secrets.plugins.base import RegexBasedDetector

    for module in pkgutil.iter_modules(detect_secrets.plugins.__path__):
        if module.name == "ip_public":  # addresses are not secrets, and have their own placeholders
            continue
        for kind in vars(importlib.import_module(f"detect_secrets.plugins.{module.name}")).values():
            if not (isinstance(kind, type) and issubclass(kind, RegexBasedDetector)):
                continue
            if kind.__module__.endswith(module.name) and not getattr(kind, "__abstractmethods__", None):
                yield from filter(None, map(_as_re2, cast("Iterable[Any]", kind().denylist)))


def _as_re2(pattern: Any) -> Any:
    """The pattern for RE2; None where RE2 cannot express it: a newer version of those rules breaks nothing."""
    text = _MANY.sub(r"{\1,}", _LOOK_AROUND.sub("", str(pattern.pattern)))
    options = re2.Options()
    options.case_sensitive = not pattern.flags & re.IGNORECASE
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error:
        return None
