/* What every native kernel shares: its exported name, and the plain C ABI.
 *
 * A file that says EXPORT is compiled once for each level of processor (hatch_build.py), so one
 * function exists under several names, and `level.c` says which of them this processor can run:
 *
 *     EXPORT(void, store)(...)   ->   agentkv_store_avx2, agentkv_store_avx512vnni, ...
 *
 * Arguments are pointers and int64_t or float alone; shapes were checked by the caller. Loops are
 * divided by `pool.h`, among as many threads as the caller says.
 */
#ifndef AGENTKV_NATIVE_H
#define AGENTKV_NATIVE_H

#include <stdint.h>

#define AGENTKV_JOIN(name, level) agentkv_##name##_##level
#define AGENTKV_NAME(name, level) AGENTKV_JOIN(name, level)
#define EXPORT(type, name) __attribute__((visibility("default"))) type AGENTKV_NAME(name, LEVEL)

#endif
