"""The state a running sequence keeps: pages of entries, and fixed-size compressor rows."""
