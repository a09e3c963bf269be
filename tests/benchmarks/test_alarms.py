"""The benchmark of alarms plants troubles, and counts what healthy runs raise."""

from __future__ import annotations


def test_a_strong_trouble_is_found_and_noise_is_not(benchmark):
    names = ("throughput falls by 30%", "60% of a step waits for data", "16 MiB leak per record")
    for name in names:
        kind, trouble = benchmark.TROUBLES[name]
        alarms, spent_s = benchmark.watch(benchmark.NOISES["normal"], 0, trouble)
        assert [alarm["kind"] for alarm in alarms] == [kind]
        assert alarms[0]["step"] >= benchmark.PLANTED_AT * benchmark.STEPS_PER_RECORD
        assert spent_s > 0
    assert benchmark.watch(benchmark.NOISES["normal"], 0)[0] == []


def test_the_table_has_both_kinds_of_error(benchmark):
    planted = {"some": {"kind": "loss_spike", "delays": [2, 3], "others": 1}}
    healthy = {"normal": {}, "outliers": {"loss_spike": 2}}
    found = {"planted": planted, "healthy": healthy, "us_per_record": [39.4], "runs": 2}
    text = benchmark.table(found | {"machine": "a CPU", "commit": "abc"})
    assert "| normal | 0 | 2,000 |\n| outliers | 2 loss_spike | 2,000 |\n" in text
    assert "| some | `loss_spike` | 2 of 2 | 2 (3) | 1 |" in text
