"""The agent beside an inference engine."""
