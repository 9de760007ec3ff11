// What Python calls: choose an instruction set, run a list of calls. The only file with OpenMP in it.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <omp.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"

enum { LINE = 64 }; // bytes that one core takes from another at once

// What the threads of one `cl_run` know of each other.
struct team {
    int arrived __attribute__((aligned(LINE))); // threads that wait at a barrier within a call now
    int passed;                                 // barriers within calls so far
    int64_t done __attribute__((aligned(LINE))); // parts of calls
    struct {
        int64_t count __attribute__((aligned(LINE)));
    } taken[]; // [size]: in how many calls this part has been taken
};

static _Thread_local struct team *team;
static _Thread_local int team_size;

// A step has some 240 calls of a few dozen microseconds each, so how to wait decides what a busy neighbour costs.
// OpenMP's barrier either spins for milliseconds, while the thread that it waits for may want this very core, or sleeps
// at once, and waking takes longer than most calls. So: spin for a moment, then let others have the core.
enum { SPINS = 200 };

static void wait_more(int spins) {
    if (spins < SPINS)
        __builtin_ia32_pause();
    else
        sched_yield();
}

void cl_barrier(void) {
    const int passed = __atomic_load_n(&team->passed, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team_size) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->passed, passed + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&team->passed, __ATOMIC_ACQUIRE) == passed; spins++) wait_more(spins);
}

void cl_share(int64_t n, int part, int parts, int64_t *first, int64_t *last) {
    *first = n * part / parts;
    *last = n * (part + 1) / parts;
}

// Does a part of call `i`, if nobody else has it. That is looked at first: to exchange takes the line from its owner.
static void do_part(const struct cl_call *calls, int64_t i, int part) {
    int64_t *taken = &team->taken[part].count, before = i;
    if (__atomic_load_n(taken, __ATOMIC_RELAXED) != i ||
        !__atomic_compare_exchange_n(taken, &before, i + 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return;
    calls[i].kernel(calls[i].args, part, team_size);
    __atomic_add_fetch(&team->done, 1, __ATOMIC_RELEASE);
}

// Calls one after the other, each in as many parts as there are threads. A thread does its own part. When it has waited
// for a moment it looks after the others': of a thread that is late, since something else has its core, nobody waits
// for more than the part that it is at.
void cl_run(const struct cl_call *calls, int64_t num_calls, int num_threads) {
    struct team *here = aligned_alloc(LINE, sizeof(struct team) + num_threads * sizeof(here->taken[0]));
    memset(here, 0, sizeof(struct team) + num_threads * sizeof(here->taken[0]));
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), size = omp_get_num_threads();
        team = here, team_size = size;
        for (int64_t i = 0; i < num_calls; i++) {
            do_part(calls, i, thread);
            for (int spins = 0; __atomic_load_n(&team->done, __ATOMIC_ACQUIRE) < (i + 1) * size; spins++) {
                if (spins == SPINS)
                    for (int k = 1; k < size; k++) do_part(calls, i, (thread + k) % size);
                wait_more(spins);
            }
        }
    }
    free(here);
}

int cl_abi(void) { return CL_ABI; }

// The file whose OpenMP this is.
const char *cl_openmp_path(void) {
    Dl_info info;
    return dladdr((void *)omp_get_num_threads, &info) ? info.dli_fname : "";
}

// Linux lets a process use AMX's registers once it has asked.
static int may_use_amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static int has_amx_bf16(void) { // cpuid 7: edx bit 22 AMX-BF16, bit 24 AMX-TILE
    unsigned eax = 7, ebx, ecx = 0, edx;
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    return (edx >> 22 & 1) && (edx >> 24 & 1);
}

// The kernels `name` says, or NULL if this processor does not have them.
const struct cl_kernels *cl_choose(const char *name) {
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const int bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
    const struct {
        const struct cl_kernels *kernels;
        int is_there;
    } all[] = {
        {&cl_kernels_amx, bf16 && has_amx_bf16() && may_use_amx()},
        {&cl_kernels_avx512bf16, bf16},
        {&cl_kernels_avx512, avx512},
        {&cl_kernels_avx2, avx2},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].is_there && strcmp(name, all[i].kernels->name) == 0) return all[i].kernels;
    return NULL;
}

// A matrix [rows, K], row-major, into its place in a packed weight (struct cl_linear). What is padding there must be
// zero already. Row r becomes output `first + r`; or, of a gate or up matrix (`spread` 2), its strips become every
// other strip of the packed one, from strip `offset` on.
struct cl_pack {
    const char *source;
    char *packed;
    int64_t rows, in_features, elem_bytes, pk, first, spread, offset, total_strips;
};

static void pack_units(const struct cl_pack *op, const char *from, char *to, int64_t block_stride) {
    const int64_t bytes = op->elem_bytes * op->pk, units = op->in_features / op->pk; // a unit is PK k's
#define UNITS(type)                                                                                                    \
    for (int64_t i = 0; i < units; i++)                                                                                \
        memcpy(to + i / 16 * block_stride + i % 16 * 16 * bytes, from + i * (int64_t)sizeof(type), sizeof(type));
    switch (bytes) {
    case 1:
        UNITS(uint8_t) break;
    case 2:
        UNITS(uint16_t) break;
    case 4:
        UNITS(uint32_t) break;
    }
#undef UNITS
    if (op->in_features % op->pk) // the odd k of a pair
        memcpy(to + units / 16 * block_stride + units % 16 * 16 * bytes, from + units * bytes, (size_t)op->elem_bytes);
}

static void pack(const void *args, int thread, int num_threads) {
    const struct cl_pack *op = args;
    const int64_t unit = op->elem_bytes * op->pk, strip_block = 16 * 16 * unit;
    const int64_t k_blocks = (op->in_features + 16 * op->pk - 1) / (16 * op->pk);
    int64_t first, last;
    cl_share(op->rows, thread, num_threads, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const int64_t output = op->first + row, strip = output / 16 * op->spread + op->offset, group = strip / 4;
        const int64_t left = op->total_strips - 4 * group, block_stride = (left < 4 ? left : 4) * strip_block;
        char *to = op->packed + (group * 4 * k_blocks + strip % 4) * strip_block + output % 16 * unit;
        pack_units(op, op->source + row * op->in_features * op->elem_bytes, to, block_stride);
    }
}

void cl_pack_weight(const struct cl_pack *op, int num_threads) {
    const struct cl_call call = {pack, op};
    cl_run(&call, 1, num_threads);
}
