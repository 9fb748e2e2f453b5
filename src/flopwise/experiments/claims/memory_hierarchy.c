/* Chains of reads and readings of working sets, for `memory-hierarchy` on a CPU. */

/* Follow addresses, from the one in `at` on; leave there where the chain goes on. */
void chase(void ***at, long steps) {
    void **p = *at;
    while (steps--) p = (void **)*p;
    *at = p;
}

/* Every add needs the result of the one before, and the compiler cannot know what they come to. */
#define ADD x += by; __asm__ volatile("" : "+r"(x));
#define EIGHT(this) this this this this this this this this
void add_chain(long steps, long *out) {
    long x = *out, by = steps;
    for (long i = 0; i < steps; i += 64) { EIGHT(EIGHT(ADD)) }
    *out = x;
}

/* Eight sums, each as wide as a vector register: no add waits for another. `bytes` is a multiple of 512. */
#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
typedef unsigned long long vec __attribute__((vector_size(WIDTH)));
void read_all(const vec *x, long bytes, long passes, unsigned long long *out) {
    vec a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};
    for (long pass = 0; pass < passes; ++pass) {
        for (const vec *at = x, *end = x + bytes / WIDTH; at < end; at += 8) {
            a += at[0]; b += at[1]; c += at[2]; d += at[3]; e += at[4]; f += at[5]; g += at[6]; h += at[7];
        }
        __asm__ volatile("" ::: "memory");
    }
    a += b + c + d + e + f + g + h;
    *out = a[0] + a[1];
}
