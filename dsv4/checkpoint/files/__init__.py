"""safetensors files: headers, the index, reading, writing."""
