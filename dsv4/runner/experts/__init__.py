"""For experts that do not all fit the GPU: how many stay, which ones, and how they move."""
