"""lm-evaluation-harness scores runs: its tasks call flatout's model class."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest

from flatout.commands import eval as eval_command
from flatout.commands.eval import evaluate
from flatout.commands.export import export
from flatout.errors import CheckpointError, ConfigError, DataError, UntrustedCode
from flatout.inference import exported
from flatout.inference.continuations import encode_pair, score_pairs
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


@pytest.fixture
def without_package(monkeypatch):
    """Import flatout's module of the harness with a stand-in for the package."""
    registered = {}

    class LM:
        pass

    def register_model(name):
        return lambda kind: registered.setdefault(name, kind)

    parts = {
        "lm_eval": module("lm_eval", simple_evaluate=None),
        "lm_eval.api": module("lm_eval.api"),
        "lm_eval.api.model": module("lm_eval.api.model", LM=LM),
        "lm_eval.api.registry": module("lm_eval.api.registry", register_model=register_model),
        "lm_eval.models": module("lm_eval.models"),
        "lm_eval.models.huggingface": module("lm_eval.models.huggingface", HFLM=SimpleNamespace),
        "lm_eval.tasks": module("lm_eval.tasks", TaskManager=None),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.delitem(sys.modules, HARNESS, raising=False)
    found = importlib.import_module(HARNESS)
    found.registered = registered
    yield found
    sys.modules.pop(HARNESS, None)


def asked(*arguments):
    return SimpleNamespace(args=arguments)


def test_the_class_answers_the_three_kinds_of_requests(without_package, fox):
    model = without_package.registered["flatout"](str(fox), "last", device="cpu")
    loaded = load_run(fox, "last", device="cpu", precision="trained")
    pair = encode_pair(loaded.tokenizer, "The fox", " jumps")
    (score,) = score_pairs(loaded, [pair])
    assert model.loglikelihood([asked("The fox", " jumps")]) == [tuple(score)]
    (whole,) = model.loglikelihood_rolling([asked("The dog")])
    assert whole < 0
    (text,) = model.generate_until([asked("The", {"until": ["\n"], "max_gen_toks": 3})])
    assert "\n" not in text


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


class Tasks:
    """A task manager that knows two tasks."""

    all_tasks = ("hellaswag", "arc_easy")

    def __init__(self, include_path):
        pass

    def match_tasks(self, names):
        return [name for name in names if name in self.all_tasks]


def test_an_unknown_task_is_answered_with_the_nearest(without_package, fox, monkeypatch):
    monkeypatch.setattr(without_package, "TaskManager", Tasks)
    with pytest.raises(ConfigError, match="no task named 'helaswag'") as caught:
        without_package.score_tasks(load_run(fox), ["helaswag"])
    assert "Did you mean 'hellaswag'?" in caught.value.fix


def test_data_that_cannot_be_read_is_an_error_with_a_fix(without_package, fox, monkeypatch):
    def refuse(**_):
        raise ConnectionError("Couldn't reach the hub.\nMore")

    monkeypatch.setattr(without_package, "TaskManager", Tasks)
    monkeypatch.setattr(without_package, "simple_evaluate", refuse)
    with pytest.raises(DataError, match="hellaswag cannot be read: Couldn't reach the hub"):
        without_package.score_tasks(load_run(fox), ["hellaswag"])


@pytest.fixture(scope="module")
def export_of_fox(fox, tmp_path_factory):
    """An export of that run for transformers."""
    out = tmp_path_factory.mktemp("exports") / "fox"
    export(fox, out=out, checkpoint="last")
    return out


@pytest.fixture
def complete(monkeypatch):
    """Let all optional packages seem installed."""
    monkeypatch.setattr(eval_command, "find_spec", lambda _name: True)
    monkeypatch.setattr(exported, "find_spec", lambda _name: True)


@pytest.mark.usefixtures("complete")
def test_an_export_is_scored_by_the_class_of_the_harness(
    without_package, export_of_fox, monkeypatch
):
    asked = []

    def simple_evaluate(**settings):
        asked.append(settings)
        return {"results": {"hellaswag": {"acc,none": 0.5}}}

    monkeypatch.setattr(without_package, "TaskManager", Tasks)
    monkeypatch.setattr(without_package, "simple_evaluate", simple_evaluate)
    monkeypatch.setattr(without_package, "pick_device", lambda _wanted, _machine: ("cpu", "CPU"))
    result = evaluate(export_of_fox, tasks=["hellaswag"], limit=3)
    assert [score.value for score in result.tasks] == [0.5]
    assert (result.run, result.checkpoint) == (str(export_of_fox), str(export_of_fox))
    assert asked[0]["limit"] == 3
    assert vars(asked[0]["model"]) == {
        "pretrained": str(export_of_fox.absolute()),
        "trust_remote_code": False,
        "device": "cpu",
    }


@pytest.mark.usefixtures("complete")
def test_code_of_an_export_is_imported_only_if_the_user_says_so(
    without_package, export_of_fox, tmp_path
):
    out = shutil.copytree(export_of_fox, tmp_path / "own")
    (out / "flatout.json").write_text('{"format_version": 1, "to": "huggingface"}')
    (out / "modeling_own.py").touch()
    (out / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}')
    with pytest.raises(UntrustedCode, match=r"modeling_own\.py"):
        evaluate(out, tasks=["hellaswag"])
    model = without_package.model_of_harness(exported.open_export(out, trust_code=True))
    assert model.trust_remote_code


def test_an_export_has_no_text_and_one_checkpoint(export_of_fox):
    with pytest.raises(ConfigError, match="no validation text") as caught:
        evaluate(export_of_fox)
    assert f"`flatout eval {export_of_fox} --tasks hellaswag`" in caught.value.fix
    with pytest.raises(ConfigError, match="--checkpoint 2 cannot choose"):
        evaluate(export_of_fox, "2", tasks=["hellaswag"])


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize("to", ["gguf", "safetensors"])
def test_exports_of_other_formats_are_refused(tmp_path, to):
    (tmp_path / "flatout.json").write_text(json.dumps({"format_version": 1, "to": to}))
    with pytest.raises(ConfigError, match=f"an export for {to}; transformers.* cannot load it"):
        evaluate(tmp_path, tasks=["hellaswag"])


@pytest.mark.usefixtures("complete")
def test_an_export_that_was_changed_is_refused(export_of_fox, tmp_path):
    out = shutil.copytree(export_of_fox, tmp_path / "fox")
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json was changed"):
        evaluate(out, tasks=["hellaswag"])


@pytest.mark.parametrize(
    ("option", "value"), [("limit", 1), ("num_fewshot", 1), ("task_dir", "tasks")]
)
def test_options_of_tasks_need_tasks(fox, option, value):
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} is for the questions"):
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


@pytest.mark.filterwarnings("default")
def test_the_harness_scores_a_task_made_from_local_files(fox, task_dir):
    pytest.importorskip("lm_eval")
    result = evaluate(fox, "last", tasks=["planted_choices"], task_dir=task_dir)
    (score,) = result.tasks
    assert (score.task, score.metric, score.samples) == ("planted_choices", "acc", 3)
    loaded = load_run(fox, "last", precision="trained")
    right = 0
    for one in QUESTIONS:
        pairs = [encode_pair(loaded.tokenizer, one["question"], c) for c in one["choices"]]
        scores = [found.log_likelihood for found in score_pairs(loaded, pairs)]
        right += scores.index(max(scores)) == one["answer"]
    assert score.value == pytest.approx(right / 3)
    assert result.val_loss is None
    assert "planted_choices" in result.summary()


@pytest.mark.filterwarnings("default")
def test_the_harness_completes_and_scores_whole_texts(fox, task_dir):
    pytest.importorskip("lm_eval")
    names = ["planted_completions,planted_texts"]
    result = evaluate(fox, "last", tasks=names, task_dir=task_dir, limit=2)
    by_task = {score.task: score for score in result.tasks}
    assert by_task["planted_completions"].value == 0.0
    assert by_task["planted_completions"].samples == 2
    assert by_task["planted_texts"].value > 0


@pytest.mark.filterwarnings("default")
def test_an_export_has_the_scores_of_its_run(fox, export_of_fox, task_dir):
    for package in ("lm_eval", "transformers", "accelerate"):
        pytest.importorskip(package)
    score_tasks = importlib.import_module(HARNESS).score_tasks
    names = ["planted_choices", "planted_completions", "planted_texts"]
    of_run = score_tasks(load_run(fox, "last"), names, folder=task_dir)
    of_export = evaluate(export_of_fox, tasks=names, task_dir=task_dir).tasks
    assert [(one.task, one.metric) for one in of_export] == [
        (one["task"], one["metric"]) for one in of_run
    ]
    assert [one.value for one in of_export] == pytest.approx(
        [one["value"] for one in of_run], rel=1e-5
    )


@pytest.mark.filterwarnings("default")
def test_the_harness_knows_the_class_by_its_name(fox):
    pytest.importorskip("lm_eval")
    importlib.import_module(HARNESS)
    from lm_eval.api.registry import get_model

    kind = get_model("flatout")
    model = kind.create_from_arg_string(f"run={fox},checkpoint=last", {"device": "cpu"})
    (score,) = model.loglikelihood([asked("The", " dog")])
    assert score[0] < 0
