"""From scheduled work to tokens: settings, loading, buffers, graphs, steps."""
