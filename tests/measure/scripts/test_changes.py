"""Changes that are applied in the process of a script do what they say, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flatout.cli.main import main
from flatout.measure.attach.request import Request, Timing
from flatout.measure.evidence import Evidence
from flatout.measure.scripts.changes import CHANGES, num_workers
from flatout.measure.trial import run_command

SCRIPT = """
import copy, gc, json, pickle, random, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.autograd.set_detect_anomaly(True)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x):
        x = self.conv(x).mean((2, 3))
        self.saw = x.dtype
        for block in self.blocks:
            x = block(x)
        return x, [x]

def main():
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(64, 3, 8, 8)), 8, True)
    collected, losses = [], []
    gc.callbacks.append(lambda phase, info: collected.append(info["generation"]))
    for epoch in range(4):
        for (batch,) in loader:
            optimizer.zero_grad(set_to_none=False)
            out, (nested,) = net(batch)
            loss = nn.MSELoss()(out, torch.zeros_like(out))  # a module without weights
            loss.backward()
            optimizer.step()
            collected.clear()
            gc.collect()
            losses.append(loss.item())
            if len(losses) == 12:
                optimizer.zero_grad(set_to_none=False)
                copied = pickle.loads(pickle.dumps(copy.deepcopy(net)))
                print(json.dumps({
                    "workers": loader.num_workers, "persistent": loader.persistent_workers,
                    "threads": torch.get_num_threads(), "anomaly": torch.is_anomaly_enabled(),
                    "collected": collected,
                    "fused": optimizer.param_groups[0]["fused"],
                    "gradient": net.conv.weight.grad is None,
                    "last": net.conv.weight.is_contiguous(memory_format=torch.channels_last),
                    "inside": str(net.saw), "out": str(out.dtype), "losses": losses,
                    "nested": str(nested.dtype),
                    "same": torch.equal(copied.conv.weight, net.conv.weight),
                    "random": random.random(),
                    "tf32": torch.get_float32_matmul_precision(),
                    "benchmark": torch.backends.cudnn.benchmark,
                }), flush=True)
    open("done", "w").write("x")

if __name__ == "__main__":
    main()
"""
ON_A_CPU = (
    *("data-workers", "no-anomaly", "no-gc-collect", "zero-grad-none", "threads"),
    *("channels-last", "fused-optimizer", "tf32", "cudnn-benchmark"),
)


@pytest.fixture(scope="module")
def effects(tmp_path_factory):
    """Return a function that runs the script with changes; what it printed, and the answer."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(SCRIPT)

    def run(changes, *, steps=14, seed_offset=0):
        answer = run_command(
            [sys.executable, "train.py"],
            Request(
                changes=changes, timing=Timing(steps=steps, warmup_steps=0, seed_offset=seed_offset)
            ),
            folder=folder,
            is_captured=True,
            limit_s=240,
        )
        assert answer.code == 0, answer.output
        assert answer.failed == {}
        return json.loads(answer.output.splitlines()[0]), answer

    return run


@pytest.fixture(scope="module")
def plain(effects):
    return effects(())


def test_a_trial_keeps_steps_and_losses_and_ends_the_script(plain):
    found, answer = plain
    assert len(answer.step_s) == 14
    assert answer.losses[:12] == pytest.approx(found["losses"], rel=1e-6)
    assert found["workers"] == 0
    assert found["anomaly"]
    assert found["threads"] == 1
    assert 2 in found["collected"]
    assert not found["gradient"]
    assert found["inside"] == "torch.float32"
    assert answer.peak_gib > 0


def test_changes_are_applied_and_keep_the_losses(effects, plain):
    found, answer = effects(ON_A_CPU)
    assert (found["workers"], found["persistent"]) == (num_workers(), True)
    assert not found["anomaly"]
    assert 2 not in found["collected"]
    assert found["fused"]
    assert found["gradient"]
    assert found["last"]
    assert found["same"]
    assert found["random"] == plain[0]["random"]
    assert (found["tf32"], found["benchmark"]) == ("high", True)
    epoch = slice(0, 8)  # the next one is shuffled by other random numbers with workers
    assert answer.losses[epoch] == pytest.approx(plain[1].losses[epoch], rel=1e-4)


@pytest.mark.thorough
def test_bf16_is_confined_to_the_forward_pass_of_a_compiled_model(effects, plain):
    found, answer = effects(("bf16", "compile"), seed_offset=0)
    assert found["inside"] == "torch.bfloat16"
    assert found["out"] == found["nested"] == "torch.float32"
    assert found["same"]
    assert answer.losses != plain[1].losses
    assert answer.losses == pytest.approx(plain[1].losses, rel=5e-2)
    assert answer.compile_s > 0


def test_another_seed_gives_other_losses_beside_workers_that_set_their_own(effects, plain):
    _, answer = effects(("data-workers",), steps=12, seed_offset=1000)
    assert answer.losses[0] != plain[1].losses[0]


def test_a_trial_overwrites_no_file_that_a_link_leads_to(tmp_path):
    own, copied = tmp_path / "own", tmp_path / "copied"
    own.mkdir()
    copied.mkdir()
    for name in ("ckpt.pt", "log.txt", "tokens.bin"):
        (own / name).write_text("the user's")
        (copied / name).symlink_to(own / name)
    (copied / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "torch.save(model.state_dict(), 'ckpt.pt')\n"
        "open('log.txt', 'w').write('new')\n"
        "for _ in range(9):\n"
        "    model(torch.ones(1)).sum().backward()\n"
        "    optimizer.step()\n"
        "try:\n"
        "    open('tokens.bin', 'r+b')\n"
        "except PermissionError as error:\n"
        "    print(error)\n"
        "import os; os.remove('tokens.bin')\n"
    )
    answer = run_command(
        [sys.executable, "train.py"],
        Request(timing=Timing(steps=20, warmup_steps=0), copy_of_user=str(copied)),
        folder=copied,
        is_captured=True,
        limit_s=120,
    )
    assert answer.code == 0, answer.output
    assert "must not change" in answer.output
    assert len(answer.step_s) == 8
    assert {path.name for path in own.iterdir()} == {"ckpt.pt", "log.txt", "tokens.bin"}
    assert {path.read_text() for path in own.iterdir()} == {"the user's"}
    assert (copied / "log.txt").read_text() == "new"


def test_every_change_can_be_applied_and_written():
    for name, change in CHANGES.items():
        edit = change.edit
        assert edit.at or edit.lines or edit.environment, name


def test_the_page_lists_every_change():
    page = (Path(__file__).parents[3] / "docs" / "scripts.md").read_text(encoding="utf-8")
    for name, change in CHANGES.items():
        assert f"| `{name}` | {change.does} |" in page


def test_reasons_name_what_the_script_lacks():
    idle = Evidence(source="script", step_s=1.0, data_wait_s=0.0, workers=0)
    waiting = idle.model_copy(update={"data_wait_s": 0.5})
    for facts, said in (
        ({"dataset": "memory"}, "tensors in memory"),
        ({"dataset": "iterable"}, "map-style"),
        ({"shared_gib": 1 / 1024}, "/dev/shm is too small"),
        ({"data_wait_s": 0.0}, "wait too little"),
    ):
        assert said in CHANGES["data-workers"].why_not(waiting.model_copy(update=facts))
    tried = {name for name, change in CHANGES.items() if not change.why_not(waiting)}
    assert "data-workers" in tried
    assert not tried & {"tf32", "pinned-memory", "channels-last", "no-anomaly", "sdpa"}
    facts = {"device": "cuda:0", "optimizer": "AdamW", "optimizer_way": "foreach"}
    facts |= {"pinned": False, "convolutions": True}
    on_gpu = idle.model_copy(update=facts)
    tried = {name for name, change in CHANGES.items() if not change.why_not(on_gpu)}
    wanted = {"tf32", "bf16", "pinned-memory", "cudnn-benchmark", "fused-optimizer", "compile"}
    assert wanted <= tried


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Write `flatout run --with bf16,compile -- python train.py`"),
        (["--with", "bf17", "--", "python"], "bf16"),
    ],
)
def test_run_names_a_mistake(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", *words])
    assert said in capsys.readouterr().err
