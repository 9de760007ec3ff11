// All kernels of one instruction set, for both element types. Included once by each of the files that name one.

#include "simd.h"

#define ELEM_BF16 0
#include "elem.h"
#include "linear.inc.h"
#include "pointwise.inc.h"
#include "caches.inc.h"
#undef ELEM_BF16
#define ELEM_BF16 1
#include "elem.h"
#include "linear.inc.h"
#include "pointwise.inc.h"
#include "caches.inc.h"

#define V(function) PASTE(function, CL_VARIANT)
#include "sampling.inc.h"

#define BOTH(kernel) {PASTE(PASTE(kernel, f32), CL_VARIANT), PASTE(PASTE(kernel, bf16), CL_VARIANT)}
#define F32(kernel) PASTE(PASTE(kernel, f32), CL_VARIANT)
#define BF16(kernel) PASTE(PASTE(kernel, bf16), CL_VARIANT)
#define CACHES(kernel)                                                                                                 \
    {{F32(kernel), F32(PASTE(kernel, int8)), F32(PASTE(kernel, narrow))}, {BF16(kernel), BF16(PASTE(kernel, int8))}}
#define STRING_(x) #x
#define STRING(x) STRING_(x)

const struct cl_kernels PASTE(cl_kernels, CL_VARIANT) = {
    .name = STRING(CL_VARIANT),
    .linear = BOTH(linear),
    .gather = BOTH(gather),
    .rms_norm = BOTH(rms_norm),
    .act_and_mul = BOTH(act_and_mul),
    .write_kv = CACHES(write_kv),
    .attention = CACHES(attention),
    .sample = V(sample),
};
