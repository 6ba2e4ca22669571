"""What is examined without a model: the machine, its kernels, its sampling."""
