// Attention of rows over selected FP4 entries and an FP8 window, with a sink: see deepinfer/ops/sparse_attention. 64 heads x 512, K = V.
//
// A producer warpgroup gathers entries, decodes them once to f16 (exact) and writes them to shared memory in the 128-byte swizzle; the same
// tile serves as K (K-major) and, read MN-major, as V. Two consumer warpgroups take alternate tiles for Q K^T, exchange probabilities
// through shared memory and hold one half of the output each (64 x 256 FP32). Blocks are persistent: while a row is multiplied, the entry
// numbers, the entries (L2 prefetch three tiles ahead), the queries and the first tiles of the next one are on their way. Few rows are split
// over blocks and merged by a second kernel. Queries come as f16.
//
// FP4 entry: 288 B = 256 B E2M1 (even channel in the low nibble) + 32 E4M3 scales of 16. Window entry: 512 E4M3 + 16 E8M0 scales of 32.
#include "common.cuh"
#include "wgmma.cuh"

struct Args {
  const uint8_t *fp4, *fp8;    // entries
  const int *select, *window;  // [row][512], [row][128], entry numbers, -1 = none
  const float* sink;           // [64]
  __nv_bfloat16* out;          // [row][64][512]
  __half* part;                // [row][split][64][512], normalised
  float* lse;                  // [row][split][64], log2
  int rows, splits;
};
constexpr int CHUNK = 8192, BUFFER = 65536, WINDOW_TILES = 2, MOST_TILES = 10, THREADS = 384;      // tiles of 64 entries
constexpr float LOG2E = 1.4426950408889634f, SCALE = 0.04419417382415922f * LOG2E;

__device__ __forceinline__ uint32_t hmul2(uint32_t a, uint32_t b) {
  uint32_t d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d;
}
__device__ __forceinline__ uint32_t from_e4m3(uint16_t v) {
  uint32_t d; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(v)); return d;
}
__device__ __forceinline__ float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ uint32_t pack_half(float a, float b) {
  uint32_t d; asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(d) : "f"(a), "f"(b)); return d;
}
__device__ __forceinline__ uint32_t pack_bf16(float a, float b) {
  uint32_t d; asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(d) : "f"(a), "f"(b)); return d;
}
// 8 E2M1 codes, a nibble each -> 8 f16 times the f16x2 scale. An E2M1 value is all in the high byte of its f16: two PRMT look eight bytes up,
// four spread them. A PRMT whose selector has bit 3 set repeats the chosen byte's sign bit: from bytes of 0x80 it makes 0xFF for a negative
// code and 0x80 for a positive one, and a shift brings that difference to the sign.
__device__ __forceinline__ uint4 decode_fp4(uint32_t w, uint32_t scale) {
  const uint32_t lo = 0x3E3C3800u, hi = 0x46444240u, m = w & 0x77777777u;
  const uint32_t signs = 0x80808080u;
  const uint32_t a = prmt(lo, hi, m) | (prmt(signs, signs, w) << 1 & signs), b = prmt(lo, hi, m >> 16) | (prmt(signs, signs, w >> 16) << 1 & signs);
  return make_uint4(hmul2(prmt(a, 0, 0x1404), scale), hmul2(prmt(a, 0, 0x3424), scale), hmul2(prmt(b, 0, 0x1404), scale), hmul2(prmt(b, 0, 0x3424), scale));
}
__device__ __forceinline__ uint4 decode_fp8(uint32_t a, uint32_t b, uint32_t scale) {
  return make_uint4(hmul2(from_e4m3(a & 0xFFFF), scale), hmul2(from_e4m3(a >> 16), scale), hmul2(from_e4m3(b & 0xFFFF), scale), hmul2(from_e4m3(b >> 16), scale));
}
// E8M0 code -> f16x2 of 2^(code - 127); below 2^-24 zero
__device__ __forceinline__ uint32_t window_scale(uint32_t code) {
  int e = (int)code - 112;
  uint32_t h = e >= 1 ? (uint32_t)min(e, 30) << 10 : e >= -9 ? 1u << (e + 9) : 0u;
  return h * 0x10001u;
}

struct Unit { uint4 d[4]; uint2 scale; };

// A lane holds 128 dims of one entry: all of them in FP4, one half (`part`) in FP8.
template <int FP4_TILES> __device__ __forceinline__ void load_unit(Unit& u, const Args& p, int tile, int part, int index, int q4) {
  const int slot = max(index, 0);
  if (tile < FP4_TILES) {
    const uint8_t* e = p.fp4 + (size_t)slot * 288;
#pragma unroll
    for (int i = 0; i < 4; i++) u.d[i] = __ldg(reinterpret_cast<const uint4*>(e + 64 * q4 + 16 * i));
    u.scale = __ldg(reinterpret_cast<const uint2*>(e + 256 + 8 * q4));
  } else {
    const uint8_t* e = p.fp8 + (size_t)slot * 528;
#pragma unroll
    for (int i = 0; i < 4; i++) u.d[i] = __ldg(reinterpret_cast<const uint4*>(e + 128 * q4 + 64 * part + 16 * i));
    u.scale.x = __ldg(reinterpret_cast<const unsigned short*>(e + 512 + 4 * q4 + 2 * part));
    u.scale.y = 0;
  }
  if (index < 0) u.scale = make_uint2(0, 0);
}
template <int OFFSET> __device__ __forceinline__ void sts128_at(uint32_t a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0 + %5], {%1,%2,%3,%4};" :: "r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "n"(OFFSET) : "memory");
}
// Keeps two results in registers of their own: reusing one register for store after store waits for each store to read it.
__device__ __forceinline__ void hold(uint4& a, uint4& b) {
  asm volatile("" : "+r"(a.x), "+r"(a.y), "+r"(a.z), "+r"(a.w), "+r"(b.x), "+r"(b.y), "+r"(b.z), "+r"(b.w));
}
// `row`: this lane's 256-byte strip of an entry (two chunks); `spin`: entry & 7, the swizzle. Words are decoded before any is stored, to overlap.
__device__ __forceinline__ void store_fp4(const Unit& u, uint32_t row, uint32_t spin) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t s = from_e4m3((i < 2 ? u.scale.x : u.scale.y) >> (i % 2 * 16) & 0xFFFF), lo = prmt(s, s, 0x1010), hi = prmt(s, s, 0x3232);
    uint4 r[4] = {decode_fp4(u.d[i].x, lo), decode_fp4(u.d[i].y, lo), decode_fp4(u.d[i].z, hi), decode_fp4(u.d[i].w, hi)};
    hold(r[0], r[1]);
    hold(r[2], r[3]);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const uint32_t at = row + ((i % 2 * 4 + c) ^ spin) * 16;
      if (i < 2) sts128_at<0>(at, r[c]); else sts128_at<CHUNK>(at, r[c]);
    }
  }
}
__device__ __forceinline__ void store_fp8(const Unit& u, uint32_t row, uint32_t spin) {
  uint32_t s0 = window_scale(u.scale.x & 0xFF), s1 = window_scale(u.scale.x >> 8 & 0xFF);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 r[2] = {decode_fp8(u.d[i].x, u.d[i].y, i < 2 ? s0 : s1), decode_fp8(u.d[i].z, u.d[i].w, i < 2 ? s0 : s1)};
    hold(r[0], r[1]);
    sts128_at<0>(row + ((2 * i) ^ spin) * 16, r[0]);
    sts128_at<0>(row + ((2 * i + 1) ^ spin) * 16, r[1]);
  }
}
__device__ __forceinline__ void prefetch_line(const void* a) { asm volatile("prefetch.global.L2 [%0];" :: "l"(a)); }
template <int FP4_TILES> __device__ __forceinline__ void prefetch_entry(const Args& p, int tile, int entry, int q4) {
  if (entry < 0) return;
  const int bytes = tile < FP4_TILES ? 288 : 528;
  const uint8_t* e = (tile < FP4_TILES ? p.fp4 : p.fp8) + (size_t)entry * bytes;
  prefetch_line(e + q4 * (tile < FP4_TILES ? 64 : 128));
  if (q4 == 3) prefetch_line(e + bytes - 1);
}

// An item is a row or one of its splits: a range of its 64-entry tiles, FP4_TILES of compressed entries and two of the window. Blocks are persistent and producers run ahead into the next item.
// The reference m of the exponentials grows only when a tile exceeds it by more than 2^8, so that the output is rarely rescaled:
// tile a (warpgroup 0) settles it first, tile b (warpgroup 1) goes on from there; nothing else ties the two warpgroups together.
template <int SPLITS, int FP4_TILES> __global__ __launch_bounds__(THREADS, 1) void attention(const __grid_constant__ CUtensorMap q_map, const Args p) {
  constexpr int TILES = FP4_TILES + WINDOW_TILES, tiles = TILES / SPLITS;                // of a row, of an item
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ __align__(8) uint64_t bars[9];
  __shared__ __align__(16) float bias[2][64];
  __shared__ float stat[2][64], sums[2][64];
  __shared__ int entries[2][MOST_TILES * 64];
  const uint32_t queries = (smem_address(dynamic) + 1023) & ~1023u, keys = queries + BUFFER, probs = keys + 2 * BUFFER;
  const uint32_t full = smem_address(bars), empty = full + 16, p_full = full + 32, p_free = full + 48, q_full = full + 64;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, items = p.rows * SPLITS;      // warp: uniform
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(full + 8 * i, 4); barrier_init(empty + 8 * i, 8);
      barrier_init(p_full + 8 * i, 4); barrier_init(p_free + 8 * i, 4);
    }
    barrier_init(q_full, 1);
    barrier_init_fence();
  }
  __syncthreads();
  auto first_tile = [](int item) { return item % SPLITS * tiles; };
  int count = 0, turn = 0;                             // tiles and items so far
  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
    constexpr int AHEAD = 3;
    const int tid = threadIdx.x - 256, key = (warp - 8) * 16 + lane % 8, q4 = lane / 8;
    int pending[5];                                    // this thread's entry numbers of the coming item
    auto look_up = [&](int item) {
#pragma unroll
      for (int k = 0; k < 5; k++) {
        int i = tid + k * 128, t = i / 64, tile = first_tile(item) + t;
        if (t < tiles) pending[k] = tile < FP4_TILES ? p.select[(size_t)(item / SPLITS) * 512 + tile * 64 + i % 64]
                                                              : p.window[(size_t)(item / SPLITS) * 128 + (tile - FP4_TILES) * 64 + i % 64];
      }
    };
    auto announce = [&](int item, int buffer) {
#pragma unroll
      for (int k = 0; k < 5; k++) if ((tid + k * 128) / 64 < tiles) entries[buffer][tid + k * 128] = pending[k];
      named_barrier(3, 128);
    };
    if ((int)blockIdx.x < items) { look_up(blockIdx.x); announce(blockIdx.x, 0); }
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
      const int t0 = first_tile(item), next = item + gridDim.x, buffer = turn & 1;
      auto fetch_ahead = [&](int n, bool announced) {  // n-th tile from the start of this item, perhaps in the next one
        const bool here = n < tiles;
        if (!here && !announced) return;
        const int other = here ? item : next, t = here ? n : n - tiles;
        if (other >= items || t >= tiles) return;
        const int* e = entries[here ? buffer : buffer ^ 1] + t * 64 + key;
        prefetch_entry<FP4_TILES>(p, first_tile(other) + t, e[0], q4);
        prefetch_entry<FP4_TILES>(p, first_tile(other) + t, e[8], q4);
      };
      if (next < items) look_up(next);
      if (turn == 0) for (int n = 1; n < AHEAD; n++) fetch_ahead(n, false);
      // A stream of units, two in flight: to a lane an FP4 tile is two units of 128 dims (entries +0, +8), a window tile four of 64.
      const int fp4 = max(0, min(tiles, FP4_TILES - t0)), units = 4 * tiles - 2 * fp4;
      const int* mine = entries[buffer] + key;
      auto load = [&](Unit& u, int i) {
        if (i < 2 * fp4) load_unit<FP4_TILES>(u, p, 0, 0, mine[i / 2 * 64 + i % 2 * 8], q4);
        else if (i < units) load_unit<FP4_TILES>(u, p, FP4_TILES, i % 2, mine[(fp4 + (i - 2 * fp4) / 4) * 64 + (i - 2 * fp4) / 2 % 2 * 8], q4);
      };
      auto store = [&](Unit& u, int i, int odd) {           // odd: i % 2
        const bool narrow = i < 2 * fp4, late = narrow ? odd : (i - 2 * fp4) / 2 % 2;      // late: the entry + 8
        const int n = narrow ? i / 2 : fp4 + (i - 2 * fp4) / 4, slot = count & 1;
        const uint32_t row = keys + slot * BUFFER + (key + 8 * late) * 128 + 2 * q4 * CHUNK;
        if (!late && !odd) {
          if (n != 0 || turn == 0) fetch_ahead(n + AHEAD, n != 0);           // the first tile's turn comes after the announcement below
          barrier_wait(empty + 8 * slot, (count >> 1 & 1) ^ 1);
        }
        if (narrow) store_fp4(u, row, lane % 8);
        else store_fp8(u, row + odd * CHUNK, lane % 8);
        load(u, i + 2);
        if (late && odd) {
          if (q4 == 0) {
            bias[slot][key] = mine[n * 64] < 0 ? -INFINITY : 0.f;
            bias[slot][key + 8] = mine[n * 64 + 8] < 0 ? -INFINITY : 0.f;
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          __syncwarp();
          if (lane == 0) barrier_arrive(full + 8 * slot);
          count++;
          if (n == 0) {
            if (next < items) announce(next, buffer ^ 1);
            if (turn != 0) fetch_ahead(AHEAD, true);
          }
        }
      };
      Unit a, b;
      load(a, 0);
      load(b, 1);
#pragma unroll 1
      for (int i = 0; i < units; i += 2) {
        store(a, i, 0);
        store(b, i + 1, 1);
      }
      named_barrier(3, 128);                           // the other entry buffer is free
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    const int wg = warp / 4, tid = threadIdx.x % 128, g = lane / 4, q = lane % 4, r0 = warp % 4 * 16 + g;
    const uint64_t dq = descriptor(queries), dk = descriptor(keys), dp = descriptor(probs), dv = descriptor(keys + wg * 4 * CHUNK, CHUNK);
    const uint32_t my_probs = probs + wg * CHUNK + (warp % 4 * 16 + lane / 8 % 2 * 8 + lane % 8) * 128, spin = lane % 8, high = lane / 16;
    auto load_queries = [&](int item) {
      if (threadIdx.x != 0 || item >= items) return;
      barrier_expect(q_full, BUFFER);
      for (int c = 0; c < 8; c++) tensor_load(queries + c * CHUNK, &q_map, c * 128, item / SPLITS * 64, q_full);
    };
    load_queries(blockIdx.x);
    int uses_a = 0, uses_b = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
      const int row = item / SPLITS;
      float o[128], m0 = -1e30f, m1 = -1e30f, own0 = -1e30f, own1 = -1e30f, l0 = 0.f, l1 = 0.f;      // own: the reference of l
#pragma unroll
      for (int i = 0; i < 128; i++) o[i] = 0.f;
      auto rescale = [&](float n0, float n1) {
        const float a0 = exp2_fast(m0 - n0), a1 = exp2_fast(m1 - n1);
        m0 = n0; m1 = n1;
#pragma unroll
        for (int j = 0; j < 32; j++) { o[4 * j] *= a0; o[4 * j + 1] *= a0; o[4 * j + 2] *= a1; o[4 * j + 3] *= a1; }
      };
      barrier_wait(q_full, turn & 1);
      for (int n = 0; n < tiles; n += 2, uses_a++) {
        const int even = count & 1, slot = even ^ wg;          // tile a in slot `even`, tile b in the other
        const bool both = n + 1 < tiles;
        float s[32], x0 = -INFINITY, x1 = -INFINITY;
        if (wg == 0 || both) {
          barrier_wait(full + 8 * slot, (count + wg) >> 1 & 1);
#pragma unroll
          for (int i = 0; i < 32; i++) s[i] = 0.f;
          const uint64_t d = dk + slot * (BUFFER / 16);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 32; k++) mma_f16(s, dq + k / 4 * (CHUNK / 16) + k % 4 * 2, d + k / 4 * (CHUNK / 16) + k % 4 * 2, k > 0);
          wgmma_commit();
          wgmma_wait<0>();
          keep(s);
#pragma unroll
          for (int j = 0; j < 8; j++) {
            float2 c = *reinterpret_cast<const float2*>(&bias[slot][8 * j + 2 * q]);
            s[4 * j] = fmaf(s[4 * j], SCALE, c.x);         s[4 * j + 1] = fmaf(s[4 * j + 1], SCALE, c.y);
            s[4 * j + 2] = fmaf(s[4 * j + 2], SCALE, c.x); s[4 * j + 3] = fmaf(s[4 * j + 3], SCALE, c.y);
            x0 = fmaxf(x0, fmaxf(s[4 * j], s[4 * j + 1]));
            x1 = fmaxf(x1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
          }
#pragma unroll
          for (int d = 1; d < 4; d *= 2) { x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, d)); x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, d)); }
        }
        float a0 = m0, a1 = m1;                                 // reference of tile a
        if (wg == 1) { barrier_wait(p_full, uses_a & 1); a0 = stat[0][r0]; a1 = stat[0][r0 + 8]; }
        if (wg == 0 || both) {
          const float n0 = x0 > a0 + 8.f ? x0 : a0, n1 = x1 > a1 + 8.f ? x1 : a1;
          l0 *= exp2_fast(own0 - n0); l1 *= exp2_fast(own1 - n1);
          own0 = n0; own1 = n1;
          barrier_wait(p_free + 8 * wg, ((wg ? uses_b : uses_a) & 1) ^ 1);
          if (q == 0) { stat[wg][r0] = n0; stat[wg][r0 + 8] = n1; }
#pragma unroll
          for (int j = 0; j < 8; j += 2) {
            uint32_t w[4];
#pragma unroll
            for (int k = 0; k < 2; k++) {
              float* e = s + 4 * (j + k);
              e[0] = exp2_fast(e[0] - n0); e[1] = exp2_fast(e[1] - n0); e[2] = exp2_fast(e[2] - n1); e[3] = exp2_fast(e[3] - n1);
              l0 += e[0] + e[1]; l1 += e[2] + e[3];
              w[2 * k] = pack_half(e[0], e[1]); w[2 * k + 1] = pack_half(e[2], e[3]);
            }
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                         :: "r"(my_probs + ((j + high) ^ spin) * 16), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          __syncwarp();
          if (lane == 0) barrier_arrive(p_full + 8 * wg);
          if (wg == 0) { a0 = n0; a1 = n1; }
        }
        if (__any_sync(~0u, a0 != m0 || a1 != m1)) rescale(a0, a1);
        barrier_wait(p_full, uses_a & 1);
        barrier_wait(full + 8 * even, count >> 1 & 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) mma_f16t(o, dp + k * 2, dv + even * (BUFFER / 16) + k * 128, 1);
        wgmma_commit();
        if (both) {
          barrier_wait(p_full + 8, uses_b & 1);
          const float b0 = stat[1][r0], b1 = stat[1][r0 + 8];
          if (__any_sync(~0u, b0 != m0 || b1 != m1)) {
            wgmma_wait<0>();
            keep(o);
            rescale(b0, b1);
          }
          barrier_wait(full + 8 * (even ^ 1), (count + 1) >> 1 & 1);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; k++) mma_f16t(o, dp + CHUNK / 16 + k * 2, dv + (even ^ 1) * (BUFFER / 16) + k * 128, 1);
          wgmma_commit();
          wgmma_wait<1>();
          if (lane == 0) { barrier_arrive(empty + 8 * even); if (wg == 1) barrier_arrive(p_free); }
          wgmma_wait<0>();
          if (lane == 0) { barrier_arrive(empty + 8 * (even ^ 1)); if (wg == 0) barrier_arrive(p_free + 8); }
          uses_b++;
          count += 2;
        } else {
          wgmma_wait<0>();
          if (lane == 0) { barrier_arrive(empty + 8 * even); if (wg == 1) barrier_arrive(p_free); }
          count++;
        }
        keep(o);
      }
      load_queries(item + gridDim.x);                   // both warpgroups have used the old ones: tile b's probabilities were there
      l0 *= exp2_fast(own0 - m0); l1 *= exp2_fast(own1 - m1);
#pragma unroll
      for (int d = 1; d < 4; d *= 2) { l0 += __shfl_xor_sync(~0u, l0, d); l1 += __shfl_xor_sync(~0u, l1, d); }
      if (q == 0) { sums[wg][r0] = l0; sums[wg][r0 + 8] = l1; }
      named_barrier(1, 256);                            // also: both are done with the probabilities
      l0 = sums[0][r0] + sums[1][r0];
      l1 = sums[0][r0 + 8] + sums[1][r0 + 8];
      const size_t at = (size_t)item * 64;
      float f0, f1;
      if (SPLITS == 1) {
        const float k0 = p.sink[r0] * LOG2E, k1 = p.sink[r0 + 8] * LOG2E, p0 = fmaxf(m0, k0), p1 = fmaxf(m1, k1);
        f0 = exp2_fast(m0 - p0) / (l0 * exp2_fast(m0 - p0) + exp2_fast(k0 - p0));
        f1 = exp2_fast(m1 - p1) / (l1 * exp2_fast(m1 - p1) + exp2_fast(k1 - p1));
      } else {
        f0 = l0 > 0.f ? 1.f / l0 : 0.f;
        f1 = l1 > 0.f ? 1.f / l1 : 0.f;
        if (wg == 0 && q == 0) { p.lse[at + r0] = l0 > 0.f ? m0 + log2f(l0) : -INFINITY; p.lse[at + r0 + 8] = l1 > 0.f ? m1 + log2f(l1) : -INFINITY; }
      }
      // 64 dims at a time through this warpgroup's probability buffer, for whole 128-byte stores.
      uint4* out = reinterpret_cast<uint4*>((SPLITS == 1 ? (uint8_t*)p.out + (size_t)row * 65536 : (uint8_t*)p.part + at * 1024) + wg * 512);
#pragma unroll
      for (int piece = 0; piece < 4; piece++) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const float* e = o + 4 * (8 * piece + j);
          uint32_t w[4];
#pragma unroll
          for (int k = 0; k < 2; k++) {
            float v0 = e[4 * k] * f0, v1 = e[4 * k + 1] * f0, v2 = e[4 * k + 2] * f1, v3 = e[4 * k + 3] * f1;
            w[2 * k] = SPLITS == 1 ? pack_bf16(v0, v1) : pack_half(v0, v1);
            w[2 * k + 1] = SPLITS == 1 ? pack_bf16(v2, v3) : pack_half(v2, v3);
          }
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                       :: "r"(my_probs + ((j + high) ^ spin) * 16), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        }
        named_barrier(4 + wg, 128);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int head = k * 16 + tid / 8, unit = tid % 8;
          out[head * 64 + piece * 8 + unit] = lds128(probs + wg * CHUNK + head * 128 + (unit ^ (head & 7)) * 16);
        }
        named_barrier(4 + wg, 128);
      }
    }
  }
}

__global__ __launch_bounds__(256) void merge(const Args p) {
  const int row = blockIdx.y, item = blockIdx.x * 256 + threadIdx.x, head = item / 64, unit = item % 64;
  const float* lse = p.lse + (size_t)row * p.splits * 64 + head;
  const float sink = p.sink[head] * LOG2E;
  float top = sink;
  for (int s = 0; s < p.splits; s++) top = fmaxf(top, lse[s * 64]);
  float total = exp2_fast(sink - top), o[8] = {};
  for (int s = 0; s < p.splits; s++) {
    float f = exp2_fast(lse[s * 64] - top);
    total += f;
    uint4 v = *reinterpret_cast<const uint4*>(p.part + (((size_t)row * p.splits + s) * 64 + head) * 512 + unit * 8);
    const __half2* h = reinterpret_cast<const __half2*>(&v);
#pragma unroll
    for (int k = 0; k < 4; k++) { float2 x = __half22float2(h[k]); o[2 * k] += x.x * f; o[2 * k + 1] += x.y * f; }
  }
  const float f = 1.f / total;
  uint4 v = make_uint4(pack_bf16(o[0] * f, o[1] * f), pack_bf16(o[2] * f, o[3] * f), pack_bf16(o[4] * f, o[5] * f), pack_bf16(o[6] * f, o[7] * f));
  *reinterpret_cast<uint4*>(p.out + ((size_t)row * 64 + head) * 512 + unit * 8) = v;
}

extern "C" int launch_attention(const void* q, Args p, int compressed, cudaStream_t stream) {
  CUtensorMap map;
  int error = make_map(&map, q, 1024, (uint64_t)p.rows * 64, 64), shared = 1024 + 3 * BUFFER + 2 * CHUNK, items = p.rows * p.splits;
  if (error) return 1000 + error;
  auto kernel = compressed ? p.splits == 1 ? attention<1, 8> : p.splits == 2 ? attention<2, 8> : p.splits == 5 ? attention<5, 8> : attention<10, 8>
                           : p.splits == 1 ? attention<1, 0> : attention<2, 0>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  kernel<<<items < 132 ? items : 132, THREADS, shared, stream>>>(map, p);
  if (p.splits > 1) merge<<<dim3(16, p.rows), 256, 0, stream>>>(p);
  return (int)cudaGetLastError();
}
