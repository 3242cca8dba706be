"""The devices that a model's layers go to."""

import logging
from dataclasses import replace

from qwen_serve.llamacpp import Device, devices, supports_gpu
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.server.engine.settings import EngineSettings

from .hardware import available_memory

log = logging.getLogger(__name__)


def devices_for(settings: EngineSettings) -> list[Device]:
    """The GPUs for layers, if any, and then the host. Raises ModelLoadError for a choice among GPUs that are
    not there."""
    found = devices()
    gpus = [device for device in found if device.is_gpu]
    host = next(device for device in found if not device.is_gpu)
    available = available_memory()
    if available is not None:
        host = replace(host, free=available)
    if not gpus or settings.n_gpu_layers == 0:
        _check_without_gpu(settings)
        return [host]
    if settings.split_mode == "layer":
        if settings.tensor_split and len(settings.shares) != len(gpus):
            raise ModelLoadError(f"tensor_split is {settings.tensor_split!r}; there are {len(gpus)} GPUs")
        return [*gpus, host]
    if settings.main_gpu >= len(gpus):
        raise ModelLoadError(f"main_gpu is {settings.main_gpu}; there are {len(gpus)} GPUs, numbered from 0")
    return [gpus[settings.main_gpu], host]


def _check_without_gpu(settings: EngineSettings) -> None:
    """Refuses a choice among GPUs; warns if layers were to be on one."""
    reason = "n_gpu_layers is 0"
    if settings.n_gpu_layers:
        reason = "llama.cpp finds no GPU" if supports_gpu() else "this llama.cpp has no GPU support"
    for name, value, without in (
        ("main_gpu", settings.main_gpu, 0),
        ("split_mode", settings.split_mode, "none"),
    ):
        if value != without:
            raise ModelLoadError(f"{name} is {value!r}, but {reason}; leave {name} out")
    if settings.n_gpu_layers > 0:
        log.warning("n_gpu_layers is %d, but %s: all layers are on the CPU", settings.n_gpu_layers, reason)
