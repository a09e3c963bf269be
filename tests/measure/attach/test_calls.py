"""Marked calls are counted by the line of user code, and leave no trace in torch."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
import torch

from flatout.measure.attach import calls as marked_calls
from flatout.measure.attach.calls import MarkedCalls

pytestmark = pytest.mark.slow


def test_each_way_to_read_a_value_is_counted_with_its_line():
    marked, loss = MarkedCalls(), torch.ones(3).sum()
    with marked.recording():
        loss.item()
        float(loss)
        assert loss > 0
        loss.tolist()
        torch.cuda.empty_cache()
        gc.collect()
    assert marked.calls == {"sync": 4, "empty-cache": 1, "gc": 1}
    assert marked.by_user("sync") == 4
    texts = {site.text for site in marked.lines.sites(2)["sync"]}
    assert texts == {"loss.item()", "float(loss)", "assert loss > 0", "loss.tolist()"}
    (site,) = marked.lines.sites(2)["gc"]
    assert (site.file, site.text) == (__file__, "gc.collect()")
    assert marked.lines.sites(2)["empty-cache"][0].text == "torch.cuda.empty_cache()"


def test_reads_of_another_thread_do_not_count(monkeypatch):
    marked = MarkedCalls()
    with marked.recording():
        loader = threading.Thread(target=lambda: [torch.ones(1).item() for _ in range(5)])
        loader.start()
        loader.join()
        torch.ones(1).item()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        torch.ones(1).item()  # waits for no GPU
    assert marked.calls == {"sync": 1}


def test_torch_is_as_before_even_after_an_error():
    before = [torch.Tensor.item, torch.Tensor.to, torch.cuda.empty_cache, gc.collect]
    own = set(vars(torch.Tensor))
    with pytest.raises(RuntimeError), MarkedCalls().recording():
        torch.ones(2).item()
    assert [torch.Tensor.item, torch.Tensor.to, torch.cuda.empty_cache, gc.collect] == before
    assert set(vars(torch.Tensor)) == own
    with MarkedCalls().recording():
        assert torch.ones(2).to(torch.float64).dtype == torch.float64


def test_calls_of_torch_itself_have_no_line():
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], foreach=False)
    weight.sum().backward()
    marked = MarkedCalls()
    with marked.recording():
        optimizer.step()  # reads its number of steps
    assert marked.calls["sync"] >= 1
    assert marked.by_user("sync") == 0
    assert marked.lines.sites(1) == {}


def test_only_unpinned_copies_to_a_gpu_count():
    def tensor(kind, pinned=False):
        return SimpleNamespace(device=SimpleNamespace(type=kind), is_pinned=lambda: pinned)

    assert marked_calls._pageable(tensor("cpu"), tensor("cuda")) == "copy"
    assert marked_calls._pageable(tensor("cpu", pinned=True), tensor("cuda")) is None
    assert marked_calls._pageable(tensor("cuda"), tensor("cuda")) is None
    assert marked_calls._pageable(tensor("cpu"), tensor("cpu")) is None
