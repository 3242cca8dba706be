"""Measurements kept for the next start with the same card, driver, build, model and settings.

Each is a small JSON file in the cache folder. If a file is unusable, it is measured again.
"""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, Field, ValidationError

from qwen_serve.common.files import write_text
from qwen_serve.llamacpp import Context, Device, patches
from qwen_serve.llamacpp.errors import LlamaError, ModelLoadError
from qwen_serve.llamacpp.mtp import MtpContext
from qwen_serve.server.about import cache_folder
from qwen_serve.server.engine.settings import EngineSettings
from qwen_serve.server.engine.speculation.times import StepTimesRecord

from .contexts import context_options, draft_context, head_options, load_draft, load_model, uses_mtp
from .spec import ModelSpec

log = logging.getLogger(__name__)

DRIVER = Path("/proc/driver/nvidia/version")


class Measured(BaseModel):
    """Times in seconds, measured at start and corrected by each step until the server ended."""

    token_seconds: float
    """Minimum time of a prompt token so far."""
    step_times: StepTimesRecord


class Buffers(BaseModel):
    """What a profile run measures."""

    sizes: dict[str, int] = Field(min_length=1)
    """Bytes of compute and output buffers, by ggml's name of the device."""


Record = TypeVar("Record", bound=BaseModel)


class RecordFile(Generic[Record]):
    """The file of one kind of record for one configuration.

    A configuration consists of the settings, the devices, the contents of the model files, the build and the
    driver. `more` is anything else that the record depends on.
    """

    def __init__(
        self,
        kind: type[Record],
        settings: EngineSettings,
        spec: ModelSpec,
        places: Iterable[Device],
        **more: Any,
    ) -> None:
        circumstances = {
            "kind": kind.__name__,
            "model": spec.file.fingerprint(),
            "draft": spec.draft and spec.draft.file.fingerprint(),
            "build": build(),
            "devices": [(place.name, place.description) for place in places],
            "driver": driver(),
            **settings.model_dump(
                exclude={"model", "draft_model", "lora", "prefix_file", "max_queue", "scheduling_policy"}
            ),
            **more,
        }
        text = json.dumps(circumstances, sort_keys=True, default=str)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.path = cache_folder() / "measured" / f"{name}.json"
        self._kind = kind

    def read(self) -> Record | None:
        """The record of an earlier start; None if there is none that can be used."""
        try:
            return self._kind.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            log.warning("%s: %s; it is measured again", self.path, error)
            return None

    def write(self, record: Record) -> None:
        """Replace the file by this record; a failure is logged."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, record.model_dump_json())
        except OSError as error:
            log.debug("%s is not written: %s", self.path, error)


def driver() -> str:
    """Version text of NVIDIA's driver; empty if there is none."""
    try:
        return DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return ""


def build() -> str:
    """Version of llama-cpp-python and its patches."""
    return f"llama-cpp-python {version('llama-cpp-python')}, {', '.join(patches()) or 'stock'}"


_BUFFER = re.compile(r"(\S+)\s+(compute|output) buffer size =\s*([0-9.]+) MiB")


def profile_run(
    settings: EngineSettings, spec: ModelSpec, places: Sequence[Device], embedding_on: Device | None
) -> dict[str, int]:
    """Bytes of compute and output buffers by ggml's name of the device. llama.cpp reports them, now or at an
    earlier start."""
    file = RecordFile(Buffers, settings, spec, places) if settings.remember else None
    if file is not None and (known := file.read()) is not None:
        return known.sizes
    sizes: Counter[str] = Counter()
    with load_model(settings, spec, embedding_on, no_alloc=True) as model:
        try:
            context = Context(model, context_options(settings))
            sizes += reported(context.log, "the model's context")
            if spec.draft is not None:
                with load_draft(settings, spec.draft, no_alloc=True) as draft:
                    beside = draft_context(settings, spec.draft, draft, context)
                    sizes += reported(beside.log, "the draft model's context")
                    beside.close()
            context.close()
            if uses_mtp(settings, spec):
                head = MtpContext(model, head_options(settings))
                sizes += reported(head.log, "the MTP head's context")
                head.close()
        except ModelLoadError:
            raise
        except LlamaError as error:
            raise ModelLoadError(f"llama.cpp refuses these settings for {settings.model}: {error}") from error
    if file is not None:
        file.write(Buffers(sizes=sizes))
    return sizes


def reported(lines: Sequence[str], whose: str) -> Counter[str]:
    """Bytes of compute and output buffers in llama.cpp's log, by ggml's name of the device.

    Raises ModelLoadError if the log names no compute buffer, since every context has one.
    """
    found = [match for line in lines if (match := _BUFFER.search(line))]
    if not any(kind == "compute" and float(mib) for _, kind, mib in (match.groups() for match in found)):
        raise ModelLoadError(
            f"llama.cpp's log does not tell how large the buffers of {whose} are: no line like "
            f"'CPU compute buffer size = 12.34 MiB' among its {len(lines)}. This build of llama.cpp "
            f"({build()}) is another than this server was made for; `make setup` builds the right one"
        )
    sizes: Counter[str] = Counter()
    for device, _, mib in (match.groups() for match in found):
        sizes[device] += int(float(mib) * 1024**2)
    return sizes
