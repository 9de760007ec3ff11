// Packed linear layers: struct cl_linear says what is computed and how weights lie.
//
// A thread has a range of rows and a range of strips (`part_of`), so that each weight is read from memory once where
// rows are few. For a group of 4 strips (64 outputs) x 96 rows x a chunk of k's it runs tiles of registers; sums wait
// between chunks in `sums`, on the stack. A chunk of weights stays in a cache while all rows pass by, and the one that
// comes next is fetched meanwhile (`struct ahead`): so memory is read all the time, not only when a chunk begins.
//
// Without a product of bfloat16s both are multiplied as floats: weights become floats in the register that they are
// loaded to, which costs less than to load what was expanded before; rows, which are broadcast, are expanded chunk by
// chunk. int8 weights are expanded to bfloat16 chunk by chunk; without such a product not for few rows.

#define GROUP 64                     // outputs in a group
#define STRIP 16                     // outputs in a strip
#define SUM_ROWS 96                  // rows that share a chunk of weights; a multiple of TILE_ROWS
#define STRIP_BLOCK (16 * 16 * PK)   // elements of a strip's k block
#define GROUPS (ROW_IS_ELEM ? 1 : 4) // groups that a chunk of rows is multiplied with once it is expanded

// k's in a chunk, multiples of every k block. A chunk of weights as they are has 256 KiB, for the second-level cache.
// With 16 registers each weight serves few rows, and must come from the first-level cache: 32 KiB. What is expanded has
// 16 KiB, or for rows 48 KiB.
enum {
    NAME(direct_chunk) = (CL_WIDTH == 512 ? 4096 : 512) / (int)sizeof(elem),
    NAME(expanded_chunk) = 128
};
// FEW_ROWS, those of one tile, take each weight once. So their chunks may be long, and the next one is fetched in a
// steady stream.
#define FEW_ROWS 6
enum {
    NAME(direct_long_chunk) = 4096 / (int)sizeof(elem),
    NAME(expanded_long_chunk) = NAME(expanded_chunk) * SUM_ROWS / FEW_ROWS
};

#if defined(CL_AMX) && ELEM_BF16
#define WHOLE_BLOCKS 1 // a tile takes a whole block of k's
#include "amx.inc.h"
#else
#define WHOLE_BLOCKS 0
#define TILE_ROWS FEW_ROWS
// Strips of a tile: as many as leave registers for its sums. Fewer sums than 8 would wait for each other.
#define TILE_STRIPS(rows) (CL_WIDTH == 512 || (rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)

// ROW_PK of the PK k's of LANES outputs, from `part` on. `at`: their place in the packed weight.
INLINE row_pack NAME(weights)(const char *weight, int64_t at, const bool is_int8, const int part) {
#if ELEM_BF16 && ROW_IS_ELEM
    (void)is_int8; // expanded before
#else
    const int8_t *p = (const int8_t *)weight + at;
    if (is_int8) return PK == 1 ? int8_load(p) : part ? int8_odd(p) : int8_even(p);
#endif
    return NAME(row_load)((const elem *)weight + at, part);
}

enum { NAME(per_strip) = STRIP / LANES };
#define PER_STRIP NAME(per_strip)
// Strips whose weights are in registers at once. With 16 registers, loading a row's number again for the next strip is
// the lesser evil.
#define AT_ONCE (CL_WIDTH == 512 ? 4 : 1)

// ROW_PK k's of a tile, for some of its strips: vectors of sums from `first` on.
INLINE void NAME(tile_step)(const int rows, const int strips, const row_elem *x, int64_t x_stride, const char *weight,
                            int64_t at, const bool is_int8, const int part, vf (*c)[4 * PER_STRIP], const int first) {
    row_pack w[4 * PER_STRIP];
    __asm__ volatile("" ::: "memory"); // loads stay where they are: earlier ones would need registers
#pragma GCC unroll 8
    for (int v = 0; v < strips * PER_STRIP; v++)
        w[v] = NAME(weights)(weight, at + v / PER_STRIP * STRIP_BLOCK + v % PER_STRIP * LANES * PK, is_int8, part);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const row_pack a = ROW(pack_set)(x + r * x_stride);
#pragma GCC unroll 8
        for (int v = 0; v < strips * PER_STRIP; v++) c[r][first + v] = ROW(dot)(c[r][first + v], w[v], a);
    }
}

// sums[r][16 s ...] += x[r] . strip s, for `rows` <= TILE_ROWS and `strips` <= TILE_STRIPS, both constants.
INLINE void NAME(tile)(const int rows, const int strips, const row_elem *x, int64_t x_stride, const char *weight,
                       int64_t block_bytes, const bool is_int8, int64_t num_k, bool is_first, float *sums,
                       struct ahead *ahead) {
    vf c[TILE_ROWS][4 * PER_STRIP];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < strips * PER_STRIP; v++)
            c[r][v] = is_first ? vf_set(0.0f) : vf_load(sums + r * GROUP + v * LANES);
    for (int64_t k = 0; k < num_k; k += 16 * PK, weight += block_bytes) {
        const int64_t steps = min_(16, (num_k - k) / PK);
        for (int64_t i = 0; i < steps; i++) {
            fetch_ahead(ahead);
#pragma GCC unroll 2
            for (int part = 0; part < PK; part += ROW_PK)
#pragma GCC unroll 4
                for (int s = 0; s < strips; s += AT_ONCE)
                    NAME(tile_step)(rows, strips - s < AT_ONCE ? strips - s : AT_ONCE, x + k + i * PK + part, x_stride,
                                    weight, s * STRIP_BLOCK + i * 16 * PK, is_int8, part, c, s * PER_STRIP);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < strips * PER_STRIP; v++) vf_store(sums + r * GROUP + v * LANES, c[r][v]);
}

// Each kind of tile is a function of its own, so that what is around it takes no registers from its loop.
typedef void NAME(tile_of)(const row_elem *x, int64_t x_stride, const char *weight, int64_t block_bytes, int64_t num_k,
                           bool is_first, float *sums, struct ahead *ahead);
#define TILE(rows, strips, kind, is_int8)                                                                              \
    static __attribute__((noinline)) void NAME(tile_##rows##_##strips##_##kind)(                                       \
        const row_elem *x, int64_t x_stride, const char *weight, int64_t block_bytes, int64_t num_k, bool is_first,    \
        float *sums, struct ahead *ahead) {                                                                            \
        if (strips <= TILE_STRIPS(rows))                                                                               \
            NAME(tile)(rows, strips, x, x_stride, weight, block_bytes, is_int8, num_k, is_first, sums, ahead);         \
    }
#define FOUR(rows, kind, is_int8)                                                                                      \
    TILE(rows, 1, kind, is_int8)                                                                                       \
    TILE(rows, 2, kind, is_int8) TILE(rows, 3, kind, is_int8) TILE(rows, 4, kind, is_int8)
#define TILES(kind, is_int8)                                                                                           \
    FOUR(1, kind, is_int8)                                                                                             \
    FOUR(2, kind, is_int8) FOUR(3, kind, is_int8) FOUR(4, kind, is_int8) FOUR(5, kind, is_int8) FOUR(6, kind, is_int8)
#define NAMES(rows, kind)                                                                                              \
    {NAME(tile_##rows##_1_##kind), NAME(tile_##rows##_2_##kind), NAME(tile_##rows##_3_##kind),                         \
     NAME(tile_##rows##_4_##kind)}
#define ALL_NAMES(kind)                                                                                                \
    {NAMES(1, kind), NAMES(2, kind), NAMES(3, kind), NAMES(4, kind), NAMES(5, kind), NAMES(6, kind)}
TILES(own, false)
#if ELEM_BF16 && ROW_IS_ELEM // int8 weights are expanded before
static NAME(tile_of) *const NAME(tiles)[1][TILE_ROWS][4] = {ALL_NAMES(own)};
#else
TILES(int8, true)
static NAME(tile_of) *const NAME(tiles)[2][TILE_ROWS][4] = {ALL_NAMES(own), ALL_NAMES(int8)};
#endif
#undef TILE
#undef FOUR
#undef TILES
#undef NAMES
#undef ALL_NAMES

// sums[r][16 s ...] += x[r] . strip s, for any number of rows and up to 4 strips
static void NAME(multiply)(int64_t rows, int64_t strips, const row_elem *x, int64_t x_stride, const char *weight,
                           int64_t block_bytes, bool is_int8, int64_t num_k, bool is_first, float *sums,
                           struct ahead ahead) {
    const int64_t strip_bytes = STRIP_BLOCK * (is_int8 ? 1 : (int64_t)sizeof(elem));
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, most = (rows + tiles - 1) / tiles;
    const int64_t steps = tiles * ((strips + TILE_STRIPS(most) - 1) / TILE_STRIPS(most)) * num_k / PK;
    ahead.lines = ((ahead.end - ahead.next) / 64 + steps - 1) / steps;
    for (int64_t i = 0; i < tiles; i++) {
        if (ahead.next >= ahead.end) ahead.lines = 0;
        int64_t first, last;
        cl_share(rows, (int)i, (int)tiles, &first, &last);
        NAME(tile_of) *const *const kinds = NAME(tiles)[is_int8][last - first - 1];
        for (int64_t s = 0, n; s < strips; s += n) {
            n = min_(TILE_STRIPS(last - first), strips - s);
            kinds[n - 1](x + first * x_stride, x_stride, weight + s * strip_bytes, block_bytes, num_k, is_first,
                         sums + first * GROUP + s * STRIP, &ahead);
        }
    }
}
#endif

#if ELEM_BF16
// A chunk of int8 weights as bfloat16s, in the same order.
static void NAME(expand_weight)(const char *weight, int64_t block_bytes, int64_t strips, int64_t num_k, elem *out) {
    const struct int8_table table = int8_table();
    for (int64_t k = 0; k < num_k; k += 16 * PK, weight += block_bytes, out += strips * STRIP_BLOCK)
        for (int64_t i = 0; i < strips * STRIP_BLOCK; i += 64) int8_expand(&table, (const int8_t *)weight + i, out + i);
}
#endif

// A chunk of rows as row_elem, with zeros up to a whole k block.
static void NAME(expand_rows)(const elem *x, int64_t x_stride, int64_t rows, int64_t num_k, row_elem *out,
                              int64_t out_stride) {
    const int64_t padded = (num_k + 16 * PK - 1) / (16 * PK) * (16 * PK);
    for (int64_t r = 0; r < rows; r++, x += x_stride, out += out_stride) {
        for (int64_t k = 0; k < num_k; k += LANES) {
            const int64_t n = min_(LANES, num_k - k);
            ROW(store_n)(out + k, NAME(load_n)(x + k, n), n);
        }
        memset(out + num_k, 0, (size_t)(padded - num_k) * sizeof *out);
    }
}

// What follows the product, from `sums` to rows of the output: scale and bias (`is_scaled`), activation or residual.
INLINE void NAME(finish_rows)(const bool is_scaled, const int32_t activation, const struct cl_linear *op, int64_t row,
                              int64_t rows, int64_t strip, int64_t strips, float *sums) {
    const int64_t per_output = activation == CL_NONE ? 1 : 2;
    for (int64_t r = 0; r < rows; r++, sums += GROUP) {
        for (int64_t j = 0; is_scaled && j < strips * STRIP; j += LANES) {
            vf y = vf_load(sums + j);
            if (op->scale) y = y * vf_load(op->scale + strip * STRIP + j);
            if (op->bias) y = y + vf_load(op->bias + strip * STRIP + j);
            vf_store(sums + j, y);
        }
        for (int64_t s = 0; s < strips; s += per_output)
            for (int64_t j = 0; j < STRIP; j += LANES) {
                const int64_t column = (strip + s) / per_output * STRIP + j, n = min_(LANES, op->out_features - column);
                if (n <= 0) break;
                vf y = vf_load(sums + s * STRIP + j);
                if (activation != CL_NONE) y = vf_activate(y, activation) * vf_load(sums + (s + 1) * STRIP + j);
                y = y * vf_set(op->alpha);
                if (op->residual)
                    y = y + NAME(load_n)((const elem *)op->residual + (row + r) * op->residual_stride + column, n);
                if (op->out_float)
                    vf_store_n((float *)op->out + (row + r) * op->out_stride + column, y, n);
                else
                    NAME(store_n)((elem *)op->out + (row + r) * op->out_stride + column, y, n);
            }
    }
}

static void NAME(finish)(const struct cl_linear *op, int64_t row, int64_t rows, int64_t strip, int64_t strips,
                         float *sums) {
    const bool is_scaled = op->scale || op->bias;
    if (!is_scaled && op->activation == CL_NONE)
        NAME(finish_rows)(false, CL_NONE, op, row, rows, strip, strips, sums);
    else if (!is_scaled && op->activation == CL_SILU)
        NAME(finish_rows)(false, CL_SILU, op, row, rows, strip, strips, sums);
    else
        NAME(finish_rows)(true, op->activation, op, row, rows, strip, strips, sums);
}

// Where the strips from `strip` on begin, in a packed weight.
INLINE const char *NAME(weight_of)(const struct cl_linear *op, int64_t strip, int64_t total_strips,
                                   int64_t *group_bytes) {
    const int64_t k_blocks = (op->in_features + 16 * PK - 1) / (16 * PK), group = strip / 4;
    const int64_t strip_bytes = STRIP_BLOCK * (op->scale ? 1 : (int64_t)sizeof(elem));
    *group_bytes = min_(4, total_strips - 4 * group) * k_blocks * strip_bytes;
    return (const char *)op->weight + (group * 4 * k_blocks + strip % 4) * strip_bytes;
}

// What a thread computes: some rows, and some strips (gate and up stay together).
struct NAME(part) {
    int64_t first_row, last_row, first, last, total_strips;
};

static struct NAME(part) NAME(part_of)(const struct cl_linear *op, int thread, int num_threads) {
    const int64_t per_unit = op->activation == CL_NONE ? 1 : 2;
    const int64_t units = (op->out_features + STRIP - 1) / STRIP, rows = *op->num_rows;
    // Threads in a grid. To read a strip from memory takes about as long as to multiply it with 16 rows.
    int row_parts = 1;
    int64_t best = INT64_MAX;
    for (int parts = 1; parts <= num_threads; parts++) {
        if (num_threads % parts) continue;
        const int columns = num_threads / parts;
        const int64_t cost = ((rows + parts - 1) / parts + 16) * ((units + columns - 1) / columns);
        if (cost < best) best = cost, row_parts = parts;
    }
    const int columns = num_threads / row_parts;
    struct NAME(part) part = {.total_strips = units * per_unit};
    cl_share(rows, thread / columns, row_parts, &part.first_row, &part.last_row);
    cl_share(units, thread % columns, columns, &part.first, &part.last);
    part.first *= per_unit, part.last *= per_unit;
    return part;
}

// Some strips of one group.
struct NAME(piece) {
    const char *weight;
    int64_t block_bytes, strip, strips;
};

static struct NAME(piece) NAME(piece_of)(const struct cl_linear *op, const struct NAME(part) *part, int64_t strip,
                                         int64_t last) {
    int64_t group_bytes;
    const int64_t in_group = min_(4, part->total_strips - strip / 4 * 4);
    return (struct NAME(piece)){
        .weight = NAME(weight_of)(op, strip, part->total_strips, &group_bytes),
        .block_bytes = in_group * STRIP_BLOCK * (op->scale ? 1 : (int64_t)sizeof(elem)),
        .strip = strip,
        .strips = min_(4 - strip % 4, last - strip),
    };
}

// Chunk `i` of those of some pieces that are multiplied in turn: k by k, piece by piece. Behind the last one: `after`.
static struct ahead NAME(chunk_at)(const struct NAME(piece) *pieces, int64_t num_pieces, int64_t in_features,
                                   int64_t chunk, int64_t i, const struct ahead after) {
    const struct NAME(piece) *piece = &pieces[i % num_pieces];
    const int64_t k = i / num_pieces * chunk, left = in_features - k;
    if (left <= 0) return after;
    const char *start = piece->weight + k / (16 * PK) * piece->block_bytes;
    return (struct ahead){start, start + (min_(chunk, left) + 16 * PK - 1) / (16 * PK) * piece->block_bytes, 0};
}

// Strips `first` to `last`, of up to GROUPS groups; `after` is read next.
static void NAME(linear_pass)(const struct cl_linear *op, const struct NAME(part) *part, int64_t first, int64_t last,
                              const struct ahead after) {
    const bool are_few = part->last_row - part->first_row <= FEW_ROWS;
    const bool expand_weight = ELEM_BF16 && op->scale && (ROW_IS_ELEM || !are_few);
    const bool expand_rows = !ROW_IS_ELEM || (WHOLE_BLOCKS && op->in_features % (16 * PK));
    // An expanded chunk of weights is never long.
    const int64_t wide_chunk = are_few && !(ELEM_BF16 && ROW_IS_ELEM) ? NAME(expanded_long_chunk)
                                                                      : NAME(expanded_chunk);
    const int64_t direct_chunk = are_few ? NAME(direct_long_chunk) : NAME(direct_chunk);
    const int64_t chunk = expand_weight || expand_rows ? wide_chunk : direct_chunk;
    struct NAME(piece) pieces[GROUPS] = {{NULL, 0, 0, 0}};
    int64_t num_pieces = 0;
    for (int64_t strip = first; strip < last; strip += pieces[num_pieces++].strips)
        pieces[num_pieces] = NAME(piece_of)(op, part, strip, last);
    float sums[GROUPS][SUM_ROWS * GROUP] __attribute__((aligned(64)));
    row_elem wide_rows[SUM_ROWS * NAME(expanded_chunk)] __attribute__((aligned(64)));
    for (int64_t row = part->first_row; row < part->last_row; row += SUM_ROWS) {
        const int64_t rows = min_(SUM_ROWS, part->last_row - row);
        const struct ahead next_pass = row + SUM_ROWS < part->last_row ? (struct ahead){NULL, NULL, 0} : after;
        for (int64_t k = 0, i = 0; k < op->in_features; k += chunk) {
            const int64_t num_k = min_(chunk, op->in_features - k);
            const row_elem *x = (const row_elem *)((const elem *)op->x + row * op->x_stride + k);
            if (expand_rows) NAME(expand_rows)((const elem *)x, op->x_stride, rows, num_k, wide_rows, wide_chunk);
            if (expand_rows) x = wide_rows;
            const int64_t x_stride = expand_rows ? wide_chunk : op->x_stride;
            for (int64_t g = 0; g < num_pieces; g++, i++) {
                const struct NAME(piece) *piece = &pieces[g];
                const char *source = piece->weight + k / (16 * PK) * piece->block_bytes;
                // While weights are expanded nothing is fetched: so by then one chunk more is there.
                const struct ahead ahead =
                    NAME(chunk_at)(pieces, num_pieces, op->in_features, chunk, i + 1 + expand_weight, next_pass);
#if ELEM_BF16
                elem wide_weight[GROUP * NAME(expanded_chunk)] __attribute__((aligned(64)));
                if (expand_weight) {
                    NAME(expand_weight)(source, piece->block_bytes, piece->strips, num_k, wide_weight);
                    NAME(multiply)(rows, piece->strips, x, x_stride, (const char *)wide_weight,
                                   piece->strips * STRIP_BLOCK * (int64_t)sizeof(elem), false, num_k, k == 0, sums[g],
                                   ahead);
                    continue;
                }
#endif
                NAME(multiply)(rows, piece->strips, x, x_stride, source, piece->block_bytes, op->scale, num_k, k == 0,
                               sums[g], ahead);
            }
        }
        for (int64_t g = 0; g < num_pieces; g++)
            NAME(finish)(op, row, rows, pieces[g].strip, pieces[g].strips, sums[g]);
    }
}

// A group that is read soon: its first chunk, as far as the cache has room.
static struct ahead NAME(ahead_of)(const struct cl_linear *op, const struct NAME(part) *part, int64_t strip) {
    int64_t bytes;
    const char *next = NAME(weight_of)(op, strip, part->total_strips, &bytes);
    return (struct ahead){next, next + min_(bytes, AHEAD_BYTES), 0};
}

static void NAME(linear)(const void *args, int thread, int num_threads) {
    const struct cl_linear *op = args;
    const struct NAME(part) part = NAME(part_of)(op, thread, num_threads);
    if (part.first_row == part.last_row) return;
    // Few rows read memory strictly in order.
    const int64_t groups = part.last_row - part.first_row <= FEW_ROWS ? 1 : GROUPS;
    for (int64_t first = part.first, last; first < part.last; first = last) {
        last = min_(part.last, (first / 4 + groups) * 4);
        struct ahead after = {NULL, NULL, 0};
        if (last < part.last) {
            after = NAME(ahead_of)(op, &part, last);
        } else if (op->next) {
            const struct NAME(part) next = NAME(part_of)(op->next, thread, num_threads);
            if (next.first < next.last) after = NAME(ahead_of)(op->next, &next, next.first);
        }
        NAME(linear_pass)(op, &part, first, last, after);
    }
#if defined(CL_AMX) && ELEM_BF16
    amx_release();
#endif
}

static void NAME(gather)(const void *args, int thread, int num_threads) {
    const struct cl_gather *op = args;
    const int64_t packs = (op->in_features + PK - 1) / PK, k_blocks = (packs + 15) / 16;
    int64_t first, last;
    cl_share(*op->num_rows, thread, num_threads, &first, &last);
    for (int64_t r = first; r < last; r++) {
        const int64_t id = op->ids[r], group = id / GROUP, strip = id / STRIP;
        elem *out = (elem *)op->out + r * op->in_features;
        if (op->total_strips == 0) {
            memcpy(out, (const elem *)op->weight + id * op->in_features, op->in_features * sizeof(elem));
            continue;
        }
        const int64_t block_stride = min_(4, op->total_strips - 4 * group) * STRIP_BLOCK;
        const elem *from =
            (const elem *)op->weight + (group * 4 * k_blocks + strip % 4) * STRIP_BLOCK + id % STRIP * PK;
        for (int64_t p = 0; p < packs; p++)
            memcpy(out + p * PK, from + p / 16 * block_stride + p % 16 * 16 * PK, PK * sizeof(elem));
    }
}

#undef GROUP
#undef STRIP
#undef SUM_ROWS
#undef GROUPS
#undef STRIP_BLOCK
#undef TILE_ROWS
#undef FEW_ROWS
#undef WHOLE_BLOCKS
#undef TILE_STRIPS
#undef PER_STRIP
#undef AT_ONCE
