"""HTTP: OpenAI- and Anthropic-compatible endpoints and the web page. Start reading at `app.py`.

Two processes. The web process speaks HTTP, encodes conversations and parses outputs, without
torch; the engine process (`worker/`) runs the model. They talk in small JSON messages.
"""
