"""How values of other tools become flatout's: a function for each `unit` of words.yaml.

A unit receives the value, the key of flatout (or the unit's argument), and the values found so far.
It returns values by key, the reason why the value cannot be converted, `Unneeded`, the reason why
nothing has to be set, or `Refused`, the reason why nothing of the config can be converted. A key
after `~` is set only when nothing else sets it; `--option` and SOURCE belong to `flatout prepare`,
and the empty key is a remark.
"""

from flatout.config.units import data, shape, training
from flatout.config.units.base import (
    EARLY,
    HUB,
    LATE,
    SOURCE,
    THEIRS,
    UNITS,
    Refused,
    Unneeded,
    is_off,
)

__all__ = [
    "EARLY",
    "HUB",
    "LATE",
    "SOURCE",
    "THEIRS",
    "UNITS",
    "Refused",
    "Unneeded",
    "data",
    "is_off",
    "shape",
    "training",
]
