"""Owns what each message that is no connection adds to what is known of its process: a table by the first word.

Refuses to own the pass over the lines (reading.py) and the wording (grammar.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from re import Pattern

from holdfast.diagnose.transport import grammar
from holdfast.diagnose.transport.grammar import words
from holdfast.diagnose.transport.records import (
    SESSION_BYTES,
    Joined,
    ProcessRecord,
    Quote,
    Session,
    ThreadRecord,
)

_REMEMBERED = 1 << 9
"""Of messages that many processes write alike, how many are parsed once."""
Handler = Callable[[bytes, ThreadRecord, ProcessRecord, Quote], None]


def _fact(name: str, pattern: Pattern[bytes]) -> Handler:
    """A handler that keeps what the pattern's first group says, the first time."""

    @lru_cache(_REMEMBERED)
    def said(message: bytes) -> str | None:
        match = pattern.match(message)
        return sys.intern(words(match[1])) if match else None

    def keep(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
        if name not in process.facts and (value := said(message)) is not None:
            process.note(name, message, quote)
            process.facts[name] = value

    return keep


def _seen(name: str, *words: bytes) -> Handler:
    """A handler that keeps the first line that has any of these words."""

    def keep(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
        if name not in process.evidence and any(said in message for said in words):
            process.note(name, message, quote)

    return keep


def _network(message: bytes, thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    _begins(message, thread, process, quote)
    _chosen(message, thread, process, quote)


_chosen = _fact("network", grammar.NETWORK)


def _begins(_message: bytes, thread: ThreadRecord, process: ProcessRecord, _quote: Quote) -> None:
    """A set-up begins, or goes on: what this thread connected before, outside one, belongs to none."""
    if thread.opening is None:
        cut(thread, process)
        thread.recent.clear()


def _connected(message: bytes, thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    """A ring or tree is complete: the next one may be another communicator's."""
    stage, fact = _completes(message)
    cut(thread, process, stage)
    if fact:
        process.note(fact, message, quote)


@lru_cache(_REMEMBERED)
def _completes(message: bytes) -> tuple[bytes, str]:
    """What is connected, and what the message says of how."""
    stage = message.partition(b" ")[2].partition(b",")[0].partition(b" comm ")[0]
    match = grammar.RINGS.match(message)
    return stage, f"ring gdr {words(match[2])}" if match and match[2] else ""


def cut(thread: ThreadRecord, process: ProcessRecord, stage: bytes = b"") -> None:
    """Put what the thread has connected by now aside as one session, under the name of what that completes."""
    if thread.connections:
        thread.room.give_back(thread.until_cut_bytes - SESSION_BYTES - len(stage))
        thread.until_cut_bytes = 0
        session = Session(thread, list(thread.connections.values()), stage, thread.opening)
        process.sessions.append(session)
        thread.recent.append(session)
        thread.connections.clear()


def _ib(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    if message.startswith(b"NET/IB : Using"):
        listed, found, _ = message.partition(b"; OOB ")
        if found and not process.hcas:
            process.note("hcas", listed, quote)
            process.hcas = _hcas(listed)
    elif message.startswith(b"NET/IB : No device found"):
        process.note("no device", message, quote)
    elif match := grammar.GDR_HCA.match(message):
        process.note(f"gdr {words(match[2]).lower()}", message, quote)


@lru_cache(_REMEMBERED)
def _hcas(listed: bytes) -> tuple[str, ...]:
    return tuple(sys.intern(words(b"%s:%s/%s" % item)) for item in grammar.HCA.findall(listed))


def _socket(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    if not process.interfaces and (match := grammar.SOCKET_USING.match(message)):
        process.interfaces = tuple(words(item) for item in grammar.INTERFACE.findall(match[1]))
        process.note("interfaces", message, quote)


def _ofi(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    for name, pattern in (("plugin", grammar.OFI_PLUGIN), ("nics", grammar.OFI_NICS)):
        if match := pattern.match(message):
            process.facts.setdefault(name, sys.intern(words(match[1])))
            process.note(name, message, quote)


def _version(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    if "nccl" not in process.facts and (match := grammar.VERSION.match(message)):
        process.facts["nccl"] = sys.intern(words(match[1]))
        process.facts["cuda"] = sys.intern(words(match[2]))
        process.note("nccl", message, quote)


def _env(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    name, value = _variable(message)
    if name and name not in process.env:
        process.note(name, message, quote)
        process.env[name] = value


@lru_cache(_REMEMBERED)
def _variable(message: bytes) -> tuple[str, str]:
    match = grammar.ENV.match(message)
    return (sys.intern(words(match[1])), sys.intern(words(match[2]))) if match else ("", "")


def _split(message: bytes, thread: ThreadRecord, _process: ProcessRecord, _quote: Quote) -> None:
    """From 2.18 to 2.20 it is said apart, from 2.21 on in the set-up's own lines."""
    if match := grammar.SPLIT.match(message):
        thread.split = words(match[1] or b"?"), words(b"/" + match[4])
        if thread.opening is not None:
            _identify(thread.opening, {}, thread)


def _comm(message: bytes, thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    said = message.partition(b"- Init COMPLETE")[0]
    if said == thread.said and thread.opening is not None:
        _completed(thread.opening, thread, process)
    elif b" nRanks " in message:
        if match := grammar.COUNTS.match(message):
            _begins(message, thread, process, quote)
            if joined := _unfinished(process, words(match[1]), int(match[2]), int(match[3])):
                joined.nodes = int(match[4])
    elif match := grammar.INIT.match(message):
        pointer, rank, size, device, nvml, bus, extra, step = match.groups()
        began = step == b"START"
        if began:
            _begins(message, thread, process, quote)
        joined = None if began else _unfinished(process, words(pointer), int(rank), int(size))
        if joined is None:
            joined = Joined(
                process=thread.process,
                pointer=words(pointer),
                rank=int(rank),
                size=int(size),
                device=int(device),
                nvml=int(nvml) if nvml else None,
                bus=words(bus),
                evidence=quote(),
            )
            if joined.rank >= joined.size:
                return
            process.joined.append(joined)
        _identify(joined, _extras(extra), thread)
        if began:
            thread.opening = joined
            thread.said = message.partition(b"- Init START")[0]
        else:
            _completed(joined, thread, process)


@lru_cache(_REMEMBERED)
def _extras(said: bytes) -> Mapping[bytes, bytes]:
    """What a set-up's line names besides, which is the same for all ranks of a communicator."""
    return dict(grammar.EXTRA.findall(said))


def _completed(joined: Joined, thread: ThreadRecord, process: ProcessRecord) -> None:
    joined.complete = True
    cut(thread, process)
    for session in thread.recent:
        session.joined = joined
    thread.opening = None
    thread.recent.clear()


def _unfinished(process: ProcessRecord, pointer: str, rank: int, size: int) -> Joined | None:
    for joined in reversed(process.joined):
        if joined.pointer == pointer and joined.rank == rank and joined.size == size and not joined.complete:
            return joined
    return None


def _identify(joined: Joined, said: Mapping[bytes, bytes], thread: ThreadRecord) -> None:
    if b"commId" in said:
        joined.id = sys.intern(words(said[b"commId"]))
    if b"parent" in said:
        count = said.get(b"splitCount") or said.get(b"childCount") or b""
        joined.parent, joined.split = words(said[b"parent"]), words(b"%s/%s" % (count, said.get(b"color", b"")))
    elif thread.split[1]:
        joined.parent, joined.split = thread.split
        thread.split = "", ""


_HANDLERS: Mapping[bytes, Handler] = {  # of longer words the first ten bytes
    b"comm": _comm,
    b"[Rank": _comm,
    b"Trees": _begins,
    b"Using": _network,
    b"Connected": _connected,
    b"bootstrapS": _split,
    b"NET/IB": _ib,
    b"NET/Socket": _socket,
    b"NET/OFI": _ofi,
    b"NCCL": _version,
    b"cudaDriver": _fact("driver", grammar.DRIVER),
    b"Bootstrap": _fact("bootstrap", grammar.BOOTSTRAP),
    b"Bootstrap:": _fact("bootstrap", grammar.BOOTSTRAP),
    b"Pattern": _fact("path", grammar.PATTERN),
    b"Failed": _seen("no libibverbs", b"libibverbs"),
    b"NET/Plugin": _seen("no plugin", b"No plugin found", b"Could not find"),
}


def handler(begin: bytes) -> Handler | None:
    """That of a message whose first bytes, as many as `Channel 00` has, are these; None where it has none."""
    if begin.startswith(b"NCCL_"):
        return _env
    if begin.startswith(b"nccl"):
        return _comm
    return _HANDLERS.get(begin.partition(b"\n")[0].partition(b" ")[0])
