/* Says which of the compiled levels this processor runs. Compiled for any x86-64. */

/* Returns the suffix of the functions to call, or an empty string where none can be run. */
__attribute__((visibility("default"))) const char *agentkv_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "";
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni"))
        return "avx512vnni";
    if (__builtin_cpu_supports("avxvnni")) return "avxvnni";
    return "avx2";
}
