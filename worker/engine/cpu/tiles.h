// Weight tiles: 16 rows x a unit of 32, 64 or 256 columns, and their product with int8 activations.
//
// A unit is a whole number of cache lines: a vector that lies across two of them costs two reads.
// Vector i of a tile (64 bytes) holds columns 4i..4i+3 of the 16 rows, row-major: what one dpbusd, maddubs or sdot
// wants. Codes of up to 6 bits lie as nibbles (vector i in the low, i + 4 in the high half of 64 bytes), the bits
// above in planes behind them. Scales lie first, because they are read first: with them last, decoding Q4_0 took 20 %
// longer on Zen 4. Repacking is lossless: scales keep their float16 or their super-block integers.
#ifndef SMQ_TILES_H
#define SMQ_TILES_H
#include "base.h"

enum { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, KINDS };

// Columns of a unit, bytes of 32 columns' codes, bytes of a unit's scales; 16 rows of one unit lie together.
AI int unit_columns(int kind) {
  if (kind >= Q2_K) return 256;
  return kind == Q4_0 || kind == Q5_0 || kind == Q8_0 || kind == IQ4_NL ? 64 : 32;
}
AI int code_bytes(int kind) {
  switch (kind) {
    case F32: return 2048;
    case F16: case BF16: return 1024;
    case Q5_0: case Q5_1: case Q5_K: return 320;
    case Q6_K: return 384;
    case Q8_0: return 512;
    default: return 256;
  }
}
AI int scale_bytes(int kind) {
  switch (kind) {
    case F32: case F16: case BF16: return 0;
    case Q4_1: case Q5_1: return 64;
    case Q4_K: case Q5_K: return 64 + 256;   // d, dmin; 8 scales, 8 minima
    case Q2_K: return 64 + 512;              // d, dmin; 16 scales, 16 minima
    case Q3_K: case Q6_K: return 64 + 256;   // d, nothing; 16 scales
    case IQ4_XS: return 64 + 128;            // d, nothing; 8 scales
    default: return 64;                      // d of both halves
  }
}
AI i64 unit_bytes(int kind) { return (i64)code_bytes(kind) * (unit_columns(kind) / 32) + scale_bytes(kind); }
AI i64 units_of(int kind, i64 columns) { return (columns + unit_columns(kind) - 1) / unit_columns(kind); }
AI i64 tile_bytes(int kind, i64 columns) { return units_of(kind, columns) * unit_bytes(kind); }
AI int code_bits(int kind) {
  switch (kind) {
    case Q5_0: case Q5_1: case Q5_K: return 5;
    case Q6_K: return 6;
    case Q8_0: case IQ4_NL: case IQ4_XS: return 8;
    default: return 4;
  }
}
// What is subtracted from a code; dpbusd takes 8-bit codes unsigned, the other instructions take them signed.
// As a power of two; 0: nothing.
AI int code_offset(int kind) {
  switch (kind) {
    case Q4_0: return 3;
    case Q5_0: return 4;
    case Q6_K: return 5;
    case Q3_K: return 2;
#if SMQ_AVX512
    case Q8_0: case IQ4_NL: case IQ4_XS: return 7;
#endif
    default: return 0;
  }
}

static const i8 IQ4_VALUES[16] __attribute__((aligned(16))) = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                               1,    13,   25,  38,  53,  69,  89,  113};

AI nb iq4_codes(nb nibbles) {
#if SMQ_AVX512
  __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)IQ4_VALUES));
  return (nb)_mm512_shuffle_epi8(table, (__m512i)nibbles) ^ 0x80;
#elif SMQ_AVX2
  __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)IQ4_VALUES));
  return (nb)_mm256_shuffle_epi8(table, (__m256i)nibbles);
#elif SMQ_NEON
  return (nb)vqtbl1q_u8(vld1q_u8((const u8*)IQ4_VALUES), (uint8x16_t)nibbles);
#else
  nb out = {0};
  for (int i = 0; i < W; i++) out[i] = (u8)IQ4_VALUES[nibbles[i]];
  return out;
#endif
}

AI nb shift_left(nb v, int n) { return (nb)((nuh)v << n); }
AI nb shift_right(nb v, int n) { return (nb)((nuh)v >> n); }

// The codes of 32 columns, part `part` of the rows.
AI void expand(const int kind, const u8* w, int part, nb v[8]) {
  w += part * W;
  if (kind == Q8_0) {
    UNROLL for (int i = 0; i < 8; i++) {
      v[i] = load_bytes(w + 64 * i);
#if !SMQ_AVX512
      v[i] ^= 0x80;
#endif
    }
    return;
  }
  UNROLL for (int i = 0; i < 4; i++) {
    nb both = load_bytes(w + 64 * i);
    v[i] = both & 15;
    v[i + 4] = shift_right(both, 4) & 15;
  }
  if (code_bits(kind) == 5) {
    nb high = load_bytes(w + 256);
    UNROLL for (int i = 0; i < 8; i++) v[i] |= (i < 4 ? shift_left(high, 4 - i) : shift_right(high, i - 4)) & 0x10;
  }
  if (code_bits(kind) == 6)
    UNROLL for (int half = 0; half < 2; half++) {
      nb high = load_bytes(w + 256 + 64 * half);
      UNROLL for (int i = 0; i < 4; i++)
        v[4 * half + i] |= (i < 2 ? shift_left(high, 4 - 2 * i) : shift_right(high, 2 * i - 4)) & 0x30;
    }
  if (kind == IQ4_NL || kind == IQ4_XS)
    UNROLL for (int i = 0; i < 8; i++) v[i] = iq4_codes(v[i]);
}

#if !SMQ_AVX512
// `start` and the sum over 16 columns of code * activation, exact in int32; x are the activations of these columns.
AI ni dot(const nb* v, const i8* x, ni start, const int bits) {
  const i32_u* x4 = (const i32_u*)x;
  (void)bits;
#if SMQ_AVX2
  // The int16 sums hold: 31*127*2*4, 63*127*2*2 and 128*127*2 are all below 32768.
  const int run = bits <= 5 ? 4 : bits == 6 ? 2 : 1;
  __m256i one = _mm256_set1_epi16(1), wide = _mm256_setzero_si256(), narrow = wide;
  UNROLL for (int g = 0; g < 4; g++) {
    __m256i w = (__m256i)v[g], xb = _mm256_set1_epi32(x4[g]);
    if (bits == 8) {
      xb = _mm256_sign_epi8(xb, w);
      w = _mm256_abs_epi8(w);
    }
    __m256i product = _mm256_maddubs_epi16(w, xb);
    narrow = g % run ? _mm256_add_epi16(narrow, product) : product;
    if (g % run == run - 1 || g == 3) wide = _mm256_add_epi32(wide, _mm256_madd_epi16(narrow, one));
  }
  return (ni)wide + start;
#elif SMQ_NEON && defined(__ARM_FEATURE_DOTPROD)
  int32x4_t a = (int32x4_t)start;
  UNROLL for (int g = 0; g < 4; g++)
    a = vdotq_s32(a, (int8x16_t)v[g], vreinterpretq_s8_s32(vdupq_n_s32(x4[g])));
  return (ni)a;
#else
  const int run = bits <= 5 ? 4 : bits == 6 ? 2 : 1;
  ni wide = start;
  nh narrow = (nh){0};
  UNROLL for (int g = 0; g < 4; g++) {
    nh w = (nh)v[g], xb = (nh)bcast_i(x4[g]);
    nh even = bits == 8 ? (nh)(w << 8) >> 8 : w & 0xff, odd = bits == 8 ? w >> 8 : (nh)((nuh)w >> 8);
    nh product = even * ((nh)(xb << 8) >> 8) + odd * (xb >> 8);
    narrow = g % run ? narrow + product : product;
    if (g % run == run - 1 || g == 3) {
      ni pairs = (ni)narrow;
      wide += ((ni)(pairs << 16) >> 16) + (pairs >> 16);
    }
  }
  return wide;
#endif
}
#endif

// Both halves of a block of 32 columns, each on top of its -sum (`minus`) times 2^offset; offset 0: of nothing.
AI void dot_halves(const nb* v, const i8* x, const i32* minus, ni* sum, const int bits, const int offset) {
#if SMQ_AVX512
  const i32_u* x4 = (const i32_u*)x;
  (void)bits;
  // Shifted by hand: gcc shifts before it broadcasts, which is a way from a general register into a vector one.
  UNROLL for (int half = 0; half < 2; half++)
    sum[half] = offset ? (ni)_mm512_slli_epi32(_mm512_set1_epi32(minus[half]), (u32)offset) : bcast_i(0);
  // The halves by turns: a sum waits for itself.
  UNROLL for (int g = 0; g < 4; g++)
    UNROLL for (int half = 0; half < 2; half++)
      sum[half] = (ni)_mm512_dpbusd_epi32((__m512i)sum[half], (__m512i)v[half * 4 + g],
                                          _mm512_set1_epi32(x4[half * 4 + g]));
#else
  UNROLL for (int half = 0; half < 2; half++)
    sum[half] = dot(v + half * 4, x + half * 16, offset ? bcast_i(minus[half]) << offset : bcast_i(0), bits);
#endif
}

// Quantised activations of M rows with K columns: q, per 16 columns the scale d, the sum of -q and d times the sum of q
// (s16; s: of 32 columns); x [M][K] are the unquantised rows for float weights.
//
// `group` rows lie together, block of 32 columns by block: q [M/group][K/32][group][32], d [M/group][K/32][group][2]. So
// the rows of a tile's product are constants apart: with a row's length between them gcc kept addresses in vector
// registers, and a product took 6-9 % longer.
//
// 16 columns to a scale, not the weights' 32: it takes a quarter off the distance to float32 (0.195 to 0.138 on the
// issue's measure) and costs a tenth of the arithmetic, which decoding does not notice.
typedef struct {
  i8* q;
  i32* minus;
  float *d, *s, *s16;
  const float* x;
  i64 columns, group;
  i64 ahead;  // bytes before their use at which weights are asked for; 0: the processor does it better by itself
} Act;

#define ACT_GROUP 8  // of many rows; a single row is a group by itself

// Where block 0 of a row lies, in blocks; the next one lies `group` further on.
AI i64 first_block(const Act* a, i64 row) {
  return row / a->group * (a->columns / 32) * a->group + row % a->group;
}

AI void prefetch(const u8* w, i64 bytes) {
  UNROLL for (i64 i = 0; i < bytes; i += 64) __builtin_prefetch(w + i, 0, 3);
}

#if SMQ_AVX512
#define TM_MAX 8
#else
#define TM_MAX 4
#endif

// out [TM][16] = the tile's 16 rows times rows m..m+TM of x.
AI void tile_rows(const int kind, const u8* w, const Act* x, i64 m, const int TM, float* out) {
  const i64 K = x->columns, blocks = K / 32, units = units_of(kind, K);
  const int bits = code_bits(kind), codes = code_bytes(kind), subs = unit_columns(kind) / 32;
  const int offset = code_offset(kind);
  const i64 begin = first_block(x, m);
  // Several rows take so long that the processor's own prefetching stays too near; with the later ones of a chunk the
  // tile is at hand.
  const i64 ahead = TM == 1 ? x->ahead : TM == TM_MAX && m == 0 ? 2048 : 0;
  for (int part = 0; part < PARTS; part++) {
    nf acc[TM_MAX];  // a constant bound: gcc leaves other arrays in memory
    UNROLL for (int t = 0; t < TM; t++) acc[t] = bcast(0);
    const u8* at = w;
    for (i64 u = 0; u < units; u++, at += unit_bytes(kind)) {
      if (part == 0 && ahead && subs <= 2) prefetch(at + ahead, unit_bytes(kind));
      if (kind <= BF16) {
        const float* row = x->x + m * K + u * 32;
        for (int k = 0; k < 32; k++) {
          nf weight = {0};
          if (kind == F32) weight = load((const float*)at + k * ROWS + part * VL);
          if (kind == F16) weight = load_half(at + (k * ROWS + part * VL) * 2);
          if (kind == BF16) {
            const u16_u* p = (const u16_u*)at + k * ROWS + part * VL;
            nu raw = {0};
            for (int i = 0; i < VL; i++) raw[i] = (u32)p[i] << 16;
            weight = (nf)raw;
          }
          UNROLL for (int t = 0; t < TM; t++) acc[t] = fma_v(weight, bcast(row[t * K + k]), acc[t]);
        }
        continue;
      }
      const u8 *scales = at, *first = at + scale_bytes(kind);
      nf d = load_half(scales + part * VL * 2), low = bcast(0);
      if (kind == Q4_1 || kind == Q5_1) low = load_half(scales + 32 + part * VL * 2);
      if (kind == Q2_K || kind == Q4_K || kind == Q5_K) low = -load_half(scales + 32 + part * VL * 2);
      const u8* fine = scales + 64 + part * VL;
      for (int sub = 0; sub < subs; sub++) {
        if (subs == 2 && sub) {
          if (u * 2 + 1 == blocks) break;  // an odd number of blocks: the last unit is half empty
          d = load_half(scales + 32 + part * VL * 2);
        }
        if (part == 0 && ahead && subs > 2) prefetch(first + sub * codes + ahead, codes);
        nb v[8];
        expand(kind, first + sub * codes, part, v);
        const i64 block = begin + (u * subs + sub) * x->group;
        const i8* q = x->q + block * 32;
        if (kind == Q6_K || kind == Q3_K || kind == Q2_K) {  // a scale for each 16 columns
          nf d0, d1, low0 = bcast(0), low1 = bcast(0);
          if (kind == Q2_K) {
            d0 = d * load_u8(fine + 32 * sub), d1 = d * load_u8(fine + 32 * sub + 16);
            low0 = low * load_u8(fine + 256 + 32 * sub), low1 = low * load_u8(fine + 256 + 32 * sub + 16);
          } else {
            d0 = d * load_i8(fine + 32 * sub), d1 = d * load_i8(fine + 32 * sub + 16);
          }
          UNROLL for (int t = 0; t < TM; t++) {
            const float *xd = x->d + (block + t) * 2, *s = x->s16 + (block + t) * 2;
            ni sum[2];
            dot_halves(v, q + t * 32, x->minus + (block + t) * 2, sum, bits, offset);
            nf f0 = to_float(sum[0]) * bcast(xd[0]), f1 = to_float(sum[1]) * bcast(xd[1]);
            acc[t] = fma_v(f0, d0, acc[t]), acc[t] = fma_v(f1, d1, acc[t]);
            if (kind == Q2_K) acc[t] = fma_v(low0, bcast(s[0]), acc[t]), acc[t] = fma_v(low1, bcast(s[1]), acc[t]);
          }
          continue;
        }
        nf scale = d, least = low;
        if (kind == Q4_K || kind == Q5_K) scale = d * load_u8(fine + 16 * sub), least = low * load_u8(fine + 128 + 16 * sub);
        if (kind == IQ4_XS) scale = d * load_i8(fine + 16 * sub);
        UNROLL for (int t = 0; t < TM; t++) {
          const float *xd = x->d + (block + t) * 2, s = x->s[block + t];
          ni sum[2];
          dot_halves(v, q + t * 32, x->minus + (block + t) * 2, sum, bits, offset);
          nf f = to_float(sum[0]) * bcast(xd[0]);
          f = fma_v(to_float(sum[1]), bcast(xd[1]), f);
          if (!offset && kind != Q8_0 && kind != IQ4_NL && kind != IQ4_XS) acc[t] = fma_v(least, bcast(s), acc[t]);
          acc[t] = fma_v(f, scale, acc[t]);
        }
      }
    }
    UNROLL for (int t = 0; t < TM; t++) store(out + t * ROWS + part * VL, acc[t]);
  }
}

#define TILE(kind)                                                                   \
  NI void tile_##kind(const u8* w, const Act* x, i64 m, int tm, float* out) {        \
    if (tm == TM_MAX) tile_rows(kind, w, x, m, TM_MAX, out);                         \
    else if (tm == 2) tile_rows(kind, w, x, m, 2, out);                              \
    else tile_rows(kind, w, x, m, 1, out);                                           \
  }

TILE(F32) TILE(F16) TILE(BF16) TILE(Q4_0) TILE(Q4_1) TILE(Q5_0) TILE(Q5_1) TILE(Q8_0) TILE(IQ4_NL)
TILE(Q2_K) TILE(Q3_K) TILE(Q4_K) TILE(Q5_K) TILE(Q6_K) TILE(IQ4_XS)

// How many of the remaining rows the next call takes.
AI int rows_at_once(i64 left) { return left >= TM_MAX ? TM_MAX : left >= 2 ? 2 : 1; }

AI void tile(int kind, const u8* w, const Act* x, i64 m, int tm, float* out) {
  switch (kind) {
    case F32: tile_F32(w, x, m, tm, out); return;
    case F16: tile_F16(w, x, m, tm, out); return;
    case BF16: tile_BF16(w, x, m, tm, out); return;
    case Q4_0: tile_Q4_0(w, x, m, tm, out); return;
    case Q4_1: tile_Q4_1(w, x, m, tm, out); return;
    case Q5_0: tile_Q5_0(w, x, m, tm, out); return;
    case Q5_1: tile_Q5_1(w, x, m, tm, out); return;
    case Q8_0: tile_Q8_0(w, x, m, tm, out); return;
    case IQ4_NL: tile_IQ4_NL(w, x, m, tm, out); return;
    case Q2_K: tile_Q2_K(w, x, m, tm, out); return;
    case Q3_K: tile_Q3_K(w, x, m, tm, out); return;
    case Q4_K: tile_Q4_K(w, x, m, tm, out); return;
    case Q5_K: tile_Q5_K(w, x, m, tm, out); return;
    case Q6_K: tile_Q6_K(w, x, m, tm, out); return;
    default: tile_IQ4_XS(w, x, m, tm, out); return;
  }
}
#endif
