"""Training killed at random moments: no saved step is lost, and the result is the same."""

import random
import time

import pytest
from children import wait_until
from victim import saved_step, saving

pytestmark = [pytest.mark.slow, pytest.mark.faults]

KILLS = 25
STEPS = 300


def killed_near_a_save(child, run, draw):
    """Kill a child at a random moment, in most cases within a save or shortly after."""
    if draw.random() < 0.8:
        before, saves = saving(run), draw.randint(0, 2)
        seen = set()

        def in_a_save():
            seen.update(saving(run) - before)
            return len(seen) > saves

        wait_until(in_a_save, child=child)
        time.sleep(draw.uniform(0, 0.03))
    else:
        time.sleep(draw.uniform(0, 0.5))
    return child.kill()


@pytest.mark.parametrize("way", ["loop", "beside"])
def test_training_killed_at_random_moments_ends_as_if_never_killed(way, victim, tmp_path, survived):
    target, draw = victim(STEPS, way), random.Random(way)
    assert target.whole
    kills, runs, problems = 0, 0, []
    while kills < KILLS:
        run = tmp_path / f"run-{runs}"
        runs += 1
        ended = None
        while kills < KILLS and (ended is None or ended.code < 0):
            ended = killed_near_a_save(target.children.start(*target.words(run)), run, draw)
            kills += ended.code < 0
            problems += target.lost(run, saved_step(run))
            if ended.code > 0:
                problems.append(f"resuming ended in {ended.code}: {ended.err[-2000:]}")
        problems += target.end(run)
    survived("kill", kills, problems)


@pytest.mark.parametrize("victim_rank", [0, 1])
def test_a_killed_rank_ends_the_other_and_both_resume_exactly(
    victim_rank, victim, tmp_path, survived
):
    target, draw, kills = victim(40, ranks=2), random.Random(victim_rank), 3
    wanted = target.train(tmp_path / "whole")
    assert wanted.code == 0, wanted.err
    run, problems = tmp_path / "run", []
    for _ in range(kills):
        ranks = target.start(run)
        before = saved_step(run)
        wait_until(lambda before=before: saved_step(run) > before, child=ranks[0])
        time.sleep(draw.uniform(0, 0.05))
        ranks[victim_rank].send(9)
        codes = [child.wait().code for child in ranks]
        if codes[1 - victim_rank] < 0:
            problems.append(f"the other rank ended in {codes[1 - victim_rank]}")
    ended = target.train(run)
    if ended.code:
        problems.append(ended.err[-2000:])
    elif ended.result["weights_sha256"] != wanted.result["weights_sha256"]:
        problems.append("the resumed run has other weights")
    survived("rank", kills, problems)


def test_a_second_process_in_a_run_directory_is_rejected_and_changes_nothing(
    victim, tmp_path, survived
):
    target, run, tries, problems = victim(STEPS), tmp_path / "run", 3, []
    first = target.children.start(*target.words(run))
    assert wait_until(lambda: saving(run), child=first)
    for _ in range(tries):
        second = target.train(run)
        if second.code == 0 or f"{run} is in use by process {first.pid}" not in second.err:
            problems.append(f"the second ended in {second.code}: {second.err}")
    problems += target.unequal(run, first.wait())
    survived("two", tries, problems)
