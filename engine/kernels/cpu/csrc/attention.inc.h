// Attention over the paged cache. struct cl_write_kv draws the cache.
//
// Attention's unit of work is a tile: up to TILE_QUERIES query heads (the heads that share a key head, of some tokens
// of one row) against the row's context. The context is passed in spans of SPAN tokens (softmax as it goes, rescaled
// from span to span) and ranges of RANGE tokens: each range starts afresh, and ranges are merged in order. A single
// token with a long context has its ranges spread over the threads and merged afterwards, by the same sums.
//
// Where there is no product of bfloat16s, queries and softmax weights are floats, and keys and values become floats in
// the register that they are loaded to (as in linear.inc.h).
//
// Spans and ranges lie at multiples of their size in the *sequence*, and a span in which a query sees nothing changes
// nothing of its sums. So a token's result depends on its own context alone, not on the tile it came in.

// Query heads of one row that are computed together, and where they are in their softmax. Query i is token i / heads
// and head i % heads of the tile.
struct CACHED(queries) {
    const struct cl_attention *op;
    const int64_t *table;   // the row's blocks
    int64_t queries, heads; // their number; heads of one token
    int64_t kv_head, first_head, first_token;
    int64_t position;                             // of the first token in its sequence
    operand q[TILE_QUERIES * MAX_HEAD_DIM];       // [queries][key_dim padded to packs]
    float scores[TILE_QUERIES * SPAN];            // [queries][SPAN]
    operand weights[TILE_QUERIES * SPAN];         // the same after softmax
    float top[TILE_QUERIES], total[TILE_QUERIES]; // of the current range: greatest score, sum of e^(score - top)
    float sums[TILE_QUERIES * MAX_HEAD_DIM];      // and of e^(score - top) * value, [queries][value_width]
};

INLINE int64_t CACHED(value_width)(const struct cl_attention *op) { return (op->value_dim + 15) / 16 * 16; }

// c[r][v] += x[r] * LANES of what is stored in the cache from `from` on, one vector after the other; OPERAND_PK of the
// STORED_PK that stand side by side, from `part` on. `rows` and `vectors` are constants.
INLINE void CACHED(add_products)(const int rows, const int vectors, const operand *x, int64_t x_stride,
                                 const cached *from, const int part, vf (*c)[4]) {
    operand_pack a[6], b[4];
    __asm__ volatile("" ::: "memory"); // loads stay where they are: earlier ones would need registers
    if (rows < vectors) {
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) a[r] = OPERAND(pack_set)(x + r * x_stride);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            b[0] = cached_load(from + v * LANES * STORED_PK, part);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) c[r][v] = OPERAND(dot)(c[r][v], b[0], a[r]);
        }
        return;
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) b[v] = cached_load(from + v * LANES * STORED_PK, part);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        a[0] = OPERAND(pack_set)(x + r * x_stride);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) c[r][v] = OPERAND(dot)(c[r][v], b[v], a[0]);
    }
}

// scores[r][...] = scores of `rows` queries with `vectors` * LANES tokens of one block
INLINE void CACHED(score)(const int rows, const int vectors, const operand *q, int64_t packs, const cached *keys,
                          int64_t block_size, const float *scales, float *scores, struct ahead *ahead) {
    vf c[6][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) c[r][v] = vf_set(0.0f);
    for (int64_t d = 0; d < packs; d++) {
        FETCH_AHEAD(ahead);
#pragma GCC unroll 2
        for (int part = 0; part < STORED_PK; part += OPERAND_PK)
            CACHED(add_products)(rows, vectors, q + d * STORED_PK + part, packs * STORED_PK,
                                 keys + d * block_size * STORED_PK, part, c);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vf score = c[r][v];
            if (HAS_SCALES) score = score * vf_load(scales + v * LANES);
            vf_store(scores + r * SPAN + v * LANES, score);
        }
}

// sums[r][...] += weights . values, for `vectors` * LANES dims and `num_tokens` tokens of one block
INLINE void CACHED(weigh)(const int rows, const int vectors, const operand *weights, const cached *values,
                          int64_t value_width, int64_t num_tokens, float *sums, struct ahead *ahead) {
    vf c[6][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) c[r][v] = vf_load(sums + r * value_width + v * LANES);
    for (int64_t t = 0; t + STORED_PK <= num_tokens; t += STORED_PK) {
        FETCH_AHEAD(ahead);
#pragma GCC unroll 2
        for (int part = 0; part < STORED_PK; part += OPERAND_PK)
            CACHED(add_products)(rows, vectors, weights + t + part, SPAN, values + t * value_width, part, c);
    }
    if (num_tokens % STORED_PK) { // of the last pair only the first half was stored yet
        const int64_t t = num_tokens - 1;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            operand_pack a = OPERAND(pack_set)(weights + r * SPAN + t);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                operand_pack b = cached_load(values + t * value_width + v * LANES * STORED_PK, 0);
                c[r][v] = OPERAND(dot)(c[r][v], OPERAND(pack_first)(b), a);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) vf_store(sums + r * value_width + v * LANES, c[r][v]);
}

// Rows that are multiplied at once, and vectors with them: as many as leave registers for their sums. Where there are
// fewer numbers than that, FEWEST vectors.
#if CL_WIDTH == 512
#define SCORE_VECTORS(rows) 2
#define WEIGH_ROWS 4
#define WEIGH_VECTORS(rows) 4
#define FEWEST 1
#else
#define SCORE_VECTORS(rows) ((rows) <= 3 ? 4 : 2)
#define WEIGH_ROWS 6
#define WEIGH_VECTORS(rows) ((rows) <= 3 ? 4 : 2)
#define FEWEST 2
#endif
enum { CACHED(most_rows) = 6 };

// Functions of their own, so that what is around them takes no registers from their loops.
typedef void CACHED(score_of)(const operand *q, int64_t packs, const cached *keys, int64_t block_size,
                              const float *scales, float *scores, struct ahead *ahead);
typedef void CACHED(weigh_of)(const operand *weights, const cached *values, int64_t value_width, int64_t num_tokens,
                              float *sums, struct ahead *ahead);
#define SCORE(rows, kind, vectors)                                                                                     \
    static __attribute__((noinline)) void CACHED(score_##rows##_##kind)(                                               \
        const operand *q, int64_t packs, const cached *keys, int64_t block_size, const float *scales, float *scores,   \
        struct ahead *ahead) {                                                                                         \
        CACHED(score)(rows, vectors, q, packs, keys, block_size, scales, scores, ahead);                               \
    }
#define WEIGH(rows, kind, vectors)                                                                                     \
    static __attribute__((noinline)) void CACHED(weigh_##rows##_##kind)(                                               \
        const operand *weights, const cached *values, int64_t value_width, int64_t num_tokens, float *sums,            \
        struct ahead *ahead) {                                                                                         \
        CACHED(weigh)(rows, vectors, weights, values, value_width, num_tokens, sums, ahead);                           \
    }
#define BOTH_KINDS(rows)                                                                                               \
    SCORE(rows, few, FEWEST)                                                                                           \
    SCORE(rows, many, SCORE_VECTORS(rows)) WEIGH(rows, few, FEWEST) WEIGH(rows, many, WEIGH_VECTORS(rows))
BOTH_KINDS(1) BOTH_KINDS(2) BOTH_KINDS(3) BOTH_KINDS(4) BOTH_KINDS(5) BOTH_KINDS(6)
#define NAMES(function, rows) {CACHED(function##_##rows##_few), CACHED(function##_##rows##_many)}
#define ALL_NAMES(function)                                                                                            \
    {NAMES(function, 1), NAMES(function, 2), NAMES(function, 3),                                                       \
     NAMES(function, 4), NAMES(function, 5), NAMES(function, 6)}
static CACHED(score_of) *const CACHED(score_kinds)[CACHED(most_rows)][2] = ALL_NAMES(score);
static CACHED(weigh_of) *const CACHED(weigh_kinds)[CACHED(most_rows)][2] = ALL_NAMES(weigh);
#undef SCORE
#undef WEIGH
#undef BOTH_KINDS
#undef NAMES
#undef ALL_NAMES

// A head of the block that a token lies in, and in it the token's keys or values, or their scales. Those of the tokens
// after it in the block come next.
INLINE const cached *CACHED(key_head)(const struct CACHED(queries) *tile, int64_t kv_head, int64_t token) {
    const struct cl_attention *op = tile->op;
    const int64_t head = tile->table[token / op->rows->block_size] * op->num_kv_heads + kv_head;
    return (const cached *)op->k_cache + head * CACHED(keys_size)(op->key_dim, op->rows->block_size);
}

INLINE const cached *CACHED(value_head)(const struct CACHED(queries) *tile, int64_t token) {
    const struct cl_attention *op = tile->op;
    const int64_t head = tile->table[token / op->rows->block_size] * op->num_kv_heads + tile->kv_head;
    return (const cached *)op->v_cache + head * CACHED(values_size)(op->value_dim, op->rows->block_size);
}

INLINE const cached *CACHED(keys_at)(const struct CACHED(queries) *tile, int64_t kv_head, int64_t token) {
    return CACHED(key_head)(tile, kv_head, token) + token % tile->op->rows->block_size * STORED_PK;
}

INLINE const cached *CACHED(values_at)(const struct CACHED(queries) *tile, int64_t token) {
    return CACHED(value_head)(tile, token) + token % tile->op->rows->block_size * CACHED(value_width)(tile->op);
}

#if HAS_SCALES
INLINE const float *CACHED(key_scales_at)(const struct CACHED(queries) *tile, int64_t token) {
    const int64_t block_size = tile->op->rows->block_size;
    const cached *head = CACHED(key_head)(tile, tile->kv_head, token);
    return (const float *)(head + tile->op->key_dim * block_size) + token % block_size;
}

INLINE const float *CACHED(value_scales_at)(const struct CACHED(queries) *tile, int64_t token) {
    const int64_t block_size = tile->op->rows->block_size;
    const cached *head = CACHED(value_head)(tile, token);
    return (const float *)(head + CACHED(value_width)(tile->op) * block_size) + token % block_size;
}

// Weights of `num_tokens` tokens of one block, times the scales of their values. They are whole vectors, since spans
// and blocks are; what is behind the last token is not read.
INLINE void CACHED(scale_weights)(struct CACHED(queries) *tile, int64_t place, const float *scales,
                                  int64_t num_tokens) {
    for (int64_t i = 0; i < tile->queries; i++) {
        float *weights = tile->weights + i * SPAN + place;
        for (int64_t t = 0; t < num_tokens; t += LANES)
            vf_store(weights + t, vf_load(weights + t) * vf_load(scales + t));
    }
}
#endif

// The keys that are read after those at `token`: of the next span; behind the last one those of the next head, which
// is likely to be this thread's next piece of work.
INLINE struct ahead CACHED(keys_ahead)(const struct CACHED(queries) *tile, int64_t token, int64_t last,
                                       int64_t num_tokens) {
    const struct cl_attention *op = tile->op;
    struct ahead ahead = {NULL, NULL, 0};
    if (token + SPAN < last)
        ahead.next = (const char *)CACHED(keys_at)(tile, tile->kv_head, token + SPAN);
    else if (tile->kv_head + 1 < op->num_kv_heads)
        ahead.next = (const char *)CACHED(keys_at)(tile, tile->kv_head + 1, token % SPAN);
    const int64_t token_bytes = op->key_dim * (int64_t)sizeof(cached) + (HAS_SCALES ? SCALE_BYTES : 0);
    const int64_t block_bytes = num_tokens * token_bytes, steps = (num_tokens + STORED_PK - 1) / STORED_PK;
    if (ahead.next) {
        ahead.lines = (block_bytes / 64 + steps - 1) / steps;
        ahead.end = ahead.next + block_bytes;
    }
    return ahead;
}

// Scores of the tokens `span` ... `last` - 1 of the sequence, within one span.
static void CACHED(score_span)(struct CACHED(queries) *tile, int64_t span, int64_t last) {
    const struct cl_attention *op = tile->op;
    const int64_t block_size = op->rows->block_size, packs = (op->key_dim + STORED_PK - 1) / STORED_PK;
    const int64_t step = block_size % 32 ? 16 : 32;
    for (int64_t t = span; t < last; t += step) {
        const cached *keys = CACHED(keys_at)(tile, tile->kv_head, t);
        const float *scales = NULL;
        int64_t value_bytes = step * CACHED(value_width)(op) * (int64_t)sizeof(cached);
#if HAS_SCALES
        scales = CACHED(key_scales_at)(tile, t);
        if ((t + step) % block_size == 0) value_bytes += SCALE_BYTES * block_size; // which come next
#endif
        struct ahead ahead = {(const char *)CACHED(values_at)(tile, t), NULL, 0};
        ahead.end = ahead.next + value_bytes;
        for (int64_t r = 0, rows; r < tile->queries; r += rows) {
            rows = min_(CACHED(most_rows), tile->queries - r);
            const bool many = step >= SCORE_VECTORS(rows) * LANES;
            const int64_t tokens = (many ? SCORE_VECTORS(rows) : FEWEST) * LANES, packs_left = step / tokens * packs;
            ahead.lines = r ? 0 : ((ahead.end - ahead.next) / 64 + packs_left - 1) / packs_left;
            for (int64_t u = 0; u < step; u += tokens)
                CACHED(score_kinds)[rows - 1][many](
                    tile->q + r * packs * STORED_PK, packs, keys + u * STORED_PK, block_size,
                    HAS_SCALES ? scales + u : NULL, tile->scores + r * SPAN + (t - span + u), &ahead);
        }
    }
}

// Scores to weights, and the sums so far rescaled to the new greatest score.
static void CACHED(softmax_span)(struct CACHED(queries) *tile, int64_t span, int64_t last) {
    const struct cl_attention *op = tile->op;
    const int64_t width = (last - span + LANES - 1) / LANES * LANES, value_width = CACHED(value_width)(op);
    for (int64_t i = 0; i < tile->queries; i++) {
        const int64_t position = tile->position + i / tile->heads;
        const int64_t seen_from = op->window ? position + 1 - op->window - span : 0, seen_to = position + 1 - span;
        float *scores = tile->scores + i * SPAN;
        operand *weights = tile->weights + i * SPAN;
        vf top = vf_set(tile->top[i]);
        for (int64_t t = 0; t < width; t += LANES) {
            vf s = vf_load(scores + t) * vf_set(op->scale);
            if (op->softcap != 0.0f) s = vf_set(op->softcap) * vf_tanh(s / vf_set(op->softcap));
            if (t < seen_from || t + LANES > seen_to) s = vf_keep(s, seen_from - t, seen_to - t, -INFINITY);
            vf_store(scores + t, s);
            top = vf_max(top, s);
        }
        const float new_top = vf_top(top);
        vf total = vf_set(0.0f);
        for (int64_t t = 0; t < width; t += LANES) {
            vf w = vf_exp(vf_load(scores + t) - vf_set(new_top));
            OPERAND(store)(weights + t, w);
            total = total + w;
        }
        // e^x for one x, by the same polynomial
        float factors[LANES];
        vf_store(factors, vf_exp(vf_set(tile->top[i] - new_top)));
        tile->total[i] = tile->total[i] * factors[0] + vf_sum(total);
        tile->top[i] = new_top;
        if (factors[0] != 1.0f)
            for (int64_t d = 0; d < value_width; d += LANES) {
                float *sum = tile->sums + i * value_width + d;
                vf_store(sum, vf_load(sum) * vf_set(factors[0]));
            }
    }
}

static void CACHED(weigh_span)(struct CACHED(queries) *tile, int64_t span, int64_t last, int64_t last_of_all) {
    const struct cl_attention *op = tile->op;
    const int64_t block_size = op->rows->block_size, value_width = CACHED(value_width)(op);
    for (int64_t t = span, next; t < last; t = next) {
        next = min_(last, (t / block_size + 1) * block_size);
        const cached *values = CACHED(values_at)(tile, t);
#if HAS_SCALES
        CACHED(scale_weights)(tile, t - span, CACHED(value_scales_at)(tile, t), next - t);
#endif
        struct ahead ahead = CACHED(keys_ahead)(tile, t, last_of_all, next - t);
        for (int64_t r = 0, rows; r < tile->queries; r += rows) {
            rows = min_(WEIGH_ROWS, tile->queries - r);
            for (int64_t d = 0; d < value_width;) {
                const bool many = value_width - d >= WEIGH_VECTORS(rows) * LANES;
                CACHED(weigh_kinds)[rows - 1][many](tile->weights + r * SPAN + (t - span), values + d * STORED_PK,
                                                    value_width, next - t, tile->sums + r * value_width + d, &ahead);
                ahead.lines = 0;
                d += (many ? WEIGH_VECTORS(rows) : FEWEST) * LANES;
            }
        }
    }
}

// Softmax over the tokens from `first` on, to before `last`: a multiple of RANGE to the next one at most.
static void CACHED(attend_range)(struct CACHED(queries) *tile, int64_t first, int64_t last) {
    const struct cl_attention *op = tile->op;
    memset(tile->sums, 0, (size_t)(tile->queries * CACHED(value_width)(op)) * sizeof(float));
    for (int64_t i = 0; i < tile->queries; i++) tile->top[i] = NOTHING, tile->total[i] = 0.0f;
    if (op->window) // whole spans that no query sees
        first = max_(first, (tile->position + 1 - op->window) / SPAN * SPAN);
    for (int64_t span = first; span < last; span += SPAN) {
        const int64_t end = min_(span + SPAN, last);
        CACHED(score_span)(tile, span, end);
        CACHED(softmax_span)(tile, span, end);
        CACHED(weigh_span)(tile, span, end, last);
    }
}

// A range's sums into those of the ranges before it.
INLINE void CACHED(merge)(float *top, float *total, float *sums, float range_top, float range_total,
                          const float *range_sums, int64_t value_width) {
    const float new_top = *top > range_top ? *top : range_top;
    float a[LANES], b[LANES];
    vf_store(a, vf_exp(vf_set(*top - new_top)));
    vf_store(b, vf_exp(vf_set(range_top - new_top)));
    *top = new_top;
    *total = *total * a[0] + range_total * b[0];
    for (int64_t d = 0; d < value_width; d += LANES)
        vf_store(sums + d, vf_load(sums + d) * vf_set(a[0]) + vf_load(range_sums + d) * vf_set(b[0]));
}

// Before the first range: nothing, or the sink.
INLINE void CACHED(begin_merge)(const struct cl_attention *op, int64_t head, float *top, float *total, float *sums) {
    memset(sums, 0, (size_t)CACHED(value_width)(op) * sizeof(float));
    *top = op->sinks ? op->sinks[head] : NOTHING;
    *total = op->sinks ? 1.0f : 0.0f;
}

INLINE void CACHED(put_out)(const struct cl_attention *op, int64_t token, int64_t head, float total,
                            const float *sums) {
    elem *out = (elem *)op->out + token * op->out_stride + head * op->value_dim;
    const vf inverse = vf_set(1.0f / total);
    for (int64_t d = 0; d < op->value_dim; d += LANES) {
        const int64_t n = min_(LANES, op->value_dim - d);
        NAME(store_n)(out + d, vf_load_n(sums + d, n) * inverse, n);
    }
}

static void CACHED(load_queries)(struct CACHED(queries) *tile) {
    const struct cl_attention *op = tile->op;
    const int64_t width = (op->key_dim + STORED_PK - 1) / STORED_PK * STORED_PK;
    for (int64_t i = 0; i < tile->queries; i++) {
        const elem *from = (const elem *)op->q + (tile->first_token + i / tile->heads) * op->q_stride +
                           (tile->first_head + i % tile->heads) * op->q_head_stride;
        operand *to = tile->q + i * width;
        to[width - 1] = 0;
#if CACHE == CL_CACHE_OWN && ROW_IS_ELEM
        memcpy(to, from, (size_t)op->key_dim * sizeof(elem));
#else
        for (int64_t d = 0; d < op->key_dim; d += LANES) {
            const int64_t n = min_(LANES, op->key_dim - d);
            vf_store_n(to + d, NAME(load_n)(from + d, n), n);
        }
#endif
    }
}

// All of a tile's context, one range after the other.
static void CACHED(attend_tile)(struct CACHED(queries) *tile) {
    const struct cl_attention *op = tile->op;
    const int64_t value_width = CACHED(value_width)(op);
    const int64_t last = tile->position + (tile->queries + tile->heads - 1) / tile->heads;
    float top[TILE_QUERIES], total[TILE_QUERIES], sums[TILE_QUERIES * MAX_HEAD_DIM];
    for (int64_t i = 0; i < tile->queries; i++)
        CACHED(begin_merge)(op, tile->first_head + i % tile->heads, top + i, total + i, sums + i * value_width);
    int64_t first = op->window ? max_(0, tile->position + 1 - op->window) / RANGE * RANGE : 0;
    for (; first < last; first += RANGE) {
        CACHED(attend_range)(tile, first, min_(first + RANGE, last));
        for (int64_t i = 0; i < tile->queries; i++)
            CACHED(merge)(top + i, total + i, sums + i * value_width, tile->top[i], tile->total[i],
                        tile->sums + i * value_width, value_width);
    }
    for (int64_t i = 0; i < tile->queries; i++)
        CACHED(put_out)(op, tile->first_token + i / tile->heads, tile->first_head + i % tile->heads, total[i],
                      sums + i * value_width);
}

// A row of one token whose context is longer than a range: its ranges are pieces of work of their own.
INLINE int64_t CACHED(split_ranges)(const struct cl_rows *rows, int64_t row) {
    const int64_t ranges = (rows->context_lens[row] + RANGE - 1) / RANGE;
    return rows->query_starts[row + 1] - rows->query_starts[row] == 1 && ranges > 1 ? ranges : 0;
}

// One range of such a row: [heads of a group][value_width + 2] floats of the workspace, by range, then head.
static void CACHED(attend_split)(struct CACHED(queries) *tile, int64_t range, float *partial) {
    const int64_t value_width = CACHED(value_width)(tile->op);
    CACHED(attend_range)(tile, range * RANGE, min_((range + 1) * RANGE, tile->position + 1));
    for (int64_t i = 0; i < tile->queries; i++) {
        float *to = partial + (tile->first_head + i) * (value_width + 2);
        to[0] = tile->top[i], to[1] = tile->total[i];
        memcpy(to + 2, tile->sums + i * value_width, (size_t)value_width * sizeof(float));
    }
}

static void CACHED(merge_splits)(const struct cl_attention *op, int thread, int num_threads) {
    const int64_t value_width = CACHED(value_width)(op), record = value_width + 2;
    const struct cl_rows *rows = op->rows;
    const float *partial = *op->workspace;
    float top, total, sums[MAX_HEAD_DIM];
    for (int64_t row = 0, turn = 0; row < rows->num_rows; row++) {
        const int64_t ranges = CACHED(split_ranges)(rows, row);
        for (int64_t head = 0; ranges && head < op->num_heads; head++, turn++) {
            if (turn % num_threads != thread) continue;
            CACHED(begin_merge)(op, head, &top, &total, sums);
            for (int64_t range = 0; range < ranges; range++) {
                const float *from = partial + (range * op->num_heads + head) * record;
                CACHED(merge)(&top, &total, sums, from[0], from[1], from + 2, value_width);
            }
            CACHED(put_out)(op, rows->query_starts[row], head, total, sums);
        }
        partial += ranges * op->num_heads * record;
    }
}

static void CACHED(attention)(const void *args, int thread, int num_threads) {
    const struct cl_attention *op = args;
    const struct cl_rows *rows = op->rows;
    const int64_t group = op->num_heads / op->num_kv_heads, heads = min_(group, TILE_QUERIES);
    const int64_t head_parts = (group + heads - 1) / heads, tile_tokens = max_(1, TILE_QUERIES / group);
    const int64_t record = CACHED(value_width)(op) + 2;
    struct CACHED(queries) tile;
    tile.op = op;
    // Pieces of work are numbered over rows, their tiles or ranges, key heads and parts of a group; threads draw
    // tickets.
    int64_t ticket = __atomic_fetch_add(op->ticket, 1, __ATOMIC_RELAXED), passed = 0, splits = 0;
    for (int64_t row = 0; row < rows->num_rows; row++) {
        const int64_t first_token = rows->query_starts[row], tokens = rows->query_starts[row + 1] - first_token;
        const int64_t ranges = CACHED(split_ranges)(rows, row);
        const int64_t tiles = ranges ? ranges : (tokens + tile_tokens - 1) / tile_tokens;
        const int64_t pieces = tiles * op->num_kv_heads * head_parts;
        for (; ticket < passed + pieces; ticket = __atomic_fetch_add(op->ticket, 1, __ATOMIC_RELAXED)) {
            int64_t piece = ticket - passed;
            const int64_t part = piece % head_parts;
            tile.kv_head = piece / head_parts % op->num_kv_heads;
            piece = piece / head_parts / op->num_kv_heads;
            const int64_t start = ranges ? 0 : piece * tile_tokens;
            tile.table = rows->block_tables + row * rows->table_stride;
            tile.heads = min_(heads, group - part * heads);
            tile.first_head = tile.kv_head * group + part * heads;
            tile.first_token = first_token + start;
            tile.position = rows->context_lens[row] - tokens + start;
            tile.queries = min_(tile_tokens, tokens - start) * tile.heads;
            CACHED(load_queries)(&tile);
            if (ranges)
                CACHED(attend_split)(&tile, piece, *op->workspace + (splits + piece) * op->num_heads * record);
            else
                CACHED(attend_tile)(&tile);
        }
        passed += pieces;
        splits += ranges;
    }
    // Who drew the very last ticket puts the counter back: all others are done drawing.
    if (ticket == passed + num_threads - 1) __atomic_store_n(op->ticket, 0, __ATOMIC_RELAXED);
    if (splits) {
        cl_barrier();
        CACHED(merge_splits)(op, thread, num_threads);
    }
}

#undef SCORE_VECTORS
#undef WEIGH_ROWS
#undef WEIGH_VECTORS
#undef FEWEST
