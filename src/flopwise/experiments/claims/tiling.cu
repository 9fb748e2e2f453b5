// One thread for one number of c. The threads of a warp stand in a row of c: b is read in whole rows, a by all from one place.
extern "C" __global__ void naive(const float* a, const float* b, float* c, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, row = at / n, column = at % n;
    float sum = 0.0f;
    for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];
    c[row * n + column] = sum;
}

// The same, but the threads of a warp stand in a column of c: each reads a row of a of its own.
extern "C" __global__ void scattered(const float* a, const float* b, float* c, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, row = at % n, column = at / n;
    float sum = 0.0f;
    for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];
    c[row * n + column] = sum;
}

// One block for a tile of c, in steps of DEPTH numbers of k; each thread keeps EACH by EACH sums in registers.
template <int TILE, int DEPTH, int EACH>
__device__ __forceinline__ void product(const float* a, const float* b, float* c, int n) {
    constexpr int SIDE = TILE / EACH, THREADS = SIDE * SIDE;
    __shared__ float left[TILE][DEPTH + 1], right[DEPTH][TILE];  // + 1: rows begin in different banks
    int tiles = n / TILE, row = blockIdx.x / tiles * TILE, column = blockIdx.x % tiles * TILE;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    float sums[EACH][EACH] = {};
    for (int start = 0; start < n; start += DEPTH) {
        #pragma unroll
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            left[i / DEPTH][i % DEPTH] = a[(row + i / DEPTH) * n + start + i % DEPTH];
            right[i / TILE][i % TILE] = b[(start + i / TILE) * n + column + i % TILE];
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float down[EACH], across[EACH];
            #pragma unroll
            for (int i = 0; i < EACH; ++i) down[i] = left[y + i * SIDE][k], across[i] = right[k][x + i * SIDE];
            #pragma unroll
            for (int i = 0; i < EACH; ++i)
                #pragma unroll
                for (int j = 0; j < EACH; ++j) sums[i][j] += down[i] * across[j];
        }
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < EACH; ++i)
        #pragma unroll
        for (int j = 0; j < EACH; ++j) c[(row + y + i * SIDE) * n + column + x + j * SIDE] = sums[i][j];
}
