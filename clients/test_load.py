"""A load generator: several streams at once, all of the length it asked for."""

import json
import subprocess
import sys
from pathlib import Path

NUM_TOKENS = 6
NUM_REQUESTS = 12


def test_guidellm(url: str, tokenizer: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={url},model=tiny",
        "profile": "kind=concurrent,streams=4",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={tokenizer}",
        "data": f"kind=synthetic_text,prompt_tokens=24,output_tokens={NUM_TOKENS}",
        "output": f"kind=json,path={report}",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [str(Path(sys.executable).with_name("guidellm")), "run", *arguments]
    done = subprocess.run(
        [*command, "--disable-console"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {
        "successful": NUM_REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": NUM_REQUESTS,
    }
    for request in benchmark["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == NUM_TOKENS
