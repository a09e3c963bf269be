"""`speedups` is parsed, and edited in the form that the user wrote."""

from __future__ import annotations

import pytest

from flatout.assembly.selection import adding, mentions, parse_request, removing
from flatout.errors import ConfigError


@pytest.mark.parametrize("request_", ["auto", "auto,-compile", "+compile", "-compile"])
def test_auto_and_edits_of_it_let_auto_decide_the_rest(request_):
    assert parse_request(request_).auto


def test_a_list_and_none_leave_nothing_to_auto():
    assert not parse_request("bf16,compile").auto
    assert not parse_request("none").named


def test_adding_names_drops_the_edits_that_left_them_out():
    added = adding("auto,-fused_adamw,-bf16", ["fused-adamw", "compile"])
    assert added == "auto,-bf16,+fused-adamw,+compile"
    assert adding(("bf16",), ["compile"]) == "bf16,compile"
    assert adding("-fused-adamw", ["fused-adamw"]) == "+fused-adamw"


def test_removing_a_name_keeps_the_rest():
    assert removing("bf16", "auto,+bf16,-compile") == "auto,-compile"
    assert removing("bf16", "+bf16") == "auto"
    assert removing("bf16", "bf16") == "none"


def test_underscores_are_accepted_for_hyphens():
    assert parse_request("fused_adamw").named == ("fused-adamw",)
    assert mentions("fused-adamw", "auto,-fused_adamw")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("auto,-fusedadamw", "Did you mean 'fused-adamw'"),
        ("none,bf16", "none and for others"),
        ("compile,-compile", "'compile' and leaves it out"),
        ("auto,-fused_adamw,+fused-adamw", "'fused-adamw' and leaves it out"),
    ],
)
def test_an_invalid_request_is_refused(request_, message):
    with pytest.raises(ConfigError, match=message):
        parse_request(request_)
