"""The mirror of a run on Kubernetes: keeps its folder here as the controller's pod has it, and hands questions on.

It stands where a local run has its keeper: it holds the folder's lock, answers at its socket, and ends with the run.
Nothing depends on it. Where it was ended, or the machine was off, whoever asks for the run next starts another, and
that one goes on from what is here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from holdfast.errors import ExitCode
from holdfast.events import CancelRequested, Outcome, RunFinished
from holdfast.events.log import last_event
from holdfast.folder import EVENTS_NAME, RunFolder
from holdfast.host.files import read_small
from holdfast.launch.keeping import clients_at, describe, take
from holdfast.launch.kubernetes.delivery import DESK, controllers_pod, deliver, folder_there, in_secret
from holdfast.launch.kubernetes.desk import ENDS, FILES, PIECE_BYTES, deadline, end_of, retimed
from holdfast.launch.kubernetes.ending import CANCEL, OBEYED, conclude
from holdfast.launch.kubernetes.execution import CommandFailed, Execution
from holdfast.launch.kubernetes.hearing import Ear
from holdfast.launch.kubernetes.overheard import Overheard
from holdfast.launch.kubernetes.paths import NAMESPACE, folder_of, path_of
from holdfast.launch.kubernetes.place import Place, recorded
from holdfast.launch.kubernetes.refusals import ClusterError, RefusedBy, Unanswered, refusal

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.cluster import Cluster

log = logging.getLogger("holdfast.mirror")

AGAIN_S = 0.5
"""Pause before the controller's pod is looked for again."""
SOON_S = 0.1
"""The same of a pod that waits for its code."""
LAST_WORDS_S = 10.0
"""Longest that the rest of what ranks wrote is waited for once the run is over, where their pods' logs have it."""
REFUSED_S = 60.0
"""How long a removal that is refused is asked for again: an API server that has just started forbids some of it."""
QUESTION_BYTES = 1 << 16
HEAD_BYTES = 512
"""Longest that the line before a part of a file is."""


class Code(msgspec.Struct, frozen=True):
    """Code that the controller's pod does not have from the start."""

    digest: str
    bytes: int


class Terms(msgspec.Struct, frozen=True):
    """What a mirror needs to know of how a run was accepted; the job's own models take longest to import."""

    code: Code | None = None
    """None where it needs none to be brought."""
    agent: bool = True
    lasting: bool = True

    @classmethod
    def of(cls, folder: RunFolder) -> Terms:
        """What a run's folder says."""
        try:
            terms = msgspec.json.decode(read_small(folder.job), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            sys.exit(f"{folder.job} is not what holdfast wrote there: {error}")
        brought = terms.code is None or in_secret(terms.code.bytes)
        return msgspec.structs.replace(terms, code=None) if brought else terms


class RunGone(Exception):
    """The object that stands for the run is not in the cluster any more."""


class Mirror:
    """One run's folder here, and its like in the controller's pod."""

    def __init__(self, folder: RunFolder, cluster: Cluster, place: Place) -> None:
        self._folder, self._cluster, self._place = folder, cluster, place
        self._there = folder_there(folder.run)
        self._pod: str | None = None
        """The controller's, as far as it was heard of."""
        self._heard = asyncio.Event()
        """Whether it is heard."""
        self._terms = Terms.of(folder)
        self._ear = Ear(folder)
        self._overheard = None if self._terms.lasting else Overheard(folder, cluster)
        self._supplied: str | None = None
        """The last pod that was brought the run's code."""
        self._anew = False
        """Whether the log is being sent anew."""

    async def run(self) -> None:
        """Keep up until the run is over, whatever becomes of pods and connections."""
        hearing = asyncio.ensure_future(self._overheard.run()) if self._overheard else None
        try:
            await self._follow()
        finally:
            if hearing is not None:
                hearing.cancel()
        if self._overheard is not None:
            await self._overheard.finish(LAST_WORDS_S)
        await self._leave()

    async def _follow(self) -> None:
        said = ""
        while not isinstance(last_event(self._folder.events), RunFinished):
            why, remedy, ends = "its controller's pod does not run", "", ""
            try:
                await self._keep_up()
                ends = await self._namespace_ends()
            except RunGone:
                self._conclude("its object was removed from the cluster")
            except (ClusterError, CommandFailed) as error:
                why = str(error)
                if isinstance(error, ClusterError):
                    (finding,) = refusal(error).findings
                    why, remedy = finding.what, finding.remedy
                if why != said:
                    said = why
                    log.warning("%s", said)
            except Exception as error:  # the run goes on there, so whatever it is, it is followed again
                why = f"{type(error).__name__}: {error}"
                log.exception("the run could not be followed")
            finally:
                self._pod = None
                self._heard.clear()
            self._ear.hears_nothing(why, remedy, ends=ends)
            await asyncio.sleep(SOON_S if self._waits_for_code() else AGAIN_S)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Be one question's connection to the controller, as soon as there is one; it breaks off where none comes."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            is_cancel = head.startswith(CANCEL)
            unborn = is_cancel and self._pod is None and last_event(self._folder.events) is None
            if not unborn:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(deadline(head) - time.monotonic()):
                        await self._heard.wait()
            if self._pod is not None:
                async with self._cluster.execute(self._pod, *DESK, self._there, "ask") as desk:
                    await desk.send(retimed(head, lambda: -time.monotonic()))
                    handing = asyncio.ensure_future(_hand_in(reader, desk))
                    async for data in desk.output():
                        writer.write(data)
                        await writer.drain()
                    handing.cancel()
            elif unborn or (is_cancel and await _is_forced(reader)):
                await self._remove()
                when = "before it had a controller" if unborn else "while its controller could not be reached"
                self._conclude(f"it was cancelled {when}")
                writer.write(OBEYED)
        except Exception as error:
            log.warning("a question was not answered: %s", error)
        finally:
            writer.close()

    async def _keep_up(self) -> None:
        """Follow the controller's pod as long as it can be heard."""
        pod = await self._controllers_pod()
        if pod is None:
            return
        await self._bring_code(pod)
        async with self._cluster.execute(pod, *DESK, self._there, "follow") as desk:
            await desk.send(json.dumps(self._have()).encode() + b"\n")
            self._pod = pod
            self._heard.set()
            self._anew = False
            async for piece, data in _pieces(desk.output()):
                self._ear.hears()
                if self._take(piece, data):
                    await desk.send(b"done\n")

    def _take(self, piece: _Piece, data: bytes) -> bool:
        """Keep a part of a file; whether with it the log is here to its end.

        A log that is sent anew takes the place of what is here when all of it has come: nobody reads a part of it.
        """
        log, place = self._folder.events, self._folder.path / piece.name
        fresh = log.with_suffix(".new")
        if not piece.bytes:
            if not self._anew:
                return False
            self._anew = False
            fresh.rename(log)
        elif place == log and (self._anew or (piece.at == 0 and log.exists())):
            self._anew = True
            _put(fresh, piece.at, data)
            return False
        else:
            _put(place, piece.at, data)
        return place == log and isinstance(last_event(log), RunFinished)

    async def _controllers_pod(self) -> str | None:
        """The controller's pod where it runs; raises RunGone where there will be none."""
        pod = await controllers_pod(self._cluster, self._folder.run)
        if pod is None:
            if not await self._cluster.exists(self._place.owner):
                raise RunGone
            await self._remake_controller()
        return pod

    async def _remake_controller(self) -> None:
        """Make the controller's ReplicaSet again where somebody has deleted it: nobody in the cluster would."""
        lost = self._place.controller
        if lost is None or last_event(self._folder.events) is None:
            return  # before the run begins, what has just been made may not be seen yet
        with contextlib.suppress(RefusedBy):  # who may not look may make it, which is refused where it is there
            if await self._cluster.exists(path_of(lost)):
                return
        owner = await self._cluster.read(self._place.owner)
        if "deletionTimestamp" in owner["metadata"]:
            return
        try:
            await self._cluster.make(folder_of(lost), lost)
        except RefusedBy as refused:
            if refused.status != HTTPStatus.CONFLICT:
                raise
        else:
            log.warning("ReplicaSet %s was deleted while the run goes on; it is made again", lost["metadata"]["name"])

    async def _namespace_ends(self) -> str:
        """Since when the namespace of a run that goes on is being deleted; empty where it is not, as far as is seen."""
        latest = last_event(self._folder.events)
        if latest is None or isinstance(latest, RunFinished):
            return ""  # what it waits for before it begins is looked for by whoever asks
        try:
            namespace = await self._cluster.read(NAMESPACE)
        except RefusedBy:
            return ""
        return namespace["metadata"].get("deletionTimestamp", "")

    async def _bring_code(self, pod: str) -> None:
        """Deliver the run's code, unless that was done already: to each pod, where a pod loses it with its folder."""
        code = self._terms.code
        if code and (self._waits_for_code() or (pod != self._supplied and not self._terms.lasting)):
            await deliver(self._cluster, pod, self._folder, code.digest)
        self._supplied = pod

    def _waits_for_code(self) -> bool:
        """Whether the run cannot begin before its code is brought."""
        return self._terms.code is not None and last_event(self._folder.events) is None

    def _have(self) -> dict[str, int]:
        """How much of each file is here, and how the log ends."""
        files = (self._folder.events, *self._folder.path.glob("logs/*/*"))
        sizes = {str(path.relative_to(self._folder.path)): path.stat().st_size for path in files if path.exists()}
        log = self._folder.events
        return sizes | ({ENDS: end_of(log, sizes[log.name])} if log.name in sizes else {})

    def _conclude(self, why: str) -> None:
        conclude(self._folder, Outcome.CANCELLED, why, ExitCode.CANCELLED)

    async def _leave(self) -> None:
        """Remove a run that was cancelled; one that has ended by itself stays for a day, for whoever looks at it."""
        finished = last_event(self._folder.events)
        if not (isinstance(finished, RunFinished) and finished.outcome is Outcome.CANCELLED):
            return
        deadline = time.monotonic() + REFUSED_S
        while True:
            try:
                await self._remove()
                return
            except Exception as error:  # whatever it is: what is left behind is worth another try
                log.warning("%s is not removed: %s", self._place.owner, error)
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _remove(self) -> None:
        while True:
            try:
                await self._cluster.remove(self._place.owner)
                return
            except Unanswered as error:
                log.warning("%s cannot be removed yet: %s", self._place.owner, error)
                await asyncio.sleep(AGAIN_S)


async def _is_forced(reader: asyncio.StreamReader) -> bool:
    """Whether what follows a request's head asks for an end at once, whoever is there to bring it about."""
    return msgspec.json.decode(await reader.read(QUESTION_BYTES), type=CancelRequested).force


async def _hand_in(reader: asyncio.StreamReader, desk: Execution) -> None:
    with contextlib.suppress(Exception):  # whoever waits for the answer hears of it
        while data := await reader.read(QUESTION_BYTES):
            await desk.send(data)
        await desk.end_input()


class _Piece(msgspec.Struct, frozen=True):
    """What the desk says before a part of a file; of nothing, after it has looked at all."""

    name: Annotated[str, msgspec.Meta(pattern=f"^({FILES.pattern})$")] = EVENTS_NAME
    at: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    bytes: Annotated[int, msgspec.Meta(ge=0, le=PIECE_BYTES)] = 0


_piece = msgspec.json.Decoder(_Piece)


async def _pieces(output: AsyncIterator[bytes]) -> AsyncIterator[tuple[_Piece, bytes]]:
    """Parts of files, as the desk sends them: what it is, on a line, and as many bytes as that says.

    Raises CommandFailed for what no desk sends: it comes from a pod, where others than we have a say.
    """
    buffer = bytearray()
    async for data in output:
        buffer += data
        while (end := buffer.find(b"\n", 0, HEAD_BYTES)) >= 0:
            try:
                piece = _piece.decode(buffer[:end])
            except msgspec.DecodeError as error:
                raise CommandFailed(f"what the controller's pod sends is no part of a run: {error}") from error
            if len(buffer) - end - 1 < piece.bytes:
                break
            yield piece, bytes(buffer[end + 1 : end + 1 + piece.bytes])
            del buffer[: end + 1 + piece.bytes]
        if end < 0 and len(buffer) > HEAD_BYTES:
            raise CommandFailed("what the controller's pod sends is no part of a run: a line without an end")


def _put(path: Path, at: int, data: bytes) -> None:
    """Write a part of a file in its place; what was there from then on is of another life of it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with open(descriptor, "wb") as file:
        file.truncate(at)
        file.seek(at)
        file.write(data)


@contextlib.asynccontextmanager
async def mirrored(folder: RunFolder, cluster: Cluster) -> AsyncGenerator[Awaitable[None]]:
    """Answer questions and mirror a run, or look on where it has no controller to ask; what is given ends with it."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    if Terms.of(folder).agent:
        mirror = Mirror(folder, cluster, recorded(folder))
    else:
        from holdfast.launch.kubernetes.onlooker import Onlooker

        mirror = Onlooker(folder, cluster, recorded(folder))
    server = await asyncio.start_unix_server(mirror.answer, sock=clients_at(folder))
    describe(folder)
    async with server:
        running = asyncio.ensure_future(mirror.run())
        try:
            yield running
        finally:
            running.cancel()
    folder.forget_secrets()
    folder.control_socket.unlink(missing_ok=True)


async def _go_on(folder: RunFolder) -> None:
    from holdfast.launch.kubernetes.cluster import Cluster

    place = recorded(folder)
    async with mirrored(folder, Cluster(context=place.context, namespace=place.namespace)) as over:
        await over


def main() -> None:
    """Mirror the run whose folder is named on the command line."""
    parser = argparse.ArgumentParser(prog="holdfast.launch.kubernetes.mirror")
    parser.add_argument("folder", type=Path)
    folder = RunFolder(parser.parse_args().folder)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if take(folder) is None:
        sys.exit("the run has a mirror already")
    if not folder.place.exists():
        sys.exit("the run was not started")
    asyncio.run(_go_on(folder))


if __name__ == "__main__":
    main()
