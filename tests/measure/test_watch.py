"""`flatout.watch` measures a loop, names its faults, and never changes what the loop does."""

import copy
import gc
import logging
import random
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from watching import WIDTH, batches, train

import flatout
from flatout.errors import ConfigError
from flatout.measure.attach import follower, stages
from flatout.measure.watch import PHASES
from flatout.training.metrics.phases import PhaseTimer

pytestmark = pytest.mark.slow

ROWS = torch.randn(64, WIDTH)
PLAIN = (torch.save, gc.collect, torch.Tensor.item, torch.cuda.empty_cache)


@pytest.fixture
def watch():
    """Return a watch that leaves nothing behind."""
    found = flatout.watch()
    yield found
    found._loop.close()
    assert (torch.save, gc.collect, torch.Tensor.item, torch.cuda.empty_cache) == PLAIN


def names(watch) -> set[str]:
    """Return the names of the findings, without those about the machine of the tests."""
    machine = {"busy-machine", "cpu-threads", "unstable-training"}
    return {finding.name for finding in watch.diagnosis().findings} - machine


@pytest.mark.slow
def test_waiting_for_data_is_named_with_its_line(watch):
    def slow():
        for batch in batches(60):
            time.sleep(0.02)
            yield batch

    train(watch, source=slow())
    (finding,) = (one for one in watch.diagnosis().findings if one.name == "slow-data")
    assert finding.share > 0
    assert finding.site.text == "time.sleep(0.02)"


@pytest.mark.slow
def test_a_trainers_whole_save_counts_with_the_line_that_trains(watch, monkeypatch):
    class Trainer:
        def _save_checkpoint(self):
            time.sleep(0.1)

    monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace(Trainer=Trainer))
    plain = Trainer._save_checkpoint
    train(watch, after=lambda *_: Trainer()._save_checkpoint())
    (finding,) = (one for one in watch.diagnosis().findings if one.name == "slow-save")
    assert "_save_checkpoint()" in finding.site.text
    watch._loop.close()
    assert Trainer._save_checkpoint is plain


def test_saves_are_named_with_their_line(watch, tmp_path, monkeypatch):
    plain = torch.serialization._save
    monkeypatch.setattr(torch.serialization, "_save", lambda *args: (time.sleep(0.1), plain(*args)))

    def save(number, model):
        if number % 5 == 0:
            torch.save(model.state_dict(), tmp_path / "weights.pt")

    train(watch, after=save)
    (finding,) = (one for one in watch.diagnosis().findings if one.name == "slow-save")
    assert finding.site.text.startswith("torch.save(")
    assert finding.site.file == __file__


def test_the_files_of_one_save_say_nothing_about_saves(watch, tmp_path):
    def save(number, model):
        if number in (40, 50):
            for name in ("weights.pt", "optimizer.pt"):
                torch.save(model.state_dict(), tmp_path / name)

    train(watch, after=save)
    assert watch.evidence().checkpoint_s is None


@pytest.mark.slow
def test_reads_by_the_loop_count_but_not_those_of_the_optimizer(watch):
    numbers = torch.ones(8)
    train(watch, before=lambda number: [value.item() for value in numbers])
    counts = watch.evidence()
    assert counts.syncs - counts.expected_syncs == 8
    assert watch.evidence().site("sync").text.endswith("[value.item() for value in numbers])")
    assert "host-sync" in names(watch)


@pytest.mark.slow
def test_collecting_garbage_and_emptying_the_cache_are_named(watch):
    gc.freeze()  # the tests' own objects
    kept = [[] for _ in range(20_000)]
    train(watch, before=lambda number: (gc.collect(), torch.cuda.empty_cache()))
    assert {"garbage-collection", "empty-cache"} <= names(watch)
    assert watch.evidence().collections >= 0.9
    assert watch.evidence().empty_cache == pytest.approx(1)
    del kept


def test_each_moment_counts_once(watch):
    train(watch, source=(time.sleep(0.002) or batch for batch in batches(80)))
    evidence = watch.evidence()
    assert sum(evidence.phase_shares().values()) <= 1.001
    assert evidence.steps >= 20


def test_without_step_the_optimizer_ends_steps(watch):
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number, batch in enumerate(watch(batches(140))):
        model(batch).sum().backward()
        if number % 2:
            optimizer.step()
    assert watch.steps == 69
    assert watch.evidence().compute_s > 0


def test_evaluation_between_epochs_is_not_part_of_a_step(watch, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    own = SimpleNamespace(perf_counter=lambda: clock.now, monotonic=time.monotonic)
    monkeypatch.setattr(follower, "PhaseTimer", partial(PhaseTimer, clock=own.perf_counter))
    monkeypatch.setattr(stages, "time", own)

    def work(seconds):
        clock.now += seconds

    for _ in range(3):
        train(watch, 40, before=lambda number: work(0.01))
        with watch.phase("evaluation"):
            for batch in watch(batches(3)):
                work(1)
                batch.sum()
    evidence = watch.evidence()
    assert watch.steps == 120
    each = 2 * 3 / 110  # 10 steps warm up, and the last evaluation follows the last step
    assert evidence.evaluation_s == pytest.approx(each)
    assert evidence.step_s == pytest.approx(0.01 + each)


def test_gradients_may_be_accumulated_inside_a_step(watch):
    source = iter(watch(batches(1000)))
    for _ in range(50):
        with watch.step(), watch.step():
            for _ in range(4):
                next(source).sum()
    assert watch.steps == 49  # the last one has not ended
    assert watch.evidence().data_wait_s > 0
    for number, _ in enumerate(source):
        with watch.step():
            if number == 40:
                break
    assert watch.evidence().steps > 5


def test_errors_of_the_loop_pass_unchanged(watch):
    error = ValueError("mine")

    def broken():
        yield torch.ones(1)
        raise error

    with pytest.raises(ValueError, match="mine") as raised:
        list(watch(broken()))
    assert raised.value is error
    for _ in watch(batches(1)):
        with pytest.raises(ValueError, match="mine"), watch.step(), watch.phase("logging"):
            raise error


def test_lack_of_memory_is_the_verdict(watch):
    def fail(number):
        if number == 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    with pytest.raises(torch.OutOfMemoryError):
        train(watch, before=fail)
    assert "CUDA out of memory" in watch.verdict()
    assert watch.diagnosis().findings[0].name == "out-of-memory"


def test_an_error_of_ours_is_logged_and_the_loop_continues(watch, monkeypatch, caplog):
    fault = Mock(side_effect=RuntimeError("a fault of ours"))
    monkeypatch.setattr(follower.Stages, "start_step", fault)
    with caplog.at_level(logging.WARNING):
        train(watch, 10)
    (message,) = (record.getMessage() for record in caplog.records)
    assert "and the script continues: RuntimeError('a fault of ours')" in message


def test_modules_without_weights_may_be_made_in_each_step():
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loop = follower.Follower("script", at_exit=lambda: None, recorded_steps=0)
    try:
        for _ in range(30):
            normed = torch.nn.LayerNorm(WIDTH, elementwise_affine=False)(model(ROWS))
            normed[:, 0].square().mean().backward()
            optimizer.step()
        assert "created" not in loop.evidence().sites
    finally:
        loop.close()


SEEDS = {
    "once": (lambda step: random.seed(a=1) if step == 0 else None, False),
    "in each step": (lambda step: random.seed(a=1), True),
    "twice, others in each step": (lambda step: [random.seed(a=step) for _ in range(2)], False),
}


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_that_each_step_sets_again_is_told_from_others(name, caplog):
    (seed, is_found), model = SEEDS[name], torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loop = follower.Follower("script", at_exit=lambda: None, recorded_steps=0)
    try:
        for step in range(30):
            model(ROWS).square().mean().backward()
            seed(step)
            optimizer.step()
        assert ("seeded" in loop.evidence().sites) is is_found
    finally:
        loop.close()
    assert not caplog.messages


@pytest.mark.parametrize(("every", "is_found"), [(1, False), (10, True)])
def test_passes_of_each_step_in_training_mode_are_no_evaluation(every, is_found):
    """As those of a model that labels several augmented batches for itself."""
    model = torch.nn.Sequential(torch.nn.LazyLinear(WIDTH), torch.nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loop = follower.Follower("script", at_exit=lambda: None, recorded_steps=0)
    try:
        for step in range(40):
            if step and step % every == 0:
                with torch.no_grad():
                    labels = [model(ROWS) for _ in range(3)]
            (model(ROWS) - 1).square().mean().backward()
            optimizer.step()
        found = loop.evidence()
    finally:
        loop.close()
    assert ("training-mode" in found.sites) is is_found, labels
    assert found.rows == len(ROWS), "a lazy model is known"


@pytest.mark.parametrize("is_moved_on", [True, False])
def test_the_same_rows_in_every_step_are_named(is_moved_on):
    model, loader = torch.nn.Linear(WIDTH, 1), torch.utils.data.DataLoader(ROWS, batch_size=4)
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=1e-3), iter(loader)
    loop = follower.Follower("script", at_exit=lambda: None, recorded_steps=0)
    try:
        for _ in range(60):
            batch = next(batches, ROWS[:4]) if is_moved_on else next(iter(loader))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = loop.evidence()
    finally:
        loop.close()
    rows = None if is_moved_on else 4
    assert (found.rows, found.dataset_rows, found.same_rows) == (4, 64, rows)


def test_reading_that_sleeps_is_told_from_reading_that_computes():
    class Rows(torch.utils.data.Dataset):
        def __init__(self, sleeps):
            self.sleeps = sleeps

        def __len__(self):
            return 64

        def __getitem__(self, index):
            end_s = time.thread_time() + 0.01
            while not self.sleeps and time.thread_time() < end_s:
                pass
            time.sleep(0.01 * self.sleeps)
            return ROWS[index]

    def share(sleeps):
        model = torch.nn.Linear(WIDTH, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loop = follower.Follower("script", at_exit=lambda: None, recorded_steps=0)
        try:
            for batch in torch.utils.data.DataLoader(Rows(sleeps), batch_size=2):
                model(batch).square().mean().backward()
                optimizer.step()
            return loop.evidence().reads_ran
        finally:
            loop.close()

    asleep = share(sleeps=True)
    assert 0 < asleep < 0.5
    assert asleep < share(sleeps=False) <= 1.05


@pytest.mark.parametrize("is_kept", [True, False])
def test_waits_for_workers_that_are_started_anew_are_told_from_others(is_kept):
    model, data = torch.nn.Linear(WIDTH, 1), torch.utils.data.TensorDataset(ROWS)
    loader = torch.utils.data.DataLoader(
        data, batch_size=16, num_workers=1, persistent_workers=is_kept
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loop = follower.Follower("script", at_exit=lambda: None, recorded_steps=0)
    try:
        for _ in range(4):
            for (batch,) in loader:
                model(batch).square().mean().backward()
                optimizer.step()
        share = loop.evidence().started_anew
    finally:
        loop.close()
    assert share is None if is_kept else share > 0.5


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # older versions of torch
def test_an_active_profiler_is_left_alone(watch):
    with torch.profiler.profile() as profiler:
        train(watch)
    assert any(event.name == "aten::addmm" for event in profiler.events())
    assert any("Another profiler is active" in note for note in watch.evidence().notes)
    assert "tracing" in names(watch)


@pytest.mark.thorough
def test_a_profiler_that_starts_while_ours_records_takes_over(watch):
    profiler = torch.profiler.profile()

    def start(number):
        if watch._loop.stages.name == "recorded" and not profiler.profiler:
            profiler.start()

    train(watch, before=start)
    profiler.stop()
    assert any(event.name == "aten::addmm" for event in profiler.events())
    assert any("Another profiler has started" in note for note in watch.evidence().notes)
    assert watch.evidence().kernels is None


def test_the_loaders_own_attributes_are_visible(watch):
    loader = torch.utils.data.DataLoader(range(10), batch_size=2)
    assert len(watch(loader)) == 5
    assert watch(loader).batch_size == 2
    assert [batch.tolist() for batch in watch(loader)] == [[n, n + 1] for n in range(0, 10, 2)]
    with pytest.raises(TypeError, match="has no len"):
        len(watch(batches(2)))
    assert next(watch(iter(range(3)))) == 0
    assert [*copy.copy(watch([1, 2]))] == [1, 2]


def test_saves_in_other_threads_are_not_part_of_the_loop(watch, tmp_path):
    train(watch, 30)
    thread = threading.Thread(target=torch.save, args=({}, tmp_path / "x.pt"))
    thread.start()
    thread.join()
    train(watch, 30)
    assert watch.evidence().checkpoint_s == 0


def test_the_findings_are_printed_once_at_the_end(capsys):
    with flatout.watch() as watch:
        train(watch)
    told = capsys.readouterr().err
    assert "\nStep " in told
    watch.finish()
    assert watch.verdict() == told.splitlines()[0]
    with flatout.watch() as asked:
        train(asked)
        asked.verdict()
    assert not capsys.readouterr().err


@pytest.mark.thorough
def test_a_notebook_shows_what_is_known(watch):
    assert repr(watch) == "A watch that has seen no step." == watch._repr_html_()
    train(watch, 20)
    verdicts = watch.verdict(), repr(watch), watch.verdict()  # what others use may change between
    assert verdicts[1] in {f"{one} ({watch.steps} steps)" for one in verdicts[::2]}
    assert watch._repr_html_().startswith("<p>")


def test_what_cannot_be_answered_is_an_error(watch):
    with pytest.raises(ConfigError, match="No step has been watched"):
        watch.verdict()
    assert "evaluation" in PHASES
    with pytest.raises(ConfigError, match="'validation' is not a phase"), watch.phase("validation"):
        pass
    train(watch, 4)
    assert watch.evidence().step_s is None
    assert "too few" in watch.evidence().notes[-1]
    with pytest.raises(ConfigError, match="model='x' must be a Module or None"):
        flatout.watch(model="x")
    with pytest.raises(ConfigError, match="steps=0 must be a whole number from 1 or None"):
        flatout.watch(steps=0)


def test_a_new_watch_ends_the_one_before(watch):
    train(watch, 4)
    other = flatout.watch()
    train(other, 4)
    assert (watch.steps, other.steps) == (4, 4)
    other.finish()
    assert (torch.save, gc.collect, torch.Tensor.item, torch.cuda.empty_cache) == PLAIN


def test_other_ranks_neither_measure_nor_speak(monkeypatch, capsys):
    monkeypatch.setattr(follower, "ranks", lambda: (1, 2))
    with flatout.watch() as watch:
        train(watch)
    assert not capsys.readouterr().err
    assert watch.verdict() == str(watch) == "Rank 0 is watched, and this is rank 1."
    with pytest.raises(ConfigError, match="this is rank 1"):
        watch.diagnosis()


def test_logged_losses_are_evidence(watch):
    for batch in watch(batches(60)):
        with watch.step():
            watch.log(loss=batch.square().mean(), grad_norm=0.5, lr=1.0)
    evidence = watch.evidence()
    assert [step for step, _ in evidence.losses] == list(range(1, 61))


def test_a_model_that_is_called_inside_a_transform_is_measured():
    """Its inputs have no values of their own, and none once the transform has ended."""
    model, rows = torch.nn.Linear(128, 8), torch.randn(32, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    slopes = torch.func.vmap(torch.func.grad(lambda row: model(row).square().mean()))
    loop = follower.Follower("script", at_exit=lambda: None, recorded_steps=0)
    try:
        for _ in range(40):
            (model(rows).square().mean() + 0 * slopes(rows).sum()).backward()
            optimizer.step()
        found = loop.evidence()
    finally:
        loop.close()
    assert (found.rows, found.rescaled) == (len(rows), 1.0)
