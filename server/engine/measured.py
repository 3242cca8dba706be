"""What a start measured, kept for the next one of the same card, driver, build, model and settings.

Each has a small JSON file in the cache folder. Whatever is wrong with it costs what it would have saved, no
more.
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

DRIVER = Path("/proc/driver/nvidia/version")


class Measured(BaseModel):
    """What a start measures, in seconds."""

    prompt_seconds: float
    """Of a prompt as long as the warm-up's."""
    step_times: StepTimesRecord
    """As corrected by every step until the server ended."""


class MeasuredFile:
    """The file of one set of circumstances."""

    def __init__(self, circumstances: Mapping[str, Any]) -> None:
        text = json.dumps({**circumstances, "driver": driver()}, sort_keys=True, default=str)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.path = cache_folder() / "measured" / f"{name}.json"

    def read(self) -> Measured | None:
        """What an earlier start left; None where there is nothing that can be used."""
        try:
            return Measured.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            log.warning("%s: %s; it is measured again", self.path, error)
            return None

    def write(self, measured: Measured) -> None:
        """Puts it in the place of what was there before; a failure is logged."""
        part = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(measured.model_dump_json(), encoding="utf-8")
            part.replace(self.path)
        except OSError as error:
            log.debug("%s is not written: %s", self.path, error)


def driver() -> str:
    """NVIDIA's driver, where there is one."""
    try:
        return DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return ""
