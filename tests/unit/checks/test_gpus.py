"""The makers' figures, each with its source, and what is measured beside them."""

from __future__ import annotations

import re

import pytest

from dray.contract import hardware


@pytest.mark.parametrize(
    ("device", "bf16", "fp16", "bandwidth"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 312, 312, 2039),
        ("NVIDIA A100-PCIE-40GB", 312, 312, 1555),
        ("NVIDIA A100 80GB PCIe", 312, 312, 1935),
        ("NVIDIA H100 80GB HBM3", 989.4, 989.4, 3350),
        ("NVIDIA H100 PCIe", 756.5, 756.5, 2000),
        ("NVIDIA H100 NVL", 835.5, 835.5, 3900),
        ("NVIDIA H200", 989.4, 989.4, 4800),
        ("NVIDIA GH200 120GB", 989.4, 989.4, 4000),
        ("NVIDIA GH200 480GB", 989.4, 989.4, 4000),
        ("NVIDIA GH200 144G HBM3e", 989.4, 989.4, 4900),
        ("NVIDIA B200", 2250, 2250, 8000),
        ("Tesla V100-SXM2-16GB", 0, 125, 900),
        ("Tesla V100-PCIE-32GB", 0, 112, 900),
        ("NVIDIA L4", 121, 121, 300),
        ("NVIDIA A10", 125, 125, 600),
        ("AMD Instinct MI250X", 191.5, 191.5, 1638.4),
        ("AMD Instinct MI250X/MI250", 191.5, 191.5, 1638.4),
        ("AMD Instinct MI250", 181, 181, 1638.4),
        ("AMD Instinct MI210", 181, 181, 1638.4),
        ("AMD Instinct MI300A", 980.6, 980.6, 5300),
        ("AMD Instinct MI300X", 1307.4, 1307.4, 5300),
    ],
)
def test_a_gpu_is_known_by_its_name(device: str, bf16: float, fp16: float, bandwidth: float) -> None:
    found = hardware.find_gpu(device)
    assert found
    assert (found.bf16, found.fp16, found.bandwidth) == (bf16, fp16, bandwidth)


@pytest.mark.parametrize(
    "device",
    ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "NVIDIA A100-SXM-64GB", "NVIDIA L40", "", "AMD"],
)
def test_another_or_a_part_of_one_is_not(device: str) -> None:
    """The old table took any name with H100 in it, or MI300, for one and the same."""
    assert hardware.find_gpu(device) is None


def test_each_figure_has_a_source() -> None:
    assert [
        gpu.name for gpu in hardware.known_gpus() if not re.search(r"(datasheet|data sheet|guide).*20\d\d", gpu.source)
    ] == []


@pytest.mark.torch
def test_the_peak_is_that_of_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
    from dray.train.loop import metrics

    def peak(device: str, precision: str) -> float:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
        return metrics._peak(torch.device("cuda", 0), precision)

    assert peak("NVIDIA H100 PCIe", "bf16") == 756.5e12
    assert [peak("Tesla V100-SXM2-16GB", name) for name in ("bf16", "fp16", "fp32")] == [0, 125e12, 125e12]
    assert peak("NVIDIA A10G", "bf16") == 0
    assert metrics._peak(torch.device("cpu"), "bf16") == 0


@pytest.mark.torch
def test_the_measured_ceiling_stands_beside_the_makers_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
    from dray.checks import device

    real = device.ceiling(torch.device("cpu"), torch.float32, size=64)
    assert 0 < real < 100
    monkeypatch.setattr(device, "ceiling", lambda _, half: {torch.bfloat16: 612.4, torch.float16: 90.0}[half])
    said = {}
    for name in ("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB", "NVIDIA A10G"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        said[name] = device._matmul(0)
    h100, v100 = hardware.find_gpu("NVIDIA H100 80GB HBM3"), hardware.find_gpu("Tesla V100-SXM2-16GB")
    assert h100
    assert v100
    assert said == {
        "NVIDIA H100 80GB HBM3": f"612 TFLOP/s in bfloat16, 62% of the maker's 989.4 ({h100.source})",
        "Tesla V100-SXM2-16GB": f"90 TFLOP/s in float16, 72% of the maker's 125 ({v100.source})",
        "NVIDIA A10G": "612 TFLOP/s in bfloat16; gpus.toml does not have this GPU",
    }
