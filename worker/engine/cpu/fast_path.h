// The fast path of a pipeline stage: wait for a decoded token's frame, compute, and send, without Python on the way.
//
// Python (worker/engine/fast_path.py) has foretold the frame that comes next and those that will leave, all but the
// payloads and the sums. If exactly that frame comes, its step is computed and what leaves has left when Python hears
// of it; then Python does all of it once more, only that nothing is computed or sent twice. Anything else is handed to
// Python as it was read.
#ifndef SMQ_FAST_PATH_H
#define SMQ_FAST_PATH_H
#include "model.h"

#define FRAME_HEAD 8  // u32 length | u32 CRC-32, as in common/local_edges.py
#define IS_READABLE 1
#define DONT_WAIT 0x40
#define NO_SIGNAL 0x4000
#define END_OF_SEQUENCE 1

typedef struct {
  u8* frame;             // head and body, complete up to the payload but for the sum
  i64 fd, payload_at, bytes;
  i64 flags_at;          // of the record's flags, if a token may end the sequence; else 0
  i64 skipped_at_end;    // no frame for a token that ends the sequence
  i64 sent;              // bytes that the socket took, or an error number below 0
} Departure;

enum { NOTHING_DONE, COMPUTED, SENT };

typedef struct {
  i64 wake_fd, watch_fd, in_fd;  // watch_fd: readable whenever anything else of the edges is to be done
  u8* in;
  i64 in_room, in_bytes;         // what was read
  const u8* expected;            // the body up to the payload
  i64 expected_bytes, payload_bytes;
  const u32* sums;               // CRC-32 of 8 times 256 bytes
  void* step[8];
  i64 position, is_token, vocabulary;  // is_token: the payload is a token id, else a row
  i64 has_head, is_greedy;             // a last stage; it chooses the token here only if it is the most likely one
  const i64* end_ids;
  i64 end_count;
  i64 outcome, is_computing, arrived_ns, left_ns;
  i64 departures;
  Departure departure[2];
} FastPath;

AI i64 now_ns(void) {
  i64 at[2] = {0, 0};
  system_call(228, 113, 1, (i64)at, 0, 0, 0, 0);
  return at[0] * 1000000000 + at[1];
}

// As zlib's crc32: eight bytes at a time.
AI u32 crc32_of(const u32* t, const u8* p, i64 n) {
  u32 sum = 0xffffffffu;
  for (; n >= 8; n -= 8, p += 8) {
    const u32 low = *(const u32_u*)p ^ sum, high = *(const u32_u*)(p + 4);
    sum = t[7 * 256 + (low & 255)] ^ t[6 * 256 + (low >> 8 & 255)] ^ t[5 * 256 + (low >> 16 & 255)] ^
          t[4 * 256 + (low >> 24)] ^ t[3 * 256 + (high & 255)] ^ t[2 * 256 + (high >> 8 & 255)] ^
          t[256 + (high >> 16 & 255)] ^ t[high >> 24];
  }
  for (; n > 0; n--, p++) sum = t[(sum ^ *p) & 255] ^ sum >> 8;
  return ~sum;
}

// Whether what was read is the one frame that was foretold.
AI int is_foretold(const FastPath* f) {
  const i64 body = f->expected_bytes + f->payload_bytes;
  if (f->in_bytes != FRAME_HEAD + body || *(const u32_u*)f->in != (u32)body) return 0;
  for (i64 i = 0; i < f->expected_bytes; i++)
    if (f->in[FRAME_HEAD + i] != f->expected[i]) return 0;
  return *(const u32_u*)(f->in + 4) == crc32_of(f->sums, f->in + FRAME_HEAD, body);
}

// The first of the largest logits, as numpy's argmax; -1 where one is not a number.
AI i64 most_likely(const float* logits, i64 count) {
  float top = logits[0];
  nf tops = bcast(top);
  ni odd = {0};
  i64 i = 0;
  for (; i + VL <= count; i += VL) {
    const nf v = load(logits + i);
    odd |= v != v;
    tops = max_v(tops, v);
  }
  int is_odd = sum_i(odd) != 0;
  for (; i < count; i++) {
    is_odd |= logits[i] != logits[i];
    top = logits[i] > top ? logits[i] : top;
  }
  if (is_odd) return -1;
  const float rest = max_of(tops);
  top = rest > top ? rest : top;
  for (i = 0; logits[i] != top;) i++;
  return i;
}

AI int has_left(const FastPath* f, Departure* d, const void* payload, int is_end) {
  if (is_end && d->skipped_at_end) return 0;
  const u8* from = payload;
  for (i64 i = d->payload_at; i < d->bytes; i++) d->frame[i] = from[i - d->payload_at];
  if (d->flags_at && is_end) d->frame[d->flags_at] |= END_OF_SEQUENCE;
  *(u32_u*)(d->frame + 4) = crc32_of(f->sums, d->frame + FRAME_HEAD, d->bytes - FRAME_HEAD);
  d->sent = system_call(44, 206, d->fd, (i64)d->frame, d->bytes, DONT_WAIT | NO_SIGNAL, 0, 0);
  return 1;
}

NI void fast_path(FastPath* f) {
  struct { i32 fd; i16 events, happened; } waits[2] = {
      {(i32)f->wake_fd, IS_READABLE, 0}, {(i32)f->watch_fd, IS_READABLE, 0}};
  f->outcome = NOTHING_DONE, f->in_bytes = 0;
  for (i64 i = 0; i < f->departures; i++) f->departure[i].sent = 0;
  if (system_call(271, 73, (i64)waits, 2, 0, 0, 0, 0) <= 0 || waits[0].happened) return;
  const i64 got = system_call(45, 207, f->in_fd, (i64)f->in, f->in_room, DONT_WAIT, 0, 0);
  if (got <= 0) return;  // Python looks what else it was, the end of the connection for one
  f->in_bytes = got;
  f->arrived_ns = now_ns();
  if (!is_foretold(f)) return;

  Control* c = f->step[0];
  const u8* payload = f->in + FRAME_HEAD + f->expected_bytes;
  if (f->is_token) {
    const u32 token = *(const u32_u*)payload;
    if (token >= f->vocabulary) return;
    c->token[0] = token;
  } else {
    float* x = f->step[1];
    for (i64 i = 0; i < f->payload_bytes / 4; i += VL) store(x + i, load((const float*)payload + i));
  }
  c->args[0] = f->is_token;
  c->rows = 1, c->head_rows = (i32)f->has_head, c->skip_blocks = 0;
  c->position[0] = (i32)f->position, c->slot[0] = 0;
  __atomic_store_n(&f->is_computing, 1, __ATOMIC_RELAXED);
  whole_step(f->step);
  __atomic_store_n(&f->is_computing, 0, __ATOMIC_RELAXED);
  f->outcome = COMPUTED;

  const void* result = f->step[1];
  u32 token = 0;
  int is_end = 0;
  if (f->has_head) {
    const i64 chosen = f->is_greedy ? most_likely(f->step[7], f->vocabulary) : -1;
    if (chosen < 0) return;
    token = (u32)chosen;
    result = &token;
    for (i64 i = 0; i < f->end_count; i++) is_end |= f->end_ids[i] == chosen;
  }
  f->left_ns = now_ns();
  for (i64 i = 0; i < f->departures; i++)
    if (!has_left(f, &f->departure[i], result, is_end)) f->departure[i].sent = 0;
  f->outcome = SENT;
  yield();  // who was woken may wait for this very core, and is more urgent than what Python does now
}
#endif
