"""The model of a target's `notify`: whom to tell when something happens to a run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from holdfast.job.spec import Count, Model, NonEmpty, SecretRef


class Occasion(StrEnum):
    """When a message is sent."""

    FAILED = "failed"
    """The run has failed."""
    FINISHED = "finished"
    """It has succeeded or was cancelled."""
    RECOVERED = "recovered"
    """It has committed a step after a failure."""
    DEGRADED = "degraded"
    """It continues with fewer nodes than requested."""
    STALLED = "stalled"
    """A rank hangs."""


class Email(Model):
    """A message by SMTP with STARTTLS, or with TLS from the start at port 465."""

    to: Annotated[tuple[NonEmpty, ...], Field(min_length=1)]
    sender: NonEmpty
    host: NonEmpty
    port: Annotated[Count, Field(ge=1, le=65535)] = 587
    user: NonEmpty | None = None
    """None for a server that requires no login."""
    password: SecretRef | None = None


class Notification(Model):
    """One receiver: exactly one of `webhook`, `slack`, `email` and `command`."""

    on: tuple[Occasion, ...] = (Occasion.FAILED, Occasion.FINISHED, Occasion.DEGRADED, Occasion.STALLED)
    """When."""
    webhook: SecretRef | None = None
    """Where the URL is stored that gets a JSON object."""
    slack: SecretRef | None = None
    """Where the URL is stored of an incoming webhook of Slack, or of a service that takes the same JSON."""
    email: Email | None = None
    command: Annotated[tuple[NonEmpty, ...], Field(min_length=1)] | None = None
    """A program that the controller runs, with the JSON object as its input."""

    @model_validator(mode="after")
    def _one_receiver(self) -> Self:
        if sum(each is not None for each in (self.webhook, self.slack, self.email, self.command)) != 1:
            raise PydanticCustomError(
                "bad-notify", "must have exactly one receiver: `webhook`, `slack`, `email` or `command`"
            )
        return self

    @property
    def secret(self) -> SecretRef | None:
        """The secret that it needs."""
        return self.webhook or self.slack or (self.email.password if self.email else None)
