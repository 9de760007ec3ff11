// The matrix product of linear.inc.h in AMX tiles: 32 rows x 2 strips at a time, in the accumulators 0-3.
//
//              strip 0 (6)   strip 1 (7)
//     x a (4)  sums 0        sums 1          16 rows each, 16 outputs wide; tiles 4 and 5 take 16 rows of 32 k's,
//     x b (5)  sums 2        sums 3          tiles 6 and 7 a k block of a strip as it lies in memory

#define TILE_ROWS 32
#define TILE_STRIPS 2

struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};

// Rows of the tiles that belong to the upper (a) and the lower (b) half. Tiles of no rows do not exist.
static __thread int amx_rows_a, amx_rows_b;

INLINE void amx_configure(int rows_a, int rows_b) {
    if (rows_a == amx_rows_a && rows_b == amx_rows_b) return;
    struct amx_config config = {.palette = 1};
    const int rows[8] = {rows_a, rows_a, rows_b, rows_b, rows_a, rows_b, 16, 16};
    for (int i = 0; i < 8; i++) config.rows[i] = (uint8_t)rows[i], config.bytes_per_row[i] = rows[i] ? 64 : 0;
    _tile_loadconfig(&config);
    amx_rows_a = rows_a, amx_rows_b = rows_b;
}

INLINE void amx_release(void) {
    _tile_release();
    amx_rows_a = amx_rows_b = 0;
}

// sums[r][0 ... 31] += x[r] . two strips, for up to 32 rows; num_k a multiple of 32
INLINE void amx_tile(const bool has_b, const uint16_t *x, int64_t x_stride, const uint16_t *weight,
                     int64_t second_strip, int64_t block_stride, int64_t num_k, bool is_first, float *sums,
                     struct ahead *ahead) {
    const int64_t line = 64 * sizeof(float), x_line = x_stride * 2;
    const uint16_t *x_b = x + 16 * x_stride;
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        if (has_b) _tile_zero(2);
        if (has_b) _tile_zero(3);
    } else {
        _tile_loadd(0, sums, line);
        _tile_loadd(1, sums + 16, line);
        if (has_b) _tile_loadd(2, sums + 16 * 64, line);
        if (has_b) _tile_loadd(3, sums + 16 * 64 + 16, line);
    }
    for (int64_t k = 0; k < num_k; k += 32, weight += block_stride) {
        fetch_ahead(ahead);
        _tile_loadd(6, weight, 64);
        _tile_loadd(7, weight + second_strip, 64);
        _tile_loadd(4, x + k, x_line);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (has_b) {
            _tile_loadd(5, x_b + k, x_line);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, line);
    _tile_stored(1, sums + 16, line);
    if (has_b) _tile_stored(2, sums + 16 * 64, line);
    if (has_b) _tile_stored(3, sums + 16 * 64 + 16, line);
}

static void NAME(multiply)(int64_t rows, int64_t strips, const uint16_t *x, int64_t x_stride, const char *packed,
                           int64_t block_bytes, const bool is_int8, int64_t num_k, bool is_first, float *sums,
                           struct ahead ahead) {
    (void)is_int8; // expanded before
    const uint16_t *weight = (const uint16_t *)packed;
    const int64_t block_stride = block_bytes / (int64_t)sizeof *weight;
    const int64_t steps = (rows + TILE_ROWS - 1) / TILE_ROWS * ((strips + 1) / TILE_STRIPS) * ((num_k + 31) / 32);
    ahead.lines = ((ahead.end - ahead.next) / 64 + steps - 1) / steps;
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        const int rows_a = (int)min_(16, rows - r), rows_b = (int)max_(0, min_(16, rows - r - 16));
        amx_configure(rows_a, rows_b);
        for (int64_t s = 0; s < strips; s += TILE_STRIPS) {
            const uint16_t *pair = weight + s * STRIP_BLOCK;
            const int64_t second = s + 1 < strips ? STRIP_BLOCK : 0; // a last single strip is computed twice
            float *sum = sums + r * GROUP + s * STRIP;
            if (rows_b)
                amx_tile(true, x + r * x_stride, x_stride, pair, second, block_stride, num_k, is_first, sum, &ahead);
            else
                amx_tile(false, x + r * x_stride, x_stride, pair, second, block_stride, num_k, is_first, sum, &ahead);
        }
    }
}
