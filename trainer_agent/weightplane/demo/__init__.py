"""The learning part of ``weightplane demo``: a small transformer learns to sort digits by online GRPO.

Nothing here knows how weights travel: `weightplane.demo.loop` talks to a `Fleet` that generates and takes weights.
"""
