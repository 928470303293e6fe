// Index scores of FP4 keys, sum over 32 heads of relu(q . k) w: see deepinfer/ops/indexer.
//
// Keys run along M of an FP8 wgmma: E2M1 codes are decoded to E4M3 in registers, block scales in the exponents relative to the key's
// largest; (rows x heads) run along N, in shared memory. The products go to f16 behind their relu, and a second, small MMA with a
// block-diagonal weight matrix sums the heads. 64 keys are a tile, in one or more stretches that lie together in the cache: whole pages,
// or listed blocks. R rows of one request share a pass over its keys: 1 while decoding, 8 otherwise.
#include "common.cuh"
#include "wgmma.cuh"

struct Args {
  const uint8_t* keys;       // [entry][64 bytes of codes, 4 E8M0 scales]
  const int64_t* table;      // [slot][table_stride] pages
  const int *slots, *firsts, *counts;                  // [group]: of a request; first row, rows
  const int* visible;        // [row] entries that it sees
  const int* blocks;         // LISTED: [row][columns / unit], blocks of `unit` entries to score, -1 for none
  const float* weights;      // [row][32], query scales folded in
  float* out;                // [row][out_stride]
  int64_t table_stride, out_stride;
  int columns, tiles_each, unit, entries;              // unit: entries that lie together, a divisor of 64; entries: of a page
};
constexpr int HEADS = 32, TILE = 64, KEY_BYTES = 68, TILE_BYTES = TILE * KEY_BYTES, STAGES = 8, THREADS = 384, PIECES = 16, NOWHERE = 0x7FFFFFFF;

// Four codes of the low half of `w`, and of the high half. A selector with bit 3 set repeats the chosen byte's sign: from 0x80 it makes 0xFF
// for a negative code, 0x80 for a positive one, and a shift brings that difference to the sign.
__device__ __forceinline__ uint32_t decode_half(uint32_t w, uint32_t lo, uint32_t hi) {
  return prmt(lo, hi, w & 0x7777u) | ((prmt(0x80808080u, 0x80808080u, w) * 2) & 0x80808080u);
}
__device__ __forceinline__ void decode(uint32_t w, uint32_t lo, uint32_t hi, uint32_t& first, uint32_t& second) {
  first = decode_half(w, lo, hi);
  second = decode_half(w >> 16, lo, hi);
}
// (exponent field of the code for 1.0) << 3 to the E4M3 codes of 0, .5, 1, 1.5 and of 2, 3, 4, 6.
__device__ __forceinline__ void table_of(uint32_t x, uint32_t& lo, uint32_t& hi) {
  lo = x * 0x01010100u + 0x03FFF800u;
  hi = x * 0x01010101u + 0x14100C08u;
}
__device__ __forceinline__ uint32_t lds32(uint32_t a) { uint32_t v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a)); return v; }
__device__ __forceinline__ uint32_t relu_half(float a, float b) {
  uint32_t d; asm("cvt.rn.relu.f16x2.f32 %0, %2, %1;" : "=r"(d) : "f"(a), "f"(b)); return d;
}
__device__ __forceinline__ void mma_half(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ uint32_t half_bits(float x) { return (uint32_t)__half_as_ushort(__float2half_rn(x)); }

// The two keys of a tile that a thread holds parts of: rows g and g + 8 of its warp's 16. With one query row they are picked so that a
// warp reads 68-byte rows without bank conflicts; with eight, so that scores of eight neighbours are stored together.
template <int R> __device__ __forceinline__ int first_key(int warp, int g) { return R == 8 ? warp * 16 + g : warp / 2 * 32 + warp % 2 * 8 + g / 4 * 16 + g % 4; }
template <int R> constexpr int KEY_STEP = R == 8 ? 8 : 4;

struct Keys { uint32_t tops; int entry_u, entry_v; };  // E8M0 of the largest scales, u | v << 16; LISTED: where the keys are

// Reads this warp's 16 keys, frees the slot and starts the products of the tile's 64 with all queries.
template <int R, bool LISTED>
__device__ __forceinline__ Keys begin(float (&acc)[16 * R], uint32_t base, const int* places, int unit, uint32_t empty, int key, int q, int lane, uint64_t b) {
  const uint32_t u = base + key * KEY_BYTES, v = u + KEY_STEP<R> * KEY_BYTES;
  uint32_t codes_u[4], codes_v[4], a[16], lo, hi;
#pragma unroll
  for (int j = 0; j < 4; j++) { codes_u[j] = lds32(u + q * 16 + 4 * j); codes_v[j] = lds32(v + q * 16 + 4 * j); }
  const uint32_t own = prmt(lds32(u + 64), lds32(v + 64), q | (4 + q) << 8) & 0x00FF00FFu;      // scale of this thread's 32 channels, u | v << 16
  Keys keys;
  if (LISTED) { keys.entry_u = places[key / unit] + key % unit; keys.entry_v = places[(key + KEY_STEP<R>) / unit] + (key + KEY_STEP<R>) % unit; }
  keys.tops = __vmaxu2(own, __shfl_xor_sync(~0u, own, 1));
  keys.tops = __vmaxu2(keys.tops, __shfl_xor_sync(~0u, keys.tops, 2));
  const uint32_t fields = 0x00580058u - __vminu2(keys.tops - own, 0x00090009u) * 8;            // the largest at 11, none below 2
  table_of(fields & 0xFFFFu, lo, hi);
#pragma unroll
  for (int j = 0; j < 4; j++) decode(codes_u[j], lo, hi, a[4 * j], a[4 * j + 2]);
  table_of(fields >> 16, lo, hi);
#pragma unroll
  for (int j = 0; j < 4; j++) decode(codes_v[j], lo, hi, a[4 * j + 1], a[4 * j + 3]);
  __syncwarp();
  if (lane == 0) barrier_arrive(empty);
#pragma unroll
  for (int k = 0; k < 16 * R; k++) acc[k] = 0.f;
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < 4; j++) mma_e4m3(acc, a + 4 * j, b + 2 * j, j > 0);
  wgmma_commit();
  return keys;
}

// 2^(code - 11 + 7 - 127), at least the smallest normal
__device__ __forceinline__ float key_scale(uint32_t code) { return __uint_as_float((uint32_t)max((int)code - 4, 1) << 23); }

// What a warpgroup knows of its rows. `weights`: for each 16 heads the operand of the second MMA; R = 8: column r has row r's; R = 1: columns
// 0 and 1 have the high and the low part. `scale`: what the row's weights were divided by, of the rows whose sums this thread gets.
template <int R> struct Rows { uint32_t weights[2 * R][2]; float scale[2]; int first, count, seen, length; };

template <int R, bool LISTED>
__device__ __forceinline__ void finish(const Args& p, const float (&acc)[16 * R], const Rows<R>& rows, const Keys& keys, int column, int q) {
  constexpr int CHAINS = R == 8 ? 4 : 2;               // independent sums: one chain of MMAs would be all latency
  float part[CHAINS][4] = {}, c[4];
#pragma unroll
  for (int k = 0; k < 2 * R; k++) {
    const float* d = acc + 8 * k;
    const uint32_t a[4] = {relu_half(d[0], d[1]), relu_half(d[2], d[3]), relu_half(d[4], d[5]), relu_half(d[6], d[7])};
    mma_half(part[k % CHAINS], a, rows.weights[k]);
  }
#pragma unroll
  for (int e = 0; e < 4; e++) c[e] = CHAINS == 4 ? (part[0][e] + part[1][e]) + (part[CHAINS - 2][e] + part[CHAINS - 1][e]) : part[0][e] + part[1][e];
  const float su = key_scale(keys.tops & 0xFFFFu), sv = key_scale(keys.tops >> 16);
  const bool has_u = column < rows.length, has_v = column + KEY_STEP<R> < rows.length;
  if (R == 8) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (2 * q + e >= rows.count) continue;
      float* out = p.out + (rows.first + 2 * q + e) * p.out_stride + column;
      if (has_u) out[0] = c[e] * su * rows.scale[e];
      if (has_v) out[KEY_STEP<R>] = c[2 + e] * sv * rows.scale[e];
    }
  } else if (q == 0) {
    float* out = p.out + rows.first * p.out_stride + column;
    float u = (c[0] + c[1]) * su * rows.scale[0], v = (c[2] + c[3]) * sv * rows.scale[0];
    if (LISTED) { u = keys.entry_u < rows.seen ? u : -INFINITY; v = keys.entry_v < rows.seen ? v : -INFINITY; }
    if (has_u) out[0] = u;
    if (has_v) out[KEY_STEP<R>] = v;
  }
}

// Weights as f16 relative to the row's largest, so that none is lost below f16's range.
template <int R> __device__ __forceinline__ void load_weights(const Args& p, Rows<R>& rows, int g, int q) {
  const int r = R == 8 ? g : 0;
  const bool mine = (R == 8 || g < 2) && r < rows.count;
  float2 w[2][2];
  float largest = 0x1p-100f;
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      w[k][h] = mine ? *reinterpret_cast<const float2*>(p.weights + (size_t)(rows.first + r) * HEADS + k * 16 + h * 8 + 2 * q) : make_float2(0.f, 0.f);
      largest = fmaxf(largest, fmaxf(fabsf(w[k][h].x), fabsf(w[k][h].y)));
    }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const uint32_t power = min(__float_as_uint(largest) & 0x7F800000u, 253u << 23);
  const float inverse = __uint_as_float((254u << 23) - power);
#pragma unroll
  for (int e = 0; e < 2; e++) rows.scale[e] = __uint_as_float(__shfl_sync(~0u, power, R == 8 ? (2 * q + e) * 4 : 0));
#pragma unroll
  for (int k = 0; k < 2 * R; k++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float x = w[k % 2][h].x * inverse, y = w[k % 2][h].y * inverse;
      if (R == 1 && g == 1) { x -= __half2float(__float2half_rn(x)); y -= __half2float(__float2half_rn(y)); }
      rows.weights[k][h] = R == 8 && k / 2 != g ? 0u : half_bits(x) | half_bits(y) << 16;
    }
}

// Fetches the tiles from `first` to `last`; all lanes of one warp. A lane looks up one stretch, for several tiles at a time, one round ahead.
template <int R, bool LISTED>
__device__ __forceinline__ void fetch(const Args& p, int slot_of_request, int row, int seen, int length, int first, int last, uint32_t ring, int (*places)[PIECES], uint32_t full, uint32_t empty) {
  const int lane = threadIdx.x % 32, pieces = TILE / p.unit, tiles = 32 / pieces, piece = lane % pieces;
  const int64_t* table = p.table + slot_of_request * p.table_stride;
  const uint64_t policy = evict_first();
  int entry, ahead_entry;
  int64_t from, ahead;
  auto look_up = [&](int tile, int& entry) -> int64_t {
    const int at = (tile + lane / pieces) * pieces + piece;
    entry = NOWHERE - TILE;
    if (tile + lane / pieces >= last || at * p.unit >= length) return -1;
    int begin = at * p.unit;
    if (LISTED) {
      const int block = p.blocks[(int64_t)row * (p.columns / p.unit) + at];
      begin = block * p.unit;
      if (block < 0 || begin >= seen) return -1;
    }
    entry = begin;
    return (table[begin / p.entries] * p.entries + begin % p.entries) * KEY_BYTES;
  };
  int slot = 0;
  uint32_t phase = 1;
  ahead = look_up(first, ahead_entry);
  for (int tile = first; tile < last; tile += tiles) {
    from = ahead; entry = ahead_entry;
    ahead = look_up(tile + tiles, ahead_entry);
    const uint32_t found = __ballot_sync(~0u, from >= 0);
    for (int i = 0; i < tiles && tile + i < last; i++) {
      const uint32_t own = found >> (i * pieces) & (pieces == 32 ? ~0u : (1u << pieces) - 1);
      barrier_wait(empty + 8 * slot, phase);
      if (LISTED && lane / pieces == i) places[slot][piece] = entry;
      __syncwarp();
      if (lane == 0) barrier_expect(full + 8 * slot, __popc(own) * p.unit * KEY_BYTES);
      __syncwarp();
      if (lane / pieces == i && from >= 0)
        bulk_load(ring + slot * TILE_BYTES + piece * p.unit * KEY_BYTES, p.keys + from, p.unit * KEY_BYTES, full + 8 * slot, policy);
      if (++slot == STAGES) { slot = 0; phase ^= 1; }
    }
  }
}

template <int R, bool LISTED>
__global__ __launch_bounds__(THREADS, R == 1 ? 2 : 1) void score(const __grid_constant__ CUtensorMap q_map, const Args p) {
  constexpr int N = HEADS * R;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ __align__(8) uint64_t bars[2 * STAGES + 1];
  __shared__ int places[STAGES][PIECES];
  const uint32_t queries = (smem_address(dynamic) + 1023) & ~1023u, ring = queries + N * 128;
  const uint32_t full = smem_address(bars), empty = full + 8 * STAGES, ready = empty + 8 * STAGES;
  const int group = blockIdx.y, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) { barrier_init(full + 8 * i, 1); barrier_init(empty + 8 * i, 4); }
    barrier_init(ready, 1);
    barrier_init_fence();
  }
  wait_for_earlier();
  let_later_begin();
  Rows<R> rows;
  rows.first = p.firsts[group]; rows.count = min(p.counts[group], R); rows.seen = 0;
  for (int r = 0; r < rows.count; r++) rows.seen = max(rows.seen, p.visible[rows.first + r]);
  rows.length = LISTED ? p.columns : min(rows.seen, p.columns);
  const int first = blockIdx.x * p.tiles_each, last = min(first + p.tiles_each, (rows.length + TILE - 1) / TILE);
  if (first >= last) return;
  __syncthreads();
  if (warp >= 8) {
    if (R > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); else asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (warp == 8) {
      if (lane == 0) {
        barrier_expect(ready, N * 128);
        tensor_load(queries, &q_map, 0, rows.first * HEADS, ready);
      }
      fetch<R, LISTED>(p, p.slots[group], rows.first, rows.seen, rows.length, first, last, ring, places, full, empty);
    }
  } else {
    if (R > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); else asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    const int wg = warp / 4, g = lane / 4, q = lane % 4, key = first_key<R>(warp % 4, g);
    load_weights<R>(p, rows, g, q);
    barrier_wait(ready, 0);
    const uint64_t b = descriptor(queries);
    auto start = [&](int i, float (&acc)[16 * R]) {
      const int slot = (i - first) % STAGES;
      barrier_wait(full + 8 * slot, (i - first) / STAGES & 1);
      return begin<R, LISTED>(acc, ring + slot * TILE_BYTES, places[slot], p.unit, empty + 8 * slot, key, q, lane, b);
    };
    int i = first + wg;
    if (R == 1) {                                      // two tiles at a time, so that one's products run while the other is decoded or summed
      for (; i + 2 < last; i += 4) {
        float acc0[16 * R], acc1[16 * R];
        const Keys keys0 = start(i, acc0), keys1 = start(i + 2, acc1);
        wgmma_wait<1>();
        keep(acc0);
        finish<R, LISTED>(p, acc0, rows, keys0, i * TILE + key, q);
        wgmma_wait<0>();
        keep(acc1);
        finish<R, LISTED>(p, acc1, rows, keys1, (i + 2) * TILE + key, q);
      }
    }
    for (; i < last; i += 2) {
      float acc[16 * R];
      const Keys keys = start(i, acc);
      wgmma_wait<0>();
      keep(acc);
      finish<R, LISTED>(p, acc, rows, keys, i * TILE + key, q);
    }
  }
}

// queries: E4M3 [rows][32][128], each head in the order of the operand. rows_per_tile: 1 or 8; listed blocks go with 1.
extern "C" int launch_scores(int rows_per_tile, const void* queries, int rows, int groups, Args p, cudaStream_t stream) {
  CUtensorMap map;
  const int n = HEADS * rows_per_tile, error = make_map(&map, queries, 128, (uint64_t)rows * HEADS, n);
  if (error) return 1000 + error;
  const int shared = 1024 + n * 128 + STAGES * TILE_BYTES, tiles = (p.columns + TILE - 1) / TILE;
  void (*kernel)(CUtensorMap, Args) = rows_per_tile == 8 ? score<8, false> : p.blocks ? score<1, true> : score<1, false>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  return launch_after(kernel, dim3((tiles + p.tiles_each - 1) / p.tiles_each, groups), THREADS, shared, stream, map, p);
}
