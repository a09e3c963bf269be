"""Each recipe states the number of parameters of its model."""

import re

import pytest

from flatout.cli.commands.plan import plan
from flatout.config.registry import MODELS, RECIPES
from flatout.config.schema import load_config

SHAKESPEARE = 65
"""The number of different characters in Shakespeare, for recipes that state no vocabulary size."""


def stated(name: str) -> int | None:
    found = re.search(r"([\d,]+) parameters", RECIPES.describe(name))
    return int(found[1].replace(",", "")) if found else None


def vocabulary(name: str) -> int | None:
    found = re.search(r"vocabulary of ([\d,]+) tokens", RECIPES.describe(name))
    return int(found[1].replace(",", "")) if found else None


@pytest.mark.parametrize("name", [name for name in RECIPES.names() if stated(name)])
def test_a_recipe_has_the_stated_number_of_parameters(name):
    config = load_config(name)
    model = MODELS.get(config.model.kind)
    shape = model.check(
        {"vocab_size": vocabulary(name) or SHAKESPEARE}
        | config.model.own()
        | ({"vocab_size": config.model.vocab_size} if config.model.vocab_size else {}),
        seq_len=config.data.seq_len,
    )
    assert model.num_parameters(shape) == stated(name)


CARDS = {12: "rtx-4070", 16: "rtx-4080", 24: "rtx-4090", 48: "l40s", 80: "a100-sxm-80gb"}
FITS = re.compile(r"fits an? (\d+) GB GPU")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["eigenstate-small-32k", "eigenstate-large-32k", "gpt2-350m"])
def test_a_recipe_fits_the_gpu_that_it_names(name):
    found = plan(name, machine=CARDS[int(FITS.search(RECIPES.describe(name))[1])])
    assert found.fits
    assert ("checkpointing" in " ".join(found.speedups)) == name.startswith("eigenstate")


@pytest.mark.slow
def test_the_largest_recipe_fits_the_smaller_gpu_with_the_speedups_that_it_names():
    _, _, speedups = RECIPES.describe("eigenstate-large-32k").rpartition(" with ")
    assert plan("eigenstate-large-32k", [speedups], machine=CARDS[48]).fits


def test_every_recipe_of_a_large_model_names_its_gpu():
    named = {name for name in RECIPES.names() if FITS.search(RECIPES.describe(name))}
    large = {name for name in RECIPES.names() if (stated(name) or 0) > 3e8}
    assert large - named == {"llama-8b"}, "which no single GPU trains"
    assert all(int(FITS.search(RECIPES.describe(name))[1]) in CARDS for name in named)


def test_recipes_of_published_shapes_exist():
    assert {stated(name) for name in ("gpt2-124m", "llama-1b", "llama-8b")} == {
        124_475_904,
        1_235_814_400,
        8_030_261_248,
    }
    assert sum(stated(name) is not None for name in RECIPES.names()) >= 15


def test_no_recipe_sets_a_chunk_size_because_it_depends_on_the_device():
    assert [name for name in RECIPES.names() if "chunk_size" in load_config(name).model.own()] == []
