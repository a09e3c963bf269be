"""Whether weights learn is told by gradients and weights, whatever a loop looks like."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from flatout.measure.attach.learning import Learning, gradients_of_all, wasted
from flatout.measure.evidence import CallSite, Evidence
from flatout.measure.rules import rules

HEAD = """
torch.manual_seed(0)
net, other = nn.Linear(8, 8), nn.Linear(8, 8)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
second = torch.optim.SGD(other.parameters(), lr=1e-2)
x = torch.randn(4, 8)
def backward(loss):
    learning.before_backward()
    loss.backward()
def loss_of(module):
    return module(x).square().mean()
"""
HEALTHY = {
    "plain": "backward(loss_of(net)); optimizer.step(); optimizer.zero_grad()",
    "cleared before": "optimizer.zero_grad(); backward(loss_of(net)); optimizer.step()",
    "set to zero": """
optimizer.zero_grad(set_to_none=False); backward(loss_of(net)); optimizer.step()
""",
    "accumulated": """
for micro in range(3):
    backward(loss_of(net) / 3)
optimizer.step()
net.zero_grad()
""",
    "projected": """
backward(loss_of(net)); optimizer.step(); optimizer.zero_grad()
for weights in net.parameters():
    weights.data.mul_(0.999)
""",
    "masked": """
before = [weights.detach().clone() for weights in net.parameters()]
backward(loss_of(net)); optimizer.step(); optimizer.zero_grad()
for weights, value in zip(net.parameters(), before):
    weights.data.flatten()[4:].copy_(value.flatten()[4:])
""",
    "clipped": """
backward(loss_of(net))
nn.utils.clip_grad_norm_(net.parameters(), 0.1)
nn.utils.clip_grad_norm_(net.parameters(), max_norm=float("inf"))
optimizer.step(); optimizer.zero_grad()
""",
    "by hand": """
for weights in net.parameters():
    weights.grad = None
backward(loss_of(net))
optimizer.step()
""",
    "a new optimizer without a state": """
sgd = torch.optim.SGD(net.parameters(), lr=1e-2)
backward(loss_of(net)); sgd.step(); sgd.zero_grad()
""",
    "adversaries": """
second.zero_grad()
backward(loss_of(other))
second.step()
optimizer.zero_grad()
backward(-loss_of(nn.Sequential(net, other)))  # the other one's gradients are cleared later
optimizer.step()
""",
    "a closure": """
def closure():
    optimizer.zero_grad()
    loss = loss_of(net)
    backward(loss)
    return loss
optimizer.step(closure)
""",
    "gradients that the script sets": """
learning.before_backward([*net.parameters()])
for weights, gradient in zip(net.parameters(), torch.autograd.grad(loss_of(net), net.parameters())):
    weights.grad = gradient
optimizer.step()
""",
    "a penalty of gradients of inputs": """
optimizer.zero_grad()
points = x.clone().requires_grad_()
learning.before_backward([points])
penalty = torch.autograd.grad(loss_of(net), points, create_graph=True, allow_unused=True)
backward(loss_of(net)); optimizer.step()
""",
    "an embedding with sparse gradients": """
table = space.setdefault("table", nn.Embedding(50, 4, sparse=True))
sparse = space.setdefault("sparse", torch.optim.SparseAdam(table.parameters(), lr=1e-2))
sparse.zero_grad()
backward(table(torch.tensor([1, 2])).square().mean())
sparse.step()
""",
    "a loss without a gradient": """
optimizer.zero_grad()
backward(loss_of(net) * 0.0)
learning.after_backward()
optimizer.step()
""",
    "a frozen part that is larger than what learns": """
whole = space.setdefault("whole", nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)]))
whole[:8].requires_grad_(False)
sgd = space.setdefault("sgd", torch.optim.SGD(whole.parameters(), lr=1e-2))
backward(whole(x).square().mean()); sgd.step(); sgd.zero_grad()
""",
    "weights that are averaged every fourth step": """
slow = space.setdefault("slow", [weights.detach().clone() for weights in net.parameters()])
backward(loss_of(net)); optimizer.step(); optimizer.zero_grad()
if next(space.setdefault("turns", iter(range(99)))) % 4 == 3:
    for weights, value in zip(net.parameters(), slow):
        weights.data.copy_(value.lerp_(weights.detach(), 0.5))
""",
    "a warm-up": """
optimizer.param_groups[0]["lr"] = 1e-7 * (1 + next(space.setdefault("steps", iter(range(99)))))
backward(loss_of(net)); optimizer.step(); optimizer.zero_grad()
""",
    "a frozen half": """
net.weight.requires_grad_(False)
backward(loss_of(net)); optimizer.step(); optimizer.zero_grad()
""",
}
FAULTY = {
    "cleared-gradients after a pass that left some": """
backward(loss_of(net)); learning.after_backward(); net.zero_grad(); optimizer.step()
""",
    "cleared-gradients": "backward(loss_of(net)); net.zero_grad(); optimizer.step()",
    "cleared-gradients to zero": """
backward(loss_of(net)); optimizer.zero_grad(set_to_none=False); optimizer.step()
""",
    "cleared-gradients of a copy": "backward(loss_of(other)); other.zero_grad(); optimizer.step()",
    "uncleared-gradients": "backward(loss_of(net)); optimizer.step()",
    "uncleared-gradients beside a penalty": """
learning.before_backward([x])
backward(loss_of(net)); optimizer.step()
""",
    "uncleared-gradients of another": """
backward(loss_of(net)); optimizer.step(); second.zero_grad()
""",
    "new-optimizers": """
adam = torch.optim.Adam(net.parameters())
backward(loss_of(net)); adam.step(); adam.zero_grad()
""",
    "unreached-weights": """
both = space.setdefault("both", torch.optim.SGD([*net.parameters(), *other.parameters()], lr=1e-2))
backward(other(net(x).detach()).square().mean()); both.step(); both.zero_grad()
""",
    "undone-updates": """
before = [weights.detach().clone() for weights in net.parameters()]
backward(loss_of(net)); optimizer.step(); optimizer.zero_grad()
for weights, value in zip(net.parameters(), before):
    weights.data.lerp_(value, 0.95)
""",
    "undone-updates by the same weights again": """
saved = space.setdefault("saved", [weights.detach().clone() for weights in net.parameters()])
backward(loss_of(net)); optimizer.step(); optimizer.zero_grad()
for weights, value in zip(net.parameters(), saved):
    weights.data.copy_(value)
""",
    "repeated-steps": """
backward(loss_of(net)); optimizer.step(); optimizer.step(); optimizer.zero_grad()
""",
    "tight-clipping": """
backward(loss_of(net)); nn.utils.clip_grad_norm_(net.parameters(), 1e-6)
optimizer.step(); optimizer.zero_grad()
""",
    "unclipped-gradients": """
backward(loss_of(net)); optimizer.step(); nn.utils.clip_grad_norm_(net.parameters(), 0.1)
optimizer.zero_grad()
""",
    "cleared-gradients of weights that are detached": """
fast = [(each - 0.1).detach().requires_grad_() for each in net.parameters()]
learning.before_backward([*net.parameters()])
torch.autograd.grad(loss_of(net), net.parameters())
backward(sum(each.square().mean() for each in fast)); optimizer.step(); optimizer.zero_grad()
""",
    "unclipped-gradients without any": """
optimizer.zero_grad(); nn.utils.clip_grad_norm_(net.parameters(), 0.1)
backward(loss_of(net)); optimizer.step()
""",
    "tiny-updates": """
optimizer.param_groups[0]["lr"] = 1e-7
backward(loss_of(net)); optimizer.step(); optimizer.zero_grad()
""",
    "unmoved-weights": """
optimizer.param_groups[0]["lr"] = 0.0
backward(loss_of(net)); optimizer.step(); optimizer.zero_grad()
""",
    "unmoved-weights in bf16": """
half = space.setdefault("half", nn.Linear(8, 8).bfloat16())
adam = space.setdefault("adam", torch.optim.Adam(half.parameters(), lr=1e-6))
backward(half(x.bfloat16()).square().mean()); adam.step(); adam.zero_grad()
""",
}


def findings(loop: str, steps: int = 14) -> dict[str, str]:
    """Return what the rules say after some steps of a loop, and the fix, by name."""
    learning = Learning()
    space = {"torch": torch, "nn": nn, "learning": learning}
    space["space"] = space
    try:
        exec(HEAD, space)
        code = compile(loop, "loop", "exec")
        for _ in range(steps):
            exec(code, space)
        evidence = Evidence(source="script", step_s=0.1, **learning.found())
        if learning.unclipped is not None:
            place = CallSite(file="loop", line=1, text="")
            evidence = evidence.model_copy(update={"sites": {"unclipped": (place,)}})
    finally:
        learning.close()
    every = (rule.look(evidence) for rule in rules())
    return {one.name: f"{one.verdict} {one.fixes[0].text}" for one in every if one is not None}


@pytest.mark.parametrize("loop", HEALTHY.values(), ids=HEALTHY)
def test_a_loop_that_learns_has_no_finding(loop):
    assert findings(loop, steps=50) == {}


@pytest.mark.parametrize("name", FAULTY)
def test_a_loop_that_does_not_learn_is_named(name):
    assert findings(FAULTY[name]).keys() == {name.partition(" ")[0]}


def test_weights_that_get_a_gradient_later_are_not_unreached():
    first, second, learning = nn.Linear(8, 8), nn.Linear(8, 8), Learning()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    for step in range(30):
        learning.before_backward()
        (first if step < 20 else second)(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    learning.close()
    assert learning.found()["unreached"] == 0.0


def test_weights_without_a_gradient_are_named_and_the_rows_of_an_embedding_are_counted():
    table, head = nn.Embedding(640, 8), nn.Linear(8, 8)
    model, learning = nn.Sequential(table, head), Learning()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(10):
        loss = nn.functional.linear(table(torch.arange(32) + 320), head.weight).square().mean()
        learning.before_backward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    learning.close()
    found = learning.found(model)
    assert found["unreached_names"] == ("1.bias",)
    assert found["unreached"] == pytest.approx(8 / sum(map(torch.numel, model.parameters())))
    assert found["full_rows"] == pytest.approx(32 / 640, abs=1 / 64)
    assert found["largest_share"] == pytest.approx(0.986, abs=1e-3)


def test_the_fix_is_that_of_the_cause():
    assert "The learning rate is 0" in findings(FAULTY["unmoved-weights"])["unmoved-weights"]
    text = findings(FAULTY["unmoved-weights in bf16"])["unmoved-weights"]
    assert "what bfloat16 can tell apart" in text


def test_few_steps_tell_nothing_and_the_hooks_leave_after_the_last_look():
    assert findings(FAULTY["uncleared-gradients"], steps=5) == {}
    learning = Learning()
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    before = len(hooks)
    for _ in range(84):
        learning.before_backward()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(hooks) == before - 1


def test_an_optimizer_that_seldom_steps_does_not_keep_the_others_watched():
    learning, net = Learning(), nn.Linear(2, 2)
    often, once = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    before = len(hooks)
    for number in range(120):
        learning.before_backward()
        net(torch.ones(1, 2)).sum().backward()
        (once if number == 1 else often).step()
        assert len(learning._looks[often].without) <= 8
    assert len(hooks) == before - 1


def test_a_copy_that_nothing_uses_any_more_is_no_part_of_the_model():
    """As in first-order meta-learning, where each task has a copy whose gradients are taken."""
    rows = torch.ones(1, 4)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copied = copy.deepcopy(model)
    copied(rows).sum().backward()
    model.weight.grad, model.bias.grad = copied.weight.grad.clone(), copied.bias.grad.clone()
    before = gradients_of_all()
    optimizer.step()
    assert wasted(before, copied)["never_updated"] == ()
    copied(rows).sum().backward()
    assert wasted(before, copied)["never_updated"] == ("weight", "bias")
