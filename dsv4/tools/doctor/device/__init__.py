"""Checks without a model: the machine, its kernels, its sampling."""
