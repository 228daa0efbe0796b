"""The part of Weightplane that runs inside vLLM's processes; ``plugin`` is what vLLM loads."""
