"""lm-evaluation-harness scores runs: its tasks call flatout's model class."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from flatout.commands.eval import evaluate
from flatout.errors import ConfigError, DataError
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
def test_the_harness_knows_the_class_by_its_name(fox):
    pytest.importorskip("lm_eval")
    importlib.import_module(HARNESS)
    from lm_eval.api.registry import get_model

    kind = get_model("flatout")
    model = kind.create_from_arg_string(f"run={fox},checkpoint=last", {"device": "cpu"})
    (score,) = model.loglikelihood([asked("The", " dog")])
    assert score[0] < 0
