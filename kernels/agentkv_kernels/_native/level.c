/* Says which of the compiled levels this processor runs. Compiled for any x86-64. */
#include <string.h>

/* Writes their names, best first and each followed by a space, into 64 bytes. */
__attribute__((visibility("default"))) void agentkv_levels(char *names) {
    names[0] = 0;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni"))
        strcat(names, "avx512vnni ");
    if (__builtin_cpu_supports("avxvnni")) strcat(names, "avxvnni ");
    strcat(names, "avx2 ");
}
