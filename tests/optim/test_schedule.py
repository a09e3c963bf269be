import itertools

import pytest

from flatout.config.sections import ScheduleConfig
from flatout.optim.schedule import SCHEDULES, factor, warmup_steps

PEAK = 3e-4


def factors(total, **keys):
    config = ScheduleConfig(**keys)
    return [factor(config, PEAK, step, total) for step in range(total)]


EVERY = list(
    itertools.product(
        SCHEDULES, [0, 1, 7, 0.1, 0.5, 0.99, 1000], [0.0, 3e-5, PEAK], [1, 2, 3, 10, 97]
    )
)


@pytest.mark.parametrize(("kind", "warmup", "min_lr", "total"), EVERY)
def test_every_schedule_stays_within_its_bounds(kind, warmup, min_lr, total):
    config = ScheduleConfig(kind=kind, warmup=warmup, min_lr=min_lr)
    values = factors(total, kind=kind, warmup=warmup, min_lr=min_lr)
    peak_step = warmup_steps(config, total)
    assert values[0] > 0
    assert all(0 <= value <= 1 for value in values)
    assert all(value > 0 for value in values[:-1])
    rising, falling = values[: peak_step + 1], values[peak_step:]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert values[peak_step] == 1.0


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("total", [2, 3, 10, 1001])
@pytest.mark.parametrize("min_lr", [0.0, 1e-5, PEAK])
def test_the_last_step_has_exactly_min_lr(kind, total, min_lr):
    assert factors(total, kind=kind, min_lr=min_lr)[-1] == min_lr / PEAK


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_rate_does_not_jump(kind):
    total = 1000
    values = factors(total, kind=kind, warmup=100, decay=0.2)
    steepest = {"cosine": 3.15 / 2 / 899, "linear": 1 / 899, "wsd": 1 / 180, "constant": 0.0}[kind]
    jumps = [abs(a - b) for a, b in itertools.pairwise(values)]
    assert max(jumps) <= max(1 / 101, steepest) * 1.001


def test_warm_up_is_linear_and_its_first_step_is_not_zero():
    assert factors(20, warmup=4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors(20, warmup=0)[0] == 1.0


def test_a_fractional_warm_up_counts_the_whole_run():
    assert warmup_steps(ScheduleConfig(warmup=0.05), 200) == 10
    assert warmup_steps(ScheduleConfig(warmup=10), 200) == 10


def test_a_warm_up_longer_than_the_run_is_shortened():
    values = factors(5, warmup=1000)
    assert values == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.0])


def test_cosine_is_halfway_down_in_the_middle():
    assert factors(101, warmup=0, min_lr=PEAK / 10)[50] == pytest.approx(0.55)


@pytest.mark.parametrize("total", [2, 3, 97])
def test_linear_equals_a_loop_that_adds_and_subtracts(total):
    warmup, min_lr = total // 4, PEAK / 5
    rate, rates = 0.0, []
    for _ in range(warmup + 1):
        rate += PEAK / (warmup + 1)
        rates.append(rate)
    falling = total - len(rates)
    for _ in range(falling):
        rate -= (PEAK - min_lr) / falling
        rates.append(rate)
    found = factors(total, kind="linear", warmup=warmup, min_lr=min_lr)
    assert [PEAK * factor for factor in found] == pytest.approx(rates)


def test_wsd_is_constant_then_linear():
    values = factors(101, kind="wsd", warmup=0, decay=0.2)
    assert values[:81] == [1.0] * 81
    assert values[90] == pytest.approx(0.5)
    assert factors(101, kind="wsd", warmup=0, decay=1.0)[50] == pytest.approx(0.5)


def test_constant_ignores_min_lr():
    assert factors(10, kind="constant", warmup=0, min_lr=1e-5) == [1.0] * 10


@pytest.mark.parametrize("kind", SCHEDULES)
def test_steps_past_the_end_keep_the_last_rate(kind):
    config = ScheduleConfig(kind=kind, min_lr=1e-5)
    assert factor(config, PEAK, 500, 100) == factor(config, PEAK, 99, 100)
