"""The address of the live server, and what the clients are asked to produce."""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

MODEL = Path(__file__).parent.parent / "dsv4" / "models" / "tiny"
QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city. Short, so that a small model is done with it in a few steps."""

    model_config = ConfigDict(extra="forbid")
    size: Literal["small", "large"]
    rank: Annotated[int, Field(ge=1, le=9)]


def weather(unit: Literal["c", "f"]) -> str:
    """The weather today.

    Args:
        unit: celsius or fahrenheit
    """
    return f"20 degrees {unit}"


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["DSV4_URL"]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model's tokenizer, as transformers wants to find it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(MODEL / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<｜begin▁of▁sentence｜>",
                "eos_token": "<｜end▁of▁sentence｜>",
            }
        )
    )
    return folder


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """No client asks anybody but the server."""
    for name, value in {
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{url}/v1",
        "ANTHROPIC_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }.items():
        monkeypatch.setenv(name, value)
