// AMX in software, for hosts without it: include before amx.c. Also what amx.c needs of run.c, for a single thread.
//
// Tiles are checked as the processor would: shapes must agree, and a tile that is not configured must not be used.

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    uint8_t data[16][64];
    int rows, bytes;
} emulated[8];

static void emulated_check(int is_right, const char *what) {
    if (is_right) return;
    fprintf(stderr, "AMX: %s\n", what);
    abort();
}

static void emulated_config(const uint8_t *config) {
    emulated_check(config[0] == 1, "palette");
    for (int i = 0; i < 8; i++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * i, 2);
        emulated_check(bytes <= 64 && config[48 + i] <= 16 && !bytes == !config[48 + i], "shape of a tile");
        memset(&emulated[i], 0, sizeof emulated[i]);
        emulated[i].rows = config[48 + i], emulated[i].bytes = bytes;
    }
}

static void emulated_zero(int t) {
    emulated_check(emulated[t].rows, "tile is not configured");
    memset(emulated[t].data, 0, sizeof emulated[t].data);
}

static void emulated_load(int t, const char *from, int64_t stride) {
    emulated_zero(t);
    for (int r = 0; r < emulated[t].rows; r++) memcpy(emulated[t].data[r], from + r * stride, emulated[t].bytes);
}

static void emulated_store(int t, char *to, int64_t stride) {
    emulated_check(emulated[t].rows, "tile is not configured");
    for (int r = 0; r < emulated[t].rows; r++) memcpy(to + r * stride, emulated[t].data[r], emulated[t].bytes);
}

static float emulated_number(const uint8_t *pair) {
    uint8_t bytes[4] = {0, 0, pair[0], pair[1]};
    float number;
    memcpy(&number, bytes, 4);
    return number;
}

static void emulated_dot(int c, int a, int b) {
    emulated_check(emulated[c].rows == emulated[a].rows && emulated[c].bytes == emulated[b].bytes &&
                       emulated[a].bytes == 4 * emulated[b].rows && emulated[c].rows,
                   "shapes of a product");
    for (int m = 0; m < emulated[c].rows; m++)
        for (int n = 0; n < emulated[c].bytes / 4; n++) {
            float sum;
            memcpy(&sum, emulated[c].data[m] + 4 * n, 4);
            for (int k = 0; k < emulated[b].rows; k++)
                for (int i = 0; i < 2; i++)
                    sum += emulated_number(emulated[a].data[m] + 4 * k + 2 * i) *
                           emulated_number(emulated[b].data[k] + 4 * n + 2 * i);
            memcpy(emulated[c].data[m] + 4 * n, &sum, 4);
        }
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated_config((const uint8_t *)(config))
#define _tile_release() memset(emulated, 0, sizeof emulated)
#define _tile_zero(t) emulated_zero(t)
#define _tile_loadd(t, from, stride) emulated_load(t, (const char *)(from), stride)
#define _tile_stored(t, to, stride) emulated_store(t, (char *)(to), stride)
#define _tile_dpbf16ps(c, a, b) emulated_dot(c, a, b)

void cl_barrier(void) {}

void cl_share(int64_t n, int part, int parts, int64_t *first, int64_t *last) {
    *first = n * part / parts;
    *last = n * (part + 1) / parts;
}
