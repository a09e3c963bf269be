"""Parts are set by at most one speedup, those that are named exist, tolerances are checked."""

import gc

import pytest

from flatout.assembly.choices import all_speedups, assemble
from flatout.assembly.parts import ImmediateReadback, Parts, rows_people_write
from flatout.assembly.speedup import gpu_below, uses_gpu
from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.hardware.machine import Gpu, Machine

CPU = Machine("a CPU", 2, 8.0, (), "3.11")
TURING = Machine("a CPU", 2, 8.0, (Gpu("a T4", 16.0, (7, 5), "1"),), "3.11")


@pytest.mark.parametrize(
    ("seq_len", "rows"), [(64, 12), (8_192, 12), (32_768, 4), (131_072, 1), (131_073, 1)]
)
def test_the_plain_micro_batch_is_what_people_write(seq_len, rows):
    assert rows_people_write(seq_len, "cpu") == rows


@pytest.mark.parametrize(("before", "within"), [(50_000, 700), (100, 100), (0, 0)])
def test_a_run_collects_garbage_at_least_as_often_as_python_does_by_default(before, within):
    usual = gc.get_threshold()
    gc.set_threshold(before)
    try:
        with Parts().gc():
            assert gc.get_threshold()[0] == within
        assert gc.get_threshold()[0] == before
    finally:
        gc.set_threshold(*usual)


def test_every_part_that_is_named_exists():
    for parts in (Parts(), *(changed(one) for one in all_speedups() if one.name != "fp8")):
        for name, value in vars(parts.loaded()).items():
            assert not isinstance(value, str) or name == "matmul"


def changed(speedup) -> Parts:
    parts = Parts()
    speedup.apply(parts)
    return parts


def test_a_speedup_sets_its_parts_and_no_other():
    plain, found = assemble([]), assemble(["tf32", "chunked-ce"])
    assert {name for name, value in vars(found).items() if value != vars(plain)[name]} == {
        "matmul",
        "cross_entropy",
    }
    assert (plain.matmul, found.matmul) == ("highest", "high")


def test_two_speedups_that_set_one_part_are_rejected_by_name():
    for names in (["compile", "cuda-graphs"], ["compile-blocks", "prefetch", "compile"]):
        words = f"'{names[0]}' and '{names[-1]}' both set 'compilation'"
        with pytest.raises(ConfigError, match=words):
            assemble(names)


def test_the_device_of_a_run_is_known_without_torch():
    assert not uses_gpu(CPU, load_config())
    assert uses_gpu(TURING, load_config())
    assert not uses_gpu(TURING, load_config(None, ["train.device=cpu"]))
    too_old = "bfloat16 needs compute capability 8.0. The a T4 has 7.5."
    assert gpu_below(TURING, (8, 0), "bfloat16") == too_old
    assert gpu_below(TURING, (7, 0), "float16") is None


def test_plain_readback_reads_every_step_and_keeps_those_due():
    readback = ImmediateReadback()
    readback.push(1, {"loss": 3.0}, due=False)
    readback.push(2, {"loss": 2.0}, due=True)
    assert readback.ready() == [(2, {"loss": 2.0})]
    assert readback.ready(flush=True) == []
