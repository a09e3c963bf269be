"""An export has the scores of its run in lm-evaluation-harness, by its class for transformers."""

import json

import pytest
import torch

from flatout.cli.commands.export import export
from flatout.cli.commands.train import train
from flatout.config.schema import load_config
from flatout.inference.load import load_run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

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


@pytest.fixture
def accuracy(tmp_path, monkeypatch):
    """Return a function that asks an export the questions, and returns its accuracy."""
    harness = pytest.importorskip("lm_eval")
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "tasks" / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    (tmp_path / "tasks" / "choices.yaml").write_text(CHOICES.format(data=data))

    def ask(folder, *, trust_remote_code):
        found = harness.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "trust_remote_code": trust_remote_code},
            tasks=["planted_choices"],
            task_manager=harness.tasks.TaskManager(include_path=str(tmp_path / "tasks")),
            device="cpu",
        )
        return found["results"]["planted_choices"]["acc,none"]

    return ask


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


@pytest.mark.thorough
def test_an_export_has_the_scores_of_its_run(fox_run, tmp_path, accuracy):
    run = fox_run[0] / "runs" / "fox"
    export(run, out=tmp_path / "hf", checkpoint="last")
    loaded, right = load_run(run, "last", precision="trained"), 0
    with torch.no_grad():
        for one in QUESTIONS:
            scores = [log_likelihood(loaded, one["question"], c) for c in one["choices"]]
            right += scores.index(max(scores)) == one["answer"]
    assert accuracy(tmp_path / "hf", trust_remote_code=False) == pytest.approx(right / 3)


@pytest.mark.thorough
def test_a_shape_that_transformers_lacks_is_scored_with_its_own_code(fox_run, tmp_path, accuracy):
    words = ["model.kind=eigenstate", "model.num_layers=1", "model.d_model=16", "train.steps=1"]
    words += ["model.num_eigenstates=4", "batch.rows_per_device=4", "batch.tokens_per_step=128"]
    words += [f"data.path={fox_run[0] / 'data'}", "data.seq_len=32", "train.device=cpu"]
    train(load_config(None, words), run=tmp_path / "own")
    export(tmp_path / "own", out=tmp_path / "hf")
    assert 0 <= accuracy(tmp_path / "hf", trust_remote_code=True) <= 1
