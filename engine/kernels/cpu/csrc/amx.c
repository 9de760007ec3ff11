// AVX-512 as in avx512bf16.c, and AMX tiles for the linear layers in bfloat16 (Sapphire Rapids and later).
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,amx-tile,amx-bf16")
#define CL_VARIANT amx
#define CL_WIDTH 512
#define CL_BF16
#define CL_AMX
#include "kernels.inc.h"
