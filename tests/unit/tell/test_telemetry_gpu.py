"""NVML sampling against a fake library object (faults R66 and R86)."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.errors import ConfigError
from recipe.tell.gpu import GpuSampler, device_names, has_gpus, load_nvml, read_sample, visible_handles


class FakeNvml:
    """Four GPUs; the second has no power reading; the fourth is split into two MIG parts. Names are bytes."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.started = False

    def nvmlInit(self) -> None:
        self.started = True

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"gpu{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        known = {f"GPU-{index}aaa-bbb": f"gpu{index}" for index in range(4)} | {"MIG-123": "mig0", "MIG-456": "mig1"}
        if uuid not in known:
            raise self.NVMLError("Not Found")
        return known[uuid]

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return {"mig0": b"MIG-123", "mig1": b"MIG-456"}.get(handle) or f"GPU-{handle[3:]}aaa-bbb".encode()

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return f"Fake {handle}".encode()

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        if handle == "gpu0":
            raise self.NVMLError("Not Supported")
        return (1, 1) if handle == "gpu3" else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        return f"mig{index}"

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        return 7 + int(handle[3:])

    def nvmlDeviceGetComputeInstanceId(self, handle: str) -> int:
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle.startswith("mig"):
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=10 * int(handle[3:]), memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=1000 + int(handle[3:]), total=9000)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if handle == "gpu1":
            raise self.NVMLError("Not Supported")
        return 350_500

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 0  # a real zero is kept


@pytest.mark.parametrize(
    ("mask", "expected"),
    [(None, ["gpu0", "gpu1", "gpu2", "mig0"]), ("", []), ("3,1", ["mig0", "gpu1"]), ("2", ["gpu2"]),
     ("GPU-1aaa-bbb, GPU-0aaa", ["gpu1", "gpu0"]), ("0,-1,1", ["gpu0"]), ("0,9,1", ["gpu0"]), ("NoDevFiles", []),
     ("MIG-456", ["mig1"]), ("MIG-789", []), ("MIG-GPU-3aaa-bbb/8/0", ["mig1"]), ("MIG-GPU-3aaa-bbb/9/0", [])],
)  # fmt: skip
def test_the_mask_decides_which_devices(mask: str | None, expected: list[str]) -> None:
    assert visible_handles(FakeNvml(), {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}) == expected


def test_unsupported_fields_are_absent_and_bytes_become_text() -> None:
    nvml = FakeNvml()
    assert read_sample(nvml, "gpu2") == {
        "name": "Fake gpu2", "uuid": "GPU-2aaa-bbb", "util_pct": 20, "mem_used": 1002, "mem_total": 9000,
        "power_w": 350.5, "temperature_c": 0,
    }  # fmt: skip
    assert "power_w" not in read_sample(nvml, "gpu1")
    part = read_sample(nvml, "mig0")
    assert "util_pct" not in part and part["mem_used"] == 1000


def test_loading() -> None:
    nvml = FakeNvml()
    assert load_nvml(nvml=nvml, gpu_machine=True) is nvml and nvml.started
    assert load_nvml(gpu_machine=False) is None
    assert load_nvml(wanted=False, gpu_machine=True) is None


def test_a_missing_or_wrong_library_is_loud_on_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("NVML Shared Library Not Found")

    with pytest.raises(ConfigError, match="Shared Library Not Found"):
        load_nvml(nvml=Broken(), gpu_machine=True)
    with pytest.raises(ConfigError, match="old pynvml"):
        load_nvml(nvml=SimpleNamespace(nvmlInit=lambda: None), gpu_machine=True)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)  # importing it now raises ImportError
    with pytest.raises(ConfigError, match="pip install nvidia-ml-py"):
        load_nvml(gpu_machine=True)


@pytest.mark.skipif(has_gpus(), reason="looks at a machine without GPUs")
def test_the_real_package_on_this_machine() -> None:
    assert load_nvml() is None and device_names(None) == []
    with pytest.raises(ConfigError, match="NVML does not start"):
        load_nvml(gpu_machine=True)


@pytest.mark.gpu
def test_real_devices() -> None:
    nvml = load_nvml()
    sampler = GpuSampler(nvml, 1, lambda samples: None)
    for sample in sampler.sample():
        assert 0 < sample["mem_used"] <= sample["mem_total"] and sample["name"]  # type: ignore[operator]


def test_sampler_numbers_devices_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.tell import gpu

    monkeypatch.setattr(gpu, "visible_handles", lambda nvml: visible_handles(nvml, {"CUDA_VISIBLE_DEVICES": "2,1"}))
    seen: list[list[dict[str, Any]]] = []
    twice = threading.Event()

    def sink(samples: list[dict[str, Any]]) -> None:
        seen.append(samples)
        if len(seen) == 2:
            twice.set()

    sampler = GpuSampler(FakeNvml(), 0.01, sink)
    sampler.start()
    assert twice.wait(10)
    sampler.stop()
    assert [sample["util_pct"] for sample in seen[0]] == [20, 10] and "power_w" not in seen[0][1]


def test_a_failing_sink_and_no_nvml_harm_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    def sink(samples: list[dict[str, Any]]) -> None:
        raise OSError("gone")

    sampler = GpuSampler(FakeNvml(), 0.01, sink)
    sampler.start()
    sampler.stop()
    assert capsys.readouterr().out.count("GPU samples stop") == 1
    inert = GpuSampler(None, 1, sink)
    inert.start()
    inert.stop()
    assert inert.sample() == []
