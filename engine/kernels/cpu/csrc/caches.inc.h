// write_kv and attention of one element type, for each kind of cache.

#undef CACHE
#define CACHE CL_CACHE_OWN
#include "cache.h"
#include "write_kv.inc.h"
#include "attention.inc.h"
#undef CACHE
#define CACHE CL_CACHE_INT8
#include "cache.h"
#include "write_kv.inc.h"
#include "attention.inc.h"
#if !ELEM_BF16
#undef CACHE
#define CACHE CL_CACHE_BF16
#include "cache.h"
#include "write_kv.inc.h"
#include "attention.inc.h"
#endif
