// Grouped expert products, FP4 weights x FP8 activations: see deepinfer/ops/experts.
//
// E2M1 weights are decoded to E4M3 in registers (two PRMT for eight weights), with the block scale in the E4M3 exponent relative to one
// scale a weight row, and fed to wgmma as the register operand. Activations are E4M3 with one scale a row: the K loop never rescales.
// One bulk copy fetches a tile. Four kernels by the widest token tile: 16 or 32 (two blocks an SM), 32 or 64 and 64 or 96 (four consumer
// warpgroups, 256 weight rows), 128 or 256 (two warpgroups). With -DCLUSTER=2 two blocks share the activations by multicast.
// The smallest kernel deals out equal shares of all tiles' columns: a tile may be begun by one block and ended by others, which leave their
// sums to the one that began it. Each kernel starts while the one before it ends; weights are loaded before the activations are there.
#include "common.cuh"
#include "wgmma.cuh"
#ifndef CLUSTER
#define CLUSTER 1
#endif

struct Args {
  const uint8_t* weights;    // [expert][128-row tile][128-column block][8704]: fragments of 2 x 64 rows, then scale bytes
  const float* row_scale;    // [expert][row]
  const float* x_scale;      // [token]
  const int* offsets;        // [experts + 1], token range of each expert
  __nv_bfloat16* out;        // [token][out_columns]
  float* parts;              // [block][accumulators of its threads]: sums of a tile's end for the block that began it
  int* flags;                // [block][warpgroup], zero before: set once the sums are there
  float limit;               // of the SwiGLU
  int experts, row_tiles, k_blocks, max_tokens, slot_bytes, stages, out_columns;       // row_tiles: of 128 rows
  int early;                 // whether the kernel before the last one has made the offsets
};
constexpr int WEIGHT_BYTES = 8704, MAX_EXPERTS = 512, PITCH = 144;

// Few tokens: small blocks, two on an SM. Middle: four consumer warpgroups share the activations and hide each other's decoding.
// Many: two warpgroups with wide accumulators. SUB 128-column blocks make one pipeline slot.
template <int CLASS> struct Shape;
template <> struct Shape<0> { static constexpr int NARROW = 16, WIDE = 32, WGS = 2, SUB = 2, BLOCKS = 2, CONSUMER = 104, PRODUCER = 32; static constexpr bool DOUBLE = false; };
template <> struct Shape<1> { static constexpr int NARROW = 32, WIDE = 64, WGS = 4, SUB = 2, BLOCKS = 1, CONSUMER = 112, PRODUCER = 32; static constexpr bool DOUBLE = false; };
template <> struct Shape<2> { static constexpr int NARROW = 64, WIDE = 96, WGS = 4, SUB = 2, BLOCKS = 1, CONSUMER = 112, PRODUCER = 32; static constexpr bool DOUBLE = false; };
template <> struct Shape<3> { static constexpr int NARROW = 128, WIDE = 256, WGS = 2, SUB = 1, BLOCKS = 1, CONSUMER = 232, PRODUCER = 40; static constexpr bool DOUBLE = true; };

// A cluster of CLUSTER blocks takes CLUSTER neighbouring feature tiles of one token tile; the activations are multicast to all.
__device__ __forceinline__ uint32_t cluster_rank() { uint32_t r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void tensor_multicast(uint32_t dst, const CUtensorMap* map, int c0, int c1, uint32_t bar, uint16_t mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
               :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "h"(mask) : "memory");
}
// Without ".release.cluster": that form puts a MEMBAR.ALL.GPU into every step and halves the speed.
__device__ __forceinline__ void arrive_at(uint32_t bar, uint32_t rank) {
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
               :: "r"(bar), "r"(rank) : "memory");
}
// Each consumer warp tells every block of the cluster that it is done with a slot.
__device__ __forceinline__ void release_slot(uint32_t bar) {
  const int lane = threadIdx.x % 32;
  if (CLUSTER == 1) { if (lane == 0) barrier_arrive(bar); }
  else if (lane < CLUSTER) arrive_at(bar, lane);
}

// begin, end: the pipeline slots of K that the block takes; finish: where the tile ends, counted in slots over all tiles.
struct Tile { int expert, feature, token0, tokens, width, begin, end; unsigned finish; };

// Walks the tiles of this block; `first` holds the running tile count of each expert. SPLIT: block `share` (the last ones have the lowest
// numbers, so that nobody waits for a block that starts later) takes every slot from `at` to `last`; else every gridDim-th tile.
template <int CLASS> struct Walk {
  static constexpr bool SPLIT = CLASS == 0;
  unsigned total, share, at, last;
  int slots, expert;
  __device__ __forceinline__ Walk(const int* first, const Args& p, int start) : slots(p.k_blocks / Shape<CLASS>::SUB), expert(start) {
    total = first[p.experts];
    share = SPLIT ? gridDim.x - 1 - blockIdx.x : 0;
    if (SPLIT) { total *= slots; at = bound(share); last = bound(share + 1); }
    else { at = blockIdx.x / CLUSTER; last = total; }
  }
  __device__ __forceinline__ unsigned bound(unsigned share) const { return share * total / gridDim.x; }
  __device__ __forceinline__ bool next(const int* first, const int* offsets, const Args& p, Tile& t) {
    if (at >= last) return false;
    const int tile = SPLIT ? at / slots : at;
    t.begin = SPLIT ? at - tile * slots : 0;
    t.end = SPLIT ? min(slots, t.begin + (int)(last - at)) : slots;
    t.finish = (unsigned)(tile + 1) * slots;
    at += SPLIT ? t.end - t.begin : gridDim.x / CLUSTER;
    while (tile >= first[expert + 1]) expert++;
    int begin = offsets[expert], n = offsets[expert + 1] - begin;
    int splits = (n + p.max_tokens - 1) / p.max_tokens;
    int local = tile - first[expert];
    int split = local % splits;
    t.expert = expert;
    t.feature = local / splits * CLUSTER + cluster_rank();
    t.token0 = begin + split * p.max_tokens;
    t.tokens = min(n - split * p.max_tokens, p.max_tokens);
    t.width = t.tokens <= Shape<CLASS>::NARROW ? Shape<CLASS>::NARROW : Shape<CLASS>::WIDE;
    return true;
  }
};

// One warp: the running tile counts, and the expert of the first tile that this block walks.
template <int CLASS> __device__ __forceinline__ void count_tiles(const int* offsets, int* first, int* start, const Args& p) {
  const int lane = threadIdx.x % 32, each = (p.experts + 31) / 32, begin = min(lane * each, p.experts), end = min(begin + each, p.experts);
  const int features = p.row_tiles / (Shape<CLASS>::WGS / 2 * CLUSTER);
  int sum = 0;
  for (int e = begin; e < end; e++) sum += (offsets[e + 1] - offsets[e] + p.max_tokens - 1) / p.max_tokens;
  int scan = sum;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) { const int v = __shfl_up_sync(~0u, scan, d); if (lane >= d) scan += v; }
  int at = (scan - sum) * features;
  for (int e = begin; e < end; e++) {
    first[e] = at;
    at += (offsets[e + 1] - offsets[e] + p.max_tokens - 1) / p.max_tokens * features;
  }
  if (lane == 31) { first[p.experts] = scan * features; *start = 0; }
  __syncwarp();
  const Walk<CLASS> walk(first, p, 0);
  const int tile = Walk<CLASS>::SPLIT ? walk.at / walk.slots : walk.at;
  for (int e = begin; e < end; e++) if (first[e] <= tile && tile < first[e + 1]) *start = e;
}

__device__ __forceinline__ void table(uint32_t scales, uint32_t select, uint32_t& lo, uint32_t& hi) {
  uint32_t x = prmt(scales, 0, select);            // (exponent field of the code for 1.0) << 3
  lo = x * 0x01010100u + 0x03FFF800u;              // E4M3 of 0, .5, 1, 1.5
  hi = x * 0x01010101u + 0x14100C08u;              // E4M3 of 2, 3, 4, 6
}
__device__ __forceinline__ void decode(uint32_t w, uint32_t lo, uint32_t hi, uint32_t& first, uint32_t& second) {
  uint32_t m = w & 0x77777777u;
  first = prmt(lo, hi, m) | (w & 0x80808080u);
  second = prmt(lo, hi, m >> 16) | ((w << 4) & 0x80808080u);
}

struct Ring { uint32_t base, full, empty; int slot; uint32_t phase; int freed; };      // slot: next to read; freed: next to release
struct Raw { uint4 u, v; uint2 s; uint32_t tokens; };                                  // tokens: low word of the activation descriptor

// This thread's fragments of one 128-column block, read one step before they are decoded.
__device__ __forceinline__ Raw read(uint32_t tokens, uint32_t weights, uint32_t fragment, uint32_t scale) {
  Raw raw;
  raw.tokens = tokens >> 4 | 1u << 16;
  raw.u = lds128(weights + fragment);
  raw.v = lds128(weights + fragment + 2048);
  raw.s = lds64(weights + scale);
  return raw;
}
__device__ __forceinline__ uint32_t next_slot(const Args& p, Ring& r) {
  barrier_wait(r.full + 8 * r.slot, r.phase);
  const uint32_t base = r.base + r.slot * p.slot_bytes;
  if (++r.slot == p.stages) { r.slot = 0; r.phase ^= 1; }
  return base;
}
__device__ __forceinline__ void free_slot(const Args& p, Ring& r) {
  release_slot(r.empty + 8 * r.freed);
  if (++r.freed == p.stages) r.freed = 0;
}
// Decodes and starts four wgmma. DOUBLE: two sets of A registers alternate and the step before may still run while this one is decoded.
template <bool DOUBLE, int N>
__device__ __forceinline__ void multiply(const Raw& w, float (&acc)[N], uint32_t (&a)[16], int scale_d, uint32_t select) {
  if (!DOUBLE) wgmma_wait<0>();
  uint32_t lo, hi;
  table(w.s.x, select, lo, hi);
  decode(w.u.x, lo, hi, a[0], a[2]);   decode(w.u.y, lo, hi, a[4], a[6]);
  decode(w.u.z, lo, hi, a[8], a[10]);  decode(w.u.w, lo, hi, a[12], a[14]);
  table(w.s.y, select, lo, hi);
  decode(w.v.x, lo, hi, a[1], a[3]);   decode(w.v.y, lo, hi, a[5], a[7]);
  decode(w.v.z, lo, hi, a[9], a[11]);  decode(w.v.w, lo, hi, a[13], a[15]);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < 4; j++) mma_e4m3(acc, a + 4 * j, (uint64_t)0x40000040u << 32 | (w.tokens + 2 * j), j ? 1 : scale_d);
  wgmma_commit();
  if (DOUBLE) wgmma_wait<1>();
}

__device__ __forceinline__ uint32_t pack(float a, float b) {
  __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&v);
}
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

// Where this thread's sums lie that share `share` leaves, four floats and then the next thread's.
__device__ __forceinline__ float4* part_of(const Args& p, unsigned share) {
  return reinterpret_cast<float4*>(p.parts) + (size_t)share * (p.max_tokens / 8) * 256 + threadIdx.x;
}
// A share's sums of a tile that an earlier share began.
template <int N> __device__ __forceinline__ void leave(const Args& p, const Walk<0>& walk, const float (&acc)[N]) {
  float4* to = part_of(p, walk.share);
#pragma unroll
  for (int i = 0; i < N / 4; i++) __stcg(to + i * 256, make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
  __threadfence();
  const int group = threadIdx.x / 128;
  named_barrier(1 + group, 128);
  if (threadIdx.x % 128 == 0) asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(p.flags + walk.share * 2 + group), "r"(1) : "memory");
}
// Adds what the shares behind this one have left of its last tile, in their order.
template <int N> __device__ __forceinline__ void collect(const Args& p, const Walk<0>& walk, const Tile& t, float (&acc)[N]) {
  const int group = threadIdx.x / 128;
  for (unsigned share = walk.share + 1; walk.bound(share) < t.finish; share++) {
    if (walk.bound(share) == walk.bound(share + 1)) continue;
    if (threadIdx.x % 128 == 0) {
      int ready = 0;
      while (!ready) asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(ready) : "l"(p.flags + share * 2 + group) : "memory");
    }
    named_barrier(1 + group, 128);
    const float4* from = part_of(p, share);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const float4 v = __ldcg(from + i * 256);
      acc[4 * i] += v.x; acc[4 * i + 1] += v.y; acc[4 * i + 2] += v.z; acc[4 * i + 3] += v.w;
    }
  }
}

template <int NT, int CLASS, bool SWIGLU>
__device__ __forceinline__ void consume(const Args& p, Ring& r, const Walk<CLASS>& walk, const Tile& t, float* x_scale, uint32_t staging) {
  using S = Shape<CLASS>;
  constexpr int N = NT / 2;
  const int group = threadIdx.x / 128, tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32, g = lane / 4, q = lane % 4;
  for (int i = tid; i < NT; i += 128) x_scale[i] = i < t.tokens ? p.x_scale[t.token0 + i] : 0.f;
  const int row = (t.feature * S::WGS + group) * 64 + warp * 16 + g;
  const float* rs = p.row_scale + (size_t)t.expert * p.row_tiles * 128;
  const float f0 = rs[row], f1 = rs[row + 8];
  named_barrier(1 + group, 128);

  float acc[N];
#pragma unroll
  for (int i = 0; i < N; i++) acc[i] = 0.f;
  uint32_t a0[16], a1[16];
  const uint32_t weights = S::SUB * p.max_tokens * 128 + group / 2 * S::SUB * WEIGHT_BYTES;
  const uint32_t fragment = group % 2 * 4096 + tid * 16, scale = 8192 + group % 2 * 256 + (warp * 8 + g) * 8, select = 0x4440 | q;
  uint32_t base = next_slot(p, r);
  Raw w0 = read(base, base + weights, fragment, scale), w1;
  const int blocks = (t.end - t.begin) * S::SUB;
  for (int kb = 0; kb < blocks; kb += 2) {
    if (S::SUB == 2) w1 = read(base + p.max_tokens * 128, base + weights + WEIGHT_BYTES, fragment, scale);
    else { base = next_slot(p, r); w1 = read(base, base + weights, fragment, scale); }
    multiply<S::DOUBLE>(w0, acc, a0, kb > 0, select);
    if (kb > 0) free_slot(p, r);
    if (kb + 2 < blocks) { base = next_slot(p, r); w0 = read(base, base + weights, fragment, scale); }
    multiply<S::DOUBLE>(w1, acc, S::DOUBLE ? a1 : a0, 1, select);
    if (S::SUB == 1) free_slot(p, r);
  }
  wgmma_wait<0>();
  keep(acc);
  free_slot(p, r);
  if constexpr (Walk<CLASS>::SPLIT) {
    if (t.begin > 0) { leave(p, walk, acc); return; }
    if (t.end < walk.slots) collect(p, walk, t, acc);
  }

  // Transpose 16 tokens at a time through shared memory, so that features are contiguous in the 16-byte stores.
#pragma unroll
  for (int c = 0; c < NT / 16; c++) {
    if (c * 16 < t.tokens) {
      uint32_t m[4];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int j = 2 * c + h;
        const float s0 = x_scale[8 * j + 2 * q], s1 = x_scale[8 * j + 2 * q + 1];
        float v0 = acc[4 * j] * f0 * s0, v1 = acc[4 * j + 1] * f0 * s1, v2 = acc[4 * j + 2] * f1 * s0, v3 = acc[4 * j + 3] * f1 * s1;
        if (SWIGLU) m[h] = pack(swiglu(v0, v2, p.limit), swiglu(v1, v3, p.limit));
        else { m[2 * h] = pack(v0, v1); m[2 * h + 1] = pack(v2, v3); }
      }
      uint32_t buffer = staging + (group * 2 + (c & 1)) * 16 * PITCH;
      if (SWIGLU) {
        uint32_t address = buffer + (lane % 16) * PITCH + warp * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" :: "r"(address), "r"(m[0]), "r"(m[1]) : "memory");
      } else {
        uint32_t address = buffer + ((lane / 16) * 8 + lane % 8) * PITCH + warp * 32 + (lane / 8 % 2) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(address), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
      }
      named_barrier(1 + group, 128);
      constexpr int SEGMENTS = SWIGLU ? 4 : 8;
      int token = tid / SEGMENTS, segment = tid % SEGMENTS;
      if (token < 16 && c * 16 + token < t.tokens) {
        uint4 v = lds128(buffer + token * PITCH + segment * 16);
        size_t column = (size_t)(t.feature * S::WGS + group) * (SWIGLU ? 32 : 64) + segment * 8;
        *reinterpret_cast<uint4*>(p.out + (size_t)(t.token0 + c * 16 + token) * p.out_columns + column) = v;
      }
    }
  }
  named_barrier(1 + group, 128);
}

template <bool SWIGLU, int CLASS>
__global__ __launch_bounds__(128 * Shape<CLASS>::WGS + 128, Shape<CLASS>::BLOCKS)
void expert_gemm(const __grid_constant__ CUtensorMap map16, const __grid_constant__ CUtensorMap map32, const Args p) {
  using S = Shape<CLASS>;
  constexpr int CONSUMERS = 128 * S::WGS, THREADS = CONSUMERS + 128;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ __align__(8) uint64_t bars[64];
  __shared__ int offsets[MAX_EXPERTS + 1], first[MAX_EXPERTS + 1], start;
  __shared__ float x_scale[S::WGS][256];
  Ring r{(smem_address(dynamic) + 1023) & ~1023u, smem_address(bars), smem_address(bars + 32), 0, 0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; i++) { barrier_init(r.full + 8 * i, 1); barrier_init(r.empty + 8 * i, 4 * S::WGS * CLUSTER); }
    barrier_init_fence();
  }
  if (!p.early) { wait_for_earlier(); let_later_begin(); }
  for (int i = threadIdx.x; i <= p.experts; i += THREADS) offsets[i] = p.offsets[i];
  __syncthreads();
  if (threadIdx.x < 32) count_tiles<CLASS>(offsets, first, &start, p);
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();
  Walk<CLASS> walk(first, p, start);
  Tile t = {};
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(S::PRODUCER));
    if (threadIdx.x == CONSUMERS) {
      const uint64_t policy = evict_first();
      const size_t stride = (size_t)p.k_blocks * WEIGHT_BYTES;
      auto weights = [&](int s) {                  // what slot `s` of tile `t` waits for, and the weights of it
        const uint8_t* w = p.weights + ((size_t)t.expert * p.row_tiles + t.feature * (S::WGS / 2)) * stride + (size_t)s * S::SUB * WEIGHT_BYTES;
        const uint32_t base = r.base + r.slot * p.slot_bytes, bar = r.full + 8 * r.slot;
        barrier_expect(bar, S::SUB * (t.width * 128 + S::WGS / 2 * WEIGHT_BYTES));
#pragma unroll
        for (int h = 0; h < S::WGS / 2; h++)
          bulk_load(base + S::SUB * (p.max_tokens * 128 + h * WEIGHT_BYTES), w + h * stride, S::SUB * WEIGHT_BYTES, bar, policy);
      };
      auto tokens = [&](int s) {
        if (CLUSTER > 1 && s % CLUSTER != (int)cluster_rank()) return;
        const uint32_t base = r.base + r.slot * p.slot_bytes, bar = r.full + 8 * r.slot;
        const int step = t.width == 16 ? 16 : 32;
        const CUtensorMap* map = t.width == 16 ? &map16 : &map32;
        for (int sub = 0; sub < S::SUB; sub++)
          for (int i = 0; i < t.width; i += step) {
            const uint32_t dst = base + (sub * p.max_tokens + i) * 128;
            if (CLUSTER > 1) tensor_multicast(dst, map, (s * S::SUB + sub) * 128, t.token0 + i, bar, (1 << CLUSTER) - 1);
            else tensor_load(dst, map, (s * S::SUB + sub) * 128, t.token0 + i, bar);
          }
      };
      bool more = walk.next(first, offsets, p, t);
      const int ahead = more ? min(p.stages, t.end - t.begin) : 0;
      for (r.slot = 0; r.slot < ahead; r.slot++) weights(t.begin + r.slot);
      wait_for_earlier();
      for (r.slot = 0; r.slot < ahead; r.slot++) tokens(t.begin + r.slot);
      if (r.slot == p.stages) { r.slot = 0; r.phase = 1; }
      for (int s = t.begin + ahead; more; s = t.begin) {
        for (; s < t.end; s++) {
          barrier_wait(r.empty + 8 * r.slot, r.phase ^ 1);
          weights(s);
          tokens(s);
          if (++r.slot == p.stages) { r.slot = 0; r.phase ^= 1; }
        }
        more = walk.next(first, offsets, p, t);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(S::CONSUMER));
    wait_for_earlier();
    if (p.early) let_later_begin();
    float* xs = x_scale[threadIdx.x / 128];
    const uint32_t staging = r.base + p.stages * p.slot_bytes;
    while (walk.next(first, offsets, p, t)) {
      if (t.width == S::NARROW) consume<S::NARROW, CLASS, SWIGLU>(p, r, walk, t, xs, staging);
      else consume<S::WIDE, CLASS, SWIGLU>(p, r, walk, t, xs, staging);
    }
  }
  if (CLUSTER > 1) cluster_sync();                 // nobody leaves while others may still write to it
}

// One row of at most 5,120 columns to E4M3, by 128 threads: returns its power-of-two scale. Columns are permuted inside each 128 to the
// order that the register operand holds. `meanwhile` runs while the row is on its way.
template <class F> __device__ __forceinline__ float round_row(const __nv_bfloat16* row, uint8_t*& q, int columns, F meanwhile) {
  constexpr int VECTORS = 5;
  __shared__ float partial[4];
  uint4 raw[VECTORS];
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int v = threadIdx.x + i * 128;
    raw[i] = v * 8 < columns ? *reinterpret_cast<const uint4*>(row + v * 8) : make_uint4(0, 0, 0, 0);
  }
  meanwhile();
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const __nv_bfloat162* b = reinterpret_cast<const __nv_bfloat162*>(&raw[i]);
#pragma unroll
    for (int j = 0; j < 4; j++) { float2 f = __bfloat1622float2(b[j]); amax = fmaxf(amax, fmaxf(fabsf(f.x), fabsf(f.y))); }
  }
#pragma unroll
  for (int d = 16; d; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, d));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = amax;
  __syncthreads();
  amax = fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3]));
  const float s = __uint_as_float((__float_as_uint(__fdiv_rn(fmaxf(amax, 0x1p-100f), 448.f)) + 0x7FFFFFu) & 0xFF800000u), inv = 1.f / s;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int v = threadIdx.x + i * 128;
    if (v * 8 < columns) {
      const __nv_bfloat162* b = reinterpret_cast<const __nv_bfloat162*>(&raw[i]);
      uint32_t half[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 f = __bfloat1622float2(b[j]);
        uint16_t h;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(h) : "f"(f.y * inv), "f"(f.x * inv));
        half[j] = h;
      }
      const int block = v / 16, t = v / 4 % 4, j = v % 4;
      uint32_t* out = reinterpret_cast<uint32_t*>(q + block * 128 + 32 * j + 4 * t);
      out[0] = half[0] | half[1] << 16;
      out[4] = half[2] | half[3] << 16;
    }
  }
  return s;
}

// Row i is row order[i] / each of x, or row i. Its scale is multiplied by factor[order[i]].
__global__ __launch_bounds__(128) void quantise_rows(const __nv_bfloat16* x, const int* order, int each, const float* factor, uint8_t* q, float* scale, int columns) {
  wait_for_earlier();
  let_later_begin();
  const size_t row = blockIdx.x;
  uint8_t* to = q + row * columns;
  const float s = round_row(x + (each ? order[row] / each : row) * columns, to, columns, [] {});
  if (threadIdx.x == 0) scale[row] = factor ? s * factor[order[row]] : s;
}

extern "C" int launch_gemm(int swiglu, int kind, const void* x, int rows, Args p, int blocks, cudaStream_t stream) {
  CUtensorMap map16, map32;
  int error = make_map(&map16, x, (uint64_t)p.k_blocks * 128, rows, 16);
  if (!error) error = make_map(&map32, x, (uint64_t)p.k_blocks * 128, rows, 32);
  if (error) return 1000 + error;
  const int warpgroups[4] = {Shape<0>::WGS, Shape<1>::WGS, Shape<2>::WGS, Shape<3>::WGS};
  int shared = 1024 + p.stages * p.slot_bytes + warpgroups[kind] * 2 * 16 * PITCH;
  void (*kernels[2][4])(CUtensorMap, CUtensorMap, Args) = {{expert_gemm<false, 0>, expert_gemm<false, 1>, expert_gemm<false, 2>, expert_gemm<false, 3>},
                                                          {expert_gemm<true, 0>, expert_gemm<true, 1>, expert_gemm<true, 2>, expert_gemm<true, 3>}};
  auto kernel = kernels[swiglu][kind];
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = CLUSTER; attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.blockDim = dim3(128 * warpgroups[kind] + 128); config.gridDim = dim3(blocks / CLUSTER * CLUSTER); config.dynamicSmemBytes = shared; config.stream = stream;
  config.attrs = attributes; config.numAttrs = 1;
  int clusters = 0;                                // clusters that fit at once: the grid is persistent
  CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  if (clusters * CLUSTER < (int)config.gridDim.x) config.gridDim.x = clusters * CLUSTER;
  config.numAttrs = 2;
  CHECK(cudaLaunchKernelEx(&config, kernel, map16, map32, p));
  return 0;
}
// Columns: a multiple of 128, at most 5,120.
extern "C" int launch_quantise(const void* x, const void* order, int each, const void* factor, void* q, void* scale, int rows, int columns, cudaStream_t stream) {
  return launch_after(quantise_rows, rows, 128, 0, stream, (const __nv_bfloat16*)x, (const int*)order, each, (const float*)factor, (uint8_t*)q, (float*)scale, columns);
}

// A few visits, one block each: its place among the visits sorted by expert, those of an expert in their order, and its row of x rounded
// into that place. One block more writes the offsets and clears the flags of the products.
__global__ __launch_bounds__(128) void place_and_quantise(const __nv_bfloat16* x, const int64_t* chosen, int each, int visits, int experts, int* flags, int flag_count,
                                                          int* offsets, int* order, int* places, uint8_t* q, float* scale, int columns) {
  __shared__ int counts[MAX_EXPERTS];
  let_later_begin();
  const int t = threadIdx.x, visit = blockIdx.x;
  if (visit == visits) {
    for (int i = t; i < flag_count; i += 128) flags[i] = 0;
    for (int i = t; i < experts; i += 128) counts[i] = 0;
    __syncthreads();
    for (int v = t; v < visits; v += 128) atomicAdd(&counts[chosen[v]], 1);
    __syncthreads();
    if (t < 32) {
      const int own = (experts + 31) / 32, begin = min(t * own, experts), end = min(begin + own, experts);
      int sum = 0;
      for (int e = begin; e < end; e++) sum += counts[e];
      int at = sum;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) { const int v = __shfl_up_sync(~0u, at, d); if (t >= d) at += v; }
      at -= sum;
      for (int e = begin; e < end; e++) { offsets[e] = at; at += counts[e]; }
      if (t == 31) offsets[experts] = visits;
    }
    return;
  }
  const int64_t mine = chosen[visit];
  int before = 0;
  __shared__ int warps[4];
  auto count = [&] {
    for (int v = t; v < visits; v += 128) before += chosen[v] < mine || (chosen[v] == mine && v < visit);
    before = __reduce_add_sync(~0u, before);
    if (t % 32 == 0) warps[t / 32] = before;
    __syncthreads();
    before = warps[0] + warps[1] + warps[2] + warps[3];
    q += (size_t)before * columns;
  };
  const float s = round_row(x + (size_t)(visit / each) * columns, q, columns, count);
  if (t == 0) { scale[before] = s; order[before] = visit; places[visit] = before; }
}
extern "C" int launch_place_and_quantise(const void* x, const void* chosen, int each, int visits, int experts, void* flags, int flag_count, void* offsets, void* order,
                                         void* places, void* q, void* scale, int columns, cudaStream_t stream) {
  if (experts > MAX_EXPERTS) return (int)cudaErrorInvalidValue;
  place_and_quantise<<<visits + 1, 128, 0, stream>>>((const __nv_bfloat16*)x, (const int64_t*)chosen, each, visits, experts, (int*)flags, flag_count, (int*)offsets,
                                                     (int*)order, (int*)places, (uint8_t*)q, (float*)scale, columns);
  return (int)cudaGetLastError();
}

// Many visits sorted by expert. `counts` [experts] must be zero before; afterwards it is used up.
__global__ __launch_bounds__(1024) void count_visits(const int64_t* chosen, int visits, int experts, int* counts) {
  __shared__ int mine[MAX_EXPERTS];
  for (int i = threadIdx.x; i < experts; i += blockDim.x) mine[i] = 0;
  __syncthreads();
  for (int v = blockIdx.x * blockDim.x + threadIdx.x; v < visits; v += gridDim.x * blockDim.x) atomicAdd(&mine[chosen[v]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < experts; i += blockDim.x) if (mine[i]) atomicAdd(&counts[i], mine[i]);
}
// order[place] = visit, place[visit] = place, offsets [experts + 1]. Which of an expert's places a visit gets is left to chance:
// no result depends on it.
__global__ __launch_bounds__(1024) void place_visits(const int64_t* chosen, int visits, int experts, const int* counts, int* cursors, int* offsets, int* order, int* places) {
  __shared__ int begin[MAX_EXPERTS + 1], mine[MAX_EXPERTS], first[MAX_EXPERTS];
  for (int i = threadIdx.x; i < experts; i += blockDim.x) { mine[i] = 0; first[i] = counts[i]; }
  __syncthreads();
  for (int i = threadIdx.x; i <= experts; i += blockDim.x) {
    int sum = 0;
    for (int e = 0; e < i; e++) sum += first[e];
    begin[i] = sum;
    if (blockIdx.x == 0) offsets[i] = sum;
  }
  __syncthreads();
  const int each = (visits + gridDim.x - 1) / gridDim.x, low = blockIdx.x * each, high = min(low + each, visits);
  for (int v = low + threadIdx.x; v < high; v += blockDim.x) atomicAdd(&mine[chosen[v]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < experts; i += blockDim.x) { first[i] = begin[i] + (mine[i] ? atomicAdd(&cursors[i], mine[i]) : 0); mine[i] = 0; }
  __syncthreads();
  for (int v = low + threadIdx.x; v < high; v += blockDim.x) {
    const int e = (int)chosen[v], at = first[e] + atomicAdd(&mine[e], 1);
    order[at] = v;
    places[v] = at;
  }
}
// `counters`: two an expert, then whatever else has to be zero.
extern "C" int launch_dispatch(const void* chosen, int visits, int experts, void* counters, int counter_count, void* offsets, void* order, void* places, cudaStream_t stream) {
  if (experts > MAX_EXPERTS) return (int)cudaErrorInvalidValue;
  int *counts = (int*)counters, *cursors = counts + experts;
  CHECK(cudaMemsetAsync(counters, 0, counter_count * sizeof(int), stream));
  const int blocks = min(132, (visits + 1023) / 1024);
  count_visits<<<blocks, 1024, 0, stream>>>((const int64_t*)chosen, visits, experts, counts);
  place_visits<<<blocks, 1024, 0, stream>>>((const int64_t*)chosen, visits, experts, counts, cursors, (int*)offsets, (int*)order, (int*)places);
  return (int)cudaGetLastError();
}

__device__ __forceinline__ void add(float (&sum)[8], const uint4& raw) {
  const __nv_bfloat162* b = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
  for (int j = 0; j < 4; j++) { float2 f = __bfloat1622float2(b[j]); sum[2 * j] += f.x; sum[2 * j + 1] += f.y; }
}
// out[row] = sum over `each` visits, in their order, of y[place], plus base[row] if there is one; FP32. Columns: a multiple of 8.
__global__ __launch_bounds__(128) void combine(const __nv_bfloat16* y, const int* places, int each, const __nv_bfloat16* base, __nv_bfloat16* out, int columns) {
  constexpr int AT_ONCE = 6;
  const int v = blockIdx.y * 128 + threadIdx.x;
  const size_t row = blockIdx.x;
  if (v * 8 >= columns) return;
  float sum[8] = {};
  const uint4 last = base ? *reinterpret_cast<const uint4*>(base + row * columns + v * 8) : make_uint4(0, 0, 0, 0);
  for (int k = 0; k < each; k += AT_ONCE) {
    uint4 raw[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) if (k + i < each) raw[i] = *reinterpret_cast<const uint4*>(y + (size_t)places[row * each + k + i] * columns + v * 8);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) if (k + i < each) add(sum, raw[i]);
  }
  if (base) add(sum, last);
  *reinterpret_cast<uint4*>(out + row * columns + v * 8) = make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
}
extern "C" int launch_combine(const void* y, const void* places, int each, const void* base, void* out, int rows, int columns, cudaStream_t stream) {
  combine<<<dim3(rows, (columns / 8 + 127) / 128), 128, 0, stream>>>((const __nv_bfloat16*)y, (const int*)places, each, (const __nv_bfloat16*)base, (__nv_bfloat16*)out, columns);
  return (int)cudaGetLastError();
}
