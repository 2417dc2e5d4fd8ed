/* The threads behind `pool.h`, and the protocol by which they take parts.
 *
 * Everything about a job stands in fixed places. `ticket` is its generation and the number of parts
 * that nobody has taken, in one word; a part is taken by exchanging that word for the next, which
 * fails when any part, or another job, has come in between, and nothing is taken at 0. A job's other
 * fields are read before a part is taken, and written only after all parts of the one before are. So
 * who read them too early or too late fails to take a part, and touches nothing: a helper may sleep, or
 * lose its core, for as long as it likes.
 *
 * Helpers look for work for some microseconds after the last and then sleep on a futex. They are made
 * when first wanted and live as long as the process; a fork has none, and makes its own.
 */
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE _Alignas(64)

enum { PARTS_BITS = 24 };       /* of a ticket; the rest is the generation */
enum { MOST_PARTS = 1 << 20 };  /* of a job */
enum { WAKING_PARTS = 4 };      /* a job of fewer is over before a sleeper is up */
enum { HELPER_SPIN_NS = 60000 };/* longer than what lies between two jobs of a step */
enum { CALLER_SPIN_NS = 30000 };/* longer than a part takes; then its helper has lost its core */

typedef struct {
    LINE _Atomic uint32_t asleep; /* 1: waits for it to be 0 */
} Helper;

static struct {
    LINE _Atomic uint64_t ticket;
    LINE _Atomic(Part *) part; /* the job of the ticket's generation */
    _Atomic(const void *) job;
    _Atomic int64_t count, grain, num_threads;
    LINE _Atomic uint32_t done; /* parts that helpers have done */
    _Atomic uint32_t waiting;   /* the caller sleeps until `done` changes */
    LINE _Atomic uint32_t taken; /* a caller has the helpers */
    int64_t num_helpers;         /* begun; whoever has the helpers may change it */
    Helper helpers[POOL_THREADS];
} pool;

static void futex_wait(_Atomic uint32_t *word, uint32_t while_it_is) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, while_it_is, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static uint64_t generation_of(uint64_t ticket) { return ticket >> PARTS_BITS; }

/* Takes a part of the job that is on, and does it; answers whether there was one for this worker.
 * *seen becomes the generation of that job. */
static int do_part(int64_t worker, uint64_t *seen) {
    for (;;) {
        uint64_t ticket = atomic_load(&pool.ticket);
        Part *part = atomic_load_explicit(&pool.part, memory_order_relaxed);
        const void *job = atomic_load_explicit(&pool.job, memory_order_relaxed);
        const int64_t count = atomic_load_explicit(&pool.count, memory_order_relaxed);
        const int64_t grain = atomic_load_explicit(&pool.grain, memory_order_relaxed);
        const int64_t num_threads = atomic_load_explicit(&pool.num_threads, memory_order_relaxed);
        const int64_t left = (int64_t)(ticket & (((uint64_t)1 << PARTS_BITS) - 1));
        *seen = generation_of(ticket);
        if (left == 0 || worker >= num_threads) return 0;
        if (!atomic_compare_exchange_strong(&pool.ticket, &ticket, ticket - 1)) continue;
        const int64_t end = count - (left - 1) * grain; /* the first part may be short */
        part(job, end - grain > 0 ? end - grain : 0, end, worker);
        return 1;
    }
}

static void sleep_until_woken(Helper *helper, uint64_t seen) {
    atomic_store(&helper->asleep, 1);
    if (generation_of(atomic_load(&pool.ticket)) != seen) { /* a job whose caller may not have seen it asleep */
        atomic_store(&helper->asleep, 0);
        return;
    }
    while (atomic_load(&helper->asleep)) futex_wait(&helper->asleep, 1);
}

static void *live(void *argument) {
    const int64_t worker = (int64_t)(intptr_t)argument;
    for (;;) {
        uint64_t seen;
        while (do_part(worker, &seen)) {
            atomic_fetch_add(&pool.done, 1);
            if (atomic_load(&pool.waiting)) futex_wake(&pool.done);
        }
        const int64_t end = now_ns() + HELPER_SPIN_NS;
        const int is_wanted = worker < atomic_load_explicit(&pool.num_threads, memory_order_relaxed);
        int is_new = 0;
        while (is_wanted && !is_new && now_ns() < end)
            for (int i = 0; i < 16 && !is_new; i++) {
                __builtin_ia32_pause();
                is_new = generation_of(atomic_load_explicit(&pool.ticket, memory_order_relaxed)) != seen;
            }
        if (!is_new) sleep_until_woken(&pool.helpers[worker], seen);
    }
    return NULL;
}

/* Begins helpers until there are `wanted`, or no more can be had. Signals go to other threads. */
static void begin_helpers(int64_t wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.num_helpers < wanted) {
        const int64_t worker = pool.num_helpers + 1;
        pthread_t thread;
        atomic_store(&pool.helpers[worker].asleep, 0);
        if (pthread_create(&thread, NULL, live, (void *)(intptr_t)worker)) break;
        pthread_detach(thread);
        pool.num_helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void wake_helpers(int64_t num_helpers) {
    for (int64_t worker = 1; worker <= num_helpers; worker++) {
        _Atomic uint32_t *asleep = &pool.helpers[worker].asleep;
        if (atomic_load(asleep) && atomic_exchange(asleep, 0)) futex_wake(asleep);
    }
}

/* Waits until helpers have done `wanted` parts of this job. */
static void wait_for(uint32_t wanted) {
    if (atomic_load(&pool.done) == wanted) return;
    const int64_t end = now_ns() + CALLER_SPIN_NS;
    do
        for (int i = 0; i < 16; i++) {
            if (atomic_load(&pool.done) == wanted) return;
            __builtin_ia32_pause();
        }
    while (now_ns() < end);
    atomic_store(&pool.waiting, 1);
    for (uint32_t done; (done = atomic_load(&pool.done)) != wanted;) futex_wait(&pool.done, done);
    atomic_store(&pool.waiting, 0);
}

static void share(Part *part, const void *job, int64_t count, int64_t grain, int64_t num_parts, int64_t num_threads) {
    const uint64_t generation = generation_of(atomic_load(&pool.ticket)) + 1;
    if (pool.num_helpers < num_threads - 1) begin_helpers(num_threads - 1);
    atomic_store(&pool.done, 0);
    atomic_store_explicit(&pool.part, part, memory_order_relaxed);
    atomic_store_explicit(&pool.job, job, memory_order_relaxed);
    atomic_store_explicit(&pool.count, count, memory_order_relaxed);
    atomic_store_explicit(&pool.grain, grain, memory_order_relaxed);
    atomic_store_explicit(&pool.num_threads, num_threads, memory_order_relaxed);
    atomic_store(&pool.ticket, generation << PARTS_BITS | (uint64_t)num_parts);
    if (num_parts >= WAKING_PARTS)
        wake_helpers(pool.num_helpers < num_threads - 1 ? pool.num_helpers : num_threads - 1);
    int64_t own = 0;
    for (uint64_t seen; do_part(0, &seen);) own++;
    wait_for((uint32_t)(num_parts - own));
}

void pool_run(Part *part, const void *job, int64_t count, int64_t grain, int64_t num_threads) {
    if (count <= 0) return;
    if (grain < 1) grain = 1;
    if ((count - 1) / grain >= MOST_PARTS) grain = (count - 1) / MOST_PARTS + 1;
    if (num_threads > POOL_THREADS) num_threads = POOL_THREADS;
    const int64_t num_parts = (count - 1) / grain + 1;
    if (num_threads < 2 || num_parts < 2 || atomic_exchange(&pool.taken, 1)) {
        part(job, 0, count, 0);
        return;
    }
    share(part, job, count, grain, num_parts, num_threads);
    atomic_store(&pool.taken, 0);
}

/* A fork has one thread: the helpers stayed behind, and so did whoever had them. */
static void forget_helpers(void) {
    pool.num_helpers = 0;
    atomic_store(&pool.waiting, 0);
    atomic_store(&pool.ticket, (generation_of(atomic_load(&pool.ticket)) + 1) << PARTS_BITS);
    atomic_store(&pool.taken, 0);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_helpers); }
