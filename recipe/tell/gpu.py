"""Samples of the GPUs that this process was given, through NVML."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recipe.errors import ConfigError

Sample = dict[str, float | int | str]


def has_gpus() -> bool:
    """Whether this machine has an NVIDIA GPU, told from its device files: no library needed."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or any(Path("/dev").glob("nvidia-caps/*"))


def load_nvml(wanted: bool = True, gpu_machine: bool | None = None, nvml: Any = None) -> Any:
    """An initialised NVML module, or None on CPU machines and where it is not ``wanted``.

    Raises ConfigError on a machine with GPUs if the package or the driver's library is missing, or if the package is
    the old ``pynvml``, which has the same module name. ``nvml`` stands in for the imported module.
    """
    if not wanted or not (has_gpus() if gpu_machine is None else gpu_machine):
        return None
    off = "or set dflash.telemetry.gpu to false"
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            rule = "this machine has GPUs, but the NVML package is missing"
            raise ConfigError("dflash.telemetry.gpu", True, rule, f"pip install nvidia-ml-py, {off}") from error
    if not hasattr(nvml, "nvmlDeviceGetHandleByUUID") or not hasattr(nvml, "NVMLError"):
        rule = "the module pynvml is not nvidia-ml-py (an old pynvml shadows it)"
        fix = f"pip uninstall pynvml; pip install --force-reinstall nvidia-ml-py, {off}"
        raise ConfigError("dflash.telemetry.gpu", True, rule, fix)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        rule = f"this machine has GPUs, but NVML does not start ({error})"
        raise ConfigError("dflash.telemetry.gpu", True, rule, f"check that nvidia-smi works, {off}") from error
    return nvml


def visible_handles(nvml: Any, environment: Mapping[str, str] = os.environ) -> list[Any]:
    """NVML handles in the order of CUDA's device numbers: NVML itself knows nothing of CUDA_VISIBLE_DEVICES.

    Understands indices, (shortened) GPU UUIDs and both forms of MIG names; like CUDA, stops at the first entry that
    names no device. Indices follow the PCI bus, which equals CUDA's order on machines with one kind of GPU.
    """
    mask = environment.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        indices = range(int(nvml.nvmlDeviceGetCount()))
        found = (_by_index(nvml, index) for index in indices)
        return [handle for handle in found if handle is not None]
    handles: list[Any] = []
    for entry in (part.strip() for part in mask.split(",")):
        handle = _by_name(nvml, entry)
        if handle is None:
            break
        handles.append(handle)
    return handles


def _by_name(nvml: Any, entry: str) -> Any:
    if entry.isdecimal():
        return _by_index(nvml, int(entry)) if int(entry) < int(nvml.nvmlDeviceGetCount()) else None
    if entry.startswith("MIG-GPU-"):
        return _old_mig(nvml, entry)
    if entry.startswith("MIG-"):
        return _try(nvml, nvml.nvmlDeviceGetHandleByUUID, entry)
    if entry.startswith("GPU-"):
        for index in range(int(nvml.nvmlDeviceGetCount())):
            handle = _try(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None and _text(_try(nvml, nvml.nvmlDeviceGetUUID, handle)).startswith(entry):
                return handle
    return None


def _by_index(nvml: Any, index: int) -> Any:
    """A GPU; if it is split, its first MIG part, which is what CUDA uses then."""
    handle = _try(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    mode = _call(nvml, "nvmlDeviceGetMigMode", handle) if handle is not None else None
    if mode and mode[0]:
        return _call(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, 0)
    return handle


def _old_mig(nvml: Any, entry: str) -> Any:
    """``MIG-GPU-<uuid>/<gpu instance>/<compute instance>``, the name that drivers before 470 use."""
    uuid, _, instances = entry.removeprefix("MIG-").partition("/")
    parent = _try(nvml, nvml.nvmlDeviceGetHandleByUUID, uuid)
    for index in range(_call(nvml, "nvmlDeviceGetMaxMigDeviceCount", parent) or 0 if parent is not None else 0):
        part = _call(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", parent, index)
        ids = (_call(nvml, "nvmlDeviceGetGpuInstanceId", part), _call(nvml, "nvmlDeviceGetComputeInstanceId", part))
        if part is not None and instances == f"{ids[0]}/{ids[1]}":
            return part
    return None


def read_sample(nvml: Any, handle: Any) -> Sample:
    """One device now; what it does not support is absent, never 0.

    Keys: name, uuid, util_pct, mem_used and mem_total (bytes), power_w, temperature_c, sm_mhz.
    """
    sample: Sample = {}
    for key, function in (("name", "nvmlDeviceGetName"), ("uuid", "nvmlDeviceGetUUID")):
        if (text := _text(_call(nvml, function, handle))) != "":
            sample[key] = text
    if (rates := _call(nvml, "nvmlDeviceGetUtilizationRates", handle)) is not None:
        sample["util_pct"] = int(rates.gpu)
    if (memory := _call(nvml, "nvmlDeviceGetMemoryInfo", handle)) is not None:
        sample["mem_used"], sample["mem_total"] = int(memory.used), int(memory.total)
    if (milliwatts := _call(nvml, "nvmlDeviceGetPowerUsage", handle)) is not None:
        sample["power_w"] = milliwatts / 1000
    sensor, sm_clock = getattr(nvml, "NVML_TEMPERATURE_GPU", 0), getattr(nvml, "NVML_CLOCK_SM", 1)
    if (celsius := _call(nvml, "nvmlDeviceGetTemperature", handle, sensor)) is not None:
        sample["temperature_c"] = int(celsius)
    if (clock := _call(nvml, "nvmlDeviceGetClockInfo", handle, sm_clock)) is not None:
        sample["sm_mhz"] = int(clock)
    return sample


def device_names(nvml: Any) -> list[str]:
    """Names of the visible GPUs, for provenance; empty without NVML."""
    return [] if nvml is None else [str(read_sample(nvml, handle).get("name", "?")) for handle in visible_handles(nvml)]


class GpuSampler:
    """Hands ``sink`` a sample of every visible GPU each ``interval_s``, in the order of CUDA's device numbers.

    Inert where ``nvml`` is None. One sampler per node is enough.
    """

    def __init__(self, nvml: Any, interval_s: float, sink: Callable[[list[Sample]], None]) -> None:
        self._nvml, self._interval, self._sink = nvml, interval_s, sink
        self._handles = [] if nvml is None else visible_handles(nvml)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self) -> list[Sample]:
        """All visible devices now."""
        return [read_sample(self._nvml, handle) for handle in self._handles]

    def start(self) -> None:
        """Sample in a daemon thread until `stop`."""
        if self._handles:
            self._thread = threading.Thread(target=self._loop, name="gpu-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Safe to call without `start`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _loop(self) -> None:
        while True:
            try:
                self._sink(self.sample())
            except Exception as error:  # telemetry must not end a run, and a daemon thread's traceback helps nobody
                print(f"warning: GPU samples stop: {error}", flush=True)
                return
            if self._stop.wait(self._interval):
                return


def _call(nvml: Any, function: str, *arguments: Any) -> Any:
    found = getattr(nvml, function, None)
    return None if found is None or arguments[0] is None else _try(nvml, found, *arguments)


def _try(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return "" if value is None else value.decode(errors="replace") if isinstance(value, bytes) else str(value)
