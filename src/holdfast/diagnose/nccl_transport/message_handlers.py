"""Handles each message that is not a connection: a table by the first word of what it adds to its process's record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from re import Pattern

from holdfast.diagnose.nccl_transport import line_patterns
from holdfast.diagnose.nccl_transport.causes import BY_NAME, Effect, named_by
from holdfast.diagnose.nccl_transport.line_patterns import to_text
from holdfast.diagnose.nccl_transport.process_records import (
    BATCH_BYTES,
    CommInit,
    ConnectionBatch,
    ProcessRecord,
    Quote,
    ThreadRecord,
)

_CACHE_SIZE = 1 << 9
"""How many messages that many processes write alike are parsed only once."""
Handler = Callable[[bytes, ThreadRecord, ProcessRecord, Quote], None]


def _fact(name: str, pattern: Pattern[bytes]) -> Handler:
    """A handler that keeps the first value of the pattern's first group."""

    @lru_cache(_CACHE_SIZE)
    def first_group(message: bytes) -> str | None:
        match = pattern.match(message)
        return sys.intern(to_text(match[1])) if match else None

    def keep(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
        if name not in process.facts and (value := first_group(message)) is not None:
            process.note(name, message, quote)
            process.facts[name] = value

    return keep


def _seen(name: str, *words: bytes) -> Handler:
    """A handler that keeps the first line with any of these words."""

    def keep(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
        if name not in process.evidence and any(word in message for word in words):
            process.note(name, message, quote)

    return keep


def note_warning(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    """Keep the first line of each cause; NCCL also logs a failed call as INFO, where it continues."""
    name = named_by(message)
    if name and BY_NAME[name].effect is not Effect.FAILURE and name not in process.evidence:
        process.note(name, message, quote)


def _network(message: bytes, thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    _setup_started(message, thread, process, quote)
    _chosen(message, thread, process, quote)


_chosen = _fact("network", line_patterns.NETWORK)


def _setup_started(_message: bytes, thread: ThreadRecord, process: ProcessRecord, _quote: Quote) -> None:
    """A set-up begins, or continues: what this thread connected before, outside one, belongs to none."""
    if thread.initializing is None:
        close_batch(thread, process)
        thread.batches.clear()


def _connected(message: bytes, thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    """A ring or tree is complete: the next one may be another communicator's."""
    stage, fact = _completed_stage(message)
    close_batch(thread, process, stage)
    if fact:
        process.note(fact, message, quote)


@lru_cache(_CACHE_SIZE)
def _completed_stage(message: bytes) -> tuple[bytes, str]:
    """What is connected, and how, as the message says."""
    stage = message.partition(b" ")[2].partition(b",")[0].partition(b" comm ")[0]
    match = line_patterns.RINGS.match(message)
    return stage, f"ring gdr {to_text(match[2])}" if match and match[2] else ""


def close_batch(thread: ThreadRecord, process: ProcessRecord, stage: bytes = b"") -> None:
    """Stores the thread's connections so far as one session, under the name of what that completes."""
    if thread.connections:
        thread.budget.release(thread.pending_bytes - BATCH_BYTES - len(stage))
        thread.pending_bytes = 0
        links, mixed = list(thread.connections.values()), thread.mixed or not stage
        session = ConnectionBatch(thread, links, stage, thread.initializing, mixed)
        process.batches.append(session)
        thread.batches.append(session)
        thread.connections.clear()
    thread.mixed = False


def _ib(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    if message.startswith(b"NET/IB : Using"):
        listed, found, _ = message.partition(b"; OOB ")
        if found and not process.hcas:
            process.note("hcas", listed, quote)
            process.hcas = _hcas(listed)
    elif message.startswith(b"NET/IB : No device found"):
        process.note("no device", message, quote)
    elif match := line_patterns.GDR_HCA.match(message):
        process.note(f"gdr {to_text(match[2]).lower()}", message, quote)


@lru_cache(_CACHE_SIZE)
def _hcas(listed: bytes) -> tuple[str, ...]:
    return tuple(sys.intern(to_text(b"%s:%s/%s" % item)) for item in line_patterns.HCA.findall(listed))


def _socket(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    if not process.interfaces and (match := line_patterns.SOCKET_USING.match(message)):
        process.interfaces = tuple(to_text(item) for item in line_patterns.INTERFACE.findall(match[1]))
        process.note("interfaces", message, quote)


def _ofi(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    for name, pattern in (("plugin", line_patterns.OFI_PLUGIN), ("nics", line_patterns.OFI_NICS)):
        if match := pattern.match(message):
            process.facts.setdefault(name, sys.intern(to_text(match[1])))
            process.note(name, message, quote)


def _version(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    if "nccl" not in process.facts and (match := line_patterns.VERSION.match(message)):
        process.facts["nccl"] = sys.intern(to_text(match[1]))
        process.facts["cuda"] = sys.intern(to_text(match[2]))
        process.note("nccl", message, quote)


def _env(message: bytes, _thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    name, value = _variable(message)
    if name and name not in process.env:
        process.note(name, message, quote)
        process.env[name] = value


@lru_cache(_CACHE_SIZE)
def _variable(message: bytes) -> tuple[str, str]:
    match = line_patterns.ENV.match(message)
    return (sys.intern(to_text(match[1])), sys.intern(to_text(match[2]))) if match else ("", "")


def _split(message: bytes, thread: ThreadRecord, _process: ProcessRecord, _quote: Quote) -> None:
    """From 2.18 to 2.20 it has its own line, from 2.21 on it is in the set-up's lines."""
    if match := line_patterns.SPLIT.match(message):
        thread.split = to_text(match[1] or b"?"), to_text(b"/" + match[4])
        if thread.initializing is not None:
            _identify(thread.initializing, {}, thread)


def _comm(message: bytes, thread: ThreadRecord, process: ProcessRecord, quote: Quote) -> None:
    begun = message.partition(b"- Init COMPLETE")[0]
    if begun == thread.init_line and thread.initializing is not None:
        _init_completed(thread.initializing, thread, process)
    elif b" nRanks " in message:
        if match := line_patterns.COUNTS.match(message):
            _setup_started(message, thread, process, quote)
            if joined := _unfinished(process, to_text(match[1]), int(match[2]), int(match[3])):
                joined.nodes = int(match[4])
    elif match := line_patterns.INIT.match(message):
        pointer, rank, size, device, nvml, bus, extra, step = match.groups()
        began = step == b"START"
        if began:
            _setup_started(message, thread, process, quote)
        joined = None if began else _unfinished(process, to_text(pointer), int(rank), int(size))
        if joined is None:
            joined = CommInit(
                process=thread.process,
                pointer=to_text(pointer),
                rank=int(rank),
                size=int(size),
                device=int(device),
                nvml=int(nvml) if nvml else None,
                bus=to_text(bus),
                evidence=quote(),
            )
            if joined.rank >= joined.size:
                return
            process.failures.clear()  # it has gone on
            process.comms.append(joined)
        _identify(joined, _extras(extra), thread)
        if began:
            thread.initializing = joined
            thread.init_line = message.partition(b"- Init START")[0]
        else:
            _init_completed(joined, thread, process)


@lru_cache(_CACHE_SIZE)
def _extras(line: bytes) -> Mapping[bytes, bytes]:
    """The other fields of a set-up's line, which are the same for all ranks of a communicator."""
    return dict(line_patterns.EXTRA.findall(line))


def _init_completed(joined: CommInit, thread: ThreadRecord, process: ProcessRecord) -> None:
    joined.complete = True
    process.failures.clear()
    close_batch(thread, process)
    for session in thread.batches:
        session.comm = joined
    thread.initializing = None
    thread.batches.clear()


def _unfinished(process: ProcessRecord, pointer: str, rank: int, size: int) -> CommInit | None:
    for joined in reversed(process.comms):
        if joined.pointer == pointer and joined.rank == rank and joined.size == size and not joined.complete:
            return joined
    return None


def _identify(joined: CommInit, extras: Mapping[bytes, bytes], thread: ThreadRecord) -> None:
    if b"commId" in extras:
        joined.id = sys.intern(to_text(extras[b"commId"]))
    if b"parent" in extras:
        count = extras.get(b"splitCount") or extras.get(b"childCount") or b""
        joined.parent, joined.split = to_text(extras[b"parent"]), to_text(b"%s/%s" % (count, extras.get(b"color", b"")))
    elif thread.split[1]:
        joined.parent, joined.split = thread.split
        thread.split = "", ""


_HANDLERS: Mapping[bytes, Handler] = {  # the first ten bytes of longer words
    b"comm": _comm,
    b"[Rank": _comm,
    b"Trees": _setup_started,
    b"Using": _network,
    b"Connected": _connected,
    b"bootstrapS": _split,
    b"NET/IB": _ib,
    b"NET/Socket": _socket,
    b"NET/OFI": _ofi,
    b"NCCL": _version,
    b"cudaDriver": _fact("driver", line_patterns.DRIVER),
    b"Bootstrap": _fact("bootstrap", line_patterns.BOOTSTRAP),
    b"Bootstrap:": _fact("bootstrap", line_patterns.BOOTSTRAP),
    b"Pattern": _fact("path", line_patterns.PATTERN),
    b"Failed": note_warning,
    b"Call": note_warning,
    b"DMA-BUF": _seen("dma-buf", b"is available on GPU"),
    b"GPU": _seen("far apart", b"GPU Direct RDMA Disabled for GPU"),
    b"NET/Plugin": _seen("no plugin", b"No plugin found", b"Could not find"),
}


def handler(begin: bytes) -> Handler | None:
    """The handler for a message with these first bytes, as many as `Channel 00` has; None where it has none."""
    if begin.startswith(b"NCCL_"):
        return _env
    if begin.startswith(b"nccl"):
        return _comm
    return _HANDLERS.get(begin.partition(b"\n")[0].partition(b" ")[0])
