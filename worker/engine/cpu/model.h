// The control block and the plan that Python writes (cpu_plan.py holds the same layouts), and the row-wise parts of
// a block: norms, quantisation of activations, RoPE, attention.
#ifndef SMQ_MODEL_H
#define SMQ_MODEL_H
#include "pool.h"
#include "tiles.h"

#define MAX_ROWS 64
#define GROUP 6  // query rows that share one pass over keys and values

typedef struct {
  i64 offset, kind, rows, columns, bias;  // bytes into the weights; bias -1: none; kind -1: no matrix
} Matrix;

typedef struct {
  i64 attn_norm, ffn_norm, q_norm, k_norm, post_attn_norm, post_ffn_norm;  // bytes into the weights, -1: none
  i64 window, rope;                                                        // positions seen, 0: all; table number
  Matrix q, k, v, out, gate, up, down;
} Layer;

typedef struct {
  i64 width, ffn, heads, kv_heads, head_dim, rope_dim, positions, layers, activation, slots;
  double epsilon, attn_scale;
  i64 head_norm;
  Matrix head;
  Layer layer[];
} Plan;

enum { OP_STEP = 1, OP_HELPER, OP_REPACK, OP_STREAM, OP_SCRATCH, OP_MATMUL, OP_QUANTISE, OP_ROWS, OP_STOP, OP_UNPACK,
       OP_FAST_PATH };

typedef struct {
  i32 op, threads, rows, head_rows;  // head_rows: how many of the last rows get logits
  i32 exit, skip_blocks;
  i64 ahead;                         // as in Act
  i64 args[10];                      // of the small operations; of a step: where its rows come from
  void* shared[8];                   // the step's buffers, for the helpers
  i32 position[MAX_ROWS], slot[MAX_ROWS];
  i64 token[MAX_ROWS];
  Signal step __attribute__((aligned(64)));
} Control;

// Per-thread: activations of one row, a normed row, scores of a group.
#define PHASES 12  // of a block at most; the head has two

typedef struct {
  Phase* phases;  // zeroed once by Python: they lie first
  float *qkv, *mixed, *hidden, *temp, *normed;
  Act act;      // shared by all threads, for many rows
  Act own;      // this thread's, for one row
  float* scores;
  i64 score_stride;
} Scratch;

AI i64 max_i(i64 a, i64 b) { return a > b ? a : b; }
AI char* take(char** at, i64 bytes) {
  char* p = *at;
  *at += (bytes + 63) / 64 * 64;
  return p;
}
AI Act take_act(char** at, i64 rows, i64 columns) {
  Act a = {0};
  a.group = rows == 1 ? 1 : ACT_GROUP;
  rows = (rows + a.group - 1) / a.group * a.group;
  a.q = (i8*)take(at, rows * columns);
  a.d = (float*)take(at, rows * columns / 16 * 4);
  a.minus = (i32*)take(at, rows * columns / 16 * 4);
  a.s = (float*)take(at, rows * columns / 32 * 4);
  a.s16 = (float*)take(at, rows * columns / 16 * 4);
  return a;
}
AI i64 qkv_width(const Plan* p) { return (p->heads + 2 * p->kv_heads) * p->head_dim; }

// Lays the scratch out from `base`; gives the bytes it needs for all threads (base 0: only the size).
AI i64 lay_out(const Plan* p, char* base, int tid, int threads, Scratch* s) {
  char* at = base;
  i64 widest = max_i(max_i(p->width, p->ffn), p->heads * p->head_dim);
  s->phases = (Phase*)take(&at, (p->layers + 1) * PHASES * (i64)sizeof(Phase));
  s->qkv = (float*)take(&at, MAX_ROWS * qkv_width(p) * 4);
  s->mixed = (float*)take(&at, MAX_ROWS * p->heads * p->head_dim * 4);
  s->hidden = (float*)take(&at, MAX_ROWS * p->ffn * 4);
  s->temp = (float*)take(&at, MAX_ROWS * p->width * 4);
  s->normed = (float*)take(&at, MAX_ROWS * p->width * 4);
  s->act = take_act(&at, MAX_ROWS, widest);
  char* mine = at;
  s->score_stride = (p->positions + 15) / 16 * 16;
  for (int t = 0; t <= tid; t++) {
    mine = at;
    s->own = take_act(&mine, 1, widest);
    s->own.x = (float*)take(&mine, widest * 4);
    s->scores = (float*)take(&mine, GROUP * s->score_stride * 4);
    if (t < tid) at = mine;
  }
  return (mine - at) * threads + (at - base);
}

// -- rows ------------------------------------------------------------------------------------------------------

AI void norm_row(const float* x, const float* weight, float* out, i64 n, float epsilon) {
  nf sum = bcast(0);
  for (i64 i = 0; i < n; i += VL) {
    nf v = load(x + i);
    sum = fma_v(v, v, sum);
  }
  float scale = 1.0f / root(sum_v(sum) / (float)n + epsilon);
  for (i64 i = 0; i < n; i += VL) store(out + i, load(x + i) * scale * load(weight + i));
}

AI void quantise_row(const float* x, const Act* a, i64 row) {
  const i64 blocks = a->columns / 32, first = first_block(a, row);
  for (i64 b = 0; b < blocks; b++) {
    float sums[2];
    UNROLL for (int half = 0; half < 2; half++) {
      const i64 at = (first + b * a->group) * 2 + half;
      const float* p = x + b * 32 + half * 16;
      nf top = bcast(0);
      UNROLL for (int part = 0; part < PARTS; part++) top = max_v(top, abs_v(load(p + part * VL)));
      float most = max_of(top), d = most / 127.0f, inverse = 127.0f / most;
      if (!(most > 1e-30f)) d = 0, inverse = 0;  // 1 / d would overflow
      ni v[PARTS], sum = bcast_i(0);
      UNROLL for (int part = 0; part < PARTS; part++) {
        v[part] = (ni)(load(p + part * VL) * inverse + 12582912.0f) - 0x4b400000;  // rounds to nearest even
        sum += v[part];
      }
      store_bytes(a->q + at * 16, v);
      a->d[at] = d;
      a->minus[at] = -sum_i(sum);
      a->s16[at] = sums[half] = d * (float)-a->minus[at];
    }
    a->s[first + b * a->group] = sums[0] + sums[1];
  }
}

// The second half of a head's rotary part belongs to the first: (a, b) -> (a cos - b sin, b cos + a sin).
AI void rotate(float* v, const float* table, i64 half) {
  for (i64 i = 0; i + VL <= half; i += VL) {
    nf a = load(v + i), b = load(v + half + i), c = load(table + i), s = load(table + half + i);
    store(v + i, (a * c - b * s));
    store(v + half + i, (b * c + a * s));
  }
  for (i64 i = half / VL * VL; i < half; i++) {
    float a = v[i], b = v[half + i], c = table[i], s = table[half + i];
    v[i] = a * c - b * s;
    v[half + i] = b * c + a * s;
  }
}

// -- attention ---------------------------------------------------------------------------------------------------

typedef struct {
  const float* q;
  float* out;
  i64 first, last;  // positions seen
} Query;

// Vectors of key positions, or of a head's columns, that are worked on at once: the sums of one wait for each other,
// so there must be some eight to twelve of them, and they must fit the registers.
#if SMQ_AVX512 || SMQ_NEON
#define TOGETHER(n) ((n) == 1 ? 8 : 4)
#else
#define TOGETHER(n) ((n) <= 2 ? 4 : 2)
#endif

// Scores of `together` vectors of positions, from vector `v` on.
AI void score_vectors(const Query* query, const int n, const u16* keys, i64 head_dim, float scale, float* scores,
                      i64 stride, i64 v, const int together, const u16* values) {
  const u16* key[8];
  nf acc[GROUP][8];  // constant bounds: gcc leaves other arrays in memory
  UNROLL for (int g = 0; g < together; g++) {
    key[g] = keys + (v + g) / PARTS * head_dim * ROWS + (v + g) % PARTS * VL;
    UNROLL for (int r = 0; r < n; r++) acc[r][g] = bcast(0);
  }
  for (i64 d = 0; d < head_dim; d++) {
    nf k[8];
    if (together > 1 && d % 2 == 0)  // a tile is too short for the processor to see the stream by itself
      UNROLL for (int g = 0; g < together; g++) __builtin_prefetch(key[g] + (together * head_dim + d) * ROWS, 0, 2);
    if (values && d % (32 / VL) == 0)
      UNROLL for (int g = 0; g < together; g++)
        __builtin_prefetch(values + v * VL * head_dim + (d / (32 / VL) * together + g) * 32, 0, 2);
    UNROLL for (int g = 0; g < together; g++) k[g] = load_half(key[g] + d * ROWS);
    UNROLL for (int r = 0; r < n; r++) {
      nf q = bcast(query[r].q[d]);
      UNROLL for (int g = 0; g < together; g++) acc[r][g] = fma_v(q, k[g], acc[r][g]);
    }
  }
  UNROLL for (int r = 0; r < n; r++)
    UNROLL for (int g = 0; g < together; g++) store(scores + r * stride + (v + g) * VL, acc[r][g] * scale);
}

// Columns d.. of the outputs: `together` vectors of them.
AI void mix_vectors(const Query* query, const int n, const u16* values, i64 head_dim, const float* share,
                    const float* scores, i64 stride, i64 first, i64 last, i64 d, const int together,
                    const u16* next) {
  nf acc[GROUP][8];
  UNROLL for (int r = 0; r < n; r++)
    UNROLL for (int g = 0; g < together; g++) acc[r][g] = bcast(0);
  for (i64 j = first; j <= last; j++) {
    const u16* value = values + j * head_dim + d;
    nf v[8];
    if (next)
      for (i64 at = 0; at < head_dim; at += 32) __builtin_prefetch(next + j * head_dim + at, 0, 2);
    UNROLL for (int g = 0; g < together; g++) v[g] = load_half(value + g * VL);
    UNROLL for (int r = 0; r < n; r++) {
      nf s = bcast(scores[r * stride + j]);
      UNROLL for (int g = 0; g < together; g++) acc[r][g] = fma_v(s, v[g], acc[r][g]);
    }
  }
  UNROLL for (int r = 0; r < n; r++)
    UNROLL for (int g = 0; g < together; g++) store(query[r].out + d + g * VL, acc[r][g] * share[r]);
}

// keys [positions / 16][head_dim][16], values [positions][head_dim]: float16, of one key-value head and slot. next: the
// keys of the next head, or none; asked for while the values are mixed, as the values are during the scores. Into the
// second cache: the first one has so few reads at once on their way that they would take longer than the sums do.
AI void attend_rows(const Query* query, const int n, const u16* keys, const u16* values, i64 head_dim, float scale,
                    float* scores, i64 stride, const u16* next) {
  i64 first = query[0].first, last = query[0].last;
  for (int r = 1; r < n; r++) {
    if (query[r].first < first) first = query[r].first;
    if (query[r].last > last) last = query[r].last;
  }
  const i64 begin = first / VL * VL, end = (last / VL + 1) * VL;
  i64 v = begin / VL;
  for (; v + TOGETHER(n) <= end / VL; v += TOGETHER(n))
    score_vectors(query, n, keys, head_dim, scale, scores, stride, v, TOGETHER(n), next ? values : 0);
  for (; v < end / VL; v++) score_vectors(query, n, keys, head_dim, scale, scores, stride, v, 1, next ? values : 0);
  float share[GROUP];
  for (int r = 0; r < n; r++) {
    float* s = scores + r * stride;
    const i64 a = query[r].first, b = query[r].last;
    for (i64 j = begin; j < a; j++) s[j] = -1e30f;
    for (i64 j = b + 1; j < end; j++) s[j] = -1e30f;
    nf top = bcast(-1e30f), sum = bcast(0);
    for (i64 j = begin; j < end; j += VL) top = max_v(top, load(s + j));
    const float most = max_of(top);
    for (i64 j = begin; j < end; j += VL) {
      nf e = exp_v(load(s + j) - most);
      store(s + j, e);
      sum += e;
    }
    share[r] = 1.0f / sum_v(sum);
  }
  i64 d = 0;
  for (; d + TOGETHER(n) * VL <= head_dim; d += TOGETHER(n) * VL)
    mix_vectors(query, n, values, head_dim, share, scores, stride, first, last, d, TOGETHER(n), d ? 0 : next);
  for (; d < head_dim; d += VL) mix_vectors(query, n, values, head_dim, share, scores, stride, first, last, d, 1, 0);
}

#define ATTEND(n)                                                                                               \
  NI void attend_##n(const Query* q, const u16* k, const u16* v, i64 dim, float scale, float* s, i64 stride,    \
                     const u16* next) {                                                                         \
    attend_rows(q, n, k, v, dim, scale, s, stride, next);                                                       \
  }
ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) ATTEND(5) ATTEND(6)

AI void attend(const Query* q, int n, const u16* k, const u16* v, i64 dim, float scale, float* s, i64 stride,
               const u16* next) {
  switch (n) {
    case 1: attend_1(q, k, v, dim, scale, s, stride, next); return;
    case 2: attend_2(q, k, v, dim, scale, s, stride, next); return;
    case 3: attend_3(q, k, v, dim, scale, s, stride, next); return;
    case 4: attend_4(q, k, v, dim, scale, s, stride, next); return;
    case 5: attend_5(q, k, v, dim, scale, s, stride, next); return;
    default: attend_6(q, k, v, dim, scale, s, stride, next); return;
  }
}
#endif
