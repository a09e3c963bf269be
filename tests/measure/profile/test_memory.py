"""Memory by category, from addresses that the run names and from the lives of blocks."""

from __future__ import annotations

from flatout.measure.profile.memory import GIB, Named, peak_of, timeline
from flatout.measure.profile.report import PHASES
from flatout.measure.steps.trace import Allocation, Range, Trace

STEPS = tuple(Range("step", 10.0 * n, 10.0 * n + 10) for n in range(2))
BOUNDS = (0.0, 1.0, 2.0, 4.0, 8.0, 9.0, 10.0)
NAMES = ("data", "compute", *PHASES[1:])


def recording(allocations=()):
    phases = tuple(
        Range(name, 10.0 * step + BOUNDS[at], 10.0 * step + BOUNDS[at + 1])
        for step in range(2)
        for at, name in enumerate(NAMES)
    )
    return Trace((), (), 2, phases, STEPS, tuple(allocations))


def moves(*changes):
    return [Allocation(time_s, address, size, None, None) for time_s, address, size in changes]


def at_peak(changes, **named):
    known = {"before": {"weights": {1: 1000}}, "after": {}} | named
    found = recording(moves(*changes))
    moments = timeline(found, Named(**known))
    return max(moments, key=lambda moment: moment.total).bytes, peak_of(moments, found, 7)


def test_what_lives_from_forward_to_backward_is_an_activation():
    parts, peak = at_peak([(2, 7, 50), (3, 8, 9), (3.5, 8, -9), (6, 7, -50)])
    assert {name: size for name, size in parts.items() if size} == {
        "weights": 1000,
        "activations": 50,
        "temporary": 9,
    }
    assert peak.gib == 1059 / GIB
    assert peak.phase == "forward"
    assert peak.step == 7
    assert peak.share_of_step == 0.3
    assert [*peak.parts_gib] == ["weights", "activations", "temporary"]


def test_gradients_are_known_by_their_addresses_and_inputs_by_their_phase():
    changes = [(0.5, 3, 10), (1.5, 4, 20), (5, 6, 300), (5.5, 7, 40), (6, 7, -40), (8.5, 6, -300)]
    parts, _ = at_peak([*changes, (9.5, 3, -10), (9.6, 4, -20)], gradients=[{6: 300}])
    assert {name: size for name, size in parts.items() if size} == {
        "weights": 1000,
        "inputs": 30,  # one from the data loader, one that the step converted
        "gradients": 300,
        "temporary": 40,
    }


def test_an_address_that_is_used_again_is_another_block():
    changes = [(2, 6, 50), (4.5, 6, -50), (5, 6, 300), (8.5, 6, -300)]
    parts, _ = at_peak(changes, gradients=[{6: 300}])
    assert (parts["gradients"], parts["activations"]) == (300, 0)
    parts, _ = at_peak([(8.5, 9, 77)], after={"optimizer": {9: 77}})
    assert parts["optimizer"] == 77, "a state that appears has its name at the end"


def test_memory_from_before_without_a_name_is_other():
    allocated = [Allocation(2.0, 7, 50, 5050, 9000), Allocation(6.0, 99, -400, 4650, 9000)]
    moments = timeline(recording(allocated), Named({"weights": {1: 1000}}, {}))
    assert moments[0].bytes == {"weights": 1000, "other": 4000}
    assert moments[-1].bytes["other"] == 3600
