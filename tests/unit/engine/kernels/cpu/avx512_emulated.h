// AVX-512 in software, for hosts without it: include before avx512.c and avx512bf16.c, from which the line that asks for
// AVX-512 instructions is taken. Only what the kernels use, lane by lane as Intel's guide writes it.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef union {
    __m512 ps;
    __m512i si;
    float f[16];
    uint32_t u[16];
    int32_t i[16];
    uint16_t h[32];
    uint8_t b[64];
    int64_t q[8];
} emulated_512;

#define EMULATED(type, name, ...) static __attribute__((noinline, unused)) type emulated_##name(__VA_ARGS__)
#define PS(x) ((emulated_512){.ps = (x)})
#define SI(x) ((emulated_512){.si = (x)})
// A result whose 16 lanes (floats `f`, words `u`, `i`) are `value` of lane l.
#define LANES_OF(part, kind, value)                                                                                    \
    emulated_512 y;                                                                                                    \
    for (int l = 0; l < 16; l++) y.part[l] = (value);                                                                  \
    return y.kind

EMULATED(__m512, set1_ps, float x) { LANES_OF(f, ps, x); }
EMULATED(__m512i, set1_epi32, int32_t x) { LANES_OF(i, si, x); }
EMULATED(__m512, max_ps, __m512 a, __m512 b) { LANES_OF(f, ps, PS(a).f[l] > PS(b).f[l] ? PS(a).f[l] : PS(b).f[l]); }
EMULATED(__m512, min_ps, __m512 a, __m512 b) { LANES_OF(f, ps, PS(a).f[l] < PS(b).f[l] ? PS(a).f[l] : PS(b).f[l]); }
EMULATED(__m512, abs_ps, __m512 a) { LANES_OF(f, ps, fabsf(PS(a).f[l])); }
EMULATED(__m512, fmadd_ps, __m512 a, __m512 b, __m512 c) {
    LANES_OF(f, ps, fmaf(PS(a).f[l], PS(b).f[l], PS(c).f[l]));
}
EMULATED(__m512, round_ps, __m512 a) { LANES_OF(f, ps, nearbyintf(PS(a).f[l])); }
EMULATED(__m512, scalef_ps, __m512 a, __m512 b) { LANES_OF(f, ps, ldexpf(PS(a).f[l], (int)floorf(PS(b).f[l]))); }
EMULATED(__m512, mask_mov_ps, __m512 other, __mmask16 m, __m512 a) {
    LANES_OF(f, ps, m >> l & 1 ? PS(a).f[l] : PS(other).f[l]);
}
EMULATED(__mmask16, ge_mask, __m512 a, __m512 b) {
    unsigned m = 0;
    for (int l = 0; l < 16; l++) m |= (unsigned)(PS(a).f[l] >= PS(b).f[l]) << l;
    return (__mmask16)m;
}
EMULATED(__mmask16, unordered_mask, __m512 a, __m512 b) {
    unsigned m = 0;
    for (int l = 0; l < 16; l++) m |= (unsigned)(isnan(PS(a).f[l]) || isnan(PS(b).f[l])) << l;
    return (__mmask16)m;
}
EMULATED(float, reduce_add_ps, __m512 a) { // in halves, as GCC has it
    emulated_512 y = PS(a);
    for (int n = 8; n; n /= 2)
        for (int l = 0; l < n; l++) y.f[l] += y.f[l + n];
    return y.f[0];
}
EMULATED(float, reduce_max_ps, __m512 a) {
    float top = PS(a).f[0];
    for (int l = 1; l < 16; l++) top = PS(a).f[l] > top ? PS(a).f[l] : top;
    return top;
}

EMULATED(__m512, loadu_ps, const float *p) { LANES_OF(f, ps, p[l]); }
EMULATED(void, storeu_ps, float *p, __m512 x) { memcpy(p, &x, sizeof x); }
EMULATED(__m512, maskz_loadu_ps, __mmask16 m, const float *p) { LANES_OF(f, ps, m >> l & 1 ? p[l] : 0.0f); }
EMULATED(void, mask_storeu_ps, float *p, __mmask16 m, __m512 x) {
    for (int l = 0; l < 16; l++)
        if (m >> l & 1) p[l] = PS(x).f[l];
}
EMULATED(__m512i, loadu_si512, const void *p) {
    __m512i x;
    memcpy(&x, p, sizeof x);
    return x;
}
EMULATED(void, storeu_si512, void *p, __m512i x) { memcpy(p, &x, sizeof x); }
EMULATED(__m256i, maskz_loadu_epi16, __mmask16 m, const uint16_t *p) {
    uint16_t y[16];
    for (int l = 0; l < 16; l++) y[l] = m >> l & 1 ? p[l] : 0;
    return _mm256_loadu_si256((const __m256i *)y);
}
EMULATED(void, mask_storeu_epi16, uint16_t *p, __mmask16 m, __m256i x) {
    uint16_t y[16];
    _mm256_storeu_si256((__m256i *)y, x);
    for (int l = 0; l < 16; l++)
        if (m >> l & 1) p[l] = y[l];
}

EMULATED(__m512i, and_si512, __m512i a, __m512i b) { LANES_OF(u, si, SI(a).u[l] & SI(b).u[l]); }
EMULATED(__m512i, or_si512, __m512i a, __m512i b) { LANES_OF(u, si, SI(a).u[l] | SI(b).u[l]); }
EMULATED(__m512i, add_epi32, __m512i a, __m512i b) { LANES_OF(u, si, SI(a).u[l] + SI(b).u[l]); }
EMULATED(__m512i, slli_epi32, __m512i a, int n) { LANES_OF(u, si, SI(a).u[l] << n); }
EMULATED(__m512i, srli_epi32, __m512i a, int n) { LANES_OF(u, si, SI(a).u[l] >> n); }
EMULATED(__m512i, srai_epi32, __m512i a, int n) { LANES_OF(i, si, SI(a).i[l] >> n); }
EMULATED(__m512i, mask_or_epi32, __m512i other, __mmask16 m, __m512i a, __m512i b) {
    LANES_OF(u, si, m >> l & 1 ? SI(a).u[l] | SI(b).u[l] : SI(other).u[l]);
}
EMULATED(__m512i, ternarylogic_epi32, __m512i a, __m512i b, __m512i c, int table) {
    emulated_512 y = {.u = {0}};
    for (int l = 0; l < 16; l++)
        for (int bit = 0; bit < 32; bit++) {
            const int at = (SI(a).u[l] >> bit & 1) << 2 | (SI(b).u[l] >> bit & 1) << 1 | (SI(c).u[l] >> bit & 1);
            y.u[l] |= (uint32_t)(table >> at & 1) << bit;
        }
    return y.si;
}

EMULATED(__m512, cvtepi32_ps, __m512i a) { LANES_OF(f, ps, (float)SI(a).i[l]); }
EMULATED(__m256i, cvtepi32_epi16, __m512i a) {
    uint16_t y[16];
    for (int l = 0; l < 16; l++) y[l] = (uint16_t)SI(a).u[l];
    return _mm256_loadu_si256((const __m256i *)y);
}
EMULATED(__m512i, cvtepu16_epi32, __m256i a) {
    uint16_t x[16];
    _mm256_storeu_si256((__m256i *)x, a);
    LANES_OF(u, si, x[l]);
}
EMULATED(__m512i, cvtepi8_epi32, __m128i a) {
    int8_t x[16];
    _mm_storeu_si128((__m128i *)x, a);
    LANES_OF(i, si, x[l]);
}
EMULATED(__m512i, cvtepi8_epi16, __m256i a) {
    int8_t x[32];
    emulated_512 y;
    _mm256_storeu_si256((__m256i *)x, a);
    for (int l = 0; l < 32; l++) y.h[l] = (uint16_t)x[l];
    return y.si;
}

// Bytes, for int8 as bfloat16. Unpacking works within 16 bytes.
EMULATED(__m512i, set1_epi8, char x) {
    emulated_512 y;
    memset(&y, x, sizeof y);
    return y.si;
}
EMULATED(__m512i, set_epi64, int64_t h, int64_t g, int64_t f, int64_t e, int64_t d, int64_t c, int64_t b, int64_t a) {
    return (emulated_512){.q = {a, b, c, d, e, f, g, h}}.si;
}
EMULATED(__m512i, abs_epi8, __m512i a) {
    emulated_512 y;
    for (int l = 0; l < 64; l++) y.b[l] = (uint8_t)((int8_t)SI(a).b[l] < 0 ? -SI(a).b[l] : SI(a).b[l]);
    return y.si;
}
EMULATED(__m512i, permutexvar_epi8, __m512i at, __m512i a) {
    emulated_512 y;
    for (int l = 0; l < 64; l++) y.b[l] = SI(a).b[SI(at).b[l] & 63];
    return y.si;
}
EMULATED(__m512i, permutex2var_epi8, __m512i a, __m512i at, __m512i b) {
    emulated_512 y;
    for (int l = 0; l < 64; l++) y.b[l] = (SI(at).b[l] & 64 ? SI(b) : SI(a)).b[SI(at).b[l] & 63];
    return y.si;
}
EMULATED(__m512i, unpack_epi8, __m512i a, __m512i b, int from) {
    emulated_512 y;
    for (int l = 0; l < 64; l++) y.b[l] = (l % 2 ? SI(b) : SI(a)).b[l / 16 * 16 + from + l % 16 / 2];
    return y.si;
}

// bfloat16: rounds to nearest, denormal numbers are zero, and so are those of the products' sums.
EMULATED(float, flush, float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
EMULATED(float, wide, uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return emulated_flush(y);
}
EMULATED(__m256bh, cvtneps_pbh, __m512 a) {
    union {
        uint16_t h[16];
        __m256bh bh;
    } y;
    for (int l = 0; l < 16; l++) {
        const float x = emulated_flush(PS(a).f[l]);
        uint32_t bits;
        memcpy(&bits, &x, 4);
        y.h[l] = (uint16_t)((isnan(x) ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return y.bh;
}
EMULATED(__m512, dpbf16_ps, __m512 c, __m512bh a, __m512bh b) { // the odd ones first, then the even ones
    emulated_512 x = SI((__m512i)a), w = SI((__m512i)b);
    LANES_OF(f, ps,
             emulated_flush(fmaf(emulated_wide(x.h[2 * l]), emulated_wide(w.h[2 * l]),
                                 emulated_flush(fmaf(emulated_wide(x.h[2 * l + 1]), emulated_wide(w.h[2 * l + 1]),
                                                     PS(c).f[l])))));
}

#define _mm512_castps_si512(a) ((__m512i)(a))
#define _mm512_castsi512_ps(a) ((__m512)(a))
#define _mm512_cmp_ps_mask(a, b, how) ((how) == _CMP_GE_OQ ? emulated_ge_mask(a, b) : emulated_unordered_mask(a, b))
#define _mm512_mask_blend_ps(m, a, b) emulated_mask_mov_ps(a, m, b)
#define _mm512_roundscale_ps(a, how) emulated_round_ps(a)
#define _mm512_unpacklo_epi8(a, b) emulated_unpack_epi8(a, b, 0)
#define _mm512_unpackhi_epi8(a, b) emulated_unpack_epi8(a, b, 8)
#define _mm256_maskz_loadu_epi16 emulated_maskz_loadu_epi16
#define _mm256_mask_storeu_epi16 emulated_mask_storeu_epi16
#define _mm512_abs_epi8 emulated_abs_epi8
#define _mm512_abs_ps emulated_abs_ps
#define _mm512_add_epi32 emulated_add_epi32
#define _mm512_and_si512 emulated_and_si512
#define _mm512_or_si512 emulated_or_si512
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtepi8_epi16 emulated_cvtepi8_epi16
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtneps_pbh emulated_cvtneps_pbh
#define _mm512_dpbf16_ps emulated_dpbf16_ps
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_loadu_ps emulated_loadu_ps
#define _mm512_loadu_si512 emulated_loadu_si512
#define _mm512_mask_mov_ps emulated_mask_mov_ps
#define _mm512_mask_or_epi32 emulated_mask_or_epi32
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm512_max_ps emulated_max_ps
#define _mm512_min_ps emulated_min_ps
#define _mm512_permutex2var_epi8 emulated_permutex2var_epi8
#define _mm512_permutexvar_epi8 emulated_permutexvar_epi8
#define _mm512_reduce_add_ps emulated_reduce_add_ps
#define _mm512_reduce_max_ps emulated_reduce_max_ps
#define _mm512_scalef_ps emulated_scalef_ps
#define _mm512_set1_epi32 emulated_set1_epi32
#define _mm512_set1_epi8 emulated_set1_epi8
#define _mm512_set1_ps emulated_set1_ps
#define _mm512_set_epi64 emulated_set_epi64
#define _mm512_slli_epi32 emulated_slli_epi32
#define _mm512_srai_epi32 emulated_srai_epi32
#define _mm512_srli_epi32 emulated_srli_epi32
#define _mm512_storeu_ps emulated_storeu_ps
#define _mm512_storeu_si512 emulated_storeu_si512
#define _mm512_ternarylogic_epi32 emulated_ternarylogic_epi32
