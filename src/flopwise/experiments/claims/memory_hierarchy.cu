// Chains of reads and readings of working sets, for `memory-hierarchy` on a GPU. Compiled at run time by NVRTC, without headers.
// Before it: -DREADS of a thread under way at the same time; -DTHREADS of a block; -DCHAINS and -DSTEPS of multiply-adds in a pass.

typedef unsigned long long word;

__device__ __forceinline__ word nanoseconds() {
    word now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// told: cycles, nanoseconds, and the address at which the chain goes on. Both clocks, the work, and both clocks again.
#define TIMED(WORK)                                 \
    word ns = nanoseconds();                        \
    long long cycles = clock64();                   \
    WORK                                            \
    told[0] = (word)(clock64() - cycles);           \
    told[1] = nanoseconds() - ns;

#define FOLLOW asm volatile("ld.global.ca.u64 %0, [%0];" : "+l"(at) :: "memory");

// One thread: what it reads is the address of its next read. First some steps that are not timed: L1 begins empty.
extern "C" __global__ void chase_far(word* told, int warm, int steps) {
    word at = told[2];
    for (int i = 0; i < warm; ++i) FOLLOW
    TIMED(
        _Pragma("unroll 16")
        for (int i = 0; i < steps; ++i) FOLLOW
    )
    told[2] = at;
}

// The same in shared memory, whose addresses have 32 bits.
extern "C" __global__ void chase_shared(word* told, int steps) {
    __shared__ unsigned chain[1024];
    unsigned first;
    asm("{ .reg .u64 p; cvta.to.shared.u64 p, %1; cvt.u32.u64 %0, p; }" : "=r"(first) : "l"(chain));
    for (int i = 0; i < 1024; ++i) chain[i] = first + 4 * ((i + 33) % 1024);
    __syncthreads();
    unsigned at = first;
    TIMED(
        _Pragma("unroll 16")
        for (int i = 0; i < steps; ++i) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(at) :: "memory");
    )
    told[3] = at;
}

// A chain of multiply-adds in registers.
extern "C" __global__ void chase_registers(word* told, int steps) {
    float x = (float)told[3], by = x + 1.0f;
    TIMED(
        _Pragma("unroll 64")
        for (int i = 0; i < steps; ++i) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x) : "f"(by));
    )
    told[3] = x == 12345.678f;
}

#define LOAD(HOW, to, from) \
    asm volatile("ld.global." HOW ".v4.f32 {%0, %1, %2, %3}, [%4];" \
                 : "=f"((to).x), "=f"((to).y), "=f"((to).z), "=f"((to).w) : "l"(from))

__device__ __forceinline__ float all(float4 v) { return v.x + v.y + v.z + v.w; }

// All threads go through the set together, again and again, past L1: 16 bytes each, neighbours side by side.
extern "C" __global__ void __launch_bounds__(THREADS) read_far(const float4* x, word* told, unsigned mask, int passes) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned threads = gridDim.x * blockDim.x;
    float sum = 0.0f;
    for (int pass = 0; pass < passes; ++pass) {
        float4 v[READS];
        #pragma unroll
        for (int i = 0; i < READS; ++i, at += threads) LOAD("cg", v[i], x + (at & mask));
        #pragma unroll
        for (int i = 0; i < READS; ++i) sum += all(v[i]);
    }
    if (sum == 12345.678f) told[3] = 1;
}

// Every block goes through 16 KiB of its own: after the first pass they are in L1.
extern "C" __global__ void __launch_bounds__(THREADS) read_l1(const float4* x, word* told, int passes) {
    const float4* own = x + blockIdx.x * 1024;
    float sum = 0.0f;
    for (int pass = 0; pass < passes; ++pass) {
        const float4* from = own + ((threadIdx.x + 32 * pass) & 511);
        float4 v[READS];
        #pragma unroll
        for (int i = 0; i < READS; ++i) LOAD("ca", v[i], from + 64 * i);
        #pragma unroll
        for (int i = 0; i < READS; ++i) sum += all(v[i]);
    }
    if (sum == 12345.678f) told[3] = 1;
}

// The same in shared memory.
extern "C" __global__ void __launch_bounds__(THREADS) read_shared(const float4* x, word* told, int passes) {
    __shared__ float4 own[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) own[i] = x[i];
    __syncthreads();
    float sum = 0.0f;
    for (int pass = 0; pass < passes; ++pass) {
        const float4* from = own + ((threadIdx.x + 32 * pass) & 511);
        #pragma unroll
        for (int i = 0; i < READS; ++i) sum += all(from[64 * i]);
    }
    if (sum == 12345.678f) told[3] = 1;
}

// Some chains of multiply-adds in every thread, some steps of each in a pass.
extern "C" __global__ void __launch_bounds__(THREADS) read_registers(const float* x, word* told, int passes) {
    float by = x[0], sums[CHAINS];
    #pragma unroll
    for (int i = 0; i < CHAINS; ++i) sums[i] = x[i] + threadIdx.x;
    for (int pass = 0; pass < passes; ++pass)
        #pragma unroll
        for (int step = 0; step < STEPS; ++step)
            #pragma unroll
            for (int i = 0; i < CHAINS; ++i) sums[i] = sums[i] * by + by;
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < CHAINS; ++i) sum += sums[i];
    if (sum == 12345.678f) told[3] = 1;
}
