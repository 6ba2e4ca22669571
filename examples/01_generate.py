"""Two questions in one batch, through the Python API."""

from dsv4 import Engine, SamplingParams

engine = Engine.load("tiny")  # or the folder of a checkpoint
questions = ["What is the capital of France?", "Which continent is Peru in?"]
for question, answer in zip(
    questions, engine.generate(questions, SamplingParams(temperature=0, max_tokens=64)), strict=True
):
    print(f"{question} {answer.text} ({answer.finish_reason})")
