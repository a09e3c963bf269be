"""Parse the `speedups` of a configuration, and edit it in the form that the user wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flatout.errors import ConfigError
from flatout.registry import SPEEDUPS, unknown_name


@dataclass(frozen=True)
class Request:
    """The value of `config.speedups`, parsed."""

    auto: bool
    """Whether `auto` decides the speedups that are not listed."""
    named: tuple[str, ...]
    dropped: tuple[str, ...]

    def includes(self, name: str) -> bool:
        """Return whether a speedup is named, or may be chosen by `auto`."""
        return name in self.named or (self.auto and name not in self.dropped)


def parse_request(speedups: str | Sequence[str]) -> Request:
    """Parse auto, none, a list of names, or edits of auto such as `auto,-compile,+fused-adamw`.

    Raises: ConfigError for an unknown name, with the nearest one, or for a contradiction.
    """
    words = _words(speedups)
    named: list[str] = []
    dropped: list[str] = []
    auto = "auto" in words or any(word[0] in "+-" for word in words)
    for word in words:
        if word in ("auto", "none"):
            continue
        name = _name(word)
        _require_comma(word)
        if ":" not in name and name not in SPEEDUPS.names():
            raise unknown_name("speedup", name, [*SPEEDUPS.names(), "auto", "none"])
        (dropped if word.startswith("-") else named).append(name)
    if "none" in words and (auto or named):
        raise ConfigError(
            f"speedups={','.join(words)} asks for none and for others.",
            fix="Write none alone, or leave it out.",
        )
    both = next((name for name in named if name in dropped), None)
    if both:
        raise ConfigError(
            f"speedups={','.join(words)} asks for {both!r} and leaves it out.",
            fix=f"Write {both} once, with + or with -.",
        )
    return Request(auto, tuple(named), tuple(dropped))


def _require_comma(word: str) -> None:
    """Check that no comma is missing, as in `auto-compile`."""
    edit = word.removeprefix("auto")
    if edit != word and edit[0] in "+-":
        raise ConfigError(f"speedups has no comma in {word!r}.", fix=f"Write speedups=auto,{edit}.")


def adding(speedups: str | Sequence[str], names: Iterable[str]) -> str:
    """Return the request with `names` added and no longer left out."""
    added = list(names)
    sign = "+" if parse_request(speedups).auto else ""
    kept = [
        word for word in _words(speedups) if not (word.startswith("-") and _name(word) in added)
    ]
    return ",".join([*kept, *(sign + name for name in added)])


def removing(name: str, speedups: str | Sequence[str]) -> str:
    """Return the request without any mention of `name`."""
    kept = [word for word in _words(speedups) if _name(word) != name]
    still_edits = parse_request(kept).auto or not parse_request(speedups).auto
    return ",".join(kept if still_edits else ["auto", *kept]) or "none"


def mentions(name: str, speedups: str | Sequence[str]) -> bool:
    """Return whether the request mentions `name`, with or without a sign."""
    return name in map(_name, _words(speedups))


def _words(speedups: str | Sequence[str]) -> list[str]:
    return [
        word.strip()
        for word in (speedups.split(",") if isinstance(speedups, str) else speedups)
        if word.strip()
    ]


def _name(word: str) -> str:
    name = word.lstrip("+-")
    return name if ":" in name else name.replace("_", "-")
