// One of `paths` branches for each thread: neighbours in groups of `group` take the same one. Every branch does the same work.
extern "C" __global__ void branches(float* out, int paths, int group) {
    int thread = blockIdx.x * THREADS + threadIdx.x, mine = thread / group % paths;
    float x = 1.0f;
    #pragma unroll 1
    for (int path = 0; path < paths; ++path) {
        if (mine == path) {
            float grow = 0.999f - 0.001f * path;
            #pragma unroll 16
            for (int i = 0; i < STEPS; ++i) x = x * grow + 0.5f;
        }
    }
    out[thread] = x;
}

// A loop of 1 to 32 rounds: neighbours in groups of `group` make the same number of them.
extern "C" __global__ void loops(float* out, int group) {
    int thread = blockIdx.x * THREADS + threadIdx.x, rounds = thread / group % 32 + 1;
    float x = 1.0f;
    #pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        #pragma unroll
        for (int i = 0; i < ROUND; ++i) x = x * 0.999f + 0.5f;
    }
    out[thread] = x;
}
