"""On the path of the tests' vLLM processes; the tests' own process runs it as well (conftest.py)."""

import ctypes
import faulthandler
import gc
import os

# Collecting garbage is a fifth of what it takes to import vLLM.
gc.set_threshold(200_000, 10, 10)

# vLLM 0.32's attention on CPU uses a processor's AMX tiles without asking Linux for them (ARCH_REQ_XCOMP_PERM,
# XTILEDATA): in bfloat16 it dies of SIGILL, unless something else (oneDNN, in float32) has asked before. Elsewhere this
# call does nothing. It is refused where a signal's stack is small, as pytest's faulthandler has it.
faulthandler.disable()
if os.uname().machine == "x86_64":
    ctypes.CDLL(None).syscall(158, 0x1023, 18)
