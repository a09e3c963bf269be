"""Where FlashAttention 4 is used, and the reason where it is not."""

import pytest

from flatout.assembly.conditions import uses_gpu
from flatout.config.schema import load_config
from flatout.hardware import Gpu, Machine
from flatout.speedups import flash_attention_4
from flatout.speedups.flash_attention_4 import SPEEDUP

CPU = Machine("a CPU", 2, 8.0, (), "3.11")


def gpu(capability):
    return Machine("a CPU", 2, 8.0, (Gpu("a GPU", 16.0, capability, "1"),), "3.11")


def reason(machine, *overrides):
    return SPEEDUP.reason_against(
        machine, load_config(None, ["train.device=auto", "data.seq_len=1024", *overrides])
    )


def missing(name):
    raise flash_attention_4.PackageNotFoundError(name)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(flash_attention_4, "version", lambda name: "4.0.0b36")


def test_it_is_for_plain_causal_attention_on_hopper_and_later():
    assert uses_gpu(gpu((9, 0)), load_config(None, ["train.device=auto"]))
    assert reason(gpu((9, 0))) is None
    assert reason(gpu((10, 0)), "model.window=1024") is None
    assert "use flex-attention" in reason(gpu((9, 0)), "model.window=1023")
    assert "use flex-attention" in reason(gpu((9, 0)), "data.document_mask=true")
    assert "set train.precision=auto" in reason(gpu((9, 0)), "train.precision=fp32")
    assert "needs compute capability 9.0" in reason(gpu((8, 0)))
    assert "uses a CPU" in reason(CPU)


def test_without_the_package_it_names_the_install_line_and_the_licence(monkeypatch):
    monkeypatch.setattr(flash_attention_4, "version", missing)
    why = reason(gpu((9, 0)))
    assert 'pip install "flatout[flash-attention-4]"' in why
    assert "NVIDIA's own licence" in why
