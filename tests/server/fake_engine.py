"""An engine process that says what the prompt tells it to; the wire is the real one.

The last user message of a prompt may hold directives, one a line:

    SAY text     answer with this text, markers by their spelling; `¦` separates phases,
                 {index} is the number of the choice
    MS number    wait so many milliseconds before each token
    DIE          the process ends in the middle of the answer
    FAIL         the request ends with an internal error
    REFUSE text  the request is refused with this reason
    BUSY text    the request is refused for now
    HANG         nothing comes until the request is aborted
    STUCK        the process lives, its loop turns no more

To QUESTION it gives OVERVIEW; without SAY it answers "ok". Requests it got are appended to the
file in FAKE_ENGINE_LOG.
"""

import json
import os
import queue
import re
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from dsv4.chat import V4_OFFICIAL, Tokenizer
from dsv4.server.worker.wire import Channel, ids_from_wire
from dsv4.util.models import model_folder

MAX_CONTEXT = 4096
QUESTION = "What kinds of layers are there?"
OVERVIEW = r"""
The user wants an overview.
I will be brief.</think>## Layers

Each layer is one of **three** kinds:

| kind | ratio | sees |
|:---|---:|---|
| swa | 0 | the window |
| csa | 4 | `top-k | selected` entries |
| hca | 128 | all entries |

1. First the window
2. Then `entries`, see [the paper](https://example.org)

- [x] compress
- [ ] select

A head weighs them by $p_i = e^{s_i} / (z + \sum_j e^{s_j})$, so that

$$\sum_i p_i = 1 - \frac{z}{z + \sum_j e^{s_j}} \le 1$$

> The reference is the definition.

```python
def step(self) -> list[Output]:
    # one pass over everything that runs
    return [self.accept(item, 0.5) for item in self.work if item != "done"]
```""".lstrip()
POOLS = ("window", "csa", "hca")


@dataclass
class Job:
    request: dict[str, Any]
    tokens: list[int]
    directives: dict[str, str]
    due: float = field(default_factory=time.monotonic)
    num_sent: int = 0
    stop_ids: set[int] = field(default_factory=set)


class FakeEngine:
    def __init__(self, channel: Channel, model: str) -> None:
        self.channel = channel
        self.tokenizer = Tokenizer.from_folder(model_folder(model))
        self.ends = self.tokenizer.stop_ids(V4_OFFICIAL)
        self.jobs: dict[str, Job] = {}
        self.num_tokens = 0
        self.log = os.environ.get("FAKE_ENGINE_LOG")

    def facts(self) -> dict[str, Any]:
        return {
            "max_context": MAX_CONTEXT,
            "max_sequences": 4,
            "vocab_size": self.tokenizer.vocab_size,
            "bos_id": self.tokenizer.special.bos,
            "stop_ids": sorted(self.ends),
            "dialect": V4_OFFICIAL.name,
            "settings": {},
            "page_bytes": dict.fromkeys(POOLS, 1024),
        }

    def stats(self) -> dict[str, Any]:
        return {
            "num_waiting": 0,
            "num_running": len(self.jobs),
            "pages_total": dict.fromkeys(POOLS, 100),
            "pages_used": dict.fromkeys(POOLS, len(self.jobs)),
            "pages_cached": dict.fromkeys(POOLS, 3),
            "num_prefix_asked": 10,
            "num_prefix_hit": 4,
            "num_prompt_tokens": 5,
            "num_output_tokens": self.num_tokens,
            "num_preemptions": 0,
            "num_surprises": 0,
            "num_steps": 1,
            "last_step_s": 0.01,
            "num_finished": {},
            "step_sizes": {"bounds": [1, 2], "counts": [3, 4, 5], "num_tokens": 70},
        }

    def on_message(self, message: dict[str, Any]) -> None:
        if "request" in message:
            message["request"]["prompt_ids"] = ids_from_wire(message["request"]["prompt_ids"])
        self.write_log(message)
        if message["kind"] == "abort":
            self.jobs.pop(message["id"], None)
        elif message["kind"] == "score":
            top = [[1, -0.5], [2, -1.5]][: message["top"]]
            scores = [(token, -1.0, top) for token in ids_from_wire(message["ids"])[1:]]
            self.channel.send({"kind": "accepted", "id": message["id"]})
            half = len(scores) // 2
            for first, part in ((0, scores[: half + 1]), (half, scores[half:])):  # a new try
                answer = {"kind": "scores", "id": message["id"], "first": first, "scores": part}
                self.channel.send({**answer, "is_last": first == half})
        else:
            self.add(message["id"], message["request"])

    def add(self, name: str, request: dict[str, Any]) -> None:
        text = self.tokenizer.decode(request["prompt_ids"])
        said = re.split(r"<｜User｜>", text)[-1].partition("<｜Assistant｜>")[0]
        directives = dict(
            re.findall(r"^(SAY|MS|DIE|FAIL|REFUSE|BUSY|HANG|STUCK) ?(.*)$", said, re.M)
        )
        if "REFUSE" in directives:
            self.channel.send({"kind": "refused", "id": name, "error": directives["REFUSE"]})
            return
        if "BUSY" in directives:
            answer = {"kind": "refused", "id": name, "error": directives["BUSY"], "busy": True}
            self.channel.send(answer)
            return
        if said == QUESTION:
            directives = {"SAY": OVERVIEW}
        phases = directives.get("SAY", "ok").replace("\\n", "\n").split("¦")
        phase = min(int(name.rsplit("-", 1)[-1]) if name.count("-") > 1 else 0, len(phases) - 1)
        index = name.rsplit("-", 2)[1] if name.count("-") > 1 else "0"
        tokens = self.tokenizer.encode_with_specials(phases[phase].replace("{index}", index))
        job = Job(request, [*tokens, self.tokenizer.special.eos], directives)
        stop_ids = request["params"]["stop_ids"]
        job.stop_ids = self.ends if stop_ids is None else set(stop_ids)
        self.jobs[name] = job
        self.channel.send({"kind": "accepted", "id": name})

    def step(self) -> None:
        now = time.monotonic()
        outputs = [
            self.output(name, job) for name, job in list(self.jobs.items()) if job.due <= now
        ]
        found = [output for output in outputs if output is not None]
        if found:
            self.channel.send({"kind": "outputs", "outputs": found})

    def output(self, name: str, job: Job) -> dict[str, Any] | None:
        if "HANG" in job.directives:
            return None
        if "STUCK" in job.directives:
            sys.stderr.write("the loop is stuck\n")
        while "STUCK" in job.directives:
            self.channel.send({"kind": "beat", "age": time.monotonic() - job.due})
            time.sleep(0.1)
        if "DIE" in job.directives and job.num_sent == 1:
            os._exit(9)
        job.due = time.monotonic() + float(job.directives.get("MS") or 0) / 1000
        token = job.tokens[min(job.num_sent, len(job.tokens) - 1)]  # who ignores ends goes on
        job.num_sent += 1
        self.num_tokens += 1
        output: dict[str, Any] = {"id": name, "tokens": [token]}
        output["text"] = "" if token in self.ends else self.tokenizer.decode([token])
        if job.num_sent == 1:
            output["cached"], output["times"] = 4, (0.25, 0.5)
        top = job.request["params"]["logprobs"]
        if top is not None:
            value = -0.125 if name.endswith("-1-0") else -0.25  # a second choice is the best
            output["logprobs"] = [(token, value, [[token, -0.25], [1, -2.0]][:top])]
        if "FAIL" in job.directives:
            reason, stop, error = "error", None, "internal error: /secret/path broke"
        elif token in job.stop_ids:
            reason, stop, error = "stop", token, None
        elif job.num_sent >= job.request["params"]["max_tokens"]:
            reason, stop, error = "length", None, None
        else:
            return output
        del self.jobs[name]
        end = {"finish": reason, "stop": stop, "error": error, "refused": False, "drafts": (5, 3)}
        return {**output, **end}

    def write_log(self, message: dict[str, Any]) -> None:
        if self.log:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(json.dumps(message) + "\n")


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    order = channel.receive()
    assert order is not None
    if "FAKE_FAIL" in os.environ:
        channel.send({"kind": "failed", "error": os.environ["FAKE_FAIL"], "exit_code": 2})
        return
    engine = FakeEngine(channel, order["model"])
    channel.send({"kind": "plan", "text": "nothing to plan"})
    channel.send({"kind": "stats", "stats": engine.stats()})
    channel.send({"kind": "ready", "facts": engine.facts()})
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        message: Any = {}
        while message is not None:
            message = channel.receive()
            inbox.put(message)

    threading.Thread(target=read, daemon=True).start()
    said_at = 0.0
    while True:
        dues = [job.due for job in engine.jobs.values() if "HANG" not in job.directives]
        wait = min(0.05, min(dues, default=1e9) - time.monotonic())
        try:
            message = inbox.get(block=wait > 0, timeout=max(wait, 0))
            if message is None:
                return
            engine.on_message(message)
        except queue.Empty:
            engine.step()
        if time.monotonic() - said_at > 0.1:
            said_at = time.monotonic()
            channel.send({"kind": "stats", "stats": engine.stats()})


if __name__ == "__main__":
    main()
