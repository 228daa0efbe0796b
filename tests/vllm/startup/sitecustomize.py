"""On the path of the tests' vLLM processes: collecting garbage is a fifth of what it takes to import vLLM."""

import gc

gc.set_threshold(200_000, 10, 10)
