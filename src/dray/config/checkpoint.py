"""[checkpoint] of a recipe: how often a run saves checkpoints, and where."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from dray.config.model import SecretError, Spec
from dray.config.training import Count

Every = tuple[tuple[Annotated[int, Field(ge=0)], Count], ...]
_URL = re.compile(r"(s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]+(/(?!\.\.?(/|$))[A-Za-z0-9._=-]+)*/?")


class Checkpoint(Spec):
    """The checkpoints of a run, from which it or another run can resume."""

    every: Every = ()
    """Pairs [until, every]: [[100, 10], [0, 50]] saves every 10 steps until step 100, then every 50. A single number
    holds to the end. Left out: no checkpoint before the end."""
    at_start: bool = False
    """Whether step 0 is saved too. Its checkpoint is removed like the others, once there are `keep` newer ones."""
    keep: Count = 2
    """How many of the newest checkpoints to keep."""
    final: bool = True
    """Whether the model is saved at the end. false: for a run that only measures, as dray tune's runs do."""
    folder: str = ""
    """Folder for checkpoints. Left out: in the run folder. With a folder, the same command, requeued or typed again,
    resumes where the last one stopped. A relative path starts at the recipe's own folder. One run at a time uses it."""
    mirror: str = ""
    """Where each checkpoint is copied during training: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or a folder. A run
    resumes from the mirror if it has a newer checkpoint than the folder. It also keeps `keep` of them."""

    @property
    def mirror_folder(self) -> str:
        """The mirror, if it is a folder."""
        return "" if "://" in self.mirror else self.mirror

    @field_validator("mirror")
    @classmethod
    def _a_place(cls, mirror: str) -> str:
        if mirror.startswith("file:///"):
            mirror = mirror.removeprefix("file://")
        if "://" not in mirror:
            return mirror
        if "@" in mirror or "?" in mirror:
            shown = "a URL with a user, a password or a signature would appear in plans and run folders"
            raise SecretError(f"{shown}; export the secret, and name it in pass_env")
        if not _URL.fullmatch(mirror):
            raise ValueError("expected s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or a folder")
        return mirror.rstrip("/")

    @model_validator(mode="after")
    def _copies_something(self) -> Checkpoint:
        if self.mirror and not self.every:
            raise ValueError("mirror copies checkpoints, but none is saved before the end; set checkpoint.every")
        if self.mirror and self.mirror == self.folder:
            raise ValueError("mirror is the checkpoint folder itself; name another place")
        return self

    @field_validator("every", mode="before", json_schema_input_type=Count | Every)
    @classmethod
    def _number_alone(cls, value: object) -> object:
        if isinstance(value, int):
            return ((0, value),)
        return (
            tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
            if isinstance(value, list)
            else value
        )

    @field_validator("every")
    @classmethod
    def _ascending(cls, every: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        untils = [until or math.inf for until, _ in every]
        if untils != sorted(set(untils)):
            raise ValueError(
                "expected pairs whose first numbers increase, such as [[100, 10], [0, 50]]; 0 stands for the end"
            )
        return every
