// Keys and values into the paged cache, and attention over it. struct cl_write_kv draws the cache.
//
// Attention's unit of work is a tile: up to TILE_QUERIES query heads (the heads that share a key head, of some tokens
// of one row) against the row's context. The context is passed in spans of SPAN tokens (softmax as it goes, rescaled
// from span to span) and ranges of RANGE tokens: each range starts afresh, and ranges are merged in order. A single
// token with a long context has its ranges spread over the threads and merged afterwards, by the same sums.
//
// Spans and ranges lie at multiples of their size in the *sequence*, and a span in which a query sees nothing changes
// nothing of its sums. So a token's result depends on its own context alone, not on the tile it came in.

#ifndef CL_ATTENTION_SIZES
#define CL_ATTENTION_SIZES
enum { TILE_QUERIES = 32, SPAN = 128, RANGE = 512, MAX_HEAD_DIM = 512 };
#define NOTHING -1e30f // a maximum below all scores, yet finite
#endif

// ---- storing

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

static void NAME(write_kv)(const void *args, int thread, int num_threads) {
    const struct cl_write_kv *op = args;
    const int64_t block_size = op->block_size, key_packs = (op->key_dim + PK - 1) / PK;
    const int64_t value_width = (op->value_dim + 15) / 16 * 16;
    const elem *all_cos = op->cos ? *op->cos : NULL, *all_sin = op->cos ? *op->sin : NULL;
    float head[MAX_HEAD_DIM + 1];
    int64_t first, last;
    cl_share(*op->num_rows, thread, num_threads, &first, &last);
    for (int64_t t = first; t < last; t++) {
        const elem *cos = all_cos ? all_cos + t * op->rotary_dim : NULL;
        const elem *sin = all_cos ? all_sin + t * op->rotary_dim : NULL;
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
            elem *keys = (elem *)op->k_cache + ((block * op->num_kv_heads + g) * key_packs * block_size + place) * PK;
            elem *values = (elem *)op->v_cache + (block * op->num_kv_heads + g) * block_size * value_width +
                           place / PK * value_width * PK + place % PK;
            NAME(prepare_head)(op, k, op->k_weight, cos, sin, head);
            head[op->key_dim] = 0.0f; // the other half of an odd last pair
            for (int64_t d = 0; d < key_packs * PK; d++) keys[d / PK * block_size * PK + d % PK] = NAME(put)(head[d]);
            for (int64_t d = 0; d < op->value_dim; d++) values[d * PK] = v[d];
        }
    }
}

// ---- attending

// Query heads of one row that are computed together, and where they are in their softmax. Query i is token i / heads
// and head i % heads of the tile.
struct NAME(queries) {
    const struct cl_attention *op;
    const int64_t *table;   // the row's blocks
    int64_t queries, heads; // their number; heads of one token
    int64_t kv_head, first_head, first_token;
    int64_t position;                             // of the first token in its sequence
    elem q[TILE_QUERIES * MAX_HEAD_DIM];          // [queries][key_dim padded to pairs]
    float scores[TILE_QUERIES * SPAN];            // [queries][SPAN]
    elem weights[TILE_QUERIES * SPAN];            // the same after softmax
    float top[TILE_QUERIES], total[TILE_QUERIES]; // of the current range: greatest score, sum of e^(score - top)
    float sums[TILE_QUERIES * MAX_HEAD_DIM];      // and of e^(score - top) * value, [queries][value_width]
};

INLINE int64_t NAME(value_width)(const struct cl_attention *op) { return (op->value_dim + 15) / 16 * 16; }

// c[r][...] = scores of `rows` queries with `vectors` * LANES tokens of one block
INLINE void NAME(score)(const int rows, const int vectors, const elem *q, int64_t packs, const elem *keys,
                        int64_t block_size, float *scores, struct ahead ahead) {
    vf c[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) c[r][v] = vf_set(0.0f);
    for (int64_t d = 0; d < packs; d++) {
        PACK k[2];
        fetch_ahead(&ahead);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) k[v] = NAME(pack_load)(keys + (d * block_size + v * LANES) * PK);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            PACK a = NAME(pack_set)(q + (r * packs + d) * PK);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) c[r][v] = NAME(dot)(c[r][v], k[v], a);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) vf_store(scores + r * SPAN + v * LANES, c[r][v]);
}

// sums[r][...] += weights . values, for `vectors` * LANES dims and `num_tokens` tokens of one block
INLINE void NAME(weigh)(const int rows, const int vectors, const elem *weights, const elem *values, int64_t value_width,
                        int64_t num_tokens, float *sums, struct ahead ahead) {
    vf c[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) c[r][v] = vf_load(sums + r * value_width + v * LANES);
    for (int64_t t = 0; t < num_tokens; t += PK) {
        PACK b[4];
        fetch_ahead(&ahead);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) b[v] = NAME(pack_load)(values + t * value_width + v * LANES * PK);
        if (num_tokens - t < PK) // nothing was stored yet in the second half of this pair
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) b[v] = NAME(pack_first)(b[v]);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            PACK a = NAME(pack_set)(weights + r * SPAN + t);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) c[r][v] = NAME(dot)(c[r][v], b[v], a);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) vf_store(sums + r * value_width + v * LANES, c[r][v]);
}

// A token's keys or values, behind which lie those of the tokens after it in its block.
INLINE const elem *NAME(keys_at)(const struct NAME(queries) *tile, int64_t kv_head, int64_t token) {
    const struct cl_attention *op = tile->op;
    const int64_t block_size = op->rows->block_size, packs = (op->key_dim + PK - 1) / PK;
    const int64_t head = tile->table[token / block_size] * op->num_kv_heads + kv_head;
    return (const elem *)op->k_cache + (head * packs * block_size + token % block_size) * PK;
}

INLINE const elem *NAME(values_at)(const struct NAME(queries) *tile, int64_t token) {
    const struct cl_attention *op = tile->op;
    const int64_t block_size = op->rows->block_size;
    const int64_t head = tile->table[token / block_size] * op->num_kv_heads + tile->kv_head;
    return (const elem *)op->v_cache + (head * block_size + token % block_size) * NAME(value_width)(op);
}

// The keys that are read after those at `token`: of the next span; behind the last one those of the next head, which
// is likely to be this thread's next piece of work.
INLINE struct ahead NAME(keys_ahead)(const struct NAME(queries) *tile, int64_t token, int64_t last,
                                     int64_t num_tokens) {
    const struct cl_attention *op = tile->op;
    struct ahead ahead = {NULL, NULL, 0};
    if (token + SPAN < last)
        ahead.next = (const char *)NAME(keys_at)(tile, tile->kv_head, token + SPAN);
    else if (tile->kv_head + 1 < op->num_kv_heads)
        ahead.next = (const char *)NAME(keys_at)(tile, tile->kv_head + 1, token % SPAN);
    const int64_t block_bytes = num_tokens * op->key_dim * (int64_t)sizeof(elem), steps = (num_tokens + PK - 1) / PK;
    if (ahead.next) ahead.lines = (block_bytes / 64 + steps - 1) / steps;
    return ahead;
}

// Scores of the tokens `span` ... `last` - 1 of the sequence, within one span.
static void NAME(score_span)(struct NAME(queries) *tile, int64_t span, int64_t last) {
    const struct cl_attention *op = tile->op;
    const int64_t block_size = op->rows->block_size, packs = (op->key_dim + PK - 1) / PK;
    const bool wide = block_size % (2 * LANES) == 0;
    for (int64_t t = span, step = wide ? 2 * LANES : LANES; t < last; t += step) {
        const elem *keys = NAME(keys_at)(tile, tile->kv_head, t);
        struct ahead ahead = {(const char *)NAME(values_at)(tile, t), NULL, 0};
        ahead.lines = (step * NAME(value_width)(op) * (int64_t)sizeof(elem) / 64 + packs - 1) / packs;
        for (int64_t r = 0; r < tile->queries; r += 6) {
            const elem *q = tile->q + r * packs * PK;
            float *scores = tile->scores + r * SPAN + (t - span);
#define SCORE(n)                                                                                                       \
    case n:                                                                                                            \
        wide ? NAME(score)(n, 2, q, packs, keys, block_size, scores, ahead)                                            \
             : NAME(score)(n, 1, q, packs, keys, block_size, scores, ahead);                                           \
        break;
            switch (min_(6, tile->queries - r)) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) SCORE(5) SCORE(6) }
            ahead.lines = 0;
#undef SCORE
        }
    }
}

// Scores to weights, and the sums so far rescaled to the new greatest score.
static void NAME(softmax_span)(struct NAME(queries) *tile, int64_t span, int64_t last) {
    const struct cl_attention *op = tile->op;
    const int64_t width = (last - span + LANES - 1) / LANES * LANES, value_width = NAME(value_width)(op);
    for (int64_t i = 0; i < tile->queries; i++) {
        const int64_t position = tile->position + i / tile->heads;
        const int64_t seen_from = op->window ? position + 1 - op->window - span : 0, seen_to = position + 1 - span;
        float *scores = tile->scores + i * SPAN;
        elem *weights = tile->weights + i * SPAN;
        vf top = vf_set(tile->top[i]);
        for (int64_t t = 0; t < width; t += LANES) {
            vf s = vf_load(scores + t) * vf_set(op->scale);
            if (op->softcap != 0.0f) s = vf_set(op->softcap) * vf_tanh(s / vf_set(op->softcap));
            s = vf_keep(s, seen_from - t, seen_to - t, -INFINITY);
            vf_store(scores + t, s);
            top = vf_max(top, s);
        }
        const float new_top = vf_top(top);
        vf total = vf_set(0.0f);
        for (int64_t t = 0; t < width; t += LANES) {
            vf w = vf_exp(vf_load(scores + t) - vf_set(new_top));
            NAME(store)(weights + t, w);
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

static void NAME(weigh_span)(struct NAME(queries) *tile, int64_t span, int64_t last, int64_t last_of_all) {
    const struct cl_attention *op = tile->op;
    const int64_t block_size = op->rows->block_size, value_width = NAME(value_width)(op);
    for (int64_t t = span, next; t < last; t = next) {
        next = min_(last, (t / block_size + 1) * block_size);
        const elem *values = NAME(values_at)(tile, t);
        struct ahead ahead = NAME(keys_ahead)(tile, t, last_of_all, next - t);
        for (int64_t r = 0; r < tile->queries; r += 4)
            for (int64_t d = 0; d < value_width;) {
                const elem *weights = tile->weights + r * SPAN + (t - span);
                float *sums = tile->sums + r * value_width + d;
                // AVX2's 16 registers hold 4 x 2 sums
                const bool wide = CL_WIDTH == 512 && value_width - d >= 4 * LANES;
                const int vectors = CL_WIDTH == 256 ? 2 : wide ? 4 : 1;
#define WEIGH(n)                                                                                                       \
    case n:                                                                                                            \
        wide ? NAME(weigh)(n, 4, weights, values + d * PK, value_width, next - t, sums, ahead)                         \
             : NAME(weigh)(n, CL_WIDTH == 256 ? 2 : 1, weights, values + d * PK, value_width, next - t, sums, ahead);  \
        break;
                switch (min_(4, tile->queries - r)) { WEIGH(1) WEIGH(2) WEIGH(3) WEIGH(4) }
#undef WEIGH
                ahead.lines = 0;
                d += vectors * LANES;
            }
    }
}

// Softmax over the tokens from `first` on, to before `last`: a multiple of RANGE to the next one at most.
static void NAME(attend_range)(struct NAME(queries) *tile, int64_t first, int64_t last) {
    const struct cl_attention *op = tile->op;
    memset(tile->sums, 0, (size_t)(tile->queries * NAME(value_width)(op)) * sizeof(float));
    for (int64_t i = 0; i < tile->queries; i++) tile->top[i] = NOTHING, tile->total[i] = 0.0f;
    if (op->window) // whole spans that no query sees
        first = max_(first, (tile->position + 1 - op->window) / SPAN * SPAN);
    for (int64_t span = first; span < last; span += SPAN) {
        const int64_t end = min_(span + SPAN, last);
        NAME(score_span)(tile, span, end);
        NAME(softmax_span)(tile, span, end);
        NAME(weigh_span)(tile, span, end, last);
    }
}

// A range's sums into those of the ranges before it.
INLINE void NAME(merge)(float *top, float *total, float *sums, float range_top, float range_total,
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
INLINE void NAME(begin_merge)(const struct cl_attention *op, int64_t head, float *top, float *total, float *sums) {
    memset(sums, 0, (size_t)NAME(value_width)(op) * sizeof(float));
    *top = op->sinks ? op->sinks[head] : NOTHING;
    *total = op->sinks ? 1.0f : 0.0f;
}

INLINE void NAME(put_out)(const struct cl_attention *op, int64_t token, int64_t head, float total, const float *sums) {
    elem *out = (elem *)op->out + token * op->out_stride + head * op->value_dim;
    const vf inverse = vf_set(1.0f / total);
    for (int64_t d = 0; d < op->value_dim; d += LANES) {
        const int64_t n = min_(LANES, op->value_dim - d);
        NAME(store_n)(out + d, vf_load_n(sums + d, n) * inverse, n);
    }
}

static void NAME(load_queries)(struct NAME(queries) *tile) {
    const struct cl_attention *op = tile->op;
    const int64_t width = (op->key_dim + PK - 1) / PK * PK;
    for (int64_t i = 0; i < tile->queries; i++) {
        const elem *q = (const elem *)op->q + (tile->first_token + i / tile->heads) * op->q_stride +
                        (tile->first_head + i % tile->heads) * op->q_head_stride;
        memset(tile->q + (i + 1) * width - PK, 0, PK * sizeof(elem));
        memcpy(tile->q + i * width, q, (size_t)op->key_dim * sizeof(elem));
    }
}

// All of a tile's context, one range after the other.
static void NAME(attend_tile)(struct NAME(queries) *tile) {
    const struct cl_attention *op = tile->op;
    const int64_t value_width = NAME(value_width)(op);
    const int64_t last = tile->position + (tile->queries + tile->heads - 1) / tile->heads;
    float top[TILE_QUERIES], total[TILE_QUERIES], sums[TILE_QUERIES * MAX_HEAD_DIM];
    for (int64_t i = 0; i < tile->queries; i++)
        NAME(begin_merge)(op, tile->first_head + i % tile->heads, top + i, total + i, sums + i * value_width);
    int64_t first = op->window ? max_(0, tile->position + 1 - op->window) / RANGE * RANGE : 0;
    for (; first < last; first += RANGE) {
        NAME(attend_range)(tile, first, min_(first + RANGE, last));
        for (int64_t i = 0; i < tile->queries; i++)
            NAME(merge)(top + i, total + i, sums + i * value_width, tile->top[i], tile->total[i],
                        tile->sums + i * value_width, value_width);
    }
    for (int64_t i = 0; i < tile->queries; i++)
        NAME(put_out)(op, tile->first_token + i / tile->heads, tile->first_head + i % tile->heads, total[i],
                      sums + i * value_width);
}

// A row of one token whose context is longer than a range: its ranges are pieces of work of their own.
INLINE int64_t NAME(split_ranges)(const struct cl_rows *rows, int64_t row) {
    const int64_t ranges = (rows->context_lens[row] + RANGE - 1) / RANGE;
    return rows->query_starts[row + 1] - rows->query_starts[row] == 1 && ranges > 1 ? ranges : 0;
}

// One range of such a row: [heads of a group][value_width + 2] floats of the workspace, by range, then head.
static void NAME(attend_split)(struct NAME(queries) *tile, int64_t range, float *partial) {
    const int64_t value_width = NAME(value_width)(tile->op);
    NAME(attend_range)(tile, range * RANGE, min_((range + 1) * RANGE, tile->position + 1));
    for (int64_t i = 0; i < tile->queries; i++) {
        float *to = partial + (tile->first_head + i) * (value_width + 2);
        to[0] = tile->top[i], to[1] = tile->total[i];
        memcpy(to + 2, tile->sums + i * value_width, (size_t)value_width * sizeof(float));
    }
}

static void NAME(merge_splits)(const struct cl_attention *op, int thread, int num_threads) {
    const int64_t value_width = NAME(value_width)(op), record = value_width + 2;
    const struct cl_rows *rows = op->rows;
    const float *partial = *op->workspace;
    float top, total, sums[MAX_HEAD_DIM];
    for (int64_t row = 0, turn = 0; row < rows->num_rows; row++) {
        const int64_t ranges = NAME(split_ranges)(rows, row);
        for (int64_t head = 0; ranges && head < op->num_heads; head++, turn++) {
            if (turn % num_threads != thread) continue;
            NAME(begin_merge)(op, head, &top, &total, sums);
            for (int64_t range = 0; range < ranges; range++) {
                const float *from = partial + (range * op->num_heads + head) * record;
                NAME(merge)(&top, &total, sums, from[0], from[1], from + 2, value_width);
            }
            NAME(put_out)(op, rows->query_starts[row], head, total, sums);
        }
        partial += ranges * op->num_heads * record;
    }
}

static void NAME(attention)(const void *args, int thread, int num_threads) {
    const struct cl_attention *op = args;
    const struct cl_rows *rows = op->rows;
    const int64_t group = op->num_heads / op->num_kv_heads, heads = min_(group, TILE_QUERIES);
    const int64_t head_parts = (group + heads - 1) / heads, tile_tokens = max_(1, TILE_QUERIES / group);
    const int64_t record = NAME(value_width)(op) + 2;
    struct NAME(queries) tile;
    tile.op = op;
    // Pieces of work are numbered over rows, their tiles or ranges, key heads and parts of a group; threads draw
    // tickets.
    int64_t ticket = __atomic_fetch_add(op->ticket, 1, __ATOMIC_RELAXED), passed = 0, splits = 0;
    for (int64_t row = 0; row < rows->num_rows; row++) {
        const int64_t first_token = rows->query_starts[row], tokens = rows->query_starts[row + 1] - first_token;
        const int64_t ranges = NAME(split_ranges)(rows, row);
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
            NAME(load_queries)(&tile);
            if (ranges)
                NAME(attend_split)(&tile, piece, *op->workspace + (splits + piece) * op->num_heads * record);
            else
                NAME(attend_tile)(&tile);
        }
        passed += pieces;
        splits += ranges;
    }
    // Who drew the very last ticket puts the counter back: all others are done drawing.
    if (ticket == passed + num_threads - 1) __atomic_store_n(op->ticket, 0, __ATOMIC_RELAXED);
    if (splits) {
        cl_barrier();
        NAME(merge_splits)(op, thread, num_threads);
    }
}
