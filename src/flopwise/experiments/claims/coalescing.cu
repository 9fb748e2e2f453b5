// Block after block of the array: the threads of a warp are `stride` numbers apart. The sum keeps the reads alive.
extern "C" __global__ void strided(const float* x, float* out, long long stride) {
    const float* from = x + ((long long)blockIdx.x * THREADS * READS + threadIdx.x) * stride;
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < READS; ++i) sum += from[i * THREADS * stride];
    if (sum == 12345.678f) out[blockIdx.x] = sum;
}

// A thread adds up WALK numbers of its column; the threads beside it have the columns beside it: a warp reads along a row.
extern "C" __global__ void by_rows(const float* x, float* out, unsigned side) {
    unsigned thread = blockIdx.x * THREADS + threadIdx.x;
    const float* from = x + (long long)(thread / side * WALK) * side + thread % side;
    float sum = 0.0f;
    #pragma unroll 8
    for (int i = 0; i < WALK; ++i) sum += from[(long long)i * side];
    if (sum == 12345.678f) out[thread] = sum;
}

// A thread adds up WALK numbers of its row; the threads beside it have the rows below it: a warp reads along a column.
extern "C" __global__ void by_columns(const float* x, float* out, unsigned side) {
    unsigned thread = blockIdx.x * THREADS + threadIdx.x;
    const float* from = x + (long long)(thread % side) * side + thread / side * WALK;
    float sum = 0.0f;
    #pragma unroll 8
    for (int i = 0; i < WALK; ++i) sum += from[i];
    if (sum == 12345.678f) out[thread] = sum;
}
