// AVX-512 with bfloat16 products (Cooper Lake, Zen 4).
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define CL_VARIANT avx512bf16
#define CL_WIDTH 512
#define CL_BF16
#include "kernels.inc.h"
