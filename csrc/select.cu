// The 512 largest scores of each row, exactly; of equal ones the lower position: see deepinfer/ops/indexer.
//
// One pass over the scores is enough. Up to 8,192 (or 16,384) stay in the registers of one block. More are first sampled: a histogram, linear over the
// sample's range, gives a threshold that roughly twice 512 scores exceed, and only those go to shared memory. A second histogram, linear
// over the range of the candidates, leaves a handful in the bin of the 512th; they are ranked against each other. If the sample misleads,
// or more than 1,024 share that bin, the block falls back to a radix search over all scores: the result is always exact. Few long rows:
// `splits` blocks select 512 each and a last block merges. Where a page table is given, positions come out as addresses of entries.
#include "common.cuh"

constexpr int TOP = 512, THREADS = 512, CAPACITY = 4096, BINS = 4096, SAMPLE = 4096, RANKED = 1024;

struct Shared {
  uint32_t key[CAPACITY];
  int index[CAPACITY];
  int hist[BINS];
  int warp_sum[THREADS / 32];
  int count, emitted, ties, bin, above, taken;
  uint32_t low, high;
};

__device__ __forceinline__ uint32_t ordered(float f) {
  uint32_t u = __float_as_uint(f + 0.f);  // -0 is 0
  return u ^ ((u >> 31) ? 0xFFFFFFFFu : 0x80000000u);
}
__device__ __forceinline__ float unordered(uint32_t k) { return __uint_as_float(k ^ ((k >> 31) ? 0x80000000u : 0xFFFFFFFFu)); }

// Bin holding the `rank`-th largest (1-based): sets s.bin and s.above (elements in higher bins).
__device__ void find_bin(Shared& s, int bins, int rank) {
  const int t = threadIdx.x, each = bins / THREADS, lane = t % 32, warp = t / 32;
  int sum = 0;
  for (int i = 0; i < each; i++) sum += s.hist[bins - 1 - t * each - i];          // thread 0 owns the highest bins
  int scan = sum;
  for (int d = 1; d < 32; d *= 2) { int v = __shfl_up_sync(~0u, scan, d); if (lane >= d) scan += v; }
  if (lane == 31) s.warp_sum[warp] = scan;
  __syncthreads();
  int before = lane < warp ? s.warp_sum[lane] : 0;
  scan += __reduce_add_sync(~0u, before);
  int above = scan - sum;
  if (above < rank && rank <= scan) {
    for (int i = 0; i < each; i++) {
      int h = s.hist[bins - 1 - t * each - i];
      if (above + h >= rank) { s.bin = bins - 1 - t * each - i; s.above = above; break; }
      above += h;
    }
  }
  __syncthreads();
}
__device__ void clear(Shared& s, int bins) {
  for (int i = threadIdx.x; i < bins; i += THREADS) s.hist[i] = 0;
  __syncthreads();
}
// Where this thread's `mine` items go, behind those of the threads before it; all threads take part. Not by an atomic: the order has to be
// the same each time, since whoever sums over the chosen does it in this order.
__device__ __forceinline__ int reserve(Shared& s, int& counter, int mine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int scan = mine;
  for (int d = 1; d < 32; d *= 2) { int v = __shfl_up_sync(~0u, scan, d); if (lane >= d) scan += v; }
  if (lane == 31) s.warp_sum[warp] = scan;
  __syncthreads();
  const int at = counter + __reduce_add_sync(~0u, lane < warp ? s.warp_sum[lane] : 0) + scan - mine;
  __syncthreads();
  if (threadIdx.x == THREADS - 1) counter = at + mine;
  return at;
}

// Exact key of the TOP-th largest among n elements given by key_at(i); s.above = how many are larger.
template <class F> __device__ uint32_t radix_search(Shared& s, int n, F key_at) {
  uint32_t prefix = 0, mask = 0;
  int above = 0;
  const int shifts[3] = {20, 10, 0}, widths[3] = {12, 10, 10};
  for (int pass = 0; pass < 3; pass++) {
    int bins = 1 << widths[pass];
    clear(s, bins);
    for (int i = threadIdx.x; i < n; i += THREADS) {
      uint32_t k = key_at(i);
      if ((k & mask) == prefix) atomicAdd(&s.hist[(k >> shifts[pass]) & (bins - 1)], 1);
    }
    __syncthreads();
    find_bin(s, bins, TOP - above);
    above += s.above;
    prefix |= (uint32_t)s.bin << shifts[pass];
    mask |= (uint32_t)(bins - 1) << shifts[pass];
    __syncthreads();
  }
  if (threadIdx.x == 0) s.above = above;
  __syncthreads();
  return prefix;
}

// Where entries lie. A column is an entry or, with `blocks`, entry i % block of the row's block i / block, -1 for none.
struct Entries {
  const int64_t* table;        // [slot][stride] pages; null: columns stay columns
  const int* slots;            // [row]
  const int* blocks;           // [row][listed]; may be null
  int64_t stride;
  int entries, listed, block;  // entries: of a page
};
constexpr uint32_t HIDDEN = 0x007FFFFFu;         // `ordered` of -infinity

struct Output {
  int* index;
  float* score;                // may be null
  __device__ void put(int slot, int i, uint32_t k) const { index[slot] = i; if (score) score[slot] = unordered(k); }
};

// Top TOP of the block's candidates (EACH per thread, `used` bits say which are real): one histogram, linear over the range of the values
// (a monotone map), leaves few at the boundary, which are ranked by key, then by index. False: too many at the boundary, nothing written.
template <int EACH, class F> __device__ bool finish(Shared& s, const uint32_t (&k)[EACH], uint32_t used, F index_at, const Output& out) {
  const int t = threadIdx.x, lane = t % 32;
  uint32_t lowest = ~0u, highest = 0;
#pragma unroll
  for (int e = 0; e < EACH; e++) if (used >> e & 1) { lowest = min(lowest, k[e]); highest = max(highest, k[e]); }
  lowest = __reduce_min_sync(~0u, lowest); highest = __reduce_max_sync(~0u, highest);
  if (lane == 0) { atomicMin(&s.low, lowest); atomicMax(&s.high, highest); }
  clear(s, BINS);
  const float low = unordered(s.low), range = unordered(s.high) - low;
  const float factor = range > 0.f ? (BINS - 1) / range : 0.f;
  if (!isfinite(factor) || !isfinite(range)) return false;
  auto bin_of = [&](uint32_t key) { return (uint32_t)min((int)((unordered(key) - low) * factor), BINS - 1); };
#pragma unroll
  for (int e = 0; e < EACH; e++) if (used >> e & 1) atomicAdd(&s.hist[bin_of(k[e])], 1);
  __syncthreads();
  find_bin(s, BINS, TOP);
  const uint32_t bin = s.bin;
  const int above = s.above, size = s.hist[bin];
  __syncthreads();
  if (size > RANKED) return false;
  uint32_t* tie_key = reinterpret_cast<uint32_t*>(s.hist);
  int *tie_index = s.hist + RANKED, mine = 0;
#pragma unroll
  for (int e = 0; e < EACH; e++) mine += (used >> e & 1) && bin_of(k[e]) > bin;
  int at = reserve(s, s.emitted, mine);
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (!(used >> e & 1)) continue;
    uint32_t b = bin_of(k[e]);
    if (b > bin) out.put(at++, index_at(e), k[e]);
    else if (b == bin) { int i = atomicAdd(&s.ties, 1); tie_key[i] = k[e]; tie_index[i] = index_at(e); }
  }
  __syncthreads();
  for (int i = t; i < size; i += THREADS) {
    const uint32_t key = tie_key[i];
    const int place = tie_index[i];
    int rank = 0;
    for (int j = 0; j < size; j++) rank += tie_key[j] > key || (tie_key[j] == key && tie_index[j] < place);
    if (above + rank < TOP) out.put(above + rank, place, key);
  }
  return true;
}

// Scores x, n of them; INDIRECT: element i stands for map[i] (-1 = empty), else for begin + i. `sparse`: any may be -infinity, which is not chosen
// (where fewer than TOP are left and n is small; else it may be, last).
template <bool INDIRECT, int EACH>
__device__ __forceinline__ void choose(Shared& s, const float* x, const int* map, int begin, int n, bool aligned, bool sparse, const Output& out) {
  constexpr int DIRECT = THREADS * EACH;
  const int t = threadIdx.x, lane = t % 32;
  auto index_of = [&](int i) { return INDIRECT ? map[i] : begin + i; };
  auto key_of = [&](int i) { return INDIRECT && map[i] < 0 ? 0u : ordered(x[i]); };
  if (n <= TOP) {
    for (int i = t; i < TOP; i += THREADS) {
      if (i < n) out.put(i, index_of(i), key_of(i));
      else { out.index[i] = -1; if (out.score) out.score[i] = -INFINITY; }
    }
    return;
  }
  if (t == 0) { s.count = s.emitted = s.ties = s.taken = 0; s.low = ~0u; s.high = 0; }
  // Element i of a round of THREADS * EACH: (e / 4 * THREADS + t) * 4 + e % 4
  auto place = [&](int e) { return (e / 4 * THREADS + t) * 4 + e % 4; };
  auto load = [&](int base, uint32_t (&k)[EACH]) {
#pragma unroll
    for (int v = 0; v < EACH / 4; v++) {
      int i = base + place(4 * v);
      if (aligned && i + 3 < n) {
        float4 f = __ldg(reinterpret_cast<const float4*>(x + i));
        k[4 * v] = ordered(f.x); k[4 * v + 1] = ordered(f.y); k[4 * v + 2] = ordered(f.z); k[4 * v + 3] = ordered(f.w);
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++) k[4 * v + e] = i + e < n ? ordered(x[i + e]) : 0u;
      }
    }
  };
  uint32_t k[EACH], used = 0;
  if (n <= DIRECT) {
    load(0, k);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      int i = place(e);
      if (i < n) { used |= 1u << e; if (INDIRECT && map[i] < 0) k[e] = 0; }
    }
    __syncthreads();
    if (sparse) {
#pragma unroll
      for (int e = 0; e < EACH; e++) if (k[e] <= HIDDEN) used &= ~(1u << e);
      int at = reserve(s, s.count, __popc(used));
      __syncthreads();
      const int count = s.count;
      if (count <= TOP) {
#pragma unroll
        for (int e = 0; e < EACH; e++) if (used >> e & 1) out.put(at++, index_of(place(e)), k[e]);
        for (int i = count + t; i < TOP; i += THREADS) out.put(i, -1, 0u);
        return;
      }
    }
    if (finish(s, k, used, [&](int e) { return index_of(place(e)); }, out)) return;
  } else {
    // Threshold from SAMPLE scores (whole sectors of 8, spread evenly): a histogram linear over their range.
    constexpr int MINE = SAMPLE / THREADS;
    float f[MINE], low = INFINITY, high = -INFINITY;
    const int sectors = n / 8;
#pragma unroll
    for (int e = 0; e < MINE; e++) {
      const int i = e * THREADS + t;
      f[e] = unordered(key_of((int)((int64_t)(i / 8) * sectors / (SAMPLE / 8)) * 8 + i % 8));
      low = fminf(low, f[e]); high = fmaxf(high, f[e]);
    }
    uint32_t lowest = __reduce_min_sync(~0u, ordered(low)), highest = __reduce_max_sync(~0u, ordered(high));
    __syncthreads();
    if (lane == 0) { atomicMin(&s.low, lowest); atomicMax(&s.high, highest); }
    clear(s, BINS);
    low = unordered(s.low);
    const float range = unordered(s.high) - low, factor = range > 0.f && isfinite(range) ? (BINS - 1) / range : 0.f;
#pragma unroll
    for (int e = 0; e < MINE; e++) atomicAdd(&s.hist[min(max((int)((f[e] - low) * factor), 0), BINS - 1)], 1);
    __syncthreads();
    const float expected = (float)TOP * SAMPLE / n;
    find_bin(s, BINS, min(SAMPLE, (int)(expected * 1.5f + 4.f * sqrtf(expected) + 4.f)));
    const uint32_t threshold = factor > 0.f ? ordered(low + s.bin / factor) : 0u;
    if (t == 0) { s.low = ~0u; s.high = 0; }
    for (int base = 0; base < n; base += THREADS * EACH) {
      load(base, k);
      int mine = 0;
#pragma unroll
      for (int e = 0; e < EACH; e++) mine += base + place(e) < n && k[e] >= threshold;
      int at = reserve(s, s.count, mine);
#pragma unroll
      for (int e = 0; e < EACH; e++)
        if (base + place(e) < n && k[e] >= threshold) { if (at < CAPACITY) { s.key[at] = k[e]; s.index[at] = base + place(e); } at++; }
    }
    __syncthreads();
    const int count = s.count;
    if (count >= TOP && count <= CAPACITY) {
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        int i = e * THREADS + t;
        if (i < count) { used |= 1u << e; k[e] = s.key[i]; }
      }
      if (finish(s, k, used, [&](int e) { return index_of(s.index[e * THREADS + t]); }, out)) return;
    }
  }
  // General case: exact key of the 512th by radix search, then the equal ones in index order.
  __syncthreads();
  const uint32_t kth = radix_search(s, n, key_of);
  const int need = TOP - s.above;
  if (!INDIRECT) {
    for (int base = 0; base < n; base += THREADS) {
      int i = base + t;
      uint32_t key = i < n ? key_of(i) : 0;
      bool equal = i < n && key == kth;
      const bool larger = i < n && key > kth;
      const int at = reserve(s, s.emitted, larger);
      if (larger) out.put(at, begin + i, key);
      unsigned mask = __ballot_sync(~0u, equal);
      if (lane == 0) s.warp_sum[t / 32] = __popc(mask);
      __syncthreads();
      int rank = s.taken + __popc(mask & ((1u << lane) - 1));
      for (int w = 0; w < t / 32; w++) rank += s.warp_sum[w];
      if (equal && rank < need) out.put(TOP - need + rank, begin + i, key);
      __syncthreads();
      if (t == THREADS - 1) s.taken = rank + equal;
      __syncthreads();
    }
  } else {
    for (int i = t; i < n; i += THREADS) {  // n is a multiple of THREADS
      uint32_t key = key_of(i);
      const int at = reserve(s, s.emitted, key > kth);
      if (key > kth) out.put(at, map[i], key);
      else if (key == kth) {
        int rank = 0;
        for (int j = 0; j < n; j++) rank += key_of(j) == kth && (map[j] < map[i] || (map[j] == map[i] && j < i));
        if (rank < need) out.put(TOP - need + rank, map[i], key);
      }
    }
  }
}

// Scores [row][stride] with `lengths[row]` or `fixed_length` valid; gridDim.x blocks take a chunk of a row each.
template <bool INDIRECT, int EACH>
__global__ __launch_bounds__(THREADS, EACH == 16 ? 3 : 2) void select(const float* scores, int64_t stride, const int* index_in, const int* lengths, int fixed_length, int chunk,
                                                                      int* out_index, float* out_score, const Entries places) {
  extern __shared__ uint8_t dynamic[];
  const int row = blockIdx.y, begin = blockIdx.x * chunk;
  wait_for_earlier();
  let_later_begin();
  const int n = max(0, min(chunk, (lengths ? lengths[row] : fixed_length) - begin));
  const float* x = scores + row * stride + begin;
  const int64_t to = ((int64_t)row * gridDim.x + blockIdx.x) * TOP;
  const Output out{out_index + to, out_score ? out_score + to : nullptr};
  choose<INDIRECT, EACH>(*reinterpret_cast<Shared*>(dynamic), x, INDIRECT ? index_in + row * stride + begin : nullptr, begin, n, stride % 4 == 0 && begin % 4 == 0,
                         places.blocks != nullptr, out);
  if (!places.table) return;
  __syncthreads();                               // from columns to addresses, a thread each
  int i = out.index[threadIdx.x];
  if (i >= 0 && places.blocks) {
    const int listed = places.blocks[(int64_t)row * places.listed + i / places.block];
    i = listed < 0 || scores[row * stride + i] == -INFINITY ? -1 : listed * places.block + i % places.block;
  }
  out.index[threadIdx.x] = i < 0 ? -1 : (int)places.table[places.slots[row] * places.stride + i / places.entries] * places.entries + i % places.entries;
}

// `lengths` may be null: then all rows have `longest`. Addresses come of the last choice alone.
extern "C" int launch_select(const void* scores, int64_t stride, const void* lengths, int rows, int splits, int longest, void* part_index, void* part_score,
                             void* out, Entries places, cudaStream_t stream) {
  const int shared = sizeof(Shared), chunk = ((longest + splits - 1) / splits + 3) / 4 * 4;
  auto columns = chunk > THREADS * 16 && chunk <= THREADS * 32 ? select<false, 32> : select<false, 16>;
  auto merge = select<true, 16>;
  CHECK(cudaFuncSetAttribute(columns, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  CHECK(cudaFuncSetAttribute(merge, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  const float* from = (const float*)scores;
  const int *ends = (const int*)lengths, *none = nullptr;
  if (splits == 1) return launch_after(columns, dim3(1, rows), THREADS, shared, stream, from, stride, none, ends, longest, chunk, (int*)out, (float*)nullptr, places);
  CHECK((cudaError_t)launch_after(columns, dim3(splits, rows), THREADS, shared, stream, from, stride, none, ends, longest, chunk, (int*)part_index, (float*)part_score, Entries{}));
  return launch_after(merge, dim3(1, rows), THREADS, shared, stream, (const float*)part_score, (int64_t)splits * TOP, (const int*)part_index, none, splits * TOP, splits * TOP,
                      (int*)out, (float*)nullptr, places);
}
