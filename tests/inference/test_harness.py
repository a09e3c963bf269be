"""Runs and exports are scored on tasks by the class of lm-evaluation-harness for transformers."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flatout.cli.commands.eval import evaluate
from flatout.cli.commands.export import export
from flatout.cli.commands.train import train
from flatout.config.schema import load_config
from flatout.errors import CheckpointError, ConfigError, DataError, MissingPackage, UntrustedCode
from flatout.inference import exported
from flatout.inference.load import load_run

pytestmark = pytest.mark.slow

HARNESS = "flatout.inference.harness"


@pytest.fixture(scope="module")
def fox(fox_run):
    """The directory of a tiny run of characters."""
    return fox_run[0] / "runs" / "fox"


def module(name, **members):
    found = ModuleType(name)
    vars(found).update(members)
    return found


class Tasks:
    """A task manager that knows two tasks."""

    all_tasks = ("hellaswag", "arc_easy")

    def __init__(self, include_path):
        pass

    def match_tasks(self, names):
        return [name for name in names if name in self.all_tasks]


def packages():
    """Skip the test where the packages are not installed."""
    for package in exported.PACKAGES:
        pytest.importorskip(package)


@pytest.fixture
def without_package(monkeypatch):
    """Import flatout's module of the harness with a stand-in for the package."""
    parts = {
        "lm_eval": module("lm_eval", simple_evaluate=None),
        "lm_eval.models": module("lm_eval.models"),
        "lm_eval.models.huggingface": module("lm_eval.models.huggingface", HFLM=dict),
        "lm_eval.tasks": module("lm_eval.tasks", TaskManager=Tasks),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.delitem(sys.modules, HARNESS, raising=False)
    found = importlib.import_module(HARNESS)
    monkeypatch.setattr(found, "pick_device", lambda _wanted, _machine: ("cpu", "CPU"))
    yield found
    sys.modules.pop(HARNESS, None)


def test_results_become_one_row_per_metric(without_package):
    results = {
        "results": {
            "own": {
                "alias": "own",
                "acc,none": 0.5,
                "acc_stderr,none": 0.1,
                "exact_match,strict": 0.25,
                "exact_match_stderr,strict": "N/A",
            }
        },
        "n-samples": {"own": {"original": 9, "effective": 4}},
        "n-shot": {"own": 2},
    }
    shared = {"task": "own", "samples": 4, "num_fewshot": 2}
    assert without_package.rows_of(results) == [
        {**shared, "metric": "acc", "value": 0.5, "stderr": 0.1},
        {**shared, "metric": "exact_match (strict)", "value": 0.25, "stderr": None},
    ]


@pytest.fixture
def asked(without_package, monkeypatch):
    """Let the stand-in answer, and list what it was asked."""
    found = []

    def simple_evaluate(**settings):
        folder = settings["model"]["pretrained"]
        found.append(settings | {"config": json.loads(Path(folder, "config.json").read_text())})
        return {"results": {"hellaswag": {"acc,none": 0.5}}}

    monkeypatch.setattr(without_package, "simple_evaluate", simple_evaluate)
    return found


@pytest.mark.usefixtures("without_package", "complete")
def test_an_unknown_task_is_answered_with_the_nearest(fox):
    with pytest.raises(ConfigError, match="no task named 'helaswag'") as caught:
        evaluate(fox, tasks=["helaswag"])
    assert "Did you mean 'hellaswag'?" in caught.value.fix


@pytest.mark.usefixtures("complete")
def test_data_that_cannot_be_read_is_an_error_with_a_fix(without_package, fox, monkeypatch):
    def refuse(**_):
        raise ConnectionError("Couldn't reach the hub.\nMore")

    monkeypatch.setattr(without_package, "simple_evaluate", refuse)
    with pytest.raises(DataError, match="hellaswag cannot be read: Couldn't reach the hub"):
        evaluate(fox, tasks=["hellaswag"])


def test_missing_packages_are_named(fox, monkeypatch):
    monkeypatch.setattr(exported, "find_spec", lambda name: None if name == "lm_eval" else True)
    with pytest.raises(
        MissingPackage, match="--tasks needs packages that are not installed: lm_eval"
    ) as caught:
        evaluate(fox, tasks=["hellaswag"])
    assert 'pip install "flatout[tasks]"' in caught.value.fix


@pytest.mark.usefixtures("complete")
def test_a_run_is_exported_and_scored(asked, fox):
    result = evaluate(fox, "2", tasks=["hellaswag"], num_fewshot=2)
    assert (result.run, result.checkpoint) == (str(fox), str(fox / "checkpoints" / "step-2"))
    assert [score.value for score in result.tasks] == [0.5]
    assert asked[0]["num_fewshot"] == 2
    assert asked[0]["config"]["model_type"]
    assert not list(fox.glob("export-*")), "the export is temporary"


@pytest.fixture(scope="module")
def export_of_fox(fox, tmp_path_factory):
    """An export of that run for transformers."""
    out = tmp_path_factory.mktemp("exports") / "fox"
    export(fox, out=out, checkpoint="last")
    return out


@pytest.fixture
def complete(monkeypatch):
    """Let all optional packages seem installed."""
    monkeypatch.setattr(exported, "find_spec", lambda _name: True)


@pytest.mark.usefixtures("complete")
def test_an_export_is_scored_by_the_class_of_the_harness(asked, export_of_fox):
    result = evaluate(export_of_fox, tasks=["hellaswag"], limit=3)
    assert [score.value for score in result.tasks] == [0.5]
    assert (result.run, result.checkpoint) == (str(export_of_fox), str(export_of_fox))
    assert asked[0]["limit"] == 3
    assert asked[0]["model"] == {
        "pretrained": str(export_of_fox.absolute()),
        "trust_remote_code": False,
        "device": "cpu",
    }


@pytest.mark.usefixtures("complete")
def test_code_of_an_export_is_imported_only_if_the_user_shows_so(asked, export_of_fox, tmp_path):
    out = shutil.copytree(export_of_fox, tmp_path / "own")
    (out / "flatout.json").write_text('{"format_version": 1, "to": "huggingface"}')
    (out / "modeling_own.py").touch()
    (out / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}')
    with pytest.raises(UntrustedCode, match=r"modeling_own\.py"):
        evaluate(out, tasks=["hellaswag"])
    evaluate(out, tasks=["hellaswag"], trust_code=True)
    assert asked[0]["model"]["trust_remote_code"]


def test_an_export_has_no_text_and_one_checkpoint(export_of_fox):
    with pytest.raises(ConfigError, match="no validation text") as caught:
        evaluate(export_of_fox)
    assert f"`flatout eval {export_of_fox} --tasks hellaswag`" in caught.value.fix
    with pytest.raises(ConfigError, match="--checkpoint 2 cannot choose"):
        evaluate(export_of_fox, "2", tasks=["hellaswag"])


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize("to", ["gguf", "safetensors"])
def test_exports_of_other_formats_are_rejected(tmp_path, to):
    (tmp_path / "flatout.json").write_text(json.dumps({"format_version": 1, "to": to}))
    with pytest.raises(ConfigError, match=rf"an export for {to}\. transformers.* cannot load it"):
        evaluate(tmp_path, tasks=["hellaswag"])


@pytest.mark.usefixtures("complete")
def test_an_export_that_was_changed_is_rejected(export_of_fox, tmp_path):
    out = shutil.copytree(export_of_fox, tmp_path / "fox")
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json was changed"):
        evaluate(out, tasks=["hellaswag"])


@pytest.mark.parametrize(
    ("option", "value"), [("limit", 1), ("num_fewshot", 1), ("task_dir", "tasks")]
)
def test_options_of_tasks_need_tasks(fox, option, value):
    with pytest.raises(
        ConfigError, match=f"--{option.replace('_', '-')} only applies to the questions"
    ):
        evaluate(fox, **{option: value})


QUESTIONS = [
    {"question": "The quick", "choices": [" dog", " brown", " kkkkkkk"], "answer": 1},
    {"question": "over the", "choices": [" lazy", " xx"], "answer": 0},
    {"question": "fox", "choices": [" jumps", " zzzzz"], "answer": 1},
]
CHOICES = """\
task: planted_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
COMPLETIONS = """\
task: planted_completions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{question}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""
TEXTS = """\
task: planted_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.fixture
def task_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    for name, text in {"choices": CHOICES, "completions": COMPLETIONS, "texts": TEXTS}.items():
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder


def log_likelihood(loaded, context, continuation):
    before = loaded.tokenizer.encode(context)
    ids = torch.tensor([before + loaded.tokenizer.encode(continuation)])
    hidden = loaded.model.embed(ids)
    for block in loaded.model.blocks:
        hidden = block(hidden, None)
    logits = torch.stack(
        [loaded.model.last_logits(hidden[:, : t + 1]) for t in range(ids.shape[1])]
    )
    logps = logits[:, 0].log_softmax(-1)
    return sum(float(logps[t - 1, ids[0, t]]) for t in range(len(before), ids.shape[1]))


@pytest.mark.filterwarnings("default")
def test_the_harness_scores_a_task_made_from_local_files(fox, task_dir):
    packages()
    result = evaluate(fox, "last", tasks=["planted_choices"], task_dir=task_dir)
    (score,) = result.tasks
    assert (score.task, score.metric, score.samples) == ("planted_choices", "acc", 3)
    loaded = load_run(fox, "last", precision="trained")
    right = 0
    with torch.no_grad():
        for one in QUESTIONS:
            scores = [log_likelihood(loaded, one["question"], c) for c in one["choices"]]
            right += scores.index(max(scores)) == one["answer"]
    assert score.value == pytest.approx(right / 3)
    assert result.val_loss is None
    assert "planted_choices" in result.summary()


@pytest.mark.filterwarnings("default")
def test_the_harness_completes_and_scores_whole_texts(fox, task_dir):
    packages()
    names = ["planted_completions,planted_texts"]
    result = evaluate(fox, "last", tasks=names, task_dir=task_dir, limit=2)
    by_task = {score.task: score for score in result.tasks}
    assert by_task["planted_completions"].value == 0.0
    assert by_task["planted_completions"].samples == 2
    assert by_task["planted_texts"].value > 0


@pytest.mark.filterwarnings("default")
def test_an_export_has_the_scores_of_its_run(fox, export_of_fox, task_dir):
    packages()
    names = ["planted_choices,planted_texts"]
    of_run = evaluate(fox, "last", tasks=names, task_dir=task_dir).tasks
    assert evaluate(export_of_fox, tasks=names, task_dir=task_dir).tasks == of_run


@pytest.mark.filterwarnings("default")
def test_a_run_of_a_shape_that_transformers_lacks_is_scored(fox_run, tmp_path, task_dir):
    packages()
    root, _ = fox_run
    words = ["model.kind=eigenstate", "model.num_layers=1", "model.d_model=16", "train.steps=1"]
    words += ["model.num_eigenstates=4", "batch.rows_per_device=4", "batch.tokens_per_step=128"]
    config = load_config(None, [*words, f"data.path={root / 'data'}", "data.seq_len=32"])
    train(config.with_values({"train.device": "cpu"}), run=tmp_path / "own")
    (score,) = evaluate(tmp_path / "own", tasks=["planted_choices"], task_dir=task_dir).tasks
    assert 0 <= score.value <= 1
