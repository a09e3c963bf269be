"""Work is accounted for by what it reads and what reads it, not by the names of functions."""

from __future__ import annotations

import itertools
import linecache
import time

import pytest
import torch
from torch import nn

from flatout.measure.attach.recorder import CallRecorder
from flatout.measure.attach.work import Work

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
net, head = nn.Linear(16, 16), nn.Linear(16, 4)
rnn = nn.LSTM(16, 16)
frozen = nn.Linear(16, 16).requires_grad_(False)
images, graph = torch.randn(64, 16), torch.rand(16, 16)
optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=1e-3)
def step(loss):
    recorder.note_backward([loss])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def found(tmp_path):
    """Return a function that takes steps, and returns the texts of lines by kind."""

    def run(loop: str, steps: int = 6) -> dict[str, set[str]]:
        path = tmp_path / "train.py"
        path.write_text(HEAD + loop)
        linecache.clearcache()
        work = Work()
        space = {"recorder": CallRecorder(lambda: "other", work)}
        exec(compile(HEAD, str(path), "exec"), space)
        lines = HEAD.count("\n")
        code = compile("\n" * lines + loop, str(path), "exec")
        with space["recorder"]:
            for _ in range(steps):
                exec(code, space)
                work.end_step()
        sites = work.sites(steps, 1.0)
        return {kind: {site.text for site in each} for kind, each in sites.items()}

    return run


REPEATED = {
    "one call": "dense = graph.softmax(-1)\nstep(net(torch.randn(8, 16) @ dense).mean())\n",
    "a chain": """
a = graph.softmax(-1)
b = (a * 2.5).T
c = b + 1
step(net(torch.randn(8, 16) @ c).mean())
""",
    "a frozen part on the same rows": """
with torch.no_grad():
    seen = frozen(images[:32])
step(net(seen).mean())
""",
    "without tensors": "mask = torch.ones(16, 16)\nstep(net(torch.randn(8, 16) @ mask).mean())\n",
}
FRESH = {
    "fresh data": "x = torch.randn(8, 16)\ny = x * 2\nstep(net(y).mean())\n",
    "the same memory": """
x = torch.full((8, 16), torch.rand(()).item())
y = x * 2
step(net(y).mean())
""",
    "changed in place": "graph += 0.1\ny = graph * 2\nstep(net(y).mean())\n",
    "weights that learn": "y = net.weight * 2\nstep((images @ y).mean())\n",
    "weights that the script writes": """
y = F.linear(images, frozen.weight)
step(net(y).mean())
frozen.weight.data.add_(0.1)
""",
    "dropout": "y = F.dropout(images)\nz = y * 2\nstep(net(z).mean())\n",
    "other rows of the same data": """
at = torch.randint(64, ()).item()
y = images[at:]
z = y * 2
step(net(z).mean())
""",
}


@pytest.mark.parametrize("loop", REPEATED.values(), ids=REPEATED)
def test_what_reads_the_same_values_is_repeated(found, loop):
    made = {line.strip() for line in loop.splitlines() if "=" in line}
    assert found(loop)["repeated"] == made


@pytest.mark.parametrize("loop", FRESH.values(), ids=FRESH)
def test_what_reads_other_values_is_not(found, loop):
    assert not {text for text in found(loop).get("repeated", ()) if text[:4] in ("y = ", "z = ")}


UNREAD = {
    "an output": "unused = head(net(images))\nstep(net(images).square().mean())\n",
}
READ = {
    "by a number": """
out = head(net(images))
print(end="" * int(out.max()))
step(net(images).mean())
""",
    "by a metric": """
out = head(net(images))
right = (out.argmax(-1) == 0).sum()
step(net(images).mean())
""",
    "detached": "out = head(net(images))\nkept = out.detach()\nstep(net(images).mean())\n",
    "in the next step": """
try:
    state
except NameError:
    state = torch.zeros(64, 16)
    loss = net(images).mean()
else:
    loss = head(state).square().mean()
step(loss)
state = net(images)
""",
}


@pytest.mark.parametrize("loop", UNREAD.values(), ids=UNREAD)
def test_a_result_that_nobody_reads_is_found(found, loop):
    assert found(loop)["unread"] == {loop.partition("\n")[0]}


@pytest.mark.parametrize("loop", READ.values(), ids=READ)
def test_a_result_that_is_read_is_none(found, loop):
    assert "unread" not in found(loop)


def test_gradients_that_are_zero_in_every_step_are_found(found):
    loop = """
y = net(images)
decoded = head(y).square().mean()
loss = y.square().mean() + 0.0 * decoded
step(loss)
"""
    assert found(loop)["zero"] == {"decoded = head(y).square().mean()"}
    assert "zero" not in found(loop.replace("0.0 * decoded", "0.1 * decoded"))


AGAIN = {
    "a kept graph": """
y = net(images)
recorder.note_backward([y])
y.square().mean().backward(retain_graph=True)
step(head(y).mean())
""",
}
ONCE = {
    "detached": """
y = net(images)
recorder.note_backward([y])
y.square().mean().backward()
step(head(y.detach()).mean())
""",
    "a penalty of gradients": """
x = images.clone().requires_grad_()
y = net(x).mean()
recorder.note_backward([y])
(slope,) = torch.autograd.grad(y, x, create_graph=True)
step(slope.square().mean() + y)
""",
}


def test_a_second_pass_through_a_graph_is_found_at_the_line_of_the_first(found):
    assert found(AGAIN["a kept graph"])["again"] == {"recorder.note_backward([y])"}


@pytest.mark.parametrize("loop", ONCE.values(), ids=ONCE)
def test_a_graph_that_is_used_once_or_for_second_derivatives_is_not(found, loop):
    assert "again" not in found(loop)


GROWING = {
    "calls": """
hooks = globals().setdefault("hooks", [])
hooks.append(1)
out = net(images)
spread = [out.detach().std() for _ in hooks]
step(out.mean())
""",
    "arguments": """
kept = globals().setdefault("kept", [])
loss = net(images).mean()
step(loss)
kept.append(loss.detach())
mean = torch.stack(kept).mean()
""",
}


@pytest.mark.parametrize("loop", GROWING.values(), ids=GROWING)
def test_work_that_grows_with_every_step_is_found(found, loop):
    (line,) = found(loop, steps=7)["growing"]
    assert line.startswith(("spread", "mean"))
    assert "growing" not in found(loop, steps=1)
    assert "growing" not in found(loop.replace("globals()", "{}"), steps=7)


HORIZON = """
horizon = globals().setdefault("horizon", [])
horizon.append(0)
state, loss = images, 0.0
for _ in horizon:
    state = net(state)
    loss = loss + state.square().mean()
step(loss)
"""


def test_a_horizon_that_grows_on_purpose_is_no_growing_work(found):
    assert "growing" not in found(HORIZON, steps=7)


USED = {
    "accumulated": """
recorder.note_backward([net.weight])
net(images).square().mean().backward()
step(net(images).square().mean())
""",
    "by hand": """
step(net(images).square().mean())
recorder.note_backward([head.weight])
head(images).square().mean().backward()
head.weight.data.sub_(head.weight.grad)
head.bias.data.sub_(head.bias.grad)
head.zero_grad()
""",
    "elsewhere": """
loss = head(net(images)).square().mean()
recorder.note_backward([loss])
torch.autograd.grad(loss, net.weight)
step(net(images).square().mean())
""",
}


def test_gradients_that_are_cleared_before_they_are_used_are_found(found):
    loop = """
loss = head(net(images)).square().mean()
recorder.note_backward([loss])
loss.backward()
optimizer.zero_grad()
step(net(images).square().mean())
"""
    assert found(loop)["discarded"] == {"recorder.note_backward([loss])"}
    assert "discarded" in found(loop.replace("grad()\n", "grad(set_to_none=False)\n", 1))
    assert "discarded" not in found(loop.replace("optimizer.zero_grad()", "optimizer.step()"))


CALLED = {
    "rows": ("for row in images:\n    y = net(row)\nstep(y.mean())\n", {"y = net(row)"}),
    "a sequence": (
        "state = None\nfor one in images[:, None]:\n    y, state = rnn(one, state)\n"
        "step(y.mean())\n",
        {"y, state = rnn(one, state)"},
    ),
    "a sequence that is made on the way": (
        "state, y = None, images[:1]\nfor _ in range(20):\n    y, state = rnn(y, state)\n"
        "step(y.mean())\n",
        set(),
    ),
    "a recurrence": (
        "y = images\nfor _ in range(20):\n    y = net(y).tanh()\nstep(y.mean())\n",
        set(),
    ),
    "few rows": ("for row in images[:8]:\n    y = net(row)\nstep(y.mean())\n", set()),
    "micro-batches": ("for row in images:\n    y = net(row)\n    step(y.mean())\n", set()),
}


@pytest.mark.parametrize("name", CALLED)
def test_calls_that_could_be_one_are_told_from_those_that_need_each_other(found, name):
    loop, lines = CALLED[name]
    assert found(loop).get("looped", set()) == lines


def test_a_pass_that_leads_on_to_discarded_gradients_alone_counts_whole(monkeypatch):
    """Without the weights whose gradients are cleared, what lies behind them is not needed."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))

    def discarded(is_first):
        torch.manual_seed(0)
        first, second, images = nn.Linear(16, 16), nn.Linear(16, 16), torch.randn(8, 16)
        cleared, used = (first, second) if is_first else (second, first)
        optimizer, work = torch.optim.SGD(used.parameters(), lr=0.1), Work()
        with CallRecorder(lambda: "other", work) as recorder:
            for _ in range(4):
                loss = second(first(images)).square().mean()
                recorder.note_backward([loss])
                loss.backward()
                cleared.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
                work.end_step()
        return sum(work.found.seconds["discarded"].values())

    assert discarded(True) == pytest.approx(2 * discarded(False))


def test_gradients_of_some_passes_of_a_line_that_are_cleared_are_lost(found):
    loop = """
for rows in images.split(16):
    optimizer.zero_grad()
    loss = head(net(rows)).square().mean()
    recorder.note_backward([loss])
    loss.backward()
optimizer.step()
"""
    assert found(loop)["lost"] == {"recorder.note_backward([loss])"}
    kept = loop.replace("    optimizer.zero_grad()\n", "").replace(
        "step()", "step(); net.zero_grad()"
    )
    assert "lost" not in found(kept)
    adversaries = """
def update(loss):
    recorder.note_backward([loss])
    loss.backward()
    optimizer.step()
    net.zero_grad()
    head.zero_grad()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
update(head(net(images)).square().mean())
optimizer = torch.optim.SGD(head.parameters(), lr=1e-3)
update(head(net(images).detach()).square().mean())
"""
    assert "lost" not in found(adversaries)  # the first loss gives head gradients in vain
    given_up = """
skips = globals().setdefault("skips", iter([True] + 99 * [False]))
recorder.note_backward([loss := head(net(images)).square().mean()])
loss.backward()
if not next(skips):
    optimizer.step()
optimizer.zero_grad()
"""
    assert "lost" not in found(given_up)  # as where the norm is too large
    another = """
loss = head(net(images)).square().mean()
recorder.note_backward([loss])
loss.backward()
optimizer.zero_grad()
step(net(images).square().mean())
"""
    assert "lost" not in found(another)


def test_gradients_that_a_script_computes_with_are_neither_lost_nor_repeated(found):
    private = """
total = [torch.zeros_like(one) for one in net.parameters()]
for rows in images.split(16):
    loss = head(net(rows)).square().mean()
    recorder.note_backward([loss])
    loss.backward()
    for one, kept in zip(total, net.parameters()):
        one += kept.grad / (1 + kept.grad.norm())
    optimizer.zero_grad()
for one, kept in zip(total, net.parameters()):
    kept.grad = one
optimizer.step()
"""
    assert "lost" not in found(private)
    projected = """
hidden = net(images)
gradients = []
for loss in (head(hidden).square().mean(), head(hidden).abs().mean()):
    optimizer.zero_grad()
    recorder.note_backward([loss])
    loss.backward(retain_graph=True)
    gradients.append([one.grad{read} for one in net.parameters()])
optimizer.step()
"""
    assert "again" not in found(projected.format(read=".clone()"))
    cleared = projected.format(read=".zero_()")
    assert found(cleared)["again"] == {"recorder.note_backward([loss])"}


@pytest.mark.parametrize("loop", USED.values(), ids=USED)
def test_gradients_that_something_uses_are_not_discarded(found, loop):
    assert "discarded" not in found(loop)


UNUSED = {
    "places": ("out = head(net(images))", "step(out[32:].square().mean())"),
    "ignored targets": (
        "out = head(net(images))",
        "step(F.cross_entropy(out, torch.tensor([1] + 63 * [-100])))",
    ),
    "a diagonal": (
        "out = net(images) @ head.weight.new_ones(16, 64)",
        "step(out.diagonal().mean())",
    ),
    "rows of a batched product": (
        "out = net(images).view(2, 32, 16) @ graph.expand(2, 16, 16)",
        "step(out[:, 20:].square().mean())",
    ),
    "steps of a convolution": (
        "out = F.conv1d(net(images)[None].mT, net.weight[:, :, None])",
        "step(out[..., 40:].square().mean())",
    ),
    "rows, after a norm": (
        "out = head(net(images))",
        "step(F.layer_norm(out, (4,))[50:, 0].mean())",
    ),
}


@pytest.mark.parametrize(("line", "rest"), UNUSED.values(), ids=UNUSED)
def test_results_of_products_that_the_loss_does_not_use_are_found(found, line, rest):
    assert line in found(f"{line}\n{rest}\n")["unused"]


@pytest.mark.parametrize(
    "loop",
    [
        "step(head(net(images)).square().mean())",
        "step(head(net(images).relu()).relu().mean())",
        "step((net(images) @ net(images).T).tril().square().mean())",
        "step(net(images)[4:].square().mean())",
        "step(head(net(images)[60:]).square().mean())",
        "step((graph[:1] @ net(images)[:16]).square().mean())",
        "step(net(images).max(0).values.square().mean())",
        "step((net(images) @ net(images).T).topk(2).values.mean())",
    ],
)
def test_what_the_loss_uses_for_the_most_part_is_not_unused(found, loop):
    assert "unused" not in found(f"{loop}\n")


def test_a_line_has_its_part_of_the_backward_pass():
    work = Work()
    recorder = CallRecorder(lambda: "other", work)
    net, x = nn.Linear(4, 4), torch.randn(2000, 4)
    with recorder:
        hidden = net(x)
        loss = hidden.square().mean()
        forward_s = sum(work.found.seconds["line"].values())
        recorder.note_backward([loss])
        loss.backward()
        work.end_step()
    assert sum(work.found.seconds["line"].values()) > forward_s > 0
    assert sum(work.found.seconds["model"].values()) > 0


def test_a_line_with_weights_is_the_models_whatever_else_it_does(found):
    sites = found("step(net(images[torch.randint(64, (32,))] * 2).tanh().mean())\n")
    assert not any("net(" in text for text in sites["line"])
    sites = found("x = images * 2\nstep(net(x).mean())\n")
    assert "x = images * 2" in sites["line"]


def test_results_in_inference_mode_are_read_without_an_error(found, caplog):
    loop = """
step(net(images).mean())
with torch.inference_mode():
    right = net(images).argmax(-1) == 3
    share = right.double().mean()
"""
    assert "share = right.double().mean()" in found(loop)["line"]
    assert not caplog.messages


def test_nothing_is_noted_after_the_last_step():
    work = Work()
    recorder = CallRecorder(lambda: "other", work)
    net = nn.Linear(4, 4)
    with recorder:
        loss = net(torch.randn(2, 4)).mean()
        recorder.note_backward([loss])
        loss.backward()
    before = str(vars(work))
    net(torch.randn(2, 4)).mean().backward()
    assert str(vars(work)) == before
