"""Damaged and foreign files: each is rejected by name, or an undamaged one takes its place."""

import pickle
import shutil

import pytest
from damage import Payload, damages, refusal, tries
from victim import KEPT

from flatout.training.checkpoint import catalog

pytestmark = [pytest.mark.slow, pytest.mark.faults]

STEPS = 40


def fresh(source, to, path=None, content=None):
    """Return a copy of a directory, with another content of one file."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to, symlinks=True)
    if path is not None:
        (to / path).write_bytes(content)
    return to


def resumed_with(changes, target, folder):
    """Resume a killed run with each change of each file; return the tries and the problems."""
    run, count, problems = folder / "run", 0, []
    newest = catalog.latest(target.halfway).name
    for path, what, content in tries(target.halfway, changes):
        fresh(target.halfway, run, path, content)
        ended = target.train(run)
        found = refusal(ended, path.name, must=newest in path.parts)
        if ended.code == 0:
            found += target.unequal(run, ended)
        elif newest in path.parts:
            found.append(f"no other checkpoint was used: {ended.err[-2000:]}")
        count += 1
        problems += [f"{path}, {what}: {problem}" for problem in found]
    return count, problems


def test_a_damaged_file_of_a_run_is_rejected_or_replaced(victim, tmp_path, survived):
    survived("run-file", *resumed_with(damages, victim(STEPS), tmp_path))


def test_text_from_a_run_with_a_damaged_file_is_the_same_or_rejected(victim, tmp_path, survived):
    target, run, count, problems = victim(STEPS), tmp_path / "run", 0, []

    def generated():
        words = ("generate", run, "--prompt", "the", "--max-tokens", 8, "--seed", 1, "--json")
        return target.children.run(*words)

    fresh(target.halfway, run)
    wanted = generated().result["samples"]
    for path, what, content in tries(target.halfway, damages):
        fresh(target.halfway, run, path, content)
        ended = generated()
        found = refusal(ended, path.name)
        if ended.code == 0 and ended.result["samples"] != wanted and path.name not in ended.err:
            found.append("another text without a word")
        count += 1
        problems += [f"{path}, {what}: {problem}" for problem in found]
    survived("run-file", count, problems)


def trained_on(changes, target, folder, source, key):
    """Train with each change of each file of a directory that `key` names; as `resumed_with`."""
    used, count, problems = folder / "used", 0, []

    def result():
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        return target.train(run, f"{key}={used}")

    fresh(source, used)
    whole = result()
    assert whole.code == 0, whole.err
    for path, what, content in tries(source, changes):
        fresh(source, used, path, content)
        ended = result()
        found = refusal(ended, path.name)
        if ended.code == 0 and any(ended.result[key] != whole.result[key] for key in KEPT):
            found.append("another result without a word")
        count += 1
        problems += [f"{path}, {what}: {problem}" for problem in found]
    return count, problems


def test_a_damaged_file_of_a_dataset_is_rejected_by_train(victim, tiny_set, tmp_path, survived):
    survived("data-file", *trained_on(damages, victim(), tmp_path, tiny_set, "data.path"))


def test_a_damaged_file_of_a_dataset_is_found_by_verify(children, tiny_set, tmp_path, survived):
    used, count, problems = tmp_path / "used", 0, []
    for path, what, content in tries(tiny_set, damages):
        ended = children.run("verify", fresh(tiny_set, used, path, content), "--json")
        found = refusal(ended, path.name)
        found += [] if ended.code else ["not found"]
        count += 1
        problems += [f"{path}, {what}: {problem}" for problem in found]
    survived("data-file", count, problems)


@pytest.fixture(scope="module")
def export(victim, tmp_path_factory):
    """The directory of an export for transformers."""
    target, out = victim(), tmp_path_factory.mktemp("export") / "model"
    ended = target.children.run("export", target.whole, "--out", out, "--json")
    assert ended.code == 0, ended.err
    return out


def test_a_damaged_export_is_rejected(victim, export, tmp_path, survived):
    found = trained_on(damages, victim(), tmp_path, export, "train.init_from")
    survived("export-file", *found)


def test_no_pickle_is_opened(victim, export, tiny_set, tmp_path, survived):
    target, marker = victim(STEPS), tmp_path / "opened"
    content = pickle.dumps(Payload(marker))

    def pickled(_data):
        return [("pickle", content)]

    count, problems = resumed_with(pickled, target, tmp_path)
    for source, key in ((tiny_set, "data.path"), (export, "train.init_from")):
        more = trained_on(pickled, victim(), tmp_path, source, key)
        count, problems = count + more[0], problems + more[1]
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists(), "the payload works"
    survived("pickle", count, problems)
