// Vectors, 512 or 256 bits wide (CL_WIDTH): the few operations that the kernels are written in.
//
// vf: LANES floats, with + - * / of the compiler. Loads and stores of the first n lanes read and write no others.

#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)

INLINE int64_t min_(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE float bf16_to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// What is fetched into the second-level cache, some cache lines with each step of a computation.
struct ahead {
    const char *next, *end;
    int64_t lines; // in each step
};
enum { AHEAD_BYTES = 256 << 10 };

INLINE void fetch_ahead(struct ahead *ahead) {
    for (int64_t i = 0; i < ahead->lines; i++, ahead->next += 64) _mm_prefetch(ahead->next, _MM_HINT_T1);
}
INLINE void fetch_ahead_to_end(struct ahead *ahead) {
    if (ahead->next < ahead->end) fetch_ahead(ahead);
}

#if CL_WIDTH == 512

#define LANES 16
typedef __m512 vf;
typedef __m512i vi;

INLINE __mmask16 first_lanes(int64_t n) { return (__mmask16)((1u << n) - 1); }
INLINE vf vf_set(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE vf vf_load_n(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE void vf_store_n(float *p, vf x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_add_product(vf c, vf a, vf b) { return vf_fma(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_copysign(vf size, vf sign) {
    const __m512i bit = _mm512_set1_epi32((int)0x80000000);
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign), _mm512_castps_si512(size), 0xCA));
}
INLINE vf vf_scale_by_power(vf x, vf n) { return _mm512_scalef_ps(x, n); }
// x where a >= b, else y
INLINE vf vf_if_ge(vf a, vf b, vf x, vf y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), y, x); }
// Lanes first <= i < last of x, `other` elsewhere.
INLINE vf vf_keep(vf x, int64_t first, int64_t last, float other) {
    unsigned below_first = first <= 0 ? 0 : first >= LANES ? 0xffffu : (1u << first) - 1;
    unsigned below_last = last <= 0 ? 0 : last >= LANES ? 0xffffu : (1u << last) - 1;
    return _mm512_mask_mov_ps(vf_set(other), (__mmask16)(below_last & ~below_first), x);
}
INLINE float vf_sum(vf x) { return _mm512_reduce_add_ps(x); }
INLINE float vf_top(vf x) { return _mm512_reduce_max_ps(x); }

INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE vi vi_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE void vi_store(void *p, vi x) { _mm512_storeu_si512(p, x); }
INLINE vi vi_low_halves(vi x) { return _mm512_and_si512(x, _mm512_set1_epi32(0xffff)); }
// The even and the odd ones of 2 * LANES bfloat16s, as floats.
INLINE vf vf_even(vi x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
INLINE vf vf_odd(vi x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000))); }
// The other way, of what bfloat16s hold exactly.
INLINE vi vf_pairs(vf even, vf odd) {
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}
INLINE vf vf_from_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE vf bf16_load(const uint16_t *p) { return vf_from_bf16(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf bf16_load_n(const uint16_t *p, int64_t n) {
    return vf_from_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
INLINE __m256i vf_to_bf16(vf x) {
#ifdef CL_BF16
    return (__m256i)_mm512_cvtneps_pbh(x);
#else // round to nearest, ties to even; NaN stays NaN
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
INLINE void bf16_store(uint16_t *p, vf x) { _mm256_storeu_si256((__m256i *)p, vf_to_bf16(x)); }
INLINE void bf16_store_n(uint16_t *p, vf x, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), vf_to_bf16(x)); }
// LANES int8s as floats
INLINE vf int8_load(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

// The even and the odd ones of 2 * LANES int8s, as floats.
INLINE vi int8_pairs(const int8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf int8_even(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(int8_pairs(p), 16), 16));
}
INLINE vf int8_odd(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(int8_pairs(p), 16)); }

#else // 256 bits

#define LANES 8
typedef __m256 vf;
typedef __m256i vi;

INLINE __m256i lane_numbers(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
INLINE __m256i first_lanes(int64_t n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane_numbers()); }
INLINE vf vf_set(float x) { return _mm256_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE vf vf_load_n(const float *p, int64_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE void vf_store_n(float *p, vf x, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
// c + a b, in the register of c: left to itself, the compiler moves sums about, and runs out of its 16 registers.
INLINE vf vf_add_product(vf c, vf a, vf b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
    return c;
}
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_copysign(vf size, vf sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, size), _mm256_and_ps(bit, sign));
}
INLINE vf vf_scale_by_power(vf x, vf n) { // n in -126 ... 127
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return x * _mm256_castsi256_ps(exponent);
}
INLINE vf vf_if_ge(vf a, vf b, vf x, vf y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
INLINE vf vf_keep(vf x, int64_t first, int64_t last, float other) {
    first = max_(-1, min_(first, LANES));
    last = max_(-1, min_(last, LANES));
    __m256i keep = _mm256_andnot_si256(first_lanes(first), first_lanes(last));
    return _mm256_blendv_ps(vf_set(other), x, _mm256_castsi256_ps(keep));
}
INLINE float vf_sum(vf x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float vf_top(vf x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vi vi_set(int32_t x) { return _mm256_set1_epi32(x); }
INLINE void vi_store(void *p, vi x) { _mm256_storeu_si256((__m256i *)p, x); }
INLINE vi vi_low_halves(vi x) { return _mm256_and_si256(x, _mm256_set1_epi32(0xffff)); }
INLINE vf vf_even(vi x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
INLINE vf vf_odd(vi x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000))); }
INLINE vi vf_pairs(vf even, vf odd) {
    return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd));
}
INLINE vf bf16_load(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE vf bf16_load_n(const uint16_t *p, int64_t n) {
    uint16_t copy[LANES] = {0};
    memcpy(copy, p, (size_t)n * 2);
    return bf16_load(copy);
}
INLINE void bf16_store(uint16_t *p, vf x) { // round to nearest, ties to even; NaN stays NaN
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    rounded = _mm256_srli_epi32(rounded, 16);
    __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(low, high));
}
INLINE void bf16_store_n(uint16_t *p, vf x, int64_t n) {
    uint16_t copy[LANES];
    bf16_store(copy, x);
    memcpy(p, copy, (size_t)n * 2);
}
INLINE vf int8_load(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vi int8_pairs(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf int8_even(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(int8_pairs(p), 16), 16));
}
INLINE vf int8_odd(const int8_t *p) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(int8_pairs(p), 16)); }

#endif

#ifdef CL_BF16
// int8 to bfloat16 by table: the low and the high bytes of 0 ... 127, as bfloat16s, in two registers each.
struct int8_table {
    __m512i low[2], high[2];
};

INLINE struct int8_table int8_table(void) {
    uint8_t low[128], high[128];
    for (int i = 0; i < 128; i++) {
        const float number = (float)i;
        uint32_t bits;
        memcpy(&bits, &number, 4);
        low[i] = (uint8_t)(bits >> 16), high[i] = (uint8_t)(bits >> 24);
    }
    return (struct int8_table){{vi_load(low), vi_load(low + 64)}, {vi_load(high), vi_load(high + 64)}};
}

// 64 int8s, none of them -128, to bfloat16. Interleaving works on 16-byte lanes, so bytes are put in place for it
// first.
INLINE void int8_expand(const struct int8_table *table, const int8_t *from, uint16_t *to) {
    const __m512i places =
        _mm512_set_epi64(0x3f3e3d3c3b3a3938, 0x1f1e1d1c1b1a1918, 0x3736353433323130, 0x1716151413121110,
                         0x2f2e2d2c2b2a2928, 0x0f0e0d0c0b0a0908, 0x2726252423222120, 0x0706050403020100);
    const __m512i bytes = _mm512_permutexvar_epi8(places, vi_load(from)), size = _mm512_abs_epi8(bytes);
    const __m512i low = _mm512_permutex2var_epi8(table->low[0], size, table->low[1]);
    const __m512i high = _mm512_ternarylogic_epi32( // with the sign
        _mm512_permutex2var_epi8(table->high[0], size, table->high[1]), bytes, _mm512_set1_epi8((char)0x80), 0xf8);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(low, high));
}

#else

struct int8_table {
    char none;
};

INLINE struct int8_table int8_table(void) { return (struct int8_table){0}; }

// 64 int8s to bfloat16, which holds each of them exactly.
INLINE void int8_expand(const struct int8_table *table, const int8_t *from, uint16_t *to) {
    (void)table;
    for (int i = 0; i < 64; i += 2 * LANES) vi_store(to + i, vf_pairs(int8_even(from + i), int8_odd(from + i)));
}

#endif

INLINE uint16_t bf16_round(float x) {
    uint16_t lanes[LANES];
    bf16_store(lanes, vf_set(x));
    return lanes[0];
}

// e^x to 2 units in the last place; 0 below -87.3 (exactly, also for -inf), capped at e^88.
INLINE vf vf_exp(vf x) {
    const vf lowest = vf_set(-87.3f);
    vf y = vf_min(vf_max(x, lowest), vf_set(88.0f));
    vf n = vf_round(y * vf_set(1.44269504f));
    vf r = vf_fma(n, vf_set(-0.693359375f), y);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_set(1.9875691500e-4f); // Cephes' expf
    p = vf_fma(p, r, vf_set(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set(5.0000001201e-1f));
    p = vf_fma(p, r * r, r) + vf_set(1.0f);
    return vf_if_ge(x, lowest, vf_scale_by_power(p, n), vf_set(0.0f));
}

INLINE vf vf_sigmoid(vf x) { // 1 / (1 + e^-x), or e^x / (1 + e^x): the exponential never overflows
    vf one = vf_set(1.0f), e = vf_exp(vf_set(0.0f) - vf_abs(x));
    return vf_if_ge(x, vf_set(0.0f), one, e) / (one + e);
}
INLINE vf vf_tanh(vf x) { return vf_fma(vf_set(2.0f), vf_sigmoid(x + x), vf_set(-1.0f)); }

// The error function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
INLINE vf vf_erf(vf x) {
    vf size = vf_abs(x), t = vf_set(1.0f) / vf_fma(vf_set(0.3275911f), size, vf_set(1.0f));
    vf p = vf_set(1.061405429f);
    p = vf_fma(p, t, vf_set(-1.453152027f));
    p = vf_fma(p, t, vf_set(1.421413741f));
    p = vf_fma(p, t, vf_set(-0.284496736f));
    p = vf_fma(p, t, vf_set(0.254829592f));
    return vf_copysign(vf_set(1.0f) - p * t * vf_exp(vf_set(0.0f) - size * size), x);
}

INLINE vf vf_activate(vf x, int32_t activation) {
    switch (activation) {
    case CL_SILU:
        return x * vf_sigmoid(x);
    case CL_GELU_TANH: // 0.5 x (1 + tanh(y)) = x sigmoid(2 y)
        return x * vf_sigmoid(vf_set(1.5957691216f) * vf_fma(vf_set(0.044715f) * x, x * x, x));
    case CL_GELU:
        return vf_set(0.5f) * x * (vf_set(1.0f) + vf_erf(x * vf_set(0.70710678f)));
    default:
        return x;
    }
}
