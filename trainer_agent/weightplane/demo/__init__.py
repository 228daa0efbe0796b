"""A small, real reinforcement-learning loop over Weightplane."""
