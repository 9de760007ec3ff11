// What the cache holds that write_kv and attention are compiled for (CACHE, a CL_CACHE_...): for each element type
// once its own, then what is narrower. Included after elem.h, the cache of float's own numbers first.
//
// `operand` is the type in which queries meet keys, and weights values: row_elem for a cache of elems, else float.
// STORED_PK numbers stand side by side in the cache, of which one multiplication takes OPERAND_PK: `cached_load` loads
// those from `part` on, of LANES tokens (keys) or dims (values), as operands.

#undef CACHED
#undef cached
#undef cached_load
#undef operand
#undef operand_pack
#undef OPERAND
#undef OPERAND_PK
#undef STORED_PK
#undef HAS_SCALES
#undef FETCH_AHEAD

#if CACHE == CL_CACHE_OWN
#define CACHED(function) NAME(function)
#define cached elem
#define cached_load NAME(row_load)
#define operand row_elem
#define operand_pack row_pack
#define OPERAND(function) ROW(function)
#define OPERAND_PK ROW_PK
#define STORED_PK PK
#define HAS_SCALES 0
#define FETCH_AHEAD fetch_ahead

#else
#define operand float
#define operand_pack vf
#define OPERAND(function) PASTE(PASTE(function, f32), CL_VARIANT)
#define OPERAND_PK 1
#define STORED_PK 1
#define FETCH_AHEAD fetch_ahead_to_end // there are fewer lines than steps

#if CACHE == CL_CACHE_INT8
#define CACHED(function) NAME(PASTE(function, int8))
#define cached int8_t
#define HAS_SCALES 1
#define cached_load(p, part) ((void)(part), int8_load(p))
#else
#define CACHED(function) NAME(PASTE(function, narrow))
#define cached uint16_t
#define HAS_SCALES 0
#define cached_load(p, part) ((void)(part), bf16_load(p))
#endif
#endif

#ifndef CL_CACHE_SIZES
#define CL_CACHE_SIZES
enum { TILE_QUERIES = 32, SPAN = 128, RANGE = 512, MAX_HEAD_DIM = 512, SCALE_BYTES = 4 };
#define NOTHING -1e30f // a maximum below all scores, yet finite
#endif

// Elements of a head of one block; scales lie behind them.
INLINE int64_t CACHED(keys_size)(int64_t key_dim, int64_t block_size) {
    return ((key_dim + STORED_PK - 1) / STORED_PK * STORED_PK + (HAS_SCALES ? SCALE_BYTES : 0)) * block_size;
}
INLINE int64_t CACHED(values_size)(int64_t value_dim, int64_t block_size) {
    return ((value_dim + 15) / 16 * 16 + (HAS_SCALES ? SCALE_BYTES : 0)) * block_size;
}
