// STEPS multiplications and additions, each of which needs the one before.
extern "C" __global__ void arithmetic(float* out, int n) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    float x = thread;
    #pragma unroll 16
    for (int i = 0; i < STEPS; ++i) x = x * 0.999f + 0.5f;
    if (thread < n) out[thread] = x;
}

// The sum of an array; a thread asks for EACH numbers before it waits for the first. The block takes SHARED KiB of shared memory.
template <int SHARED, int EACH>
__device__ __forceinline__ void reads(const float* x, float* out, long long n) {
    __shared__ float taken[SHARED * 256];
    long long threads = (long long)gridDim.x * blockDim.x;
    float sum = 0.0f;
    #pragma unroll 1
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at + (EACH - 1) * threads < n; at += EACH * threads) {
        float found[EACH];
        #pragma unroll
        for (int i = 0; i < EACH; ++i) found[i] = x[at + i * threads];
        #pragma unroll
        for (int i = 0; i < EACH; ++i) sum += found[i];
    }
    if (sum == 12345.678f) {  // never: the array is of zeros. It keeps the reads and the shared memory alive.
        taken[threadIdx.x] = sum;
        __syncthreads();
        out[0] = taken[(threadIdx.x + n) % blockDim.x];
    }
}

#define READS(SHARED) \
    extern "C" __global__ void one_##SHARED(const float* x, float* out, long long n) { reads<SHARED, 1>(x, out, n); } \
    extern "C" __global__ void eight_##SHARED(const float* x, float* out, long long n) { reads<SHARED, 8>(x, out, n); }
READS(1) READS(9) READS(13) READS(27) READS(48)

// LIVE numbers that all change in every round, so that each needs a register; the compiler must leave room for BLOCKS blocks.
template <int LIVE>
__device__ __forceinline__ void kept(float* out, int rounds, float grow) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    float x[LIVE];
    #pragma unroll
    for (int i = 0; i < LIVE; ++i) x[i] = thread + i;
    #pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        #pragma unroll
        for (int i = 0; i < LIVE; ++i) x[i] = x[i] * grow + x[(i + 1) % LIVE];
    }
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < LIVE; ++i) sum += x[i];
    out[thread] = sum;
}

#define KEPT(BLOCKS) \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) kept_##BLOCKS(float* out, int rounds, float grow) { \
        kept<96>(out, rounds, grow); \
    }
KEPT(1) KEPT(2) KEPT(3) KEPT(4) KEPT(6) KEPT(8)
