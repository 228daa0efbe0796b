"""kill -9 at every write, sync, truncation, rename and unlink that the store's files see: half of a write is done.

``test_crash.py`` kills at our own boundaries; here the boundaries are the kernel's, SQLite's own among them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.test_crash import REPO, Ledger, command

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler and LD_PRELOAD"
    ),
]

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define REAL(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

static long seen;

static int ours(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    return n > 0 && (path[n] = 0, strstr(path, "store.db") != NULL);
}
static int struck(void) {
    const char *at = getenv("KILL_AT");
    return at && ++seen == atol(at);
}
static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

static ssize_t put(const char *name, int fd, const void *data, size_t n, off_t at) {
    ssize_t (*real)(int, const void *, size_t, off_t) = REAL(ssize_t, name, int, const void *, size_t, off_t);
    if (ours(fd) && struck()) {
        real(fd, data, n / 2, at);
        die();
    }
    return real(fd, data, n, at);
}
ssize_t pwrite(int fd, const void *d, size_t n, off_t at) { return put("pwrite", fd, d, n, at); }
ssize_t pwrite64(int fd, const void *d, size_t n, off_t at) { return put("pwrite64", fd, d, n, at); }
ssize_t write(int fd, const void *d, size_t n) {
    ssize_t (*real)(int, const void *, size_t) = REAL(ssize_t, "write", int, const void *, size_t);
    if (ours(fd) && struck()) {
        real(fd, d, n / 2);
        die();
    }
    return real(fd, d, n);
}
#define ON_FILE(name) int name(int fd) { if (ours(fd) && struck()) die(); return REAL(int, #name, int)(fd); }
ON_FILE(fsync)
ON_FILE(fdatasync)
#define ON_SIZE(name) \
    int name(int fd, off_t n) { if (ours(fd) && struck()) die(); return REAL(int, #name, int, off_t)(fd, n); }
ON_SIZE(ftruncate)
ON_SIZE(ftruncate64)
#define ON_PATHS(name) int name(const char *a, const char *b) { \
    if (strstr(a, "store.db") && struck()) die(); return REAL(int, #name, const char *, const char *)(a, b); }
ON_PATHS(rename)
ON_PATHS(link)
int unlink(const char *a) {
    if (strstr(a, "store.db") && struck()) die();
    return REAL(int, "unlink", const char *)(a);
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(_SHIM)
    made = folder / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, folder / "shim.c", "-ldl"], check=True)
    return made


def killed_at(n: int, path: Path, shim: Path, rounds: int) -> tuple[bool, str]:
    """Whether it was killed, and what it had said."""
    environment = {**os.environ, "LD_PRELOAD": str(shim), "KILL_AT": str(n)}
    child = subprocess.run(command(path, rounds), cwd=REPO, env=environment, capture_output=True, timeout=60)
    assert child.returncode in (0, -signal.SIGKILL), (n, child.stderr[-2000:])
    return child.returncode != 0, child.stdout.decode()


def test_killed_at_every_system_call_of_a_new_store(shim: Path, tmp_path: Path) -> None:
    """A file of its own for each: what is made is there whole, or not at all."""
    n = 0
    while True:
        n += 1
        folder = tmp_path / str(n)
        folder.mkdir()
        ledger = Ledger()
        struck, said = killed_at(n, folder / "store.db", shim, 1)
        ledger.read(said)
        ledger.check(folder / "store.db")
        assert struck, "the store was never open"
        if "epoch" in said:  # made and open: the rest is the other test's
            break
        shutil.rmtree(folder)
    assert n > 15, f"only {n} system calls were counted: the shim sees too little"


def test_killed_at_every_system_call_of_a_store_that_lives_on(shim: Path, tmp_path: Path) -> None:
    """One file through all of it: each life finds what every life before was told is done."""
    path, ledger, n = tmp_path / "store.db", Ledger(), 0
    ledger.check(path)
    while True:
        n += 1
        struck, said = killed_at(n, path, shim, 2)
        ledger.read(said)
        ledger.check(path)
        if not struck:
            break
    assert n > 50 and len(ledger.done["decide"]) > 3, (n, ledger.done["decide"])
