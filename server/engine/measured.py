"""What a start measured, kept for the next one of the same card, driver, build, model and settings.

One JSON file in the cache folder holds the latest starts. Whatever is wrong with it costs what it would have
saved, no more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from server.about import cache_folder

from .speculation.times import StepTimesRecord  # noqa: TC001 - pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

KEPT = 32
"""Starts in the file; the oldest goes."""

DRIVER = Path("/proc/driver/nvidia/version")


class Measured(BaseModel):
    prompt_seconds: float
    """Of a prompt as long as the warm-up's."""
    step_times: StepTimesRecord
    """As corrected by every step until the server ended."""


class MeasuredFile:
    """The file, and the place in it of one set of circumstances."""

    def __init__(self, circumstances: Mapping[str, Any]) -> None:
        text = json.dumps({**circumstances, "driver": driver()}, sort_keys=True, default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()

    @property
    def path(self) -> Path:
        return cache_folder() / "measured.json"

    def read(self) -> Measured | None:
        try:
            return Measured.model_validate(self._starts()[self._key])
        except KeyError:
            return None
        except ValidationError as error:
            log.warning("%s: %s; it is measured again", self.path, error)
            return None

    def write(self, measured: Measured) -> None:
        """Puts it in the place of what was there before; a failure is logged."""
        starts = self._starts()
        starts.pop(self._key, None)
        starts[self._key] = measured.model_dump()
        newest = dict(list(starts.items())[-KEPT:])
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(newest), encoding="utf-8")
            part.replace(self.path)
        except OSError as error:
            log.debug("%s is not written: %s", self.path, error)

    def _starts(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s: %s; it is measured again", self.path, error)
            return {}
        return found if isinstance(found, dict) else {}


def driver() -> str:
    """NVIDIA's driver, where there is one."""
    try:
        return DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return ""
