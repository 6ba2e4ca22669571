"""From a batch of work to logits: settings, loading, the state, the step."""
