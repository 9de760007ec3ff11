// AVX-512 without bfloat16 products (Skylake, Cascade Lake, Ice Lake): bfloat16 is computed in float.
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#define CL_VARIANT avx512
#define CL_WIDTH 512
#include "kernels.inc.h"
