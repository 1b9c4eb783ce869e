"""Fuzzed input for the controller's API from a stranger or a stolen token: garbage by the thousand, from one seed."""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

Json = dict[str, Any]

PATHS = (
    *("/", "/v1", "/v1/agent", "/v1/cancel", "/v1/drill", "/v1/checkpoint", "/v1/nothing", "/metrics", "*", ""),
    *("/v1/code/..", "/v1/code/../../token", "/v1/code/%2e%2e/%2e%2e/token", "//v1/cancel", "/v1/../v1/agent"),
    *("/v1/agent/../cancel", "/v1/agent%00", "/%ff%fe", "/v1/agent?token=x", "http://other/v1/agent", "/" + "a" * 5000),
    *("/../../../../etc/passwd", "\\..\\token", "/v1/cancel#", "/v1/agent;x", "/\x7f", "/v1/code/" + "0" * 64),
)
METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "CONNECT", "PRI", "get", "\x00", "G" * 300, "")
HOSTS = ("x", "[", "x/v1/agent?", "a@b", "x:99999", "", "\xff", "x\r\nX: y", "a" * 3000)
BODIES = (b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 5000, b'{"type":"run-finished","at":1}', b'"' * 999)
NUMBERS = (-1, -(2**31), 2**31, 2**53 + 1, 2**64, 10**30, 1.5, -0.5, 1e308, -1e308, 1e-320)
TEXTS = ("", "x", "\0", "\x1b[31m", "../../etc/passwd", "node9.0/i", "é" * 1000, "\u2028", "A" * 70_000)
WHOLE = (None, True, [], {}, [[[[]]]], *NUMBERS, *TEXTS)


@dataclass(frozen=True)
class Tokens:
    """Tokens that a client may present."""

    wrong: tuple[str, ...]
    stale: str
    """Token of a node that the run has given up, or never had: it is accepted, and gets a shutdown order."""


class Mutator:
    """Makes inputs of many kinds; the same for the same seed."""

    def __init__(self, seed: int, tokens: Tokens) -> None:
        self.random = random.Random(seed)
        self.tokens = tokens

    # Before authentication

    def stranger(self) -> bytes:
        """First bytes of a connection."""
        kinds: tuple[Callable[[], bytes], ...] = (self._bytes, self._request, self._request, self._damaged_request)
        return self.random.choice(kinds)()

    def _bytes(self) -> bytes:
        beginnings = (
            b"",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x05\x01\x00",
        )
        return self.random.choice(beginnings) + self.random.randbytes(self.random.choice((0, 1, 7, 100, 3000, 70_000)))

    def _request(self, token: str | None = None) -> bytes:
        draw = self.random
        body = draw.choice(BODIES)
        headers = [f"Host: {draw.choice(HOSTS)}"]
        if token is not None or draw.random() < 0.8:
            scheme = draw.choice(("Bearer", "bearer", "Basic", "", "Bearer\t", "Bearer " * 50))
            headers.append(f"Authorization: {scheme} {token or draw.choice(self.tokens.wrong)}")
        extra: tuple[Callable[[], str], ...] = (
            lambda: f"Content-Length: {draw.choice((len(body), len(body) + 5, -1, '1e3', 10**20, 70_000))}",
            lambda: "Transfer-Encoding: chunked",
            lambda: "Expect: 100-continue",
            lambda: f"X: {'y' * draw.choice((10, 20_000, 100_000))}",
            lambda: "\r\n".join(f"X{number}: y" for number in range(draw.choice((5, 2000)))),
            lambda: "no colon here",
            lambda: " folded: line",
            lambda: "Connection: Upgrade\r\nUpgrade: " + draw.choice(("h2c", "websocket", "\x01")),
            lambda: "Sec-WebSocket-Version: 8",
            lambda: "Cookie: \x00\xff",
        )
        headers += [make() for make in draw.sample(extra, draw.randrange(4))]
        line = f"{draw.choice(METHODS)} {draw.choice(PATHS)} HTTP/{draw.choice(('1.1', '1.1', '1.0', '2.0', '9', ''))}"
        return "\r\n".join([line, *headers, "", ""]).encode("latin-1", "replace") + body

    def _damaged_request(self) -> bytes:
        request = bytearray(self._request())
        for _ in range(self.random.randrange(1, 20)):
            request[self.random.randrange(len(request))] = self.random.randrange(256)
        return bytes(request[: self.random.randrange(1, len(request) + 1)])

    def operator_request(self, token: str) -> bytes:
        """A request with the user's token for something that does not exist."""
        path = self.random.choice(("/v1/cancel", "/v1/drill", "/v1/checkpoint", "/v1/agent", "/v1/nothing", "/"))
        body = self.random.choice(
            (b"{", b"[]", b"\xff", b'{"type":"run-finished","at":1}', b"[" * 60_000, b"x" * 70_000)
        )
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    # WebSocket

    def handshake(self, token: str) -> bytes:
        """A correct one."""
        key = base64.b64encode(self.random.randbytes(16)).decode()
        lines = (
            "GET /v1/agent HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {token}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {key}",
        )
        return "\r\n".join([*lines, "", ""]).encode()

    def frame(self, payload: bytes, opcode: int = 2, *, fin: bool = True, masked: bool = True) -> bytes:
        """One frame as a client sends it."""
        head = bytes([fin << 7 | opcode])
        length = len(payload)
        if length < 126:
            head += bytes([masked << 7 | length])
        else:
            short = length < 65_536
            head += bytes([masked << 7 | (126 if short else 127)]) + struct.pack("!H" if short else "!Q", length)
        if not masked:
            return head + payload
        mask = self.random.randbytes(4)
        return head + mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))

    def bad_frame(self) -> bytes:
        """A frame that a client must not send, or the beginning of one, or a message that no agent sends."""
        draw = self.random
        payload = draw.choice((b"", b"x", b"{}", b"\xff" * 125, b"y" * 300))
        makes: tuple[Callable[[], bytes], ...] = (
            lambda: draw.randbytes(draw.randrange(1, 40)),
            lambda: self.frame(payload, draw.randrange(16), fin=draw.random() < 0.5),
            lambda: self.frame(payload, masked=False),
            lambda: self.frame(b"z" * 126, draw.choice((8, 9, 10))),  # a control frame is shorter
            lambda: self.frame(struct.pack("!H", draw.choice((0, 999, 1005, 5000))) + b"\xff\xfe", 8),
            lambda: bytes([0x82, 0xFF]) + struct.pack("!Q", draw.choice((2**63, 2**62, 2**32, 5 * 2**20))) + b"abcd",
            lambda: bytes([0x82 | draw.choice((0x40, 0x20, 0x10)), 0x80]) + b"abcd",
            lambda: self.frame(b"", 2, fin=False) + self.frame(b"", 0, fin=False) * 300,
            lambda: self.frame(b"\xff\xfe", 1),
            lambda: self.frame(draw.choice(BODIES), draw.choice((1, 2))),
        )
        return draw.choice(makes)()

    # Agent messages

    def mutated(self, word: msgspec.Struct) -> bytes:
        """A message of an agent with one change; more often than not to another value of its type."""
        data: Json = msgspec.to_builtins(word)
        for _ in range(self.random.randrange(1, 3)):
            self._mutate(data)
        text = json.dumps(data).encode()
        return text[: self.random.randrange(len(text))] if self.random.random() < 0.03 else text

    def _mutate(self, data: Json) -> None:
        draw = self.random
        names = [name for name in data if name != "type"]
        if draw.random() < 0.9:  # the controller checks sender and number first: mostly leave them
            names = [name for name in names if name not in {"source", "seq", "node", "replica", "generation"}]
        name = draw.choice(names or ["at"])
        value = data.get(name)
        if draw.random() < 0.15:
            data[name] = draw.choice(WHOLE)
        elif draw.random() < 0.05:
            data.pop(name, None)
        elif draw.random() < 0.05:
            data[draw.choice(TEXTS[:6])] = draw.choice(WHOLE)
        elif isinstance(value, dict) and "code" in value:
            self._mutate(value)
        elif isinstance(value, dict):
            data[name] = {f"m{number}": draw.choice(NUMBERS) for number in range(draw.choice((1, 200)))}
        elif isinstance(value, list):
            if value and isinstance(value[0], dict) and draw.random() < 0.7:
                self._mutate(value[0])
            else:
                data[name] = value * draw.choice((0, 2, 500))
        elif isinstance(value, str):
            data[name] = draw.choice(TEXTS)
        else:
            data[name] = draw.choice([number for number in NUMBERS if isinstance(number, type(value))] or [0])
