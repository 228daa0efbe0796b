"""The engine ``vllm``: a stock vLLM takes its weights from Weightplane. ``docs/vllm.md`` says how to run it."""
