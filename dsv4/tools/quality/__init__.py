"""Answer quality: seeded texts, accuracy by skill, and deliberately broken variants."""
