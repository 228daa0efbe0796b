// What two processes can do that hand memory over by copying it into a ring of shared slots and out again: the shm
// transport's copies, of its slots, and nothing else. No Python, no headers, no futex, no check of anything.
//
// _bare_ring BYTES SLOT_BYTES SLOTS
// prints: start end cpu (seconds; the first two of CLOCK_MONOTONIC, cpu is that of the busier of the two)
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct Counts {  // each on a cache line of its own, written by one side
    _Alignas(64) atomic_size_t filled;
    _Alignas(64) atomic_size_t emptied;
    _Alignas(64) atomic_int ready;
    double end, cpu;  // the receiver's
};

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static char *memory(size_t bytes, int sharing) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return memset(p, 0x5a, bytes);  // every page is there before the clock runs
}

static void until(atomic_size_t *count, size_t least) {
    for (int looks = 0; atomic_load_explicit(count, memory_order_acquire) < least;)
        if (++looks % 4096 == 0) sched_yield();  // the other one may need this very core
}

static size_t part(size_t bytes, size_t slot_bytes, size_t n) {
    size_t left = bytes - n * slot_bytes;
    return left < slot_bytes ? left : slot_bytes;
}

static void receive(struct Counts *c, const char *ring, size_t bytes, size_t slot_bytes, size_t slots) {
    char *target = memory(bytes, MAP_PRIVATE);
    double busy = seconds(CLOCK_PROCESS_CPUTIME_ID);
    atomic_store(&c->ready, 1);
    for (size_t n = 0; n * slot_bytes < bytes; n++) {
        until(&c->filled, n + 1);
        memcpy(target + n * slot_bytes, ring + n % slots * slot_bytes, part(bytes, slot_bytes, n));
        atomic_store_explicit(&c->emptied, n + 1, memory_order_release);
    }
    c->end = seconds(CLOCK_MONOTONIC);
    c->cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - busy;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s BYTES SLOT_BYTES SLOTS\n", argv[0]);
        return 2;
    }
    size_t bytes = strtoull(argv[1], NULL, 10), slot_bytes = strtoull(argv[2], NULL, 10);
    size_t slots = strtoull(argv[3], NULL, 10);
    struct Counts *c = (struct Counts *)memory(sizeof *c, MAP_SHARED);
    memset(c, 0, sizeof *c);
    char *ring = memory(slots * slot_bytes, MAP_SHARED);
    pid_t child = fork();
    if (child == 0) {
        receive(c, ring, bytes, slot_bytes, slots);
        _exit(0);
    }
    char *source = memory(bytes, MAP_PRIVATE);
    while (!atomic_load(&c->ready))
        if (waitpid(child, NULL, WNOHANG) != 0) return 1;
    double start = seconds(CLOCK_MONOTONIC), busy = seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (size_t n = 0; n * slot_bytes < bytes; n++) {
        if (n >= slots) until(&c->emptied, n + 1 - slots);
        memcpy(ring + n % slots * slot_bytes, source + n * slot_bytes, part(bytes, slot_bytes, n));
        atomic_store_explicit(&c->filled, n + 1, memory_order_release);
    }
    busy = seconds(CLOCK_PROCESS_CPUTIME_ID) - busy;
    int status = 1;
    waitpid(child, &status, 0);
    if (status != 0) return 1;
    printf("%.9f %.9f %.6f\n", start, c->end, busy > c->cpu ? busy : c->cpu);
    return 0;
}
