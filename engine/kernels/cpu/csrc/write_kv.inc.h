// Keys and values into the paged cache. struct cl_write_kv draws it.

#if CACHE == CL_CACHE_OWN

// One head as floats: normalised by `weight`, then rotated by the angles of one token (each if there).
static void NAME(prepare_head)(const struct cl_write_kv *op, const elem *x, const float *weight, const elem *cos,
                               const elem *sin, float *out) {
    const int64_t dim = op->key_dim, half = op->rotary_dim / 2;
    vf squares = vf_set(0.0f);
    for (int64_t d = 0; d < dim; d += LANES) {
        const int64_t n = min_(LANES, dim - d);
        vf y = NAME(load_n)(x + d, n);
        squares = vf_fma(y, y, squares);
        vf_store_n(out + d, y, n);
    }
    if (weight) {
        const vf factor = vf_set(1.0f / sqrtf(vf_sum(squares) / (float)dim + op->eps));
        for (int64_t d = 0; d < dim; d += LANES) {
            const int64_t n = min_(LANES, dim - d);
            vf_store_n(out + d, vf_load_n(out + d, n) * factor * vf_load_n(weight + d, n), n);
        }
    }
    if (!cos) return;
    for (int64_t i = 0; op->rotates_pairs && i < half; i++) {
        const float a = out[2 * i], b = out[2 * i + 1], c = NAME(get)(cos[i]), s = NAME(get)(sin[i]);
        out[2 * i] = a * c - b * s;
        out[2 * i + 1] = b * c + a * s;
    }
    for (int64_t d = 0; !op->rotates_pairs && d < half; d += LANES) {
        const int64_t n = min_(LANES, half - d);
        vf a = vf_load_n(out + d, n), b = vf_load_n(out + half + d, n);
        vf rotated_a = a * NAME(load_n)(cos + d, n) - b * NAME(load_n)(sin + d, n);
        vf rotated_b = b * NAME(load_n)(cos + half + d, n) + a * NAME(load_n)(sin + half + d, n);
        vf_store_n(out + d, rotated_a, n);
        vf_store_n(out + half + d, rotated_b, n);
    }
}

#endif

#if CACHE == CL_CACHE_INT8

// `n` floats to int8s, a whole vector at a time (behind them may be anything); returns the scale.
static float CACHED(quantize)(const float *x, int64_t n, int8_t *out) {
    float rounded[LANES];
    vf largest = vf_set(1e-30f), zero = vf_set(0.0f); // not so small that its inverse is infinite
    for (int64_t d = 0; d < n; d += LANES) {
        vf y = vf_load_n(x + d, min_(LANES, n - d));
        largest = vf_max(largest, vf_abs(y));
        zero = zero + (y - y); // NaN as soon as one is not finite
    }
    const float top = vf_top(largest), not_finite = vf_sum(zero);
    if (not_finite != 0.0f) {
        memset(out, 0, (size_t)n);
        return NAN;
    }
    const vf inverse = vf_set(127.0f / top);
    for (int64_t d = 0; d < n; d += LANES) {
        vf_store(rounded, vf_round(vf_load_n(x + d, min_(LANES, n - d)) * inverse));
        for (int64_t i = 0; i < LANES; i++) out[d + i] = (int8_t)rounded[i];
    }
    return top / 127.0f;
}

#endif

// A head's key, at `place` of its block.
INLINE void CACHED(put_key)(cached *keys, const float *key, int64_t key_dim, int64_t block_size, int64_t place) {
#if CACHE == CL_CACHE_INT8
    int8_t small[MAX_HEAD_DIM + 16];
    const float scale = CACHED(quantize)(key, key_dim, small);
    for (int64_t d = 0; d < key_dim; d++) keys[d * block_size + place] = small[d];
    memcpy(keys + key_dim * block_size + place * SCALE_BYTES, &scale, SCALE_BYTES);
#elif CACHE == CL_CACHE_BF16
    for (int64_t d = 0; d < key_dim; d++) keys[d * block_size + place] = bf16_round(key[d]);
#else
    for (int64_t d = 0; d < (key_dim + PK - 1) / PK * PK; d++)
        keys[(d / PK * block_size + place) * PK + d % PK] = NAME(put)(key[d]);
#endif
}

// A head's value, likewise.
INLINE void CACHED(put_value)(cached *values, const elem *value, int64_t value_dim, int64_t block_size, int64_t place) {
    const int64_t width = (value_dim + 15) / 16 * 16;
#if CACHE == CL_CACHE_INT8
    float wide[MAX_HEAD_DIM];
    int8_t small[MAX_HEAD_DIM + 16];
    for (int64_t d = 0; d < value_dim; d += LANES) {
        const int64_t n = min_(LANES, value_dim - d);
        vf_store_n(wide + d, NAME(load_n)(value + d, n), n);
    }
    const float scale = CACHED(quantize)(wide, value_dim, small);
    memcpy(values + place * width, small, (size_t)value_dim);
    memcpy(values + width * block_size + place * SCALE_BYTES, &scale, SCALE_BYTES);
#elif CACHE == CL_CACHE_BF16
    (void)block_size;
    for (int64_t d = 0; d < value_dim; d += LANES) {
        const int64_t n = min_(LANES, value_dim - d);
        vf x = NAME(load_n)(value + d, n);
        n < LANES ? bf16_store_n(values + place * width + d, x, n) : bf16_store(values + place * width + d, x);
    }
#else
    (void)block_size;
    for (int64_t d = 0; d < value_dim; d++) values[(place / PK * width + d) * PK + place % PK] = value[d];
#endif
}

static void CACHED(write_kv)(const void *args, int thread, int num_threads) {
    const struct cl_write_kv *op = args;
    const int64_t block_size = op->block_size, keys_size = CACHED(keys_size)(op->key_dim, block_size);
    const int64_t values_size = CACHED(values_size)(op->value_dim, block_size);
    const elem *all_cos = op->cos ? *op->cos : NULL, *all_sin = op->cos ? *op->sin : NULL;
    const int64_t *positions = op->positions ? *op->positions : NULL;
    float head[MAX_HEAD_DIM + 1];
    int64_t first, last;
    cl_share(*op->num_rows, thread, num_threads, &first, &last);
    for (int64_t t = first; t < last; t++) {
        const int64_t angle = (positions ? positions[t] : t) * op->rotary_dim;
        const elem *cos = all_cos ? all_cos + angle : NULL, *sin = all_cos ? all_sin + angle : NULL;
        const int64_t slot = (*op->slots)[t], block = slot / block_size, place = slot % block_size;
        for (int64_t h = 0; op->q && h < op->num_heads; h++) {
            elem *q = (elem *)op->q + t * op->q_stride + h * op->key_dim;
            NAME(prepare_head)(op, q, op->q_weight, cos, sin, head);
            for (int64_t d = 0; d < op->key_dim; d += LANES) {
                const int64_t n = min_(LANES, op->key_dim - d);
                NAME(store_n)(q + d, vf_load_n(head + d, n), n);
            }
        }
        for (int64_t g = 0; g < op->num_kv_heads; g++) {
            const elem *k = (const elem *)op->k + t * op->k_stride + g * op->k_head_stride;
            const elem *v = (const elem *)op->v + t * op->v_stride + g * op->v_head_stride;
            NAME(prepare_head)(op, k, op->k_weight, cos, sin, head);
            head[op->key_dim] = 0.0f; // the other half of an odd last pair
            const int64_t at = block * op->num_kv_heads + g;
            CACHED(put_key)((cached *)op->k_cache + at * keys_size, head, op->key_dim, block_size, place);
            CACHED(put_value)((cached *)op->v_cache + at * values_size, v, op->value_dim, block_size, place);
        }
    }
}

