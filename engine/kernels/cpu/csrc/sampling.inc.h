// Tokens from logits: struct cl_sample. What is computed stands in engine/sample/sampler.py, steps 5 to 10, in torch.
//
// A row of logits becomes weights e^((x - max) / temperature), a pass over all of it. After that a row is looked at in
// blocks of 64 tokens, of which the sum and the maximum are known: to draw from all tokens takes one block. Where
// top_k, top_p or min_p cut the ranking (most likely first, equals by id), its head is collected, as far down as they
// need, and dealt into buckets of nearly equal weights: counts and sums of buckets say in which one a cut or the drawn
// number falls, and only that one is sorted.
//
// A row is computed by one thread, in one order.

enum { BLOCK = 64, DIGIT_BITS = 10, BUCKET_SHIFT = 19, BUCKETS = 2048 }; // 16 buckets for each power of two

// One row while it is sampled; the arrays lie in the workspace.
struct V(row) {
    int64_t size, blocks;
    float *weights;               // [size], and zeros up to a whole block
    float *block_sum, *block_top; // [blocks]
    double total;
    // the head of the ranking, in order of id
    int64_t found;
    float *found_weights;
    int32_t *found_ids;
    int64_t counts[BUCKETS];
    double sums[BUCKETS];
    // one bucket in order of rank: how far its weight is below 1, then its id
    uint64_t *sorted, *half_sorted;
    int64_t sorted_bucket;
};

// The place of the largest logit; -1 if the row is not usable: NaN, +inf, or nothing but -inf.
static int64_t V(best)(const float *x, struct V(row) *row) {
    vf all_top = vf_set(-INFINITY), strange = vf_set(0.0f);
    for (int64_t b = 0; b < row->blocks; b++) {
        vf top = vf_set(-INFINITY);
        const int64_t left = min_(BLOCK, row->size - b * BLOCK);
        for (int64_t j = 0; j < left; j += LANES) {
            vf y = j + LANES <= left ? vf_load(x + b * BLOCK + j)
                                     : vf_keep(vf_load_n(x + b * BLOCK + j, left - j), 0, left - j, -INFINITY);
            strange = vf_if_ge(y, vf_set(-INFINITY), strange, vf_set(1.0f)); // NaN compares with nothing
            top = vf_max(top, y);
        }
        row->block_top[b] = vf_top(top);
        all_top = vf_max(all_top, top);
    }
    const float top = vf_top(all_top);
    if (!isfinite(top) || vf_top(strange) != 0.0f) return -1;
    int64_t b = 0, j = 0;
    while (row->block_top[b] != top) b++;
    while (x[b * BLOCK + j] != top) j++;
    return b * BLOCK + j;
}

static void V(weigh_row)(const float *x, float top, float temperature, struct V(row) *row) {
    const vf factor = vf_set(1.0f / temperature);
    row->total = 0.0;
    for (int64_t b = 0; b < row->blocks; b++) {
        const int64_t left = min_(BLOCK, row->size - b * BLOCK);
        vf sum = vf_set(0.0f), block_top = vf_set(0.0f);
        for (int64_t j = 0; j < BLOCK; j += LANES) {
            const int64_t n = max_(0, min_(LANES, left - j));
            vf y = n == LANES ? vf_load(x + b * BLOCK + j) : vf_load_n(x + b * BLOCK + j, n);
            vf w = vf_min(vf_exp((y - vf_set(top)) * factor), vf_set(1.0f)); // buckets end at 1
            if (n < LANES) w = vf_keep(w, 0, n, 0.0f);
            vf_store(row->weights + b * BLOCK + j, w);
            sum = sum + w, block_top = vf_max(block_top, w);
        }
        row->block_sum[b] = vf_sum(sum), row->block_top[b] = vf_top(block_top);
        row->total += (double)row->block_sum[b];
    }
}

// Inverts the distribution function over all tokens, in order of id.
static int64_t V(draw_among_all)(const struct V(row) *row, double u) {
    const double target = u * row->total;
    double before = 0.0, after = 0.0, within = 0.0, so_far = 0.0;
    int64_t block = 0, last = 0;
    for (int64_t b = 0; b < row->blocks && after <= target; b++) {
        if (row->block_sum[b] == 0.0f) continue;
        block = b, before = after, after += (double)row->block_sum[b];
    }
    const float *weights = row->weights + block * BLOCK;
    for (int64_t j = 0; j < BLOCK; j++) within += (double)weights[j];
    // The block's own sum is of floats: compare shares of it.
    const double inside = (target - before) / (double)row->block_sum[block] * within;
    for (int64_t j = 0; j < BLOCK; j++) {
        if (weights[j] == 0.0f) continue;
        last = j;
        if ((so_far += (double)weights[j]) > inside) break;
    }
    return block * BLOCK + last;
}

// The tokens of at least this weight; returns the sum of theirs.
static double V(collect)(struct V(row) *row, float at_least) {
    double sum = 0.0;
    int64_t n = 0;
    for (int64_t b = 0; b < row->blocks; b++) {
        if (row->block_top[b] < at_least) continue;
        const int64_t end = min_(row->size, (b + 1) * BLOCK);
        for (int64_t i = b * BLOCK; i < end; i++) {
            const bool is_in = row->weights[i] >= at_least;
            row->found_weights[n] = row->weights[i];
            row->found_ids[n] = (int32_t)i;
            sum += is_in ? (double)row->weights[i] : 0.0;
            n += is_in;
        }
    }
    row->found = n;
    return sum;
}

// How far below 1 a weight is, in steps of its type: rises as weights fall from 1 to 0.
INLINE uint32_t V(below_one)(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, 4);
    return 0x3f800000 - bits;
}

INLINE int64_t V(bucket_of)(float weight) { return V(below_one)(weight) >> BUCKET_SHIFT; }

static void V(deal)(struct V(row) *row) {
    memset(row->counts, 0, sizeof row->counts);
    memset(row->sums, 0, sizeof row->sums);
    for (int64_t i = 0; i < row->found; i++) {
        const int64_t bucket = V(bucket_of)(row->found_weights[i]);
        row->counts[bucket]++;
        row->sums[bucket] += (double)row->found_weights[i];
    }
    row->sorted_bucket = -1;
}

// One pass of a radix sort, stable: by DIGIT_BITS bits of how far below 1 the weights are.
static void V(sort_by_digit)(const uint64_t *from, uint64_t *to, int64_t n, int shift) {
    int32_t starts[(1 << DIGIT_BITS) + 1] = {0};
#define DIGIT(key) ((key) >> (32 + shift) & ((1 << DIGIT_BITS) - 1))
    for (int64_t i = 0; i < n; i++) starts[DIGIT(from[i]) + 1]++;
    for (int64_t digit = 0; digit < 1 << DIGIT_BITS; digit++) starts[digit + 1] += starts[digit];
    for (int64_t i = 0; i < n; i++) to[starts[DIGIT(from[i])]++] = from[i];
#undef DIGIT
}

// All of a bucket are equal in the bits above BUCKET_SHIFT, and come in order of id.
static void V(sort_bucket)(struct V(row) *row, int64_t bucket) {
    if (row->sorted_bucket == bucket) return;
    int64_t n = 0;
    for (int64_t i = 0; n < row->counts[bucket]; i++)
        if (V(bucket_of)(row->found_weights[i]) == bucket)
            row->sorted[n++] = (uint64_t)V(below_one)(row->found_weights[i]) << 32 | (uint32_t)row->found_ids[i];
    V(sort_by_digit)(row->sorted, row->half_sorted, n, 0);
    V(sort_by_digit)(row->half_sorted, row->sorted, n, DIGIT_BITS);
    row->sorted_bucket = bucket;
}

INLINE double V(sorted_weight)(const struct V(row) *row, int64_t i) {
    const uint32_t bits = 0x3f800000 - (uint32_t)(row->sorted[i] >> 32);
    float weight;
    memcpy(&weight, &bits, 4);
    return (double)weight;
}

// The sum of the first `count` weights of the ranking.
static double V(sum_of_first)(struct V(row) *row, int64_t count) {
    double sum = 0.0;
    for (int64_t bucket = 0; bucket < BUCKETS && count > 0; bucket++) {
        const int64_t here = row->counts[bucket];
        if (here <= count) {
            sum += row->sums[bucket];
        } else {
            V(sort_bucket)(row, bucket);
            for (int64_t i = 0; i < count; i++) sum += V(sorted_weight)(row, i);
        }
        count -= here;
    }
    return sum;
}

// The first rank at which the sum of the weights up to and with it is `target`, or more if `beyond`; the last of those
// that were found if there is none. Its token goes to `id`.
static int64_t V(reach)(struct V(row) *row, double target, bool beyond, int64_t *id) {
    double sum = 0.0;
    int64_t rank = 0, last = 0;
    for (int64_t bucket = 0; bucket < BUCKETS; bucket++) {
        if (row->counts[bucket] == 0) continue;
        last = bucket;
        const double with = sum + row->sums[bucket];
        if (beyond ? with > target : with >= target) break;
        if (rank + row->counts[bucket] == row->found) break;
        sum = with, rank += row->counts[bucket];
    }
    V(sort_bucket)(row, last);
    int64_t i = 0;
    for (; i < row->counts[last] - 1; i++) {
        sum += V(sorted_weight)(row, i);
        if (beyond ? sum > target : sum >= target) break;
    }
    *id = (int64_t)(uint32_t)row->sorted[i];
    return rank + i;
}

static int64_t V(token_of_rank)(struct V(row) *row, int64_t rank) {
    int64_t bucket = 0;
    while (rank >= row->counts[bucket]) rank -= row->counts[bucket++];
    V(sort_bucket)(row, bucket);
    return (int64_t)(uint32_t)row->sorted[rank];
}

// Inverts the distribution function over the tokens that the filters leave, in order of rank.
static int64_t V(draw_filtered)(struct V(row) *row, int64_t top_k, double top_p, float min_p, double u) {
    const bool only_top_p = top_k >= row->size && min_p == 0.0f;
    for (float at_least = 0x1p-10f;; at_least = at_least > 0x1p-40f ? at_least * 0x1p-10f : 0.0f) {
        at_least = at_least < min_p ? min_p : at_least;
        const double sum = V(collect)(row, at_least);
        if (at_least == min_p || row->found >= top_k || (only_top_p && sum >= top_p * row->total)) break;
    }
    V(deal)(row);
    int64_t left = row->size, id;
    double sum_left = row->total;
    if (!only_top_p) left = min_(row->found, top_k), sum_left = V(sum_of_first)(row, left);
    if (top_p < 1.0) {
        const int64_t nucleus = V(reach)(row, top_p * sum_left, false, &id) + 1;
        if (nucleus < left) left = nucleus, sum_left = V(sum_of_first)(row, left);
    }
    return V(reach)(row, u * sum_left, true, &id) < left ? id : V(token_of_rank)(row, left - 1);
}

// Philox4x32-10 of a request's seed (the key) and a token's position (the counter): engine/sample/random.py.
static double V(uniform)(uint64_t seed, uint64_t position) {
    uint32_t a = (uint32_t)position, b = (uint32_t)(position >> 32), c = 0, d = 0;
    uint32_t key_a = (uint32_t)seed, key_b = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, key_a += 0x9E3779B9u, key_b += 0xBB67AE85u) {
        const uint64_t of_a = (uint64_t)a * 0xD2511F53u, of_c = (uint64_t)c * 0xCD9E8D57u;
        a = (uint32_t)(of_c >> 32) ^ b ^ key_a, b = (uint32_t)of_c;
        c = (uint32_t)(of_a >> 32) ^ d ^ key_b, d = (uint32_t)of_a;
    }
    const uint64_t bits = (uint64_t)a << 20 | b >> 12;
    return ((double)bits + 0.5) * 0x1p-52; // never 0, never 1
}

static void V(sample)(const void *args, int thread, int num_threads) {
    const struct cl_sample *op = args;
    const int64_t blocks = (op->size + BLOCK - 1) / BLOCK, width = blocks * BLOCK;
    struct V(row) row = {.size = op->size, .blocks = blocks};
    float *floats = (float *)(op->workspace + thread * width * 32); // 8 + 8 + 4 + 4 + 4 + 2 * 4 / 64 bytes a token
    row.sorted = (uint64_t *)floats;
    row.half_sorted = row.sorted + width;
    row.weights = floats + 4 * width;
    row.found_weights = floats + 5 * width;
    row.found_ids = (int32_t *)(floats + 6 * width);
    row.block_sum = floats + 7 * width;
    row.block_top = row.block_sum + blocks;
    int64_t i = __atomic_fetch_add(op->ticket, 1, __ATOMIC_RELAXED);
    for (; i < op->num_rows; i = __atomic_fetch_add(op->ticket, 1, __ATOMIC_RELAXED)) {
        const float *x = op->logits + op->rows[i] * op->stride;
        const double temperature = op->temperature[i], top_p = op->top_p[i], min_p = op->min_p[i];
        const int64_t top_k = (int64_t)op->top_k[i], best = V(best)(x, &row);
        int64_t token = best;
        if (best >= 0 && temperature > 0.0) {
            const double u = V(uniform)(op->seeds[i], (uint64_t)op->positions[i]);
            V(weigh_row)(x, x[best], (float)temperature, &row);
            token = top_k >= op->size && top_p == 1.0 && min_p == 0.0
                        ? V(draw_among_all)(&row, u)
                        : V(draw_filtered)(&row, top_k, top_p, (float)min_p, u);
        }
        op->tokens[i] = token;
    }
    (void)num_threads;
}
