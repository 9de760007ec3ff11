// The element type that the kernels are compiled for: float (ELEM_BF16 = 0) or bfloat16 (1). Included once for each,
// float first.
//
// PK elements stand side by side wherever a dot product runs over them; `dot(c, a, b)` adds the PK products of each
// lane to c. Rows are multiplied as `row_elem`: elem, but float where the processor has no product of bfloat16s. A
// `row_pack` is what one multiplication takes of a row and of a weight, ROW_PK elements side by side.

#undef NAME
#undef elem
#undef PK
#undef row_elem
#undef row_pack
#undef ROW_PK
#undef ROW_IS_ELEM
#undef ROW

#if ELEM_BF16
#define NAME(function) PASTE(PASTE(function, bf16), CL_VARIANT)
#define elem uint16_t
#define PK 2
#else
#define NAME(function) PASTE(PASTE(function, f32), CL_VARIANT)
#define elem float
#define PK 1
#endif

#if ELEM_BF16 && defined(CL_BF16)
#define row_elem uint16_t
#define row_pack vi
#define ROW_PK 2
#define ROW_IS_ELEM 1
#define ROW(function) NAME(function)
#else
#define row_elem float
#define row_pack vf
#define ROW_PK 1
#define ROW_IS_ELEM !ELEM_BF16
#define ROW(function) PASTE(PASTE(function, f32), CL_VARIANT)
#endif

#if ELEM_BF16

INLINE vf NAME(load)(const elem *p) { return bf16_load(p); }
INLINE vf NAME(load_n)(const elem *p, int64_t n) { return n < LANES ? bf16_load_n(p, n) : bf16_load(p); }
INLINE void NAME(store)(elem *p, vf x) { bf16_store(p, x); }
INLINE void NAME(store_n)(elem *p, vf x, int64_t n) { n < LANES ? bf16_store_n(p, x, n) : bf16_store(p, x); }
INLINE float NAME(get)(elem x) { return bf16_to_float(x); }
INLINE elem NAME(put)(float x) { return bf16_round(x); }
INLINE vi NAME(pack_load)(const elem *p) { return vi_load(p); }
INLINE vi NAME(pack_set)(const elem *p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return vi_set(pair);
}
INLINE vi NAME(pack_first)(vi x) { return vi_low_halves(x); }
INLINE vf NAME(dot)(vf c, vi a, vi b) {
#ifdef CL_BF16
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#else
    return vf_fma(vf_odd(a), vf_odd(b), vf_fma(vf_even(a), vf_even(b), c));
#endif
}
#undef PACK
#define PACK vi

#else

INLINE vf NAME(load)(const elem *p) { return vf_load(p); }
INLINE vf NAME(load_n)(const elem *p, int64_t n) { return n < LANES ? vf_load_n(p, n) : vf_load(p); }
INLINE void NAME(store)(elem *p, vf x) { vf_store(p, x); }
INLINE void NAME(store_n)(elem *p, vf x, int64_t n) { n < LANES ? vf_store_n(p, x, n) : vf_store(p, x); }
INLINE float NAME(get)(elem x) { return x; }
INLINE elem NAME(put)(float x) { return x; }
INLINE vf NAME(pack_load)(const elem *p) { return vf_load(p); }
INLINE vf NAME(pack_set)(const elem *p) { return vf_set(*p); }
INLINE vf NAME(pack_first)(vf x) { return x; }
INLINE vf NAME(dot)(vf c, vf a, vf b) { return vf_add_product(c, a, b); }
#undef PACK
#define PACK vf

#endif

// ROW_PK of the PK numbers of LANES outputs, tokens or dims, from `part` on.
INLINE row_pack NAME(row_load)(const elem *p, const int part) {
#if ROW_IS_ELEM
    (void)part;
    return NAME(pack_load)(p);
#else
    return part ? vf_odd(vi_load(p)) : vf_even(vi_load(p));
#endif
}
