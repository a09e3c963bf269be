"""Learning rates tell of a schedule that ends too soon, and a class how it updates."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flatout.measure.attach.facts import Rates, optimizer_facts


@pytest.mark.parametrize(
    ("rate", "halved_after"),
    [
        (lambda step: 0.5 ** (step // 10), 10.0),
        (lambda step: 0.1 ** (step // 10), 3.01),
        (lambda step: 0.9**step, 6.58),
        (lambda step: 0.9999**step, 6931.13),
        (lambda step: 1 - step / 100, None),  # linear
        (lambda step: 0.5 ** (step // 40), None),  # has fallen once
        (lambda step: 0.1 ** ((step >= 10) + (step >= 20)), 3.01),
        (lambda step: min(step, 10) / 10, None),
        (lambda step: 1.0, None),
    ],
)
def test_a_rate_that_falls_by_equal_factors_halves_after_some_steps(rate, halved_after):
    rates = Rates()
    for step in range(60):
        rates.note(SimpleNamespace(param_groups=[{"lr": rate(step)}]))
    found = rates.halved_after()
    assert (found and round(found, 2)) == halved_after


@pytest.mark.parametrize(
    ("update", "way"),
    [("for one in params: one.sub_(one.grad)", "own"), ("torch._foreach_sub_(a, b)", "foreach")],
)
def test_an_optimizer_of_the_script_that_updates_all_tensors_at_once_is_not_one_by_one(
    update, way, tmp_path, monkeypatch
):
    text = f"class Own(torch.optim.SGD):\n    def step(self):\n        {update}\n"
    (tmp_path / "own.py").write_text(text)
    module = ModuleType("own")
    module.__file__, module.torch = str(tmp_path / "own.py"), torch
    exec(compile(text, module.__file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "own", module)
    optimizer = module.Own([torch.nn.Parameter(torch.ones(2))])
    assert optimizer_facts(optimizer) == {"optimizer": "Own", "optimizer_way": way, "tensors": 1}
