/* Divides loops among threads that take part if they are awake.
 *
 * A job is a number of items, cut into parts; the calling thread takes parts one after the other, and
 * helper threads that are about take parts as well. The call returns when every part is done: it waits
 * for a helper only where that has begun a part, and never for one to arrive. So a core that is busy
 * with something else costs its share of the work and no more, where a barrier costs the scheduler's
 * slice. Which thread does which part differs from run to run; what a part computes must not.
 */
#ifndef AGENTKV_POOL_H
#define AGENTKV_POOL_H

#include <stdint.h>

enum { POOL_THREADS = 64 }; /* more are not used */

/* Does items [begin, end). `worker` is in [0, num_threads): no two threads of a call have the same. */
typedef void Part(const void *job, int64_t begin, int64_t end, int64_t worker);

/* Does items [0, count), `grain` at a time, by at most `num_threads` threads. A part should take at
 * least a microsecond, to be worth its hand-over; few parts wake nobody, and one is simply called.
 * Several threads may call at once: whoever finds the helpers taken works alone. A part calls nothing
 * here. */
void pool_run(Part *part, const void *job, int64_t count, int64_t grain, int64_t num_threads);

#endif
