"""How well a model answers: texts from a seed, accuracy by skill, parts broken on purpose."""
