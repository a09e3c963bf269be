"""What a script's calls in torch show, line by line."""

from __future__ import annotations

import copy
import functools
import sys
from collections import deque

import pytest
import torch
from torch import nn

from flatout.measure.attach import recorder as module
from flatout.measure.attach.facts import moved
from flatout.measure.attach.lines import LineTotals, user_frame
from flatout.measure.attach.recorder import (
    DECOMPOSES,
    CallRecorder,
    Graphs,
    keeper_of_graphs,
    own_lines,
)
from flatout.measure.attach.work import Work
from flatout.measure.evidence import Evidence


@pytest.fixture
def weights():
    """Return a matrix with gradients."""
    return torch.nn.Parameter(torch.randn(64, 64))


def test_lines_that_train_are_told_from_others(weights):
    recorder, (file, here) = CallRecorder(lambda: "other"), user_frame(sys._getframe())
    with recorder:
        loss = (weights @ weights).sum()
        copy = weights.detach().clone()
        shown = str(weights.abs().max())
        recorder.note_backward([loss])
    lines = [(file, here + 2), (file, here + 3), (file, here + 4)]
    assert [line in recorder.trains for line in lines] == [True, False, False]
    assert (file, here + 5) in recorder.trains, "it calls the backward pass"
    sampled = LineTotals()
    for line in lines * 3:
        sampled.add("python", line, 0.1)
    for _ in range(3):  # a line of the forward pass that does not train
        sampled.add("compute", lines[2], 0.05)
    sampled.callers = {lines[1]: (file, here), lines[2]: (file, 1)}
    found, moved_s = own_lines(sampled, 1, recorder, [(file, 1)])
    assert [*found.seconds["own"]] == lines[1:]
    assert [*found.callers] == [lines[1]]
    assert moved_s == pytest.approx(0.3 - 0.15)
    del copy, shown


def test_lines_that_make_gradients_without_a_backward_pass_train(weights):
    recorder, (_, here) = CallRecorder(lambda: "other"), user_frame(sys._getframe())
    optimizer = torch.optim.SGD([weights], lr=0.1)
    with recorder, torch.no_grad():
        rows = torch.func.vmap(torch.func.grad(lambda x: (x * x).sum()))(torch.randn(8, 64))
        norms = rows.norm(dim=1)
        shown = norms.max() * 2
        weights.grad = torch.ones_like(weights)
        weights.grad.mul_(norms.clamp(max=1.0).mean())
        optimizer.step()
    trained = [here + number in {line for _, line in recorder.trains} for number in (4, 5, 7)]
    assert trained == [True, False, True], shown


def test_attention_and_float64_are_seen(weights):
    recorder = CallRecorder(lambda: "forward")
    with recorder:
        torch.softmax((weights @ weights)[None], dim=-1)
        weights.double().sum()
    assert {"softmax", "float64"} <= recorder.found.counts.keys()


@pytest.mark.parametrize("is_contrastive", [True, False])
def test_pairs_of_a_contrastive_loss_are_no_classes(is_contrastive):
    rows, head = torch.randn(64, 16), nn.Linear(16, 40)
    with CallRecorder(lambda: "other") as recorder:
        recorder.inputs = [rows]
        logits = head(rows)
        if is_contrastive:  # the true pair is first
            logits = torch.cat([(logits * logits).sum(1, keepdim=True), logits @ logits.T], 1) / 0.2
        nn.functional.cross_entropy(logits, torch.zeros(64, dtype=torch.long))
    assert bool(recorder.classes) is not is_contrastive


TIME_FIRST = torch.arange(12 * 5).reshape(12, 5) % 11 * 3 % 20
ORDERS = {
    "time first": (TIME_FIRST, lambda out: out, TIME_FIRST[1:], False),
    "outputs with rows first": (TIME_FIRST, lambda out: out.mT, TIME_FIRST[1:], True),
    "targets with rows first": (TIME_FIRST.T, lambda out: out, TIME_FIRST.T[:, 1:], True),
    "rows first": (TIME_FIRST.T, lambda out: out.mT, TIME_FIRST.T[:, 1:], False),
    "targets of another kind": (TIME_FIRST, lambda out: out.mT, TIME_FIRST[1:] * 7 % 20, False),
}


@pytest.mark.parametrize("name", ORDERS)
def test_flattened_outputs_and_targets_are_in_the_same_order(name):
    tokens, arranged, targets, is_found = ORDERS[name]
    recorder = CallRecorder(lambda: "other")
    with recorder:
        recorder.inputs = [torch.ones(3, 5, dtype=torch.long), tokens]
        steps = nn.Embedding(20, 20).weight[TIME_FIRST[:-1]]  # (11, 5, 20)
        logits = arranged(steps.permute(2, 0, 1)).permute(1, 2, 0)
        scores = logits.reshape(-1, 20).log_softmax(1)
        nn.functional.nll_loss(scores, targets.reshape(-1))
    assert bool(recorder.found.total("interleaved")) is is_found


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_whose_weights_are_returned_is_seen(need_weights):
    attention, rows = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 40, 8)
    with CallRecorder(lambda: "forward") as recorder:
        attention(rows, rows, rows, need_weights=need_weights)
    assert ("softmax" in recorder.found.counts) is need_weights


def test_graphs_that_no_pass_of_the_step_or_of_the_next_one_goes_through_are_dropped(weights):
    recorder, (_, here) = CallRecorder(lambda: "other"), user_frame(sys._getframe())
    with recorder:
        for step in range(3):
            later = weights.sum()
            later = later * 2
            loss = weights.mean()
            recorder.note_backward([loss])
            recorder.end_step()
            if step:
                recorder.note_backward([later])
    dropped = {line - here for _, line in recorder.found.counts["dropped"]}
    assert dropped == {3, 4}
    assert recorder.found.total("dropped") == 2, "those of the first step"


def test_calls_beyond_a_number_are_not_noted(monkeypatch, weights):
    monkeypatch.setattr(module, "MOST_CALLS", 10)
    (file, here), sampled = user_frame(sys._getframe()), LineTotals()
    with CallRecorder(lambda: "other", Work()) as recorder:
        for _ in range(20):
            weights.abs()
        weights.exp()
        recorder.end_step()
    assert recorder.is_cut
    assert recorder.work is None
    assert [*recorder.found.counts["op"]] == [(file, here + 3)]
    for line in (here + 3, here + 4) * 3:
        sampled.add("compute", (file, line), 0.1)
    found, _ = own_lines(sampled, 1, recorder, [])
    assert [*found.counts["own"]] == [(file, here + 3)], "the other may train"


def test_kept_outputs_keep_their_graph_without_the_loss(weights):
    graphs, outputs = Graphs(), []
    for _ in range(10):
        output = (weights @ weights).relu()
        loss = output.square().mean()
        graphs.mark(loss)
        loss.backward()
        outputs.append(output)
    assert graphs.kept() == 1.0
    assert keeper_of_graphs(sys._getframe()) == "outputs"


@pytest.mark.parametrize("keeps", [True, False])
def test_kept_graphs_are_counted(weights, keeps):
    graphs, losses, total = Graphs(), [], 0.0
    for _ in range(10):
        loss = (weights @ weights).sum()
        graphs.mark(loss)
        loss.backward()
        losses.append(loss if keeps else loss.item())
        total += loss.item()
    assert graphs.kept() == (1.0 if keeps else 0.0)
    assert keeper_of_graphs(sys._getframe()) == ("losses" if keeps else "")


class Memory:
    """An object of a script with containers in containers."""

    def __init__(self):
        self.log = {"rows": {"loss": []}, "by_step": {}}


KEEPERS = {
    "memory.log['rows']['loss']": lambda memory, loss: memory.log["rows"]["loss"].append(loss),
    "memory.log['by_step']": lambda memory, loss: memory.log["by_step"].update(
        {len(memory.log["by_step"]): (loss, 1)}
    ),
    "pairs": lambda memory, loss: PAIRS.append({"loss": loss, "step": 1}),
}
PAIRS: list[dict[str, object]] = []


@pytest.mark.parametrize("name", KEEPERS)
def test_containers_in_containers_and_of_records_are_named(weights, name):
    memory, graphs = Memory(), Graphs()
    for _ in range(12):
        loss = (weights @ weights).sum()
        graphs.mark(loss)
        KEEPERS[name](memory, loss)
        outputs = {"loss": loss, "mean": loss / 2, "double": loss * 2}  # of one step
    assert keeper_of_graphs(sys._getframe()) == name.replace("pairs", "PAIRS")
    assert graphs.grown(sys._getframe()) == (name.replace("pairs", "PAIRS"), "tensors")
    assert outputs
    PAIRS.clear()


class Rows(torch.utils.data.Dataset):
    """A dataset that keeps the rows that it has made."""

    def __init__(self):
        self.cache = {}


def test_what_is_bounded_or_keeps_rows_of_a_dataset_has_not_grown(weights):
    graphs, last, rows = Graphs(), deque(maxlen=20), Rows()
    for step in range(12):
        graphs.mark((weights @ weights).sum())
        last.append(weights.detach())
        rows.cache[step] = weights.detach()
    assert graphs.grown(sys._getframe()) == ("", "")


class Replay:
    """A buffer of the last rows, without a deque."""

    def __init__(self, capacity):
        self.capacity, self.rows = capacity, []

    def add(self, row):
        self.rows = [*self.rows, row][-self.capacity :]


@pytest.mark.parametrize(("capacity", "filling"), [(1000, "replay.rows"), (11, ""), (8, "")])
def test_a_buffer_up_to_a_stated_length_has_not_grown_and_fills_until_then(
    weights, capacity, filling
):
    graphs, replay = Graphs(), Replay(capacity)
    for _ in range(12):
        graphs.mark((weights @ weights).sum())
        replay.add(weights.detach().clone())
    assert graphs.grown(sys._getframe()) == ("", "")
    assert graphs.filling == filling


def test_a_number_elsewhere_is_no_limit_of_a_container(weights):
    graphs, replay, kept = Graphs(), Replay(1000), []
    for _ in range(12):
        graphs.mark((weights @ weights).sum())
        kept.append(weights.detach().clone())
    assert graphs.grown(sys._getframe()) == ("kept", "tensors"), replay


WRITTEN = {
    "net.weight.data.copy_(x[0, 0])": True,
    "net.weight.data *= 0.9": True,
    "net.weight.data = net.weight.detach() * 1": True,
    "net.weight.data[:] = 0.5": True,
    "net.load_state_dict(net.state_dict())": True,
    "torch._foreach_mul_([net.weight.data], 0.5)": True,
    "copied.data.copy_(net.weight)": False,
    "net.weight.grad.mul_(0.5)": False,
    "net.weight[0]; net(x)": False,
}


@pytest.mark.parametrize("text", WRITTEN)
def test_the_line_that_writes_weights_of_an_optimizer_is_found(text, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(text)
    net, x = nn.Linear(2, 2), torch.ones(3, 2)
    space = {"torch": torch, "net": net, "x": x, "copied": nn.Parameter(torch.ones(2, 2))}
    optimizer, phase = torch.optim.SGD(net.parameters(), lr=0.1), [""]
    with CallRecorder(lambda: phase[-1]) as recorder:
        for _ in range(3):
            net(x).sum().backward()
            phase.append("optimizer")
            optimizer.step()
            phase.append("other")
            with torch.no_grad():
                exec(compile(text, str(path), "exec"), space)
    assert set(recorder.found.counts["written"]) == ({(str(path), 1)} if WRITTEN[text] else set())


class Encoder:
    @functools.cache  # noqa: B019
    def encoded(self, inputs):
        return inputs * 2


def test_a_cache_that_keeps_the_tensors_of_every_step_is_named(weights):
    graphs, encoder = Graphs(), Encoder()
    for _ in range(12):
        graphs.mark((weights @ weights).sum())
        encoder.encoded(torch.ones(4))
    assert graphs.grown(sys._getframe()) == ("the lru_cache of Encoder.encoded", "")


def test_a_container_that_stays_as_long_has_not_grown(weights):
    graphs, kept, once = Graphs(), [1.0], []
    for number in range(12):
        graphs.mark((weights @ weights).sum())
        kept[0] = number
        once += [1] * (number == 6)
    assert graphs.grown(sys._getframe()) == ("", "")


class Trainer:
    """A trainer of a script that keeps what its steps return."""

    def __init__(self, kind):
        self.kind, self.history, self.total = kind, {"loss": [], "step": []}, 0.0
        self.mean = torch.zeros(())

    def run(self, weights):
        for step in range(12):
            loss = (weights @ weights).sum()
            self.history["step"].append(step)
            if self.kind == "history":
                self.history["loss"].append(loss)
            elif self.kind == "total":
                self.total += loss
            else:
                self.mean = 0.9 * self.mean + 0.1 * loss
        return keeper_of_graphs(sys._getframe())


@pytest.mark.parametrize(
    ("kind", "name"),
    [("history", "self.history['loss']"), ("total", "self.total"), ("mean", "self.mean")],
)
def test_an_attribute_that_keeps_graphs_is_named(weights, kind, name):
    assert Trainer(kind).run(weights) == name


@pytest.mark.parametrize(
    ("seconds", "times"),
    [
        (0.2, (0.1, 0.1, 0.7)),
        (0.9, (0.0, 0.1, 0.8)),
        (-0.05, (0.35, 0.05, 0.5)),
        (-0.3, (0.6, 0.0, 0.3)),
    ],
)
def test_lines_that_do_not_train_are_other_work_and_the_phases_still_add_up(seconds, times):
    found = Evidence(source="script", step_s=1.0, other_s=0.3, host_s=0.1, compute_s=0.5)
    assert tuple(moved(found, seconds).values()) == pytest.approx(times)
    unknown = found.model_copy(update={"host_s": None})
    assert moved(unknown, seconds)["host_s"] is None
    assert moved(found.model_copy(update={"device": "cuda"}), seconds) == {}


class Attention(nn.Module):
    """A module that keeps what it computes."""

    def __init__(self):
        super().__init__()
        self.weight, self.maps = nn.Parameter(torch.ones(2, 2)), []

    def forward(self):
        made = self.weight @ self.weight
        self.maps.append(made.detach())
        return made.sum()


GROWN = {
    "model.0.maps": ("tensors", lambda model: None),
    "model.0._forward_hooks": (
        "hooks",
        lambda model: model[0].register_forward_hook(lambda *_: None),
    ),
    "model.0.weight._backward_hooks": (
        "hooks",
        lambda model: model[0].weight.register_hook(lambda gradient: None),
    ),
}


@pytest.mark.parametrize("name", GROWN)
def test_what_grows_in_a_module_is_named_and_hooks_before_tensors(name):
    model, graphs, losses, (kind, act) = nn.Sequential(Attention()), Graphs(), [], GROWN[name]
    for _ in range(12):
        loss = model[0]()
        graphs.mark(loss)
        losses.append(loss.item())
        act(model)
    assert graphs.grown(sys._getframe()) == (name, kind)


CREATED = {
    "created": ("head = nn.Parameter(torch.ones(2, 2))\nloss = (net(x) @ head).sum()", True),
    "once": (
        "head = globals().setdefault('head', nn.Parameter(torch.ones(2, 2)))\n"
        "loss = (net(x) @ head).sum()",
        False,
    ),
    "copied": (
        "own = copy.deepcopy(net)\nloss = own(x).sum(); loss.backward()\n"
        "torch.optim.SGD(net.parameters(), lr=0.1).step()",
        False,
    ),
    "inverted": (
        "z = nn.Parameter(torch.ones(3, 2))\nloss = net(x + z * z).sum(); loss.backward()\n"
        "torch.optim.SGD([z], lr=0.1).step()",
        False,
    ),
}


@pytest.mark.parametrize("name", CREATED)
def test_weights_that_are_new_in_each_step_are_found_at_their_line(name, tmp_path):
    text, is_found = CREATED[name]
    path = tmp_path / "train.py"
    path.write_text(text)
    space = {"torch": torch, "nn": nn, "x": torch.ones(3, 2), "net": nn.Linear(2, 2), "copy": copy}
    with CallRecorder(lambda: "forward") as recorder:
        for _ in range(6):
            exec(compile(text, str(path), "exec"), space)
            recorder.end_step()
    assert recorder.found.counts["created"] == ({(str(path), 2): 5} if is_found else {})


def test_an_optimizers_state_is_not_printed_for_a_name(weights, monkeypatch):
    optimizer = torch.optim.Adam([weights])
    (weights @ weights).sum().backward()
    optimizer.step()
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda _: pytest.fail("reads values"))
    assert keeper_of_graphs(sys._getframe()) == ""


@pytest.mark.parametrize(
    ("loss", "is_found"),
    [
        ("F.cross_entropy(scores.softmax(-1), labels)", True),
        ("F.cross_entropy(scores.softmax(-1).view(3, 2), labels)", True),
        ("F.nll_loss(scores.softmax(-1), labels)", True),
        ("F.nll_loss(scores.log_softmax(-1), labels)", False),
        ("F.cross_entropy(scores, labels)", False),
        ("F.cross_entropy(scores.softmax(-1) @ net.weight, labels)", False),
        ("F.binary_cross_entropy_with_logits(scores.sigmoid(), scores.detach().round())", True),
        ("F.binary_cross_entropy(scores.sigmoid(), scores.detach().sigmoid())", False),
    ],
)
def test_probabilities_where_a_loss_takes_logits_are_found(loss, is_found, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"scores = net(x)\nloss = {loss}\n")
    space = {"net": nn.Linear(2, 2), "x": torch.ones(3, 2), "labels": torch.tensor([0, 1, 1])}
    with CallRecorder(lambda: "other") as recorder:
        exec(compile(path.read_text(), str(path), "exec"), space | {"F": nn.functional})
    assert set(recorder.found.counts["normalised"]) == ({(str(path), 2)} if is_found else set())
    is_rounded = "binary_cross_entropy(" in loss
    assert bool(recorder.found.counts["rounded"]) == is_rounded


@pytest.mark.parametrize(
    ("name", "decomposes"),
    [
        *(
            (name, True)
            for name in ("linalg_svdvals", "svd", "linalg_norm", "linalg_inv", "pinverse")
        ),
        *((name, True) for name in ("linalg_eigh", "qr", "linalg_lu_solve", "slogdet", "cholesky")),
        *((name, False) for name in ("sqrt", "rsqrt", "weight_norm", "detach", "norm", "invert_")),
    ],
)
def test_functions_that_decompose_are_told_from_others_with_such_letters(name, decomposes):
    assert bool(DECOMPOSES.match(name)) is decomposes
