// GeLU, tanh approximation: 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3).
//
// Compiled at run time by NVRTC, without headers: the 16-bit formats are converted by their own instructions.
// Before it: -DSCALAR=0 (fp32), 1 (bf16) or 2 (fp16); -DTHREADS per block, of which each loads 16 bytes.
// All literals are float: one double among them would move the whole formula to the slow fp64 pipe.

#if SCALAR == 0
typedef float scalar;
__device__ __forceinline__ float widen(scalar bits) { return bits; }
__device__ __forceinline__ scalar narrow(float value) { return value; }
#else
typedef unsigned short scalar;
#if SCALAR == 1
__device__ __forceinline__ float widen(scalar bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ __forceinline__ scalar narrow(float value) {
    scalar bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#else
__device__ __forceinline__ float widen(scalar bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ scalar narrow(float value) {
    scalar bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif
#endif

constexpr int WIDTH = 16 / sizeof(scalar);  // elements in one 16-byte load

union Pack {
    uint4 bits;
    scalar elements[WIDTH];
};

// 1 / (1 + exp(-2u)). Both intrinsics are within a few ulp here, and cost a fraction of tanhf.
__device__ __forceinline__ float gate(float x) {
    return __fdividef(1.0f, 1.0f + __expf(-1.5957691216057308f * x * (1.0f + 0.044715f * x * x)));
}

struct Forward {
    static constexpr bool backward = false;
    __device__ __forceinline__ static float at(float x, float) { return x * gate(x); }
};

// d/dx [x s] = s + x s (1 - s) 2u', with 2u' = 2 sqrt(2/pi) (1 + 3 * 0.044715 x^2).
struct Backward {
    static constexpr bool backward = true;
    __device__ __forceinline__ static float at(float x, float dy) {
        float s = gate(x);
        x = fminf(fmaxf(x, -16.0f), 16.0f);  // beyond, s is 0 or 1 and only 0 times infinity is left
        return dy * s * (1.0f + x * (1.0f - s) * 1.5957691216057308f * (1.0f + 0.134145f * x * x));
    }
};

template <typename Formula>
__device__ __forceinline__ void run(const scalar* x, const scalar* dy, scalar* y, long long n) {
    constexpr int TILE = THREADS * WIDTH;
    long long start = (long long)blockIdx.x * TILE;
    bool aligned = (((size_t)x | (size_t)dy | (size_t)y) & 15) == 0;
    if (aligned && start + TILE <= n) {
        long long first = start + threadIdx.x * WIDTH;
        Pack in, gradient, out;
        in.bits = *(const uint4*)(x + first);
        if (Formula::backward) gradient.bits = *(const uint4*)(dy + first);
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            out.elements[e] = narrow(Formula::at(widen(in.elements[e]), Formula::backward ? widen(gradient.elements[e]) : 0.0f));
        *(uint4*)(y + first) = out.bits;
    } else {  // the tail, or a view that begins between two 16-byte words
        long long end = start + TILE < n ? start + TILE : n;
        for (long long i = start + threadIdx.x; i < end; i += THREADS)
            y[i] = narrow(Formula::at(widen(x[i]), Formula::backward ? widen(dy[i]) : 0.0f));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gelu_forward(const scalar* __restrict__ x, scalar* __restrict__ y, long long n) {
    run<Forward>(x, x, y, n);
}

extern "C" __global__ void __launch_bounds__(THREADS)
gelu_backward(const scalar* __restrict__ x, const scalar* __restrict__ dy, scalar* __restrict__ dx, long long n) {
    run<Backward>(x, dy, dx, n);
}
