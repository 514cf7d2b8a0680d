// One step of a stage: blocks a..b and the head on up to 64 rows, by all threads together (reference/engine.md 9).
//
// `entry` must be the first function of the object: tinygrad calls the first byte of the image.
void perform(void*, void*, void*, void*, void*, void*, void*, void*);
void entry(void* c, void* x, void* weights, void* plan, void* cache, void* scratch, void* rope, void* logits) {
  perform(c, x, weights, plan, cache, scratch, rope, logits);
}

#include "model.h"
#include "unpack.h"

NI void small_operation(Control* c, float* x, const u8* weights);
NI void whole_step(void* const* all);
NI void run_step(Control* c, int tid, u32 number);
NI void embed(const Control* c, float* x, const Plan* plan);
NI void helper(Control* c, int tid);

#include "fast_path.h"

__attribute__((visibility("hidden"))) void perform(void* control, void* x, void* weights, void* plan, void* cache,
                                                   void* scratch, void* rope, void* logits) {
  Control* c = control;
  if (c->op == OP_HELPER) {
    helper((Control*)c->args[0], (int)c->args[1]);
  } else if (c->op == OP_STEP) {
    void* const all[8] = {c, x, weights, plan, cache, scratch, rope, logits};
    whole_step(all);
  } else if (c->op == OP_FAST_PATH) {
    fast_path((FastPath*)c->args[0]);
  } else if (c->op == OP_SCRATCH) {
    Scratch s;
    c->args[0] = lay_out(plan, (char*)64, c->threads - 1, c->threads, &s) + 64;
  } else if (c->op == OP_STOP) {
    __atomic_store_n(&c->exit, 1, __ATOMIC_RELEASE);
    signal_next(&c->step);
  } else {
    small_operation(c, x, weights);
  }
}

// The main thread's part of a step on its eight buffers; the control block, the first, says of what.
NI void whole_step(void* const* all) {
  Control* c = all[0];
  for (int i = 0; i < 8; i++) c->shared[i] = all[i];
  if (c->args[0]) embed(c, all[1], all[3]);
  signal_next(&c->step);
  run_step(c, 0, (u32)c->step.value);
}

// Rows of the embedding matrix as it lies in the file, for `token`. args: how many, kind, where it lies, scale.
NI void embed(const Control* c, float* x, const Plan* plan) {
  const union { i64 bits; float value; } word = {c->args[3]};
  const float scale = word.value;
  unpack_rows((int)c->args[1], (const u8*)c->args[2], c->token, c->args[0], plan->width, x);
  if (scale != 1.0f)
    for (i64 i = 0; i < c->args[0] * plan->width; i++) x[i] *= scale;
}

NI void helper(Control* c, int tid) {
  i32 seen = 0;
  for (;;) {
    signal_wait(&c->step, seen, STEP_SPINS);
    // In this order: the number that says "go home" is no step, and nobody would ever open its phases.
    seen = __atomic_load_n(&c->step.value, __ATOMIC_ACQUIRE);  // a helper that is not needed may lag behind
    if (__atomic_load_n(&c->exit, __ATOMIC_ACQUIRE)) return;
    if (tid < c->threads) run_step(c, tid, (u32)seen);
  }
}

// -- matrix products ---------------------------------------------------------------------------------------------

typedef struct {
  const u8* weights;
  const Act* x;
  i64 rows;
  Walk* walk;
} Work;

enum { STORE, ADD, GATED };

// A phase: products of up to three matrices with the same x; chunks are tiles of all of them. Matrix i writes
// columns at[i].. of `out`, `stride` floats a row. GATED: activation(first) * second, tile by tile.
AI void product(const Work* w, const Matrix* const* m, int count, float* out, i64 stride, const int mode, int act) {
  const i64 pairs = mode == GATED ? 1 : count;
  i64 total = 0;
  for (i64 i = 0; i < pairs; i++) total += (m[i]->rows + ROWS - 1) / ROWS;
  Share share_of = share(w->walk, total);
  while (claim(w->walk, &share_of)) {
  const i64 begin = share_of.begin, end = share_of.end;
  i64 column = 0, passed = 0;
  for (i64 i = 0; i < pairs; i++) {
    const i64 tiles = (m[i]->rows + ROWS - 1) / ROWS, bytes = tile_bytes((int)m[i]->kind, m[i]->columns);
    const i64 from = max_i(begin - passed, 0), to = end - passed < tiles ? end - passed : tiles;
    const float* bias = m[i]->bias >= 0 ? (const float*)(w->weights + m[i]->bias) : 0;
    for (i64 t = from; t < to; t++) {
      const u8* at = w->weights + m[i]->offset + t * bytes;
      const u8* second = mode == GATED
          ? w->weights + m[1]->offset + t * tile_bytes((int)m[1]->kind, m[1]->columns) : 0;
      for (i64 row = 0; row < w->rows;) {
        const int n = rows_at_once(w->rows - row);
        float a[TM_MAX * ROWS] __attribute__((aligned(64))), b[TM_MAX * ROWS] __attribute__((aligned(64)));
        tile((int)m[i]->kind, at, w->x, row, n, a);
        if (mode == GATED) tile((int)m[1]->kind, second, w->x, row, n, b);
        for (int r = 0; r < n; r++)
          for (int part = 0; part < PARTS; part++) {
            float* o = out + (row + r) * stride + column + t * ROWS + part * VL;
            nf v = load(a + r * ROWS + part * VL);
            if (bias) v += load(bias + t * ROWS + part * VL);
            if (mode == ADD) v += load(o);
            if (mode == GATED) v = activate(v, act) * load(b + r * ROWS + part * VL);
            store(o, v);
          }
        row += n;
      }
    }
    passed += tiles;
    column += m[i]->rows;
  }
  }
  finish(w->walk, &share_of);
}

NI void product_store(const Work* w, const Matrix* const* m, int n, float* out, i64 stride) {
  product(w, m, n, out, stride, STORE, 0);
}
NI void product_add(const Work* w, const Matrix* m, float* out, i64 stride) {
  product(w, &m, 1, out, stride, ADD, 0);
}
NI void product_gated(const Work* w, const Matrix* const* m, float* out, i64 stride, int act) {
  product(w, m, 2, out, stride, GATED, act);
}

// -- a step --------------------------------------------------------------------------------------------------------

typedef struct {
  Control* c;
  const Plan* plan;
  const u8* weights;
  float* x;
  u16* cache;
  const float* rope;
  Scratch s;
  Walk walk;
  i64 rows;
} Step;

// Norm (if any) and quantisation of rows of `source`: one row is done by each thread for itself, many are a phase.
AI const Act* prepare(Step* s, const float* source, i64 columns, i64 norm) {
  const float* weight = norm >= 0 ? (const float*)(s->weights + norm) : 0;
  const float eps = (float)s->plan->epsilon;
  Act* a = s->rows == 1 ? &s->s.own : &s->s.act;
  a->columns = columns;
  if (s->rows == 1) {
    float* normed = (float*)a->x;
    if (weight) norm_row(source, weight, normed, columns, eps);
    else for (i64 i = 0; i < columns; i += VL) store(normed + i, load(source + i));
    quantise_row(normed, a, 0);
    return a;
  }
  a->x = weight ? s->s.normed : source;
  Share part = share(&s->walk, s->rows);
  while (claim(&s->walk, &part))
    for (i64 m = part.begin; m < part.end; m++) {
      if (weight) norm_row(source + m * columns, weight, s->s.normed + m * columns, columns, eps);
      quantise_row(a->x + m * columns, a, m);
    }
  finish(&s->walk, &part);
  return a;
}

AI u16* cache_of(const Step* s, i64 layer, i64 slot, i64 head, int values) {
  const Plan* p = s->plan;
  const i64 one = p->positions * p->head_dim;
  return s->cache + (((slot * p->layers + layer) * 2 + values) * p->kv_heads + head) * one;
}

// Rotate queries and keys, write keys and values into the cache.
NI void place(Step* s, const Layer* l, i64 layer) {
  const Plan* p = s->plan;
  const i64 all = p->heads + 2 * p->kv_heads, dim = p->head_dim, stride = qkv_width(p);
  const float* table = s->rope + l->rope * p->positions * p->rope_dim;
  Share part = share(&s->walk, s->rows * all);
  while (claim(&s->walk, &part))
  for (i64 i = part.begin; i < part.end; i++) {
    const i64 row = i / all, head = i % all, position = s->c->position[row];
    float* v = s->s.qkv + row * stride + head * dim;
    const i64 norm = head < p->heads ? l->q_norm : l->k_norm;
    if (head < p->heads + p->kv_heads) {
      if (norm >= 0) norm_row(v, (const float*)(s->weights + norm), v, dim, (float)p->epsilon);
      rotate(v, table + position * p->rope_dim, p->rope_dim / 2);
    }
    if (head < p->heads) continue;
    const int values = head >= p->heads + p->kv_heads;
    u16* cache = cache_of(s, layer, s->c->slot[row], head - p->heads - (values ? p->kv_heads : 0), values);
    if (values) {
      for (i64 d = 0; d < dim; d += VL) store_half(cache + position * dim + d, load(v + d));
    } else {
      u16* column = cache + position / ROWS * dim * ROWS + position % ROWS;
      for (i64 d = 0; d < dim; d += VL) {
        u16 h[VL];
        store_half(h, load(v + d));
        for (int j = 0; j < VL; j++) column[(d + j) * ROWS] = h[j];
      }
    }
  }
  finish(&s->walk, &part);
}

// All query rows, ordered by key-value head, then row, then query head of the group; each thread takes a share.
NI void mix(Step* s, const Layer* l, i64 layer) {
  const Plan* p = s->plan;
  const i64 group = p->heads / p->kv_heads, dim = p->head_dim, per_head = s->rows * group;
  // A whole group shares what it reads; it is only cut where threads would have nothing to do.
  const i64 unit = s->rows * p->kv_heads >= s->walk.threads ? group : 1;
  Query q[GROUP];
  Share part = share(&s->walk, per_head * p->kv_heads / unit);
  while (claim(&s->walk, &part))
  for (i64 i = part.begin * unit, end = part.end * unit; i < end;) {
    const i64 head = i / per_head, slot = s->c->slot[i % per_head / group];
    int n = 0;
    for (; n < GROUP && i + n < end && (i + n) / per_head == head; n++) {
      const i64 row = (i + n) % per_head / group, query_head = head * group + (i + n) % group;
      if (s->c->slot[row] != slot) break;
      q[n].q = s->s.qkv + row * qkv_width(p) + query_head * dim;
      q[n].out = s->s.mixed + row * p->heads * dim + query_head * dim;
      q[n].last = s->c->position[row];
      q[n].first = l->window && q[n].last >= l->window ? q[n].last - l->window + 1 : 0;
    }
    i += n;
    // What the next query rows read that these do not, even if another thread gets them.
    const int more = i < per_head * p->kv_heads;
    const i64 then_head = more ? i / per_head : head, then = more ? s->c->slot[i % per_head / group] : slot;
    const int same = more && then_head == head && then == slot;
    attend(q, n, cache_of(s, layer, slot, head, 0), cache_of(s, layer, slot, head, 1), dim, (float)p->attn_scale,
           s->s.scores, s->s.score_stride, same ? 0 : cache_of(s, layer, then, then_head, 0));
  }
  finish(&s->walk, &part);
}

// x += product, with a norm of the product in between where the architecture has one.
AI void add_back(Step* s, const Act* a, const Matrix* m, i64 post_norm) {
  const Plan* p = s->plan;
  Work w = {s->weights, a, s->rows, &s->walk};
  if (post_norm < 0) {
    product_add(&w, m, s->x, p->width);
    return;
  }
  product_store(&w, &m, 1, s->s.temp, p->width);
  Share part = share(&s->walk, s->rows);
  while (claim(&s->walk, &part))
    for (i64 row = part.begin; row < part.end; row++) {
      float *t = s->s.temp + row * p->width, *x = s->x + row * p->width;
      norm_row(t, (const float*)(s->weights + post_norm), t, p->width, (float)p->epsilon);
      for (i64 i = 0; i < p->width; i += VL) store(x + i, load(x + i) + load(t + i));
    }
  finish(&s->walk, &part);
}

AI void block(Step* s, i64 layer) {
  const Plan* p = s->plan;
  const Layer* l = &p->layer[layer];
  const i64 heads_width = p->heads * p->head_dim;
  const Matrix* qkv[3] = {&l->q, &l->k, &l->v};
  const Matrix* gate[2] = {&l->gate, &l->up};
  const Act* a = prepare(s, s->x, p->width, l->attn_norm);
  Work w = {s->weights, a, s->rows, &s->walk};
  product_store(&w, qkv, 3, s->s.qkv, qkv_width(p));
  place(s, l, layer);
  mix(s, l, layer);
  a = prepare(s, s->s.mixed, heads_width, -1);
  add_back(s, a, &l->out, l->post_attn_norm);
  w.x = prepare(s, s->x, p->width, l->ffn_norm);
  product_gated(&w, gate, s->s.hidden, p->ffn, (int)p->activation);
  a = prepare(s, s->s.hidden, p->ffn, -1);
  add_back(s, a, &l->down, l->post_ffn_norm);
}

NI void run_step(Control* c, int tid, u32 number) {
  Step s;
  s.c = c, s.x = c->shared[1], s.weights = c->shared[2], s.plan = c->shared[3], s.cache = c->shared[4];
  s.rope = c->shared[6];
  lay_out(s.plan, c->shared[5], tid, c->threads, &s.s);
  s.s.act.ahead = s.s.own.ahead = c->ahead;
  s.rows = c->rows;
  s.walk = (Walk){s.s.phases, &c->step, number, c->threads, 0, tid};
  for (i64 layer = 0; layer < s.plan->layers && !c->skip_blocks && !s.walk.late; layer++) {
    s.walk.phase = s.s.phases + layer * PHASES;
    block(&s, layer);
  }
  s.walk.phase = s.s.phases + s.plan->layers * PHASES;
  if (c->head_rows > 0 && s.plan->head.kind >= 0) {
    s.x += (c->rows - c->head_rows) * s.plan->width;
    s.rows = c->head_rows;
    const Act* a = prepare(&s, s.x, s.plan->width, s.plan->head_norm);
    const Matrix* head = &s.plan->head;
    Work w = {s.weights, a, s.rows, &s.walk};
    product_store(&w, &head, 1, c->shared[7], (head->rows + ROWS - 1) / ROWS * ROWS);
  }
}

// -- small operations: loading, measuring, and the kernels by themselves for tests ----------------------------------

NI void small_operation(Control* c, float* x, const u8* weights) {
  i64* a = c->args;
  if (c->op == OP_REPACK) {  // kind, rows, columns, head_dim, rope_dim
    repack((int)a[0], (const u8*)x, (u8*)weights, a[1], a[2], a[3], a[4]);
  } else if (c->op == OP_UNPACK) {  // kind, row numbers, how many, columns, out
    unpack_rows((int)a[0], (const u8*)x, (const i64*)a[1], a[2], a[3], (float*)a[4]);
  } else if (c->op == OP_STREAM) {  // a[0] bytes at `weights` read once; the sum keeps the compiler honest
    // Four streams: one alone does not keep the memory busy.
    nu sum[4] = {{0}, {0}, {0}, {0}};
    const i64 quarter = a[0] / 4 / 64 * 64;
    for (i64 i = 0; i < quarter; i += 64) {
      UNROLL for (int stream = 0; stream < 4; stream++) {
        const u8* at = weights + stream * quarter + i;
        if (c->ahead) prefetch(at + c->ahead, 64);
        UNROLL for (int j = 0; j < 64 / W; j++) sum[stream] += (nu)load_bytes(at + j * W);
      }
    }
    for (int stream = 0; stream < 4; stream++)
      for (int i = 0; i < VL; i++) a[1] += sum[stream][i];
  } else if (c->op == OP_QUANTISE || c->op == OP_MATMUL) {
    // kind, rows of the matrix, columns, rows of x, out, then where act lies
    char* at = (char*)a[5];
    Act act = take_act(&at, a[3], a[2]);
    act.columns = a[2], act.x = x;
    for (i64 m = 0; m < a[3]; m++) quantise_row(x + m * a[2], &act, m);
    if (c->op == OP_QUANTISE) return;
    Matrix m = {0, a[0], a[1], a[2], -1};
    const Matrix* pm = &m;
    Walk alone = {0};
    alone.threads = 1;
    Work w = {weights, &act, a[3], &alone};
    product_store(&w, &pm, 1, (float*)a[4], (a[1] + ROWS - 1) / ROWS * ROWS);
  } else if (c->op == OP_ROWS) {  // what, count, out: 0, 1 activations; 2 exp; 3 to half and back
    float* out = (float*)a[2];
    for (i64 i = 0; i + VL <= a[1]; i += VL) {
      nf v = load(x + i);
      u16 h[VL];
      if (a[0] == 3) store_half(h, v);
      store(out + i, a[0] == 3 ? load_half(h) : a[0] == 2 ? exp_v(v) : activate(v, (int)a[0]));
    }
  }
}
