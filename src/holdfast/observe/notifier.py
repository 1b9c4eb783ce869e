"""Sends the messages of a run to the receivers of its target, from the controller.

It follows the event log, so that no message delays the controller, and remembers in the run's folder how far it has
come: a controller that takes over sends nothing twice.
"""

from __future__ import annotations

import asyncio
import smtplib
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from email.message import EmailMessage
from pathlib import Path

import httpx
import msgspec

from holdfast.events.log import EventReader
from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import atomic_write, read_line
from holdfast.job.notify import Email, Notification
from holdfast.observe.run_messages import Message, RunMessages

POLL_S = 1.0
TIMEOUT_S = 10.0
"""Seconds for one attempt to send a message."""
RETRY_S = (2.0, 10.0)
"""Seconds between the attempts."""


class Notifier:
    """All receivers of one run; `secrets` has their secrets by the receiver's place."""

    def __init__(
        self,
        run: str,
        log: Path,
        position: Path,
        receivers: Sequence[Notification],
        secrets: Mapping[str, str],
        report: Callable[[Finding], object],
    ) -> None:
        self._events = EventReader(log)
        self._messages = RunMessages(run)
        self._position = position
        self._receivers = receivers
        self._secrets = secrets
        self._report = report
        self._failed: set[int] = set()
        """Receivers whose failure is reported."""
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Send messages until `stop`."""
        done, number = self._read_position(), 0
        while True:
            is_last = self._stopping.is_set()
            for event in self._events.read():
                number += 1
                message = self._messages.add(event)
                if message is not None and number > done:
                    await self._send(message)
                    atomic_write(self._position, f"{number}\n".encode())
            if is_last:
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), POLL_S)
            except TimeoutError:
                continue

    def stop(self) -> None:
        """Send what is in the log, then end."""
        self._stopping.set()

    def _read_position(self) -> int:
        try:
            return int(read_line(self._position))
        except (OSError, ValueError):
            return 0

    async def _send(self, message: Message) -> None:
        wanted = [place for place, each in enumerate(self._receivers) if message.occasion in each.on]
        await asyncio.gather(*(self._send_to(place, message) for place in wanted))

    async def _send_to(self, place: int, message: Message) -> None:
        """Send to one receiver; report the first failure of each."""
        receiver, secret = self._receivers[place], self._secrets.get(str(place), "")
        problem = ""
        for wait_s in (*RETRY_S, None):
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await _deliver(receiver, secret, message)
            except (OSError, TimeoutError, httpx.HTTPError, httpx.InvalidURL, smtplib.SMTPException) as error:
                problem = (
                    type(error).__name__ if secret and secret in str(error) else str(error) or type(error).__name__
                )
            else:
                return
            if wait_s is None or self._stopping.is_set():
                break
            await asyncio.sleep(wait_s)
        if place not in self._failed:
            self._failed.add(place)
            self._report(_not_sent(place, problem))


def _not_sent(place: int, problem: str) -> Finding:
    return Finding(
        code="notification-failed",
        severity=Severity.WARNING,
        what="a message about the run could not be sent",
        where=f"notify.{place}",
        evidence=(problem,),
        remedy="Check the receiver, its secret, and whether the controller may reach it.",
        owner=Owner.USER,
    )


async def _deliver(receiver: Notification, secret: str, message: Message) -> None:
    """Raises OSError, or an error of httpx or smtplib."""
    if receiver.email is not None:
        await asyncio.to_thread(_mail, receiver.email, secret, message)
    elif receiver.command is not None:
        await _run(receiver.command, msgspec.json.encode(message))
    else:
        content = {"text": message.sentence} if receiver.slack is not None else message
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            headers = {"Content-Type": "application/json"}
            answer = await client.post(secret, content=msgspec.json.encode(content), headers=headers)
        if answer.status_code >= 300:
            raise OSError(f"the receiver answered {answer.status_code}")


async def _run(command: Sequence[str], given: bytes) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate(given)
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        raise OSError(f"{command[0]} ended with {process.returncode}: {said.decode(errors='replace').strip()[-300:]}")


def _mail(to: Email, password: str, message: Message) -> None:
    mail = EmailMessage()
    mail["Subject"] = " ".join(f"{message.run} {message.occasion.value}".split())
    mail["From"], mail["To"] = to.sender, ", ".join(to.to)
    more = f"\n\nholdfast explain {message.code}" if message.code else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(message.at))
    mail.set_content(f"{message.sentence}\n\n{when}{more}\n")
    context = ssl.create_default_context()
    direct = to.port == smtplib.SMTP_SSL_PORT
    server = (
        smtplib.SMTP_SSL(to.host, to.port, timeout=TIMEOUT_S, context=context)
        if direct
        else smtplib.SMTP(to.host, to.port, timeout=TIMEOUT_S)
    )
    with server:
        server.ehlo()
        encrypted = direct or server.has_extn("starttls")
        if encrypted and not direct:
            server.starttls(context=context)
        if to.user is not None:
            if not encrypted:
                raise OSError(f"{to.host} offers no TLS, and the password is not sent without it")
            server.login(to.user, password)
        server.send_message(mail)
