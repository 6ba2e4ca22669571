"""HTTP: OpenAI- and Anthropic-compatible endpoints and the web page. Start reading at `app.py`.

There are two processes. The web process serves HTTP, encodes conversations and parses outputs,
without torch; the engine process (`worker/`) runs the model. They exchange small JSON messages.
"""
