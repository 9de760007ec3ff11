// What the cache holds that write_kv and attention are compiled for (CACHE, a CL_CACHE_...): for each element type
// once its own, then what is narrower. Included after elem.h, the cache of float's own numbers first.
//
// `operand` is the type in which queries meet keys, and weights values: elem for a cache of elems, else float, to which
// `cached_load` expands what is stored as it is loaded.

#undef CACHED
#undef cached
#undef cached_load
#undef operand
#undef operand_pack
#undef OPERAND
#undef OPK
#undef HAS_SCALES
#undef FETCH_AHEAD

#if CACHE == CL_CACHE_OWN
#define CACHED(function) NAME(function)
#define cached elem
#define operand elem
#define operand_pack PACK
#define OPERAND(function) NAME(function)
#define OPK PK
#define HAS_SCALES 0
#define cached_load NAME(pack_load)
#define FETCH_AHEAD fetch_ahead

#else
#define operand float
#define operand_pack vf
#define OPERAND(function) PASTE(PASTE(function, f32), CL_VARIANT)
#define OPK 1
#define FETCH_AHEAD fetch_ahead_to_end // there are fewer lines than steps

#if CACHE == CL_CACHE_INT8
#define CACHED(function) NAME(PASTE(function, int8))
#define cached int8_t
#define HAS_SCALES 1
#define cached_load int8_load
#else
#define CACHED(function) NAME(PASTE(function, narrow))
#define cached uint16_t
#define HAS_SCALES 0
#define cached_load bf16_load
#endif
#endif

#ifndef CL_CACHE_SIZES
#define CL_CACHE_SIZES
enum { TILE_QUERIES = 32, SPAN = 128, RANGE = 512, MAX_HEAD_DIM = 512, SCALE_BYTES = 4 };
#define NOTHING -1e30f // a maximum below all scores, yet finite
#endif

// Elements of a head of one block; scales lie behind them.
INLINE int64_t CACHED(keys_size)(int64_t key_dim, int64_t block_size) {
    return ((key_dim + OPK - 1) / OPK * OPK + (HAS_SCALES ? SCALE_BYTES : 0)) * block_size;
}
INLINE int64_t CACHED(values_size)(int64_t value_dim, int64_t block_size) {
    return ((value_dim + 15) / 16 * 16 + (HAS_SCALES ? SCALE_BYTES : 0)) * block_size;
}
