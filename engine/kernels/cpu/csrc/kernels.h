// The C side of Chairlift's CPU kernels: what a call is made of, and what one instruction set offers.
//
// A kernel is a function that does the share of the work that is thread `thread`'s of `num_threads` (where that thread
// is late, another does it). Calls are plain structs that point to their tensors, so that a list of them can be made
// once and run many times: `cl_run` goes through such a list in one OpenMP region, and begins a call when the one
// before it is done. Whatever changes from step to step is read through a pointer (`num_rows`, `struct cl_rows`).
//
// Whoever builds a call has checked its shapes; nothing is checked here. Strides count elements. `elem` is the type of
// activations: float, or bfloat16 held as uint16_t.
//
// One output row is always computed in the same order, whatever the other rows and the number of threads: results do
// not depend on the batch, bit for bit. Keep it so.

#ifndef CL_KERNELS_H
#define CL_KERNELS_H

#include <stdint.h>

// Changes with every change of a struct here or of what the workspaces must hold: a library that was built before is
// then not used (library.py has the same number).
#define CL_ABI 3

typedef void cl_kernel(const void *args, int thread, int num_threads);

struct cl_call {
    cl_kernel *kernel;
    const void *args;
};

enum cl_activation { CL_NONE, CL_SILU, CL_GELU_TANH, CL_GELU };

// out[r, n] = residual[r, n] + alpha * (x[r, :] . weight[n, :] * scale[n] + bias[n])       activation == CL_NONE
// out[r, n] = act(gate[r, n]) * up[r, n], strips 2i of the weight being gate and 2i + 1 up  otherwise
//
// Packed weight, [N, K] to begin with, N padded to strips of 16 outputs, K to blocks of 16 * PK, with zeros; PK is 2
// for bfloat16 (and its int8) and 1 for float (and its int8). Four strips are a group; the last may have fewer:
//
//     group 0: outputs 0-63                                                                   group 1: outputs 64-127
//     | k block 0                                                          | k block 1 | ...  | ...
//     | strip 0              | strip 1               | strip 2 | strip 3   |
//     | 16 rows of PK k's, each: 16 outputs x PK     |
//
// So a block of a strip is what one AMX tile takes, a row of it one AVX-512 register, and a group is read from memory
// strictly in order.
struct cl_linear {
    const int64_t *num_rows;
    const void *x; // elem [rows, K]
    int64_t x_stride;
    const void *weight;   // packed elem, or int8 when `scale` is set
    const float *scale;   // [N padded] or NULL
    const float *bias;    // [N padded] or NULL
    const void *residual; // elem [rows, N] or NULL; may be `out`
    int64_t residual_stride;
    void *out; // elem [rows, N], or float when `out_float`; with an activation [rows, N / 2]
    int64_t out_stride;
    int64_t in_features;          // K
    int64_t out_features;         // columns of `out`
    const struct cl_linear *next; // the layer that is computed next, or NULL: its weights are fetched ahead
    float alpha;
    int32_t activation;
    int32_t out_float;
};

// out[r, :] = weight[ids[r], :]: a vocabulary's embeddings, from a packed weight where they are the output layer too.
struct cl_gather {
    const int64_t *num_rows;
    const int64_t *ids;
    const void *weight; // packed elem, or elem [any, in_features]
    void *out;          // elem [rows, in_features]
    int64_t in_features;
    int64_t total_strips; // 0: the weight is not packed
};

// sum = x + residual when there is a residual, else x; out = sum / rms(sum) * weight. With `residual_after`,
// out = residual + x / rms(x) * weight instead. With `index`, row r of x is x[index[r]].
struct cl_rms_norm {
    const int64_t *num_rows;
    const void *x; // elem [rows, N]
    int64_t x_stride;
    const int64_t *index; // [rows] or NULL
    const void *residual; // elem [rows, N] or NULL
    int64_t residual_stride;
    void *sum; // elem [rows, N] or NULL: where to keep the sum; may be `residual`
    int64_t sum_stride;
    void *out; // elem [rows, N]; may be `x`
    int64_t out_stride;
    const float *weight; // [N] or NULL
    int64_t size;        // N
    float eps;
    int32_t residual_after;
};

// out[r, i] = act(x[r, i]) * x[r, size + i]
struct cl_act_and_mul {
    const int64_t *num_rows;
    const void *x; // elem [rows, 2 * size]
    int64_t x_stride;
    void *out; // elem [rows, size]
    int64_t out_stride;
    int64_t size;
    int32_t activation;
};

// Where a step's rows lie in the packed queries and in the cache: engine.kernels.PackedRows.
struct cl_rows {
    int64_t num_rows;
    int64_t block_size; // a multiple of 16
    const int64_t *query_starts;
    const int64_t *context_lens;
    const int64_t *block_tables;
    int64_t table_stride;
};

// What a cache holds: elems, or what is narrower and expanded to float as it is loaded.
#define CL_CACHE_OWN 0
#define CL_CACHE_INT8 1
#define CL_CACHE_BF16 2
#define CL_NUM_CACHES 3

// Cache of one layer, dims padded with zeros to a multiple of PK (keys) or with anything to 16 (values). PK as above
// for elems, 1 for what is narrower:
//
//     keys    [num_blocks][G][key_dim / PK][block_size][PK]      dims in pairs, tokens across: scores without
//                                                                sideways sums, 16 tokens a register
//     values  [num_blocks][G][block_size / PK][value_dim][PK]    tokens in pairs, dims across
//
// int8s have a scale for each token: float [block_size] behind the keys of a head of a block, and behind its values.
// Number = int8 * scale, and the largest of a head is 127 or -127. What is stored of a token depends on that token
// alone. A head in which a number is not finite has the scale NaN, so that it is noticed as it is without int8.
//
// Normalises (if `q_weight`/`k_weight`), rotates (if `cos`) and stores: q in place, k and v at `slots`. Rotation is of
// the first `rotary_dim` dims: dim i with dim rotary_dim / 2 + i, or neighbours with each other (`rotates_pairs`), both
// by the angle whose cosine is cos[i]. Token t has row t of the angles, or with `positions` row positions[t].
struct cl_write_kv {
    const int64_t *num_rows; // tokens
    void *q;                 // elem [T, H, key_dim] or NULL
    int64_t q_stride;
    const void *k; // elem [T, G, key_dim]
    int64_t k_stride;
    int64_t k_head_stride;
    const void *v; // elem [T, G, value_dim]
    int64_t v_stride;
    int64_t v_head_stride;
    const void *const *cos; // *cos: elem [rows, rotary_dim]; cos itself NULL: no rotation
    const void *const *sin;
    const int64_t *const *positions; // *positions: [T] or NULL
    const float *q_weight; // [key_dim] or NULL
    const float *k_weight;
    void *k_cache;
    void *v_cache;
    const int64_t *const *slots; // *slots: [T]
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t key_dim;
    int64_t value_dim;
    int64_t rotary_dim;
    int64_t block_size;
    float eps;
    int32_t rotates_pairs;
};

// Causal attention of each row's tokens to the cache.
struct cl_attention {
    const struct cl_rows *rows;
    const void *q; // elem [T, H, key_dim]
    int64_t q_stride;
    int64_t q_head_stride;
    void *out; // elem [T, H, value_dim]
    int64_t out_stride;
    const void *k_cache;
    const void *v_cache;
    const float *sinks; // [H] or NULL
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t key_dim;
    int64_t value_dim;
    int64_t window; // 0: none
    float scale;
    float softcap;           // 0: none
    float *const *workspace; // *workspace: for each range of 512 tokens of a split row, H * (value_width + 2) floats
    int64_t *ticket;         // a counter of its own, 0 at the start and again at the end
};

// One token for each of some rows of logits, by the parameters of a request. -1 where a row has NaN or +inf, or nothing
// but -inf.
struct cl_sample {
    const float *logits;
    int64_t stride;
    int64_t size;        // of the vocabulary
    const int64_t *rows; // [num_rows]: which rows of the logits
    int64_t num_rows;
    const double *temperature; // [num_rows]; 0: the largest logit
    const double *top_k;       // [num_rows], from 1 to `size`
    const double *top_p;       // [num_rows]; 1: all
    const double *min_p;       // [num_rows]; 0: all
    const uint64_t *seeds;     // [num_rows]
    const int64_t *positions;  // [num_rows]: of the tokens to choose
    int64_t *tokens;
    char *workspace; // for each thread 32 bytes for each token of the vocabulary, rounded up to a multiple of 64
    int64_t *ticket; // 0
};

// What one instruction set offers, for float [0] and bfloat16 [1].
struct cl_kernels {
    const char *name;
    cl_kernel *linear[2];
    cl_kernel *gather[2];
    cl_kernel *rms_norm[2];
    cl_kernel *act_and_mul[2];
    cl_kernel *write_kv[2][CL_NUM_CACHES]; // NULL: bfloat16's own are no narrower
    cl_kernel *attention[2][CL_NUM_CACHES];
    cl_kernel *sample;
};

extern const struct cl_kernels cl_kernels_avx2, cl_kernels_avx512, cl_kernels_avx512bf16, cl_kernels_amx;

void cl_barrier(void);                                                        // all threads of the running `cl_run`
void cl_share(int64_t n, int part, int parts, int64_t *first, int64_t *last); // a part of 0 ... n - 1

#endif
