"""safetensors files: headers, the index, mapped reading, writing."""
