"""lm-eval with token ids, with texts and with the server's own tokenizer: the same figures."""

import json
from pathlib import Path
from typing import Any

import pytest

TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""
DOCUMENTS = [
    {"country": "France", "choices": ["Paris", "Rome"], "answer": 0},
    {"country": "Italy", "choices": ["Oslo", "Rome"], "answer": 1},
    {"country": "Norway", "choices": ["Oslo", "Paris"], "answer": 0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of three documents."""
    folder = tmp_path_factory.mktemp("lm_eval")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    (folder / "capitals.yaml").write_text(TASK.format(data=data))
    return folder


def evaluate(url: str, folder: Path, **options: Any) -> list[list[float]]:
    """The log-likelihood of every choice."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    settings = {"model": "tiny", "base_url": f"{url}/v1/completions", "max_retries": 1, **options}
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=settings,
        tasks=["capitals"],
        task_manager=TaskManager(include_path=str(folder)),
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["capitals"], key=lambda sample: sample["doc_id"])
    return [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples]


def test_the_same_figures_three_times(url: str, folder: Path, tokenizer: Path) -> None:
    local: Any = {"tokenizer_backend": "huggingface", "tokenizer": str(tokenizer)}
    ids = evaluate(url, folder, **local, tokenized_requests=True)
    text = evaluate(url, folder, **local, tokenized_requests=False)
    remote = evaluate(url, folder, tokenizer_backend="remote")
    assert len(ids) == len(DOCUMENTS)
    assert all(value < 0 for values in ids for value in values)
    for values, other, third in zip(ids, text, remote, strict=True):
        assert values == pytest.approx(other, abs=1e-3)
        assert values == pytest.approx(third, abs=1e-3)
