"""The usual causes of a resume that is not exact, chosen by what differs. No torch."""

from __future__ import annotations

from flatout.config.schema import RunConfig
from flatout.measure.resume.compare import Comparison

KERNELS = (
    "kernels of the GPU that sum in no fixed order. Set train.deterministic=true, which is slower, "
    "and verify again."
)
UNSEEDED = (
    "random numbers from a generator that train.seed does not seed, such as "
    "numpy.random.default_rng() or the clock. Draw them from torch's default generator."
)
UNORDERED = (
    "work in the order of a set, which differs between processes. Sort it, or use a list or dict."
)
HIDDEN_STATE = (
    "state outside the state_dict: a counter, a cache, or a running average that is a plain "
    "attribute, or a buffer registered with persistent=False. Register it as a buffer "
    "(self.register_buffer), or as a parameter."
)
OWN_GENERATOR = (
    "dropout or noise from a torch.Generator of your own, whose state is not saved. Use torch's "
    "default generator, which is."
)
OPTIMIZER = (
    "an optimizer that keeps something outside optimizer.state and optimizer.param_groups. Keep it "
    "there: checkpoints contain both."
)
DATA = (
    "a dataset that is read differently the second time: a file that changed meanwhile, or a feed "
    "of your own whose position does not say what it yields next. Make it a function of the seed "
    "and the position."
)
RANDOM = (
    "code that draws another number of random values after a resume, for example once per process "
    "instead of once per step. Draw the same numbers in every step."
)


def causes_of(comparison: Comparison, config: RunConfig) -> list[str]:
    """Return the usual causes of a difference, the most likely one first, each with its fix.

    The last one names the code of the user's own, if there is any.
    """
    names = {difference.name for difference in comparison.at_end.different_values}
    found = [] if is_deterministic(config) else [KERNELS]
    first = comparison.first_step or 0
    if not comparison.at_stop.are_equal or first <= comparison.stop:
        found += [UNSEEDED, UNORDERED]  # the runs differ before the stop
    else:
        is_data = bool(names & {"values.feed.position", "values.tokens"})
        found += [DATA] * is_data + [RANDOM] * any(".rng_" in name for name in names)
        found += [HIDDEN_STATE, OWN_GENERATOR]
        found += [OPTIMIZER] * config.optim.kind.count(":") + [DATA] * (not is_data)
    references = ", ".join(sorted(config.references()))
    return [*found, f"Code of your own in this recipe: {references}."] if references else found


def is_deterministic(config: RunConfig) -> bool:
    """Return whether every kernel of a resolved configuration sums in a fixed order."""
    return config.train.deterministic or config.train.device.startswith("cpu")
