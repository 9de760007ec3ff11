// AVX-512 with bfloat16 products and byte permutations (Zen 4, Sapphire Rapids).
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")
#define CL_VARIANT avx512bf16
#define CL_WIDTH 512
#define CL_BF16
#include "kernels.inc.h"
