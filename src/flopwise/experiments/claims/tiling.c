// The GPU's loops, one after the other on one core.
void naive(const float *a, const float *b, float *c, long rows, long n) {
    for (long i = 0; i < rows; ++i)
        for (long j = 0; j < n; ++j) {
            float sum = 0.0f;
            for (long k = 0; k < n; ++k) sum += a[i * n + k] * b[k * n + j];
            c[i * n + j] = sum;
        }
}

#define TILED(T)                                                                                           \
    static void tile_##T(const float *a, const float *b, float *c, long n) {                               \
        float left[T][T], right[T][T], sums[T][T];                                                         \
        for (int i = 0; i < T; ++i) for (int j = 0; j < T; ++j) sums[i][j] = 0.0f;                         \
        for (long start = 0; start < n; start += T) {                                                      \
            for (int i = 0; i < T; ++i) for (int k = 0; k < T; ++k) {                                      \
                left[i][k] = a[i * n + start + k];                                                         \
                right[i][k] = b[(start + i) * n + k];                                                      \
            }                                                                                              \
            for (int i = 0; i < T; ++i) for (int j = 0; j < T; ++j) {                                      \
                float sum = sums[i][j];                                                                    \
                for (int k = 0; k < T; ++k) sum += left[i][k] * right[k][j];                               \
                sums[i][j] = sum;                                                                          \
            }                                                                                              \
        }                                                                                                  \
        for (int i = 0; i < T; ++i) for (int j = 0; j < T; ++j) c[i * n + j] = sums[i][j];                 \
    }                                                                                                      \
    void tiles_##T(const float *a, const float *b, float *c, long rows, long n) {                          \
        for (long i = 0; i < rows; i += T)                                                                 \
            for (long j = 0; j < n; j += T) tile_##T(a + i * n, b + j, c + i * n + j, n);                  \
    }
