"""Registries find entries by their files, and import them only when needed."""

import sys

import pytest

from flatout.config import registry
from flatout.config.registry import (
    COMMANDS,
    DATASETS,
    MODELS,
    OPTIMIZERS,
    RECIPES,
    SOURCES,
    SPEEDUPS,
    Folder,
    YamlFolder,
    load_reference,
    nearest,
)
from flatout.errors import ConfigError


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """A directory of Python entries inside a package that replaces flatout."""
    package = tmp_path / "flatout"
    (package / "shapes").mkdir(parents=True)
    (package / "shapes" / "round_one.py").write_text(
        '"""A round shape.\n\nMore."""\nSHAPE = "round"\n'
    )
    (package / "shapes" / "square.py").write_text('"""A square shape."""\nSHAPE: str = "square"\n')
    (package / "shapes" / "layers.py").write_text("def SHAPE_of(): ...\n")
    (package / "shapes" / "_draft.py").write_text("SHAPE = 1\n")
    (package / "shapes" / "broken_import.py").write_text(
        '"""Fails when imported."""\nSHAPE = undefined_name\n'
    )
    monkeypatch.setattr(registry, "PACKAGE_DIR", package)
    return Folder("shapes", "SHAPE", "shape")


@pytest.fixture
def colours(tmp_path, monkeypatch):
    package = tmp_path / "flatout"
    (package / "colours").mkdir(parents=True)
    (package / "colours" / "dark-red.yaml").write_text("# A dark red.\n# And more.\nhue: 3e-1\n")
    (package / "colours" / "plain.yaml").write_text("hue: 1\n")
    monkeypatch.setattr(registry, "PACKAGE_DIR", package)
    return YamlFolder("colours", "colour")


def test_names_are_files_that_assign_the_attribute(shapes):
    assert shapes.names() == ["broken-import", "round-one", "square"]


def test_listing_imports_nothing(shapes):
    assert shapes.describe("broken-import") == "Fails when imported."
    assert shapes.describe("round-one") == "A round shape."
    assert not [name for name in sys.modules if name.startswith("flatout.shapes")]


def test_a_stated_value_is_read_without_importing_the_entry(shapes, tmp_path, monkeypatch):
    path = registry.PACKAGE_DIR / "shapes" / "broken_import.py"
    path.write_text(path.read_text() + 'CORNERS = ("left", "right")\n')
    assert shapes.stated("broken-import", "CORNERS") == ("left", "right")
    assert shapes.stated("square", "CORNERS") is None
    (tmp_path / "my_shapes.py").write_text("CORNERS = (1,)\nclass Own: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert shapes.stated("my_shapes:Own", "CORNERS") == (1,)
    with pytest.raises(ConfigError, match="no shape named"):
        shapes.stated("squar", "CORNERS")
    monkeypatch.setattr(registry.ast, "parse", None)
    assert shapes.stated("broken-import", "CORNERS") == ("left", "right"), (
        "a file is parsed once, however many speedups need it"
    )


def test_a_new_file_is_a_new_entry(shapes):
    (registry.PACKAGE_DIR / "shapes" / "oval.py").write_text('"""Oval."""\nSHAPE = "oval"\n')
    assert "oval" in Folder("shapes", "SHAPE", "shape").names()


def test_the_error_for_an_unknown_name_suggests_the_nearest(shapes, colours):
    with pytest.raises(
        ConfigError,
        match=(
            r"no shape named 'squar'.*Did you mean 'square'\? Known: broken-import, round-one, "
            r"square\."
        ),
    ):
        shapes.get("squar")
    with pytest.raises(ConfigError, match=r"Did you mean 'dark-red'\?"):
        colours.path("dark_red")
    with pytest.raises(ConfigError, match="no colour named 'zzz'") as caught:
        colours.get("zzz")
    assert "Did you mean" not in caught.value.fix


def test_yaml_entries(colours):
    assert colours.names() == ["dark-red", "plain"]
    assert colours.describe("dark-red") == "A dark red."
    assert colours.describe("plain") == ""
    assert colours.get("dark-red") == {"hue": 0.3}
    assert colours.path("plain").name == "plain.yaml"


def test_an_empty_directory_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "PACKAGE_DIR", tmp_path)
    with pytest.raises(ConfigError, match="Known: none"):
        Folder("nothing", "X", "thing").get("x")


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("shakespear", "shakespeare"),
        ("Fused_AdamW", "fused-adamw"),
        ("compil", "compile"),
        ("qqqq", None),
        ("", None),
    ],
)
def test_the_nearest_name_is_found(typo, meant):
    assert nearest(typo, ["shakespeare", "fused-adamw", "compile", "bf16"]) == meant


OPTIONS = (
    "--run",
    "--run-dir",
    "--resume",
    "--trust-code",
    "--recipe",
    "--out",
    "--text-field",
    "--max-tokens",
    "--max-bytes",
    "--json",
    "--help",
)


@pytest.mark.parametrize("name", ["plot", "deploy", "test", "infer", "restore", "inference"])
def test_a_name_far_from_every_command_gets_no_guess(name):
    assert nearest(name, registry.COMMANDS.names()) is None


@pytest.mark.parametrize("name", ["--dry-run", "--machine", "--quiet", "--verbose", "--max", "--o"])
def test_an_option_far_from_every_option_gets_no_guess(name):
    assert nearest(name, OPTIONS) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trian", "train"),
        ("benchmark", "bench"),
        ("evaluate", "eval"),
        ("gen", "generate"),
        ("prepair", "prepare"),
        ("evla", "eval"),
        ("lits", "list"),
        ("--Out-dir", "--out"),
        ("--text", "--text-field"),
        ("--rum", "--run"),
        ("--trust", "--trust-code"),
        ("--max_tokns", "--max-tokens"),
    ],
)
def test_an_obvious_correction_is_suggested(name, meant):
    assert nearest(name, [*registry.COMMANDS.names(), *OPTIONS]) == meant


@pytest.mark.parametrize(
    ("word", "other", "near"),
    [("rai", "ray", True), ("abc", "acb", True), ("abc", "cba", False), ("abc", "xyz", False)],
)
def test_one_wrong_letter_in_a_short_name_is_corrected(word, other, near):
    assert (nearest(word, [other]) == other) is near


def test_a_reference_imports_a_users_own_file(tmp_path, monkeypatch):
    (tmp_path / "my_registry_example.py").write_text(
        "class Mine:\n    def check(self): ...\n    count_flops = None\nclass Other: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    found = load_reference("my_registry_example:Mine")
    assert found.__name__ == "Mine"
    assert MODELS.get("my_registry_example:Mine") is found
    with pytest.raises(
        ConfigError,
        match=r"my_registry_example:Other is not a model: it has no 'check'.*docs/extend\.md",
    ):
        MODELS.get("my_registry_example:Other")
    monkeypatch.delitem(sys.modules, "my_registry_example")


@pytest.mark.parametrize(
    ("reference", "about"),
    [
        ("no_such_module_here:x", "no Python module"),
        ("json.no_such:x", "no Python module"),
        ("json:lods", r"no 'lods'.*Did you mean 'loads'"),
        ("json:qqqqqq", "Define 'qqqqqq'"),
        (":x", "package.module:attribute"),
        ("json:", "package.module:attribute"),
        (".json:x", "package.module:attribute"),
        ("a b:c", "package.module:attribute"),
        ("json:a:b", "package.module:attribute"),
    ],
)
def test_wrong_references_are_rejected(reference, about):
    with pytest.raises(ConfigError, match=about):
        load_reference(reference)


def test_the_error_names_a_missing_import_inside_a_users_file(tmp_path, monkeypatch):
    (tmp_path / "my_broken_example.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_reference("my_broken_example:x")


@pytest.mark.parametrize(
    "folder", [COMMANDS, MODELS, OPTIMIZERS, SOURCES, SPEEDUPS], ids=lambda f: f.folder
)
def test_every_built_in_entry_loads_and_has_a_description(folder):
    assert folder.names()
    for name in folder.names():
        assert folder.get(name) is not None
        assert folder.describe(name).endswith("."), name


@pytest.mark.parametrize("folder", [DATASETS, RECIPES], ids=lambda f: f.folder)
def test_every_built_in_document_loads_and_has_a_description(folder):
    assert folder.names()
    for name in folder.names():
        assert isinstance(folder.get(name), dict)
        assert folder.describe(name), (
            f"{folder.folder}/{name}.yaml: the first line must be a comment that describes it"
        )
