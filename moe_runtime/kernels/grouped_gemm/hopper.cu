// Grouped matrix products for Hopper: persistent, warp-specialized, fp32 sums on the tensor cores.
//
// One warpgroup loads, two multiply: each owns 64 rows of a 128 x 256 tile. Counts are read on the device. A ring of
// STAGES slots stands between them: `full` says that a slot holds its operands, `empty` that both have read it.
//
// Compiled once for each combination of
//   MODE      0 y = a @ b          1 h = a @ b, act = gate * swiglu(h)      2 da = a @ b, then swiglu's backward
//             3 dw[e] = a.T @ b over the expert's rows
//   B_MN      whether b's columns are contiguous in memory (else the contraction is); a's are in mode 3 only
//   GATHER    1: rows of a come by index; 2: rows of b (mode 3)
//   OUT_F32, ACCUMULATE   of mode 3

struct Args {
    const int* table;        // modes 0 to 2: (3, num_m) expert, first row, past-the-last row of each tile
    const int* ends;         // mode 3
    const int* order;        // mode 3: experts, the largest first
    const int* index;        // GATHER: which row of `rows_of` each routed row is
    const char* rows_of;     // GATHER: the operand whose rows come by index
    char* out;               // y, h, dh or dw
    char* act;               // modes 1 and 2: (R, F); null to leave out in mode 2
    const float* gate;       // modes 1 and 2: (R,) or null
    float* dgate;            // mode 2: (column tiles, R) or null
    int num_m, num_c, num_tiles;
    int experts;
    int rows;                // R
    int width;               // columns of the result: N, or F in modes 1 and 2
    int depth;               // K
    int group;
    int height;              // mode 3: rows of dw[e]
};

struct Work {
    int expert, start, stop, m, c, steps;
};

// What tile `t` is.
__device__ __forceinline__ Work work_of(const Args& args, int t) {
    Work work;
#if MODE == 3
    const int tiles = args.num_m * args.num_c;
    const int inside_expert = t % tiles;
    work.expert = read_int(args.order + t / tiles);
#else
    const int inside_expert = t;
#endif
    const int strip = args.group * args.num_c;
    const int first = inside_expert / strip * args.group;
    const int height = min(args.num_m - first, args.group);
    const int place = inside_expert % strip;
    work.m = first + place % height;
    work.c = place / height;
#if MODE == 3
    work.start = work.expert ? read_int(args.ends + work.expert - 1) : 0;
    work.stop = read_int(args.ends + work.expert);
    work.steps = (work.stop - work.start + TILE_K - 1) / TILE_K;
#else
    work.expert = read_int(args.table + work.m);
    work.start = read_int(args.table + args.num_m + work.m);
    work.stop = read_int(args.table + 2 * args.num_m + work.m);
    work.steps = work.expert < args.experts ? (args.depth + TILE_K - 1) / TILE_K : 0;
#endif
    return work;
}

__device__ __forceinline__ bool nothing_to_do(const Work& work) {
#if MODE == 3
    return ACCUMULATE && work.steps == 0;
#else
    return work.start >= work.stop;
#endif
}

struct Pipeline {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// How many times 64 columns of h this tile has.
__device__ __forceinline__ int h_parts(const Args& args, const Work& work) {
    return min(TILE_N, args.width - work.c * TILE_N + 63) / 64;
}

// The results of one warpgroup: 64 rows from `row` on, 256 columns of tile c. A thread holds, of rows lane / 4 and that
// + 8, columns 8 j + 2 quad and the next, at acc[4 j] and acc[4 j + 2].
__device__ __forceinline__ void epilogue(
    const Args& args, const Work& work, float (&acc)[128], long long row, long long stop, u32 memory, u32 full,
    u32 empty, Pipeline& pipe) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    row += threadIdx.x % 128 / 32 * 16 + lane / 4;
#if MODE == 0
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const long long at = row + 8 * half;
        char* out = args.out + at * args.width * 2;
#pragma unroll
        for (int group = 0; group < 8; ++group) {
            u32 values[4];
#pragma unroll
            for (int s = 0; s < 4; ++s)
                values[s] = pack(acc[16 * group + 4 * s + 2 * half], acc[16 * group + 4 * s + 2 * half + 1]);
            quad_transpose(values, quad);
            const int column = work.c * TILE_N + 32 * group + 8 * quad;
            store_16(out + column * 2, values, at < stop && column < args.width);
        }
    }
#elif MODE == 1
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const long long at = row + 8 * half;
        const bool inside = at < stop;
        const float gate = args.gate && inside && work.steps ? args.gate[at] : 1.0f;
        char* h = args.out + at * args.width * 4;
        char* act = args.act + at * args.width * 2;
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            u32 g[4], u[4], a[4];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const int at_g = 16 * group + 4 * s + 2 * half;
                g[s] = pack(acc[at_g], acc[at_g + 1]);
                u[s] = pack(acc[at_g + 64], acc[at_g + 65]);
                const float g0 = low_of(g[s]), g1 = high_of(g[s]);
                a[s] = pack(gate * (g0 * sigmoid(g0) * low_of(u[s])), gate * (g1 * sigmoid(g1) * high_of(u[s])));
            }
            quad_transpose(g, quad);
            quad_transpose(u, quad);
            quad_transpose(a, quad);
            const int column = work.c * (TILE_N / 2) + 32 * group + 8 * quad;
            const bool stored = inside && column < args.width;
            store_16(h + column * 2, g, stored);
            store_16(h + (args.width + column) * 2, u, stored);
            store_16(act + column * 2, a, stored);
        }
    }
#elif MODE == 2
    // h follows the product through the ring, 64 columns of both its halves at a time.
    const int warpgroup = threadIdx.x / 128;
    const u32 mine = ((warpgroup - 1) * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4) * 128 + quad * 4;
    const int parts = h_parts(args, work);
    float gate[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half)
        gate[half] = args.gate && work.steps && row + 8 * half < stop ? args.gate[row + 8 * half] : 1.0f;
#pragma unroll
    for (int part = 0; part < TILE_N / 64; ++part) {
        if (part >= parts) break;
        const u32 from = memory + pipe.stage * STAGE_BYTES + mine;
        if (work.steps) barrier_wait(full + pipe.stage * 8, pipe.phase);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const long long at = row + 8 * half;
            const bool inside = at < stop;
            char* dh = args.out + at * args.width * 4;
            char* act = args.act + at * args.width * 2;
#pragma unroll
            for (int group = 2 * part; group < 2 * part + 2; ++group) {
                u32 g[4], u[4], a[4];
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    const u32 place = from + half * 1024 + ((group % 2 * 4 + s) ^ lane / 4) * 16;
                    g[s] = work.steps ? load_shared(place) : 0;
                    u[s] = work.steps ? load_shared(place + H_BYTES) : 0;
                }
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    float dg[2], du[2], product[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float da = acc[16 * group + 4 * s + 2 * half + i];
                        const float gated = i ? high_of(g[s]) : low_of(g[s]), linear = i ? high_of(u[s]) : low_of(u[s]);
                        const float sig = sigmoid(gated), silu = gated * sig, dp = gate[half] * da;
                        product[i] = silu * linear;
                        sum[half] += da * product[i];
                        dg[i] = dp * linear * (sig * (1.0f + gated * (1.0f - sig)));
                        du[i] = dp * silu;
                    }
                    g[s] = pack(dg[0], dg[1]);
                    u[s] = pack(du[0], du[1]);
                    a[s] = pack(gate[half] * product[0], gate[half] * product[1]);
                }
                const int column = work.c * TILE_N + 32 * group + 8 * quad;
                const bool stored = inside && column < args.width;
                quad_transpose(g, quad);
                quad_transpose(u, quad);
                store_16(dh + column * 2, g, stored);
                store_16(dh + (args.width + column) * 2, u, stored);
                if (args.act) {
                    quad_transpose(a, quad);
                    store_16(act + column * 2, a, stored);
                }
            }
        }
        if (work.steps) {
            warpgroup_sync();
            if (threadIdx.x % 128 == 0) barrier_arrive(empty + pipe.stage * 8);
            pipe.advance();
        }
    }
    if (args.dgate) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(0xFFFFFFFFu, sum[half], 1);
            sum[half] += __shfl_xor_sync(0xFFFFFFFFu, sum[half], 2);
            if (row + 8 * half < stop && quad == 0)
                args.dgate[static_cast<long long>(work.c) * args.rows + row + 8 * half] = sum[half];
        }
    }
#else
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const long long at = row + 8 * half;
        const bool inside = at < stop;
#if OUT_F32
        char* out = args.out + (work.expert * stop + at) * args.width * 4;
#pragma unroll
        for (int group = 0; group < 8; ++group) {
            u32 low[4], high[4];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                low[s] = __float_as_uint(acc[16 * group + 4 * s + 2 * half]);
                high[s] = __float_as_uint(acc[16 * group + 4 * s + 2 * half + 1]);
            }
            quad_transpose(low, quad);
            quad_transpose(high, quad);
            const int column = work.c * TILE_N + 32 * group + 8 * quad;
            const bool stored = inside && column < args.width;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const u32 values[4] = {low[2 * part], high[2 * part], low[2 * part + 1], high[2 * part + 1]};
                char* place = out + (column + 4 * part) * 4;
                if (ACCUMULATE) add_16(place, values, stored);
                else store_16(place, values, stored);
            }
        }
#else
        char* out = args.out + (work.expert * stop + at) * args.width * 2;
#pragma unroll
        for (int group = 0; group < 8; ++group) {
            u32 values[4];
#pragma unroll
            for (int s = 0; s < 4; ++s)
                values[s] = pack(acc[16 * group + 4 * s + 2 * half], acc[16 * group + 4 * s + 2 * half + 1]);
            quad_transpose(values, quad);
            const int column = work.c * TILE_N + 32 * group + 8 * quad;
            char* place = out + column * 2;
            const bool stored = inside && column < args.width;
            if (ACCUMULATE && stored) {
                u32 before[4];
                load_16(before, place, true);
#pragma unroll
                for (int s = 0; s < 4; ++s)
                    values[s] = pack(low_of(values[s]) + low_of(before[s]), high_of(values[s]) + high_of(before[s]));
            }
            store_16(place, values, stored);
        }
#endif
    }
#endif
}

#if GATHER
#define PRODUCER_REGISTERS 56
#define CONSUMER_REGISTERS 224
#else
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232
#endif

#define ARRIVE_WHEN_COPIED(barrier) \
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory")

// Loads of one work item. With GATHER every thread copies: 16 bytes at a time, to where the matrix unit's swizzle wants
// them; a slot is full when the copies of all 128 threads and those of the copy engine are there.
__device__ __forceinline__ void produce(
    const TensorMap* map_a, const TensorMap* map_b, const TensorMap* map_h, const Args& args, const Work& work,
    u32 memory, u32 full, u32 empty, Pipeline& pipe) {
    const int lane = threadIdx.x % 128;
#if GATHER
    const int column = lane % 8, in_tile = lane / 8;
    const u32 place = in_tile * 128 + ((column ^ in_tile & 7) * 16);
#endif
#if MODE == 3
    const int count = work.stop - work.start, m = work.m * TILE_M;
#if GATHER
    // Four rows of each box of 64 columns.
    const int boxes = GATHER == 1 ? TILE_M / 64 : TILE_N / 64, width = GATHER == 1 ? args.height : args.width;
    const int first = (GATHER == 1 ? m : work.c * TILE_N) + column * 8;
    const int* indices = args.index + work.start + in_tile;
    int index[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) index[i] = in_tile + 16 * i < count ? read_int(indices + 16 * i) : -1;
#endif
#elif GATHER
    // Eight rows.
    const char* from[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int at = work.start + in_tile + 16 * i;
        const long long index = read_int(args.index + (at < work.stop ? at : work.start));
        from[i] = args.rows_of + (index * args.depth + column * 8) * 2;
    }
#endif
    for (int step = 0; step < work.steps; ++step, pipe.advance()) {
        const u32 a = memory + pipe.stage * STAGE_BYTES, b = a + A_BYTES, ready = full + pipe.stage * 8;
        barrier_wait(empty + pipe.stage * 8, pipe.phase ^ 1);
        const int k = step * TILE_K;
        if (lane == 0) {
            barrier_expect(ready, GATHER == 1 ? B_BYTES : GATHER == 2 ? A_BYTES : STAGE_BYTES);
#if MODE == 3
            if (GATHER != 1)
                for (int box = 0; box < TILE_M / 64; ++box)
                    load_ragged(a + box * BOX_BYTES, map_a, ready, m + 64 * box, k, work.start, count);
            if (GATHER != 2)
                for (int box = 0; box < TILE_N / 64; ++box)
                    load_ragged(b + box * BOX_BYTES, map_b, ready, work.c * TILE_N + 64 * box, k, work.start, count);
#else
            if (GATHER != 1) load_2d(a, map_a, ready, k, work.start);
#if B_MN
            for (int box = 0; box < TILE_N / 64; ++box)
                load_3d(b + box * BOX_BYTES, map_b, ready, work.c * TILE_N + 64 * box, k, work.expert);
#else
            for (int part = 0; part < 2; ++part) {
                const u32 to = b + part * (B_BYTES / 2);
                if (MODE == 1) load_3d(to, map_b, ready, k, work.c * 128, 2 * work.expert + part);
                else load_3d(to, map_b, ready, k, work.c * TILE_N + part * 128, work.expert);
            }
#endif
#endif
        }
#if GATHER && MODE == 3
        const u32 to = (GATHER == 1 ? a : b) + place;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const char* from = args.rows_of + (static_cast<long long>(index[i]) * width + first) * 2;
#pragma unroll
            for (int box = 0; box < boxes; ++box) {
                const bool inside = index[i] >= 0 && first + 64 * box < width;
                copy_16(to + box * BOX_BYTES + i * 2048, inside ? from + box * 128 : args.rows_of, inside);
            }
            const int next = k + TILE_K + 16 * i;
            index[i] = next + in_tile < count ? read_int(indices + next) : -1;
        }
        ARRIVE_WHEN_COPIED(ready);
#elif GATHER
        const bool inside = k + column * 8 < args.depth;
#pragma unroll
        for (int i = 0; i < 8; ++i) copy_16(a + place + i * 2048, inside ? from[i] + k * 2 : args.rows_of, inside);
        ARRIVE_WHEN_COPIED(ready);
#endif
    }
#if MODE == 2
    const int parts = work.steps ? h_parts(args, work) : 0;
    for (int part = 0; part < parts; ++part, pipe.advance()) {
        const u32 to = memory + pipe.stage * STAGE_BYTES, ready = full + pipe.stage * 8;
        barrier_wait(empty + pipe.stage * 8, pipe.phase ^ 1);
        if (lane == 0) {
            const int column_of_h = work.c * TILE_N + 64 * part;
            barrier_expect(ready, 2 * H_BYTES);
            load_2d(to, map_h, ready, column_of_h, work.start);
            load_2d(to + H_BYTES, map_h, ready, args.width + column_of_h, work.start);
        }
#if GATHER
        ARRIVE_WHEN_COPIED(ready);
#endif
    }
#endif
}

__device__ __forceinline__ void consume(
    const Args& args, const Work& work, u32 memory, u32 full, u32 empty, Pipeline& pipe) {
    const int part = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0) - 1, lane = threadIdx.x % 128;
#if MODE == 3
    const int first = work.m * TILE_M + part * 64, stop = args.height;
#else
    const int first = work.start + part * 64, stop = work.stop;
#endif
    if (first >= stop) {
        // No row of this half is an expert's: let the other half go on. All four warps must have seen a slot full before
        // it is given back, or a late one would wait for a phase long past.
        const int steps = work.steps + (MODE == 2 && work.steps ? h_parts(args, work) : 0);
        for (int step = 0; step < steps; ++step, pipe.advance()) {
            barrier_wait(full + pipe.stage * 8, pipe.phase);
            warpgroup_sync();
            if (lane == 0) barrier_arrive(empty + pipe.stage * 8);
        }
        return;
    }
    float acc[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
    if (work.steps) {
        int before = pipe.stage;
        barrier_wait_full(full + pipe.stage * 8, pipe.phase);
        multiply(acc, memory + pipe.stage * STAGE_BYTES + part * BOX_BYTES, memory + pipe.stage * STAGE_BYTES + A_BYTES);
        pipe.advance();
        for (int step = 1; step < work.steps; ++step, pipe.advance()) {
            barrier_wait_full(full + pipe.stage * 8, pipe.phase);
            const u32 a = memory + pipe.stage * STAGE_BYTES;
            multiply(acc, a + part * BOX_BYTES, a + A_BYTES);
            // The product before this one has read its operands.
            multiply_wait<1>();
            if (lane == 0) barrier_arrive(empty + before * 8);
            before = pipe.stage;
        }
        multiply_wait<0>();
        if (lane == 0) barrier_arrive(empty + before * 8);
    }
    // What follows may not be moved before the wait.
#pragma unroll
    for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(acc[i])::"memory");
    epilogue(args, work, acc, first, stop, memory, full, empty, pipe);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    grouped_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                 const __grid_constant__ TensorMap map_h, const Args args) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    const u32 memory = (shared_address(raw) + 1023) & ~1023u;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, GATHER ? 129 : 1);
            barrier_init(empty + 8 * s, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    Pipeline pipe;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (GATHER || threadIdx.x == 0)
            for (int t = blockIdx.x; t < args.num_tiles; t += gridDim.x) {
                const Work work = work_of(args, t);
                if (nothing_to_do(work)) continue;
                produce(&map_a, &map_b, &map_h, args, work, memory, full, empty, pipe);
            }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        int t = blockIdx.x;
        Work next = t < args.num_tiles ? work_of(args, t) : Work();
        for (; t < args.num_tiles; t += gridDim.x) {
            const Work work = next;
            if (t + static_cast<int>(gridDim.x) < args.num_tiles) next = work_of(args, t + gridDim.x);
            if (nothing_to_do(work)) continue;
            consume(args, work, memory, full, empty, pipe);
        }
    }
}
