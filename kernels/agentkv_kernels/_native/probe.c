/* A sum over threads: proves that the library loads and shares torch's OpenMP. */
#include "native.h"

/* sum[0] = how many threads took part in a loop. */
EXPORT(void, count_threads)(int64_t *sum) {
    int64_t count = 0;
#pragma omp parallel reduction(+ : count)
    count += 1;
    *sum = count;
}
