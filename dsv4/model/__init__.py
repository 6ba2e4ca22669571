"""The backbone of DeepSeek-V4, written once for CPU and GPU. Start at `transformer.py`."""
