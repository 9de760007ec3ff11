// AVX2 and FMA: any x86 server since 2013. bfloat16 is computed in float.
#pragma GCC target("avx2,fma,f16c")
#define CL_VARIANT avx2
#define CL_WIDTH 256
#include "kernels.inc.h"
