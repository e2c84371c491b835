// What hopper.cu is written in: barriers, copies, the matrix unit, registers of bfloat16 pairs. Stands before it in one
// compilation.

typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE_M 128
#define TILE_N 256
#define TILE_K 64
#ifndef STAGES
#define STAGES 4
#endif
#define A_BYTES (TILE_M * TILE_K * 2)
#define B_BYTES (TILE_N * TILE_K * 2)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define BOX_BYTES (64 * 64 * 2)
#define H_BYTES (TILE_M * 64 * 2)

struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra finished;\nbra again;\n"
        "finished:\n}\n" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// What another thread copied without the copy engine is in shared memory: let the matrix unit see it.
__device__ __forceinline__ void barrier_wait_full(u32 barrier, u32 phase) {
    barrier_wait(barrier, phase);
#if GATHER
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The four warps of this warpgroup.
__device__ __forceinline__ void warpgroup_sync() {
    asm volatile("bar.sync %0, 128;" ::"r"(threadIdx.x / 128) : "memory");
}

__device__ __forceinline__ void load_2d(u32 to, const TensorMap* map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            to),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void load_3d(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// A block of rows of one expert: zeros from its end on. The map's outer dims cancel; see the launcher.
__device__ __forceinline__ void load_ragged(
    u32 to, const TensorMap* map, u32 barrier, int x, int row, int start, int count) {
    const int y = (1 << 30) - count + row, z = start + count, w = 1 << 30;
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

__device__ __forceinline__ void copy_16(u32 to, const char* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ int read_int(const int* pointer) {
    int value;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(value) : "l"(pointer));
    return value;
}

__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | 1ull << 62;
}

//@WGMMA@

// One step of the contraction: 64 rows of a against all 256 columns of b.
__device__ __forceinline__ void multiply(float (&acc)[128], u32 a, u32 b) {
#if MODE == 3
    const u64 a_matrix = matrix_descriptor(a, BOX_BYTES, 1024);
    const int a_step = 2048 >> 4;
#else
    const u64 a_matrix = matrix_descriptor(a, 16, 1024);
    const int a_step = 32 >> 4;
#endif
#if B_MN
    const u64 b_matrix = matrix_descriptor(b, BOX_BYTES, 1024);
    const int b_step = 2048 >> 4;
#else
    const u64 b_matrix = matrix_descriptor(b, 16, 1024);
    const int b_step = 32 >> 4;
#endif
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < TILE_K / 16; ++k)
        wgmma(acc, a_matrix + k * a_step, b_matrix + k * b_step);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void multiply_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float low_of(u32 packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_of(u32 packed) { return __uint_as_float(packed & 0xFFFF0000u); }

// Among the four lanes of a quad: lane s's value q goes to lane q's place s. Applied twice it does nothing.
__device__ __forceinline__ void quad_transpose(u32 (&values)[4], int quad) {
    const bool odd = quad & 1, upper = quad & 2;
    u32 sent = odd ? values[0] : values[1], got = __shfl_xor_sync(0xFFFFFFFFu, sent, 1);
    if (odd) values[0] = got; else values[1] = got;
    sent = odd ? values[2] : values[3], got = __shfl_xor_sync(0xFFFFFFFFu, sent, 1);
    if (odd) values[2] = got; else values[3] = got;
    sent = upper ? values[0] : values[2], got = __shfl_xor_sync(0xFFFFFFFFu, sent, 2);
    if (upper) values[0] = got; else values[2] = got;
    sent = upper ? values[1] : values[3], got = __shfl_xor_sync(0xFFFFFFFFu, sent, 2);
    if (upper) values[1] = got; else values[3] = got;
}

__device__ __forceinline__ void store_16(char* to, const u32 (&values)[4], bool inside) {
    if (inside)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values[0]), "r"(values[1]),
                     "r"(values[2]), "r"(values[3])
                     : "memory");
}

// The one addition that an element of the result gets: the order of others does not matter.
__device__ __forceinline__ void add_16(char* to, const u32 (&values)[4], bool inside) {
    if (inside)
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(__uint_as_float(values[0])),
                     "f"(__uint_as_float(values[1])), "f"(__uint_as_float(values[2])), "f"(__uint_as_float(values[3]))
                     : "memory");
}

__device__ __forceinline__ u32 load_shared(u32 address) {
    u32 value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void load_16(u32 (&values)[4], const char* from, bool inside) {
    values[0] = values[1] = values[2] = values[3] = 0;
    if (inside)
        asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                     : "l"(from));
}

__device__ __forceinline__ float sigmoid(float g) { return __fdividef(1.0f, 1.0f + __expf(-g)); }
