// Packed linear layers: struct cl_linear says what is computed and how weights lie.
//
// A thread has a range of rows and a range of strips (`split`), so that each weight is read from memory once where rows
// are few. For 4 strips (64 outputs) x 96 rows x a chunk of k's it runs tiles of registers; sums wait between chunks in
// `sums`, on the stack. A chunk of weights stays in the second-level cache while all rows pass by, and the one that
// comes next is fetched meanwhile (`struct ahead`): so memory is read all the time, not only when a chunk begins.
//
// Weights that cannot be multiplied as they are (int8; bfloat16 without a product of them) are expanded chunk by chunk,
// and so are the rows.

#define GROUP 64                   // outputs in a group
#define STRIP 16                   // outputs in a strip
#define SUM_ROWS 96                // rows that share a chunk of weights; a multiple of TILE_ROWS
#define STRIP_BLOCK (16 * 16 * PK) // elements of a strip's k block
#define TILE_BLOCK (16 * 16 * TILE_PK)

// k's in a chunk, multiples of every k block: 256 KiB of bfloat16 weights, or 16 to 32 KiB expanded, for the
// first-level cache
enum { NAME(direct_chunk) = 4096 / (int)sizeof(elem), NAME(expanded_chunk) = 128 };

#if defined(CL_AMX) && ELEM_BF16
#define WHOLE_BLOCKS 1 // a tile takes a whole block of k's
#include "amx.inc.h"
#else
#define WHOLE_BLOCKS 0
#define TILE_ROWS 6
#define TILE_STRIPS (CL_WIDTH == 512 ? 4 : 1)

// sums[r][16 s ...] += x[r] . strip s, for `rows` <= TILE_ROWS and `strips` <= TILE_STRIPS, both constants.
INLINE void NAME(tile)(const int rows, const int strips, const tile_elem *x, int64_t x_stride, const tile_elem *weight,
                       int64_t block_stride, int64_t num_k, bool is_first, float *sums, struct ahead *ahead) {
    enum { PER_STRIP = STRIP / LANES };
    vf c[TILE_ROWS][TILE_STRIPS * PER_STRIP];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < strips * PER_STRIP; v++)
            c[r][v] = is_first ? vf_set(0.0f) : vf_load(sums + r * GROUP + v * LANES);
    for (int64_t k = 0; k < num_k; k += 16 * TILE_PK, weight += block_stride) {
        const int64_t steps = min_(16, (num_k - k) / TILE_PK);
        for (int64_t i = 0; i < steps; i++) {
            tile_pack w[TILE_STRIPS * PER_STRIP];
            fetch_ahead(ahead);
#pragma GCC unroll 4
            for (int v = 0; v < strips * PER_STRIP; v++)
                w[v] =
                    TILE(pack_load)(weight + v / PER_STRIP * TILE_BLOCK + (i * 16 + v % PER_STRIP * LANES) * TILE_PK);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                tile_pack a = TILE(pack_set)(x + r * x_stride + k + i * TILE_PK);
#pragma GCC unroll 4
                for (int v = 0; v < strips * PER_STRIP; v++) c[r][v] = TILE(dot)(c[r][v], w[v], a);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < strips * PER_STRIP; v++) vf_store(sums + r * GROUP + v * LANES, c[r][v]);
}

INLINE void NAME(tile_rows)(int64_t rows, const int strips, const tile_elem *x, int64_t x_stride,
                            const tile_elem *weight, int64_t block_stride, int64_t num_k, bool is_first, float *sums,
                            struct ahead *ahead) {
#define ROWS(n)                                                                                                        \
    case n:                                                                                                            \
        NAME(tile)(n, strips, x, x_stride, weight, block_stride, num_k, is_first, sums, ahead);                        \
        break;
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
#undef ROWS
}

// sums[r][16 s ...] += x[r] . strip s, for any number of rows and up to 4 strips
static void NAME(multiply)(int64_t rows, int64_t strips, const tile_elem *x, int64_t x_stride, const tile_elem *weight,
                           int64_t block_stride, int64_t num_k, bool is_first, float *sums, struct ahead ahead) {
    const int64_t steps =
        (rows + TILE_ROWS - 1) / TILE_ROWS * ((strips + TILE_STRIPS - 1) / TILE_STRIPS) * num_k / TILE_PK;
    ahead.lines = ((ahead.end - ahead.next) / 64 + steps - 1) / steps;
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        if (ahead.next >= ahead.end) ahead.lines = 0;
        const int64_t n = min_(TILE_ROWS, rows - r);
        const tile_elem *row = x + r * x_stride;
        float *sum = sums + r * GROUP;
#if CL_WIDTH == 512
#define STRIPS(n_strips)                                                                                               \
    case n_strips:                                                                                                     \
        NAME(tile_rows)(n, n_strips, row, x_stride, weight, block_stride, num_k, is_first, sum, &ahead);               \
        break;
        switch (strips) { STRIPS(1) STRIPS(2) STRIPS(3) STRIPS(4) }
#undef STRIPS
#else
        for (int64_t s = 0; s < strips; s++)
            NAME(tile_rows)(n, 1, row, x_stride, weight + s * TILE_BLOCK, block_stride, num_k, is_first,
                            sum + s * STRIP, &ahead);
#endif
    }
}
#endif

// A chunk of packed weights as tile_elem, a tile block for each strip and TILE_PK * 16 k's.
static void NAME(expand_weight)(const struct cl_linear *op, const char *weight, int64_t block_stride, int64_t strips,
                                int64_t num_k, tile_elem *out) {
#if TILE_IS_ELEM && ELEM_BF16
    (void)op;
    const struct int8_table table = int8_table();
    for (int64_t k = 0; k < num_k; k += 16 * PK, weight += block_stride, out += strips * TILE_BLOCK)
        for (int64_t i = 0; i < strips * TILE_BLOCK; i += 64) int8_expand(&table, (const int8_t *)weight + i, out + i);
#else
    for (int64_t k = 0; k < num_k; k += 16 * PK, weight += block_stride)
        for (int64_t s = 0; s < strips; s++)
            for (int64_t i = 0; i < 16; i++) {
                const int64_t at = s * STRIP_BLOCK + i * 16 * PK;
#if TILE_IS_ELEM // int8, in the order that is wanted
                for (int64_t j = 0; j < 16 * PK; j += LANES)
                    NAME(store)(out + (k / (16 * PK) * strips + s) * TILE_BLOCK + i * 16 * PK + j,
                                int8_load((const int8_t *)weight + at + j));
#else            // pairs of k's come apart, into two tile blocks for each k block
                tile_elem *even = out + ((k + 2 * i) / 16 * strips + s) * TILE_BLOCK + 2 * i % 16 * 16;
                for (int64_t j = 0; j < 16; j += LANES) {
                    vi pairs;
                    if (op->scale) {
                        uint16_t wide[2 * LANES];
                        for (int64_t half = 0; half < 2 * LANES; half += LANES)
                            bf16_store(wide + half, int8_load((const int8_t *)weight + at + 2 * j + half));
                        pairs = vi_load(wide);
                    } else {
                        pairs = vi_load((const uint16_t *)weight + at + 2 * j);
                    }
                    vf_store(even + j, vf_even(pairs));
                    vf_store(even + 16 + j, vf_odd(pairs));
                }
#endif
            }
    (void)op;
#endif
}

// A chunk of rows as tile_elem, [rows][expanded_chunk], with zeros up to a whole tile block.
static void NAME(expand_rows)(const elem *x, int64_t x_stride, int64_t rows, int64_t num_k, tile_elem *out) {
    const int64_t padded = (num_k + 16 * TILE_PK - 1) / (16 * TILE_PK) * (16 * TILE_PK);
    for (int64_t r = 0; r < rows; r++, x += x_stride, out += NAME(expanded_chunk)) {
        for (int64_t k = 0; k < num_k; k += LANES) {
            const int64_t n = min_(LANES, num_k - k);
            TILE(store_n)(out + k, NAME(load_n)(x + k, n), n);
        }
        memset(out + num_k, 0, (size_t)(padded - num_k) * sizeof *out);
    }
}

// What follows the product: scale, bias, activation or residual; from `sums` to rows of the output.
static void NAME(finish)(const struct cl_linear *op, int64_t row, int64_t rows, int64_t strip, int64_t strips,
                         float *sums) {
    const int64_t per_output = op->activation == CL_NONE ? 1 : 2;
    for (int64_t r = 0; r < rows; r++, sums += GROUP) {
        for (int64_t j = 0; j < strips * STRIP; j += LANES) {
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
                if (op->activation != CL_NONE) y = vf_activate(y, op->activation) * vf_load(sums + (s + 1) * STRIP + j);
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

// Strips `strip` ... of one group; `after` comes next.
static void NAME(linear_group)(const struct cl_linear *op, const struct NAME(part) *part, int64_t strip,
                               int64_t strips, struct ahead after) {
    const bool expand_weight = op->scale || !TILE_IS_ELEM;
    const bool expand_rows = !TILE_IS_ELEM || (WHOLE_BLOCKS && op->in_features % (16 * TILE_PK));
    const int64_t chunk = expand_weight || expand_rows ? NAME(expanded_chunk) : NAME(direct_chunk);
    const int64_t group_strips = min_(4, part->total_strips - strip / 4 * 4);
    const int64_t block_bytes = group_strips * STRIP_BLOCK * (op->scale ? 1 : (int64_t)sizeof(elem));
    int64_t group_bytes;
    const char *weight = NAME(weight_of)(op, strip, part->total_strips, &group_bytes);
    float sums[SUM_ROWS * GROUP] __attribute__((aligned(64)));
    tile_elem wide_weight[GROUP * NAME(expanded_chunk)] __attribute__((aligned(64)));
    tile_elem wide_rows[SUM_ROWS * NAME(expanded_chunk)] __attribute__((aligned(64)));
    for (int64_t row = part->first_row; row < part->last_row; row += SUM_ROWS) {
        const int64_t rows = min_(SUM_ROWS, part->last_row - row);
        for (int64_t k = 0; k < op->in_features; k += chunk) {
            const int64_t num_k = min_(chunk, op->in_features - k);
            const char *source = weight + k / (16 * PK) * block_bytes,
                       *behind = source + num_k / (16 * PK) * block_bytes;
            const elem *x = (const elem *)op->x + row * op->x_stride + k;
            struct ahead ahead = {NULL, NULL, 0};
            if (k + chunk < op->in_features) {
                const int64_t next_k = min_(chunk, op->in_features - k - chunk);
                ahead = (struct ahead){behind, behind + next_k / (16 * PK) * block_bytes, 0};
            } else if (row + SUM_ROWS >= part->last_row) {
                ahead = after;
            }
            // Nothing is fetched while weights are expanded: so by then one chunk more is there.
            if (expand_weight && ahead.next) ahead.next += behind - source, ahead.end += behind - source;
            if (expand_weight) NAME(expand_weight)(op, source, block_bytes, strips, num_k, wide_weight);
            if (expand_rows) NAME(expand_rows)(x, op->x_stride, rows, num_k, wide_rows);
            NAME(multiply)(rows, strips, expand_rows ? wide_rows : (const tile_elem *)x,
                           expand_rows ? NAME(expanded_chunk) : op->x_stride,
                           expand_weight ? wide_weight : (const tile_elem *)source,
                           (expand_weight ? strips : group_strips) * TILE_BLOCK, num_k, k == 0, sums, ahead);
        }
        NAME(finish)(op, row, rows, strip, strips, sums);
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
    for (int64_t strip = part.first, strips; strip < part.last; strip += strips) {
        strips = min_(4 - strip % 4, part.last - strip);
        struct ahead after = {NULL, NULL, 0};
        if (strip + strips < part.last) {
            after = NAME(ahead_of)(op, &part, strip + strips);
        } else if (op->next) {
            const struct NAME(part) next = NAME(part_of)(op->next, thread, num_threads);
            if (next.first < next.last) after = NAME(ahead_of)(op->next, &next, next.first);
        }
        NAME(linear_group)(op, &part, strip, strips, after);
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
        const int64_t block_stride = min_(4, op->total_strips - 4 * group) * STRIP_BLOCK;
        const elem *from =
            (const elem *)op->weight + (group * 4 * k_blocks + strip % 4) * STRIP_BLOCK + id % STRIP * PK;
        elem *out = (elem *)op->out + r * op->in_features;
        for (int64_t p = 0; p < packs; p++)
            memcpy(out + p * PK, from + p / 16 * block_stride + p % 16 * 16 * PK, PK * sizeof(elem));
    }
}

#undef GROUP
#undef STRIP
#undef SUM_ROWS
#undef STRIP_BLOCK
#undef TILE_BLOCK
#undef TILE_ROWS
#undef WHOLE_BLOCKS
#undef TILE_STRIPS
