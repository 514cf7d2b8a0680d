// Helper threads: they enter `helper` once, work on every step beside the main thread, and sleep in the operating
// system between steps.
//
// A step is a row of phases; a phase's work is cut into chunks that threads claim. Nobody waits for a thread, only
// for claimed chunks: on a busy machine a helper that gets no processor costs nothing, and the step goes on without
// it. Claims carry the step's number, so that a helper that comes too late claims nothing. What a chunk computes does
// not depend on who computes it.
#ifndef SMQ_POOL_H
#define SMQ_POOL_H
#include "base.h"

typedef struct {
  i32 value, sleepers;
  i32 pad[14];
} Signal;  // one cache line

typedef struct {
  u64 next, done;  // step number << 32 | chunks claimed, chunks finished
  u64 pad[6];
} Phase;

#define PHASE_SPINS 2000   // some 30 us before the processor is offered to others
#define STEP_SPINS 20000   // some 300 us: the time between two decode steps
#define CHUNKS 4           // per thread
#define ALL_CLAIMED 0xffffffffu

AI void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Linux, without a libc. Both numbers: x86-64, then arm64.
AI i64 system_call(i64 number_x86, i64 number_arm, i64 a, i64 b, i64 c, i64 d, i64 e, i64 f) {
#if defined(__x86_64__)
  i64 result;
  register i64 r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number_x86), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  (void)number_arm;
  return result;
#elif defined(__aarch64__)
  register i64 x8 __asm__("x8") = number_arm, x0 __asm__("x0") = a, x1 __asm__("x1") = b;
  register i64 x2 __asm__("x2") = c, x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  (void)number_x86;
  return x0;
#else
  (void)number_x86, (void)number_arm, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  return -1;
#endif
}
AI void futex(i32* at, i64 operation, i64 value) { system_call(202, 98, (i64)at, operation, value, 0, 0, 0); }
AI void yield(void) { system_call(24, 124, 0, 0, 0, 0, 0, 0); }

// Wait until the signal's value is no longer `seen`.
AI void signal_wait(Signal* s, i32 seen, int spins) {
  for (int i = 0; i < spins; i++) {
    if (__atomic_load_n(&s->value, __ATOMIC_ACQUIRE) != seen) return;
    relax();
  }
  __atomic_add_fetch(&s->sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&s->value, __ATOMIC_SEQ_CST) == seen) futex(&s->value, 0 /* WAIT */, seen);
  __atomic_sub_fetch(&s->sleepers, 1, __ATOMIC_SEQ_CST);
}

AI void signal_next(Signal* s) {
  __atomic_add_fetch(&s->value, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&s->sleepers, __ATOMIC_SEQ_CST)) futex(&s->value, 1 /* WAKE */, 1 << 30);
}

// -- one thread's way through the phases of a step ----------------------------------------------------------------

typedef struct {
  Phase* phase;        // the current one
  const Signal* step;  // tells that the step is over
  u32 number;          // of the step
  i32 threads, late;   // late: the step went on without this thread
  i32 tid;             // 0: the main thread, whose step it is
} Walk;

typedef struct {
  i64 total, begin, end;  // this chunk is begin..end
  u32 chunks, held;
} Share;

AI Share share(const Walk* w, i64 total) {
  Share s = {total, 0, 0, 1, 0};
  if (w->threads > 1) {
    i64 chunks = (i64)w->threads * CHUNKS;
    s.chunks = (u32)(total < chunks ? total : chunks);
  }
  return s;
}

// Hands in the chunk that this thread holds and claims the next; false when none is left.
AI int claim(Walk* w, Share* s) {
  if (w->threads == 1) {
    if (s->held) return 0;
    s->held = 1, s->begin = 0, s->end = s->total;
    return 1;
  }
  if (s->held) {
    u64 seen = __atomic_load_n(&w->phase->done, __ATOMIC_RELAXED), next;
    do next = (u32)(seen >> 32) == w->number ? seen + 1 : (u64)w->number << 32 | 1;
    while (!__atomic_compare_exchange_n(&w->phase->done, &seen, next, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    s->held = 0;
  }
  if (w->late) return 0;
  u64 seen = __atomic_load_n(&w->phase->next, __ATOMIC_ACQUIRE), next;
  // Only the main thread opens a phase. A helper that lags may read the next step's program under its own number, and
  // would claim chunks in a phase that its step does not have.
  for (int i = 0; w->tid && (i32)((u32)(seen >> 32) - w->number) < 0; i++) {
    if ((u32)__atomic_load_n(&w->step->value, __ATOMIC_ACQUIRE) != w->number) {
      w->late = 1;
      return 0;
    }
    if (i < PHASE_SPINS) relax();
    else yield();
    seen = __atomic_load_n(&w->phase->next, __ATOMIC_ACQUIRE);
  }
  u32 index;
  do {
    const u32 number = (u32)(seen >> 32);
    if ((i32)(number - w->number) > 0) {
      w->late = 1;
      return 0;
    }
    index = number == w->number ? (u32)seen : 0;
    if (index >= s->chunks) return 0;
    next = (u64)w->number << 32 | (index + 1 == s->chunks ? ALL_CLAIMED : index + 1);
  } while (!__atomic_compare_exchange_n(&w->phase->next, &seen, next, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  s->begin = s->total * index / s->chunks;
  s->end = s->total * (index + 1) / s->chunks;
  s->held = 1;
  return 1;
}

// After the last claim: wait for all chunks of the phase, then go on to the next one.
AI void finish(Walk* w, const Share* s) {
  if (w->threads > 1 && !w->late) {
    const u64 all = (u64)w->number << 32 | s->chunks;
    for (int i = 0; __atomic_load_n(&w->phase->done, __ATOMIC_ACQUIRE) != all; i++) {
      if ((u32)__atomic_load_n(&w->step->value, __ATOMIC_ACQUIRE) != w->number) {
        w->late = 1;
        break;
      }
      if (i < PHASE_SPINS) relax();
      else yield();
    }
  }
  w->phase++;
}
#endif
