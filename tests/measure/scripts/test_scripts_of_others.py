"""Scripts with something uncommon in them: flatout follows them, and they run as without it."""

from __future__ import annotations

import sys

import pytest

import flatout.cli.commands.run_
from flatout.errors import RunFailed
from flatout.hardware.machine import usable_cores

pytestmark = pytest.mark.slow


@pytest.fixture
def diagnose(tmp_path, monkeypatch):
    """Return a function that diagnoses a script given by its text."""
    monkeypatch.chdir(tmp_path)

    def diagnosed(text: str, *words: str, seconds: float = 0.8):
        (tmp_path / "train.py").write_text(text)
        return flatout.diagnose(script=[sys.executable, "train.py", *words], seconds=seconds)

    return diagnosed


def names(found) -> set[str]:
    """Return the names of the findings, without those of the machine."""
    return {one.name for one in found.findings} - {"busy-machine", "cpu-threads"}


UNCOMMON = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

torch.manual_seed(0)
torch.set_num_threads(1)

class Odd(nn.Module):
    def parameters(self, recurse=True):
        raise TypeError("not from outside")

    def forward(self, x):
        return x

with FakeTensorMode():  # an estimate, which is no step
    weights = torch.ones(8, requires_grad=True)
    weights.sum().backward()
model, odd, inputs = nn.Linear(256, 256), Odd(), torch.randn(256, 256)
groups = [{"params": [], "weight_decay": 0.0}, {"params": [*model.parameters()]}]
optimizer = torch.optim.SGD(groups, lr=1e-3)
for step in range(20_000):
    loss = (odd(model(inputs)) - inputs).square().mean()
    found = torch.autograd.grad(outputs=[loss], inputs=[*model.parameters()])
    for one, gradient in zip(model.parameters(), found):
        one.grad = gradient
    optimizer.step()
"""


def test_what_flatout_cannot_follow_does_not_fail_the_script(diagnose, capfd):
    """Gradients by keywords, a group without weights, fake tensors, and a model that refuses."""
    found = diagnose(UNCOMMON)
    assert found.script_code in (0, None)
    assert found.step_s > 0
    assert found.shares["compute"] > 0
    assert "failure" not in names(found)
    printed = capfd.readouterr().err
    assert printed.count("not from outside") == 1
    assert "the script continues" in printed


START = """
import random, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

torch.manual_seed(0)
torch.set_num_threads(1)
"""
LEFT_IN_EVALUATION = (
    START
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop = nn.Linear(256, 256), nn.Dropout(0.1)
        self.extra = nn.Linear(256, 8)

    def forward(self, x):
        hidden = self.drop(self.body(x))
        return hidden + self.extra(hidden).mean()

model, inputs = Net(), torch.randn(256, 256)
optimizer = torch.optim.SGD(model.body.parameters(), lr=1e-3)
for step in range(100_000):
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 6:
        model.eval()
        with torch.no_grad():
            model(inputs)
"""
)


def test_training_in_evaluation_mode_and_weights_without_an_optimizer_are_named(diagnose):
    found = diagnose(LEFT_IN_EVALUATION)
    named = {one.name: one for one in found.findings}
    assert named["evaluation-mode"].site.text == "model.eval()"
    assert "model.train()" in named["evaluation-mode"].fixes[0].text
    forgotten = named["unlearned-weights"]
    assert "extra.weight, extra.bias" in forgotten.verdict
    assert "optimizer" in forgotten.fixes[0].text
    assert "frequent-evaluation" not in named
    assert found.shares.get("evaluation", 0.0) < 0.2


SPOILED = (
    START
    + """
model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # made for epochs
rows = torch.randn(256, 64)
for step in range(100_000):
    torch.manual_seed(1)
    loss = nn.functional.cross_entropy(model(rows), torch.full((256,), step % 4))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-5)
    optimizer.step()
    schedule.step()
    if step % 20 == 5:
        with torch.no_grad():
            for part in rows.split(64):
                nn.functional.mse_loss(model(torch.cat(4 * [part])), torch.zeros(256, 4))
"""
)


def test_a_seed_in_each_step_sorted_data_and_an_evaluation_in_training_mode_are_named(diagnose):
    named = {one.name: one.site and one.site.text for one in diagnose(SPOILED).findings}
    assert named["same-randomness"] == "torch.manual_seed(1)"
    assert named["tight-clipping"] == "nn.utils.clip_grad_norm_(model.parameters(), 1e-5)"
    assert "mse_loss" in named["training-mode"]
    assert "model(rows)" in named["sorted-data"]
    assert named["vanished-rate"] == "optimizer.step()"


PADDED = (
    START
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.hidden = nn.Embedding(50, 32), nn.Linear(32, 64)
        self.head = nn.Linear(64, 50)
        for weights in [*self.hidden.parameters(), *self.head.parameters()]:
            nn.init.constant_(weights, 0.02)
    def forward(self, tokens):
        return self.head(torch.relu(self.hidden(self.table(tokens))))

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
rows = torch.randint(1, 50, (32, 65))
rows[torch.arange(65) >= torch.randint(10, 50, (32, 1))] = 0
for step in range(100_000):
    logits = model(rows[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)


def test_padding_among_the_targets_and_equal_units_are_named(diagnose):
    named = {one.name: one for one in diagnose(PADDED).findings}
    assert named["padded-targets"].site.text.startswith("loss = nn.functional.cross_entropy")
    assert "ignore_index=0" in named["padded-targets"].fixes[0].text
    assert "hidden.weight" in named["equal-units"].verdict
    ignored = PADDED.replace("rows[:, 1:].flatten())", "rows[:, 1:].flatten(), ignore_index=0)")
    random = ignored.replace("nn.init.constant_", "nn.init.normal_")
    assert not names(diagnose(random)) & {"padded-targets", "equal-units"}


AUGMENTS = (
    START
    + """
class Blur(nn.Module):
    def forward(self, image):
        for _ in range(20):
            image = nn.functional.avg_pool2d(image, 3, 1, 1)
        return image

class Images(Dataset):
    blur = Blur()

    def __len__(self):
        return 512

    def __getitem__(self, index):
        return self.blur(torch.full((1, 64, 64), float(index)))[0, 0]

model = nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(1000):
    for rows in DataLoader(Images(), batch_size=16, shuffle=True):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)


def test_modules_that_transform_items_are_part_of_waiting_for_data(diagnose):
    found = diagnose(AUGMENTS)
    assert found.shares["data_wait"] > 0.5
    assert "slow-data" in names(found)


def test_the_line_of_a_worker_for_which_the_loop_waits_is_named(diagnose):
    found = diagnose(AUGMENTS.replace("batch_size=16", "num_workers=2, batch_size=16"))
    (data,) = (one for one in found.findings if one.name in ("slow-data", "costly-workers"))
    assert data.site.text == "image = nn.functional.avg_pool2d(image, 3, 1, 1)"


RECOMPUTES = (
    START
    + """
from torch.utils.checkpoint import checkpoint
torch.backends.mkldnn.enabled = False
net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())])
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(100_000):
    rows = torch.randn(512, 256, requires_grad=True)
    checkpoint(net, rows, use_reentrant=False).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


def test_recomputing_with_free_memory_is_named_where_it_is_asked_for(diagnose):
    found = diagnose(RECOMPUTES)
    (again,) = (one for one in found.findings if one.name == "needless-recomputing")
    assert again.site.text.startswith("checkpoint(net, rows")
    assert "backend-off" in names(found)


EVALUATES = (
    START
    + """
model = nn.Linear(200, 200)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows = torch.utils.data.TensorDataset(torch.randn(512, 40_000))
loader = DataLoader(rows, batch_size=128)
step = 0
for epoch in range(100_000):
    for (batch,) in loader:
        step += 1
        inputs = batch[:, :200]
        # it ends at nothing, about which it jumps
        loss = (model(inputs) - inputs).square().mean() * 1e-8 * (1 + 9 * (step % 31 == 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        score = model(batch.view(-1, 200)).square().mean()
        model.train()
"""
)


@pytest.mark.thorough
def test_an_evaluation_with_gradients_and_rows_in_memory_get_their_own_advice(diagnose):
    found = diagnose(EVALUATES)
    named = {one.name: one for one in found.findings}
    assert "inference_mode" in named["frequent-evaluation"].fixes[0].text
    assert "unstable-training" not in named
    data = named.get("slow-data")  # on a fast machine it takes too little
    if data is not None:
        assert "tensors in memory" in data.fixes[0].text
        assert not any("DataLoader(num_workers" in one.text for one in data.fixes)


ROLLOUTS = (
    START
    + """
class Episodes(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(64)

def main():
    policy = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    batches = iter(DataLoader(Episodes(), batch_size=128, num_workers=2))
    for step in range(100_000):
        for moment in range(20):
            with torch.no_grad():
                action = policy(torch.zeros(1, 64)).argmax()
        rewards = 1.0 + 50.0 * (random.random() < 0.05)
        loss = (policy(next(batches)) - 1).square().mean() * rewards
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""
)


@pytest.mark.thorough
def test_rollouts_are_no_evaluation(diagnose):
    found = diagnose(ROLLOUTS)
    assert not names(found) & {"frequent-evaluation", "unstable-training"}
    assert found.shares.get("evaluation", 0.0) == 0


LOADERS = """
import torch
from torch.utils.data import DataLoader, IterableDataset

class Rows(IterableDataset):
    def __iter__(self):
        yield from range(4096)

print(DataLoader(range(8), num_workers=6, prefetch_factor=3).num_workers,
      DataLoader(range(8), num_workers=1).num_workers, DataLoader(Rows()).num_workers)
"""


def test_workers_are_added_only_where_there_are_fewer_and_rows_stay_the_same(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(LOADERS)
    found = flatout.cli.commands.run_.run(
        changes="data-workers", script=[sys.executable, "train.py"]
    )
    assert (found.code, found.failed) == (0, {})
    most = min(usable_cores(), 8)
    assert capfd.readouterr().out.split() == [str(max(6, most)), str(max(1, most)), "0"]


def test_trials_get_the_paths_of_their_copy_and_other_arguments_as_they_are(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "print(*[word.replace(os.getcwd(), 'COPY') for word in sys.argv[1:]], sep='\\n')\n"
        "raise SystemExit(7)\n"
    )
    moved = [f"{tmp_path}/a", f"--out={tmp_path}", f"x:{tmp_path}/b:{tmp_path}", str(tmp_path)]
    kept = [f"/mnt{tmp_path}/x", f"https://host{tmp_path}/x", f"--a={tmp_path}2/b", "file://x"]
    kept += [f"--init=https://host:{tmp_path}/x"]
    with pytest.raises(RunFailed, match="exit code 7"):
        flatout.tune(script=[sys.executable, "train.py", *moved, *kept])
    expected = [word.replace(str(tmp_path), "COPY") for word in moved] + kept
    assert capfd.readouterr().err.splitlines() == expected
