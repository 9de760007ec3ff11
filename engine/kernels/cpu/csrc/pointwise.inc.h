// Row by row: normalisation, activation.

static void NAME(rms_norm)(const void *args, int thread, int num_threads) {
    const struct cl_rms_norm *op = args;
    const int64_t size = op->size;
    int64_t first, last;
    cl_share(*op->num_rows, thread, num_threads, &first, &last);
    for (int64_t r = first; r < last; r++) {
        const elem *x = (const elem *)op->x + (op->index ? op->index[r] : r) * op->x_stride;
        const elem *residual = op->residual ? (const elem *)op->residual + r * op->residual_stride : NULL;
        const elem *before = op->residual_after ? NULL : residual, *after = op->residual_after ? residual : NULL;
        elem *sum = op->sum ? (elem *)op->sum + r * op->sum_stride : NULL;
        elem *out = (elem *)op->out + r * op->out_stride;
        vf squares = vf_set(0.0f);
        for (int64_t j = 0; j < size; j += LANES) {
            const int64_t n = min_(LANES, size - j);
            vf y = NAME(load_n)(x + j, n);
            if (before) y = y + NAME(load_n)(before + j, n);
            if (sum) { // what the layers after this one see as the residual is what is normalised
                NAME(store_n)(sum + j, y, n);
                y = NAME(load_n)(sum + j, n);
            }
            squares = vf_fma(y, y, squares);
        }
        const vf factor = vf_set(1.0f / sqrtf(vf_sum(squares) / (float)size + op->eps));
        for (int64_t j = 0; j < size; j += LANES) {
            const int64_t n = min_(LANES, size - j);
            vf y = sum ? NAME(load_n)(sum + j, n) : NAME(load_n)(x + j, n);
            if (before && !sum) y = y + NAME(load_n)(before + j, n);
            y = y * factor;
            if (op->weight) y = y * vf_load_n(op->weight + j, n);
            if (after) y = y + NAME(load_n)(after + j, n);
            NAME(store_n)(out + j, y, n);
        }
    }
}

static void NAME(act_and_mul)(const void *args, int thread, int num_threads) {
    const struct cl_act_and_mul *op = args;
    int64_t first, last;
    cl_share(*op->num_rows, thread, num_threads, &first, &last);
    for (int64_t r = first; r < last; r++) {
        const elem *gate = (const elem *)op->x + r * op->x_stride, *up = gate + op->size;
        elem *out = (elem *)op->out + r * op->out_stride;
        for (int64_t j = 0; j < op->size; j += LANES) {
            const int64_t n = min_(LANES, op->size - j);
            NAME(store_n)(out + j, vf_activate(NAME(load_n)(gate + j, n), op->activation) * NAME(load_n)(up + j, n), n);
        }
    }
}
