/* A job that shows who did what: for tests of the pool. */
#include "native.h"
#include "pool.h"

typedef struct {
    int64_t *times;   /* by item: how often it was done */
    int64_t *workers; /* by item: who did it last */
    int64_t rounds;
} Probe;

static void probe_items(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Probe *x = job;
    for (int64_t i = begin; i < end; i++) {
        for (int64_t round = 0; round < x->rounds; round++) __asm__ volatile("");
        x->times[i]++;
        x->workers[i] = worker;
    }
}

/* Does items [0, count) `jobs` times over; each takes about `rounds` cycles. */
EXPORT(void, probe_pool)
(int64_t *times, int64_t *workers, int64_t count, int64_t grain, int64_t rounds, int64_t jobs, int64_t num_threads) {
    const Probe probe = {times, workers, rounds};
    for (int64_t job = 0; job < jobs; job++) pool_run(probe_items, &probe, count, grain, num_threads);
}
