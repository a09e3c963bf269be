"""The calls that a patch may edit are found, with the names that their lines can use."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import types
import weakref

import pytest
import torch
from torch.autograd.anomaly_mode import detect_anomaly, set_detect_anomaly
from torch.utils.data import DataLoader

from flatout.measure.attach.calls import MarkedCalls
from flatout.measure.attach.request import Request
from flatout.measure.attach.sites import Sites
from flatout.measure.scripts.changes import edit_of
from flatout.measure.scripts.patch import Edit, apply, patch_of
from flatout.measure.trial import run_command

WATCHED = (
    (torch.optim.Optimizer, "__init__"),
    (DataLoader, "__init__"),
    (gc, "collect"),
    (torch.cuda, "empty_cache"),
    (torch, "set_num_threads"),
    (set_detect_anomaly, "__init__"),
    (detect_anomaly, "__init__"),
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a source, and returns its sites and its globals."""
    for owner, name in WATCHED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    sites = Sites()
    sites.install()

    def run(source: str, model: str | None = None, **given):
        path = tmp_path / "train.py"
        path.write_text(source)
        space = {"__name__": "train", **given}
        exec(compile(source, str(path), "exec"), space)
        root = None if model is None else eval(model, space)
        found = [site for site in sites.found(root) if site.file == str(path)]
        return found, space  # the lines of this file are users' code, too

    return run


def text_of(site) -> bytes:
    """Return the bytes of a file from the start to the end of a site."""
    with open(site.file, "rb") as file:
        lines = file.read().splitlines(keepends=True)[site.line - 1 : site.end_line]
    lines[-1] = lines[-1][: site.end_column]
    lines[0] = lines[0][site.column :]
    return b"".join(lines)


SCRIPT = """\
import gc
import torch as th
from torch import nn
from torch.optim import AdamW as Adam
from torch.utils.data import DataLoader, TensorDataset

th.set_num_threads(th.get_num_threads())
model = nn.Linear(2, 2); alias_of_it = model; 'ü'; optimizer = Adam(
    model.parameters(),
    lr=1e-3)
data = TensorDataset(th.zeros(4, 2))
for epoch in range(3):
    for (x,) in DataLoader(data, batch_size=2):
        optimizer.zero_grad(set_to_none=False)
        model(x).sum().backward()
        optimizer.step()
    gc.collect(0)
(optimizer
    .zero_grad(False))
optimizer.zero_grad()
optimizer.zero_grad(set_to_none=True)
th.cuda.empty_cache()
with th.autograd.set_detect_anomaly(False):
    th.autograd.set_detect_anomaly(th.is_anomaly_enabled())
"""


@pytest.mark.parametrize(("shuffles", "number"), [(True, 1), (False, 2)])
def test_workers_are_for_the_loader_that_shuffles_if_any_does(run, tmp_path, shuffles, number):
    source = "from torch.utils.data import DataLoader\ntest = DataLoader([3])\n"
    source += f"train = DataLoader([1, 2], shuffle={shuffles})\n"
    edits = {"data": Edit(at="loader", keywords={"num_workers": "2"})}
    patch = patch_of(edits, run(source)[0], tmp_path)
    assert f"+train = DataLoader([1, 2], shuffle={shuffles}, num_workers=2)" in patch.diff
    assert patch.diff.count("num_workers") == number


def test_calls_are_found_once_with_their_positions(run):
    sites, _ = run(SCRIPT, "model")
    found = [(site.kind, site.name, text_of(site)) for site in sites]
    assert found == [
        ("threads", "set_num_threads", b"th.set_num_threads(th.get_num_threads())"),
        ("optimizer", "AdamW", b"Adam(\n    model.parameters(),\n    lr=1e-3)"),
        ("loader", "DataLoader", b"DataLoader(data, batch_size=2)"),
        ("zero-grad", "zero_grad", b"optimizer.zero_grad(set_to_none=False)"),
        ("gc-collect", "collect", b"gc.collect(0)"),
        ("zero-grad", "zero_grad", b"zero_grad(False)"),
        ("empty-cache", "empty_cache", b"th.cuda.empty_cache()"),
    ]
    optimizer = sites[1]
    assert optimizer.names == {"model": "model", "torch": "th"}
    assert all(site.is_direct for site in sites)
    assert {"lr", "fused", "foreach"} <= {*optimizer.parameters}
    assert sites[2].parameters[5] == "num_workers"


def test_the_sites_of_a_script_can_be_patched(run, tmp_path):
    sites, _ = run(SCRIPT, "model")
    edits = {
        "fused": Edit(at="optimizer", keywords={"fused": "True"}),
        "gc": Edit(at="gc-collect", remove=True),
        "cache": Edit(at="empty-cache", remove=True),
        "data": Edit(at="loader", keywords={"num_workers": "2"}),
    }
    patch = patch_of(edits, sites, tmp_path)
    assert patch.by_hand == []
    changed = [line[1:] for line in patch.diff.splitlines()[3:] if line[0] in "+-"]
    assert changed == [
        "import gc",
        "    lr=1e-3)",
        "    lr=1e-3, fused=True)",
        "    for (x,) in DataLoader(data, batch_size=2):",
        "    for (x,) in DataLoader(data, batch_size=2, num_workers=2):",
        "    gc.collect(0)",
        "th.cuda.empty_cache()",
    ]


def test_anomaly_detection_is_a_site_when_it_is_switched_on(run):
    source = """\
import warnings
import torch
with torch.autograd.set_detect_anomaly(True):
    pass
with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
    pass
"""
    sites, _ = run(source)
    assert [(site.kind, text_of(site)) for site in sites] == [
        ("anomaly", b"torch.autograd.set_detect_anomaly(True)"),
        ("anomaly", b"torch.autograd.detect_anomaly()"),
    ]


def library(source: str, monkeypatch) -> None:
    """Make a module whose file looks installed."""
    module = types.ModuleType("some_library")
    code = compile(source, "/usr/lib/site-packages/some_library.py", "exec")
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "some_library", module)


TRAINER = """\
import gc
from torch.optim import SGD

class Trainer:
    def __init__(self, model):
        self.inner = model
    def train(self):
        gc.collect()
        self.optimizer = SGD(self.inner.parameters())
        return self.optimizer
"""


def test_an_optimizer_of_a_library_has_the_line_that_calls_it(run, monkeypatch):
    library(TRAINER, monkeypatch)
    source = """\
from some_library import Trainer
from torch import nn
def main():
    net = nn.Linear(2, 2)
    trainer = Trainer(net)
    trainer.train()
    return net
net = main()
"""
    sites, _ = run(source, "net")
    assert [(s.kind, s.is_direct, text_of(s), s.names) for s in sites] == [
        ("optimizer", False, b"trainer.train()", {"model": "net"}),
        ("caller", False, b"main()", {}),
    ]


def test_constructors_of_subclasses_are_part_of_the_call(run, monkeypatch):
    library(
        "from torch.utils.data import DataLoader\nplain = DataLoader.__init__\n"
        "def wrapped(loader, *args, **kwargs):\n    plain(loader, *args, **kwargs)\n",
        monkeypatch,
    )
    source = """\
import some_library
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
class Own(AdamW):
    def __init__(self, params):
        super().__init__(params, lr=1.0)
class Loader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
class Wrapped(DataLoader):
    __init__ = some_library.wrapped
class Job:
    def __init__(self):
        self.optimizer = Own([torch.zeros(2, requires_grad=True)])
Job()
Loader([1, 2])
Wrapped([1, 2])
"""
    sites, _ = run(source)
    assert [(s.kind, s.name, s.is_direct, text_of(s)) for s in sites] == [
        ("optimizer", "Own", True, b"Own([torch.zeros(2, requires_grad=True)])"),
        ("caller", "Own", False, b"Job()"),
        ("loader", "Loader", True, b"Loader([1, 2])"),
        ("loader", "Wrapped", True, b"Wrapped([1, 2])"),
    ]
    assert [site.parameters for site in sites if site.kind == "loader"] == [(), ()]


NAMES = """\
import torch
from torch import nn
from torch.optim import SGD

def make_optimizer(params):
    return SGD(params)

class Job:
    def __init__(self, model):
        self.model = model
        self.head = nn.Linear(2, 2)
        self.optimizer = SGD(self.model.parameters())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(3, 3)

    def configure_optimizers(self):
        return SGD(self.parameters())

def main(net):
    raw_model = net
    optimizer = make_optimizer(net.parameters())
"""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("Job(network)", {"optimizer": "model", "caller": "network"}),
        ("network.configure_optimizers()", {"optimizer": "self", "caller": "network"}),
        ("network.configure_optimizers(); network = network.model", {"optimizer": "self.model"}),
        ("network.job = Job(network.model)", {"optimizer": "network", "caller": "network"}),
    ],
)
def test_the_shortest_name_of_the_model_is_known(run, call, expected):
    sites, _ = run(f"{NAMES}\nnetwork = Net()\n{call}\n", "network")
    named = {site.kind: site.names["model"] for site in sites if "model" in site.names}
    assert named.items() >= expected.items()
    assert {site.names["torch"] for site in sites} == {"torch"}


def test_attributes_of_self_are_names(run):
    sites, _ = run(f"{NAMES}\nhold = [nn.Linear(4, 4)]\nJob(*hold)\n", "hold[0]")
    assert sites[0].names["model"] == "model"
    source = NAMES.replace("self.model = model", "self.model = model; del model")
    sites, _ = run(f"{source}\nhold = [nn.Linear(4, 4)]\nJob(*hold)\n", "hold[0]")
    assert sites[-2].names["model"] == "self.model"


def test_the_model_is_named_where_a_function_that_sees_it_asks_for_an_optimizer(run, tmp_path):
    source = (
        f"{NAMES}\ndef build():\n    net = Net()\n    main(net)\n    return net\nhold = [build()]\n"
    )
    sites, _ = run(source, "hold[0]")
    assert [(site.kind, site.names.get("model")) for site in sites] == [
        ("optimizer", None),
        ("caller", "net"),
        ("caller", "net"),
        ("caller", None),
    ]
    patch = patch_of({"compile": Edit(lines=("{model}.compile()",))}, sites, tmp_path)
    assert patch.by_hand == []
    assert "+    net.compile()\n     optimizer = make_optimizer" in patch.diff


def test_a_model_that_is_wrapped_later_is_named(run):
    source = """\
from torch import nn
from torch.optim import SGD
model = nn.Linear(2, 2)
job = nn.ModuleDict({"net": model})
del job
optimizer = SGD(model.parameters())
wrapped = nn.Sequential(model)
"""
    sites, _ = run(source, "wrapped")
    assert sites[0].names["model"] == "model"


def test_the_calls_behave_as_before(run, monkeypatch):
    assert inspect.signature(DataLoader).parameters["batch_size"].default == 1
    assert pickle.loads(pickle.dumps(gc.collect)) is gc.collect
    sites, space = run(
        "from torch.utils.data import DataLoader\nloader = DataLoader([1, 2], batch_size=2)\n"
    )
    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(space["loader"]))] == [[1, 2]]
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.SGD([])
    with pytest.raises(TypeError):
        DataLoader([1], no_such=1)
    assert gc.collect() >= 0
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)])
    copy.deepcopy(optimizer).zero_grad(set_to_none=False)
    assert len(sites) == 1


def test_what_a_function_deletes_after_the_optimizer_is_freed(run):
    source = """\
import torch
def main(freed):
    state = torch.zeros(4)
    seen = weakref.ref(state)
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)])
    del state
    freed.append(seen() is None)
def with_locals(size):
    own = locals()
    optimizer = torch.optim.SGD([torch.zeros(size, requires_grad=True)])
    return own["size"]
main(freed)
size = with_locals(3)
"""
    freed = []
    _, space = run(source, weakref=weakref, freed=freed)
    assert freed == [True]
    assert space["size"] == 3


def test_calls_that_are_marked_meanwhile_are_found(run):
    with MarkedCalls().recording_rare():
        sites, _ = run("import gc\ngc.collect(0)\n")
    assert [(site.kind, site.is_direct) for site in sites] == [("gc-collect", True)]


def test_a_compiled_function_still_compiles(run):
    source = """\
import torch
model = torch.nn.Linear(2, 2)
def step(x):
    model.zero_grad(set_to_none=False)
    return model(x).sum()
out = torch.compile(step, backend="eager", fullgraph=True)(torch.zeros(2))
"""
    _, space = run(source)
    assert space["out"].shape == ()


def test_a_measured_script_answers_with_its_sites_and_runs_with_their_patch(tmp_path):
    source = """\
import torch
from torch import nn

def main():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2000):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer

if __name__ == "__main__":
    main()
"""
    script = tmp_path / "train.py"
    script.write_text(source)
    request = Request(seconds=1.0, steps=12)
    answer = run_command([sys.executable, str(script)], request)
    assert [(site.kind, site.line) for site in answer.sites] == [
        ("optimizer", 6),
        ("caller", 14),
        ("loss", 8),
    ]
    edits = {
        "first": Edit(lines=("{torch}.manual_seed(1)",)),
        "frozen": Edit(lines=("{model}.bias.requires_grad_(False)",)),
        "fast": Edit(at="optimizer", keywords={"foreach": "True"}),
    }
    patch = patch_of(edits, answer.sites, tmp_path)
    assert patch.by_hand == []
    apply(patch, tmp_path)
    space = {"__name__": "train"}
    exec(script.read_text().replace("range(2000)", "range(2)"), space)
    (group,) = space["main"]().param_groups
    assert group["foreach"] is True
    assert [each.requires_grad for each in group["params"]] == [True, False]


LOSSES = """\
import torch
from torch import nn
from torch.nn import functional as F

class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def loss(self, batch):
        return F.mse_loss(self.net(batch), torch.zeros(len(batch), 2))

def update(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

task = Task()
optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
for step in range(2000):
    batch = torch.randn(4, 8)
    if step % 2:
        out = task.net(batch)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        loss = task.loss(batch)
        task.net.eval()
        with torch.no_grad():
            task.net(batch)
        task.net.train()
        update(loss, optimizer)
"""


@pytest.mark.thorough
def test_losses_are_wrapped_in_the_function_that_calls_the_model_and_goes_backward(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LOSSES)
    answer = run_command([sys.executable, str(script)], Request(seconds=1.0, steps=12))
    patch = patch_of({"bf16": edit_of("bf16", "cpu")}, answer.sites, tmp_path)
    block = '    with torch.autocast("cpu", dtype=torch.bfloat16):\n'
    expected = LOSSES.replace(
        "        out = task.net(batch)\n        loss = out.square().mean()\n",
        f"    {block}            out = task.net(batch)\n            loss = out.square().mean()\n",
    ).replace(
        "        loss = task.loss(batch)\n", f"    {block}            loss = task.loss(batch)\n"
    )
    assert (patch.files["train.py"], patch.by_hand) == (expected, [])
    apply(patch, tmp_path)
    answer = run_command([sys.executable, str(script)], Request(seconds=1.0, steps=12))
    assert answer.evidence is not None
    assert not patch_of({"bf16": edit_of("bf16", "cpu")}, (), tmp_path).diff


READ_LATER = """\
import torch
from torch import nn
from torch.nn import functional as F

def train(steps=2000):
    model, total = nn.Linear(8, 4), torch.zeros(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = torch.randn(16, 8), torch.randint(4, (16,))
        scores = model(x)
        classes = scores.argmax(1)
        best = scores.max(1).values
        loss = F.cross_entropy(scores, y) + best.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = scores.detach().numpy(), classes.numpy(), loss.item()
        best = torch.zeros(2)
        total = total.lerp(scores.detach()[0], 0.1), best
        total = total[0]
    return seen

if __name__ == "__main__":
    train()
"""


@pytest.mark.thorough
def test_results_that_are_read_after_the_block_are_fp32_as_before(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(READ_LATER)
    answer = run_command([sys.executable, str(script)], Request(seconds=1.0, steps=12))
    patch = patch_of({"bf16": edit_of("bf16", "cpu")}, answer.sites, tmp_path)
    apply(patch, tmp_path)
    text = script.read_text()
    assert "+ best.mean()\n        scores = scores.float()\n        loss.backward()" in text
    assert text.count(".float()") == 1
    space = {"__name__": "train"}
    exec(text, space)
    scores, classes, _ = space["train"](3)
    assert (str(scores.dtype), str(classes.dtype)) == ("float32", "int64")


def test_a_backward_pass_that_a_library_makes_has_no_place_in_the_script(tmp_path):
    sites, space = Sites(), {"sys": sys}
    space["sites"] = sites
    called = "def call(): sites.note_forward(sys._getframe())\n"
    exec(compile(called, str(tmp_path / "train.py"), "exec"), space)
    made = "def go(): sites.note_backward(sys._getframe())\n"
    exec(compile(made, f"{sys.prefix}/lib/python3/site-packages/library.py", "exec"), space)
    for _ in range(20):  # a new frame may have the identity of one that has ended
        space["call"]()
        space["go"]()
    assert {site.file for site in sites.found(None)} <= {__file__}  # which calls both
