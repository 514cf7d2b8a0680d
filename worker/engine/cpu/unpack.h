// Rows of a matrix in the file as floats, bit for bit what common/gguf_quants.py gives: the embedding of tokens.
#ifndef SMQ_UNPACK_H
#define SMQ_UNPACK_H
#include "repack.h"

AI float half_to_float(const u8* at) {
  const u32 h = *(const u16_u*)at, exponent = h >> 10 & 31, fraction = h & 1023;
  union { u32 bits; float value; } f;
  if (!exponent) {
    f.value = (float)fraction * 5.9604644775390625e-8f;  // 2^-24: a denormal number, exactly
    f.bits |= (h & 0x8000) << 16;
  } else {
    f.bits = (h & 0x8000) << 16 | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  }
  return f.value;
}

// 32 columns with one scale.
AI void unpack_small(const int kind, const u8* s, float* out) {
  union { u32 bits; float value; } f;
  u8 c[32];
  if (kind <= BF16) {
    for (int j = 0; j < 32; j++) {
      if (kind == F32) f.bits = ((const u32_u*)s)[j];
      else if (kind == F16) f.value = half_to_float(s + 2 * j);
      else f.bits = (u32)((const u16_u*)s)[j] << 16;
      out[j] = f.value;
    }
    return;
  }
  const float scale = half_to_float(s);
  if (kind == Q8_0) {
    for (int j = 0; j < 32; j++) out[j] = (float)(i8)s[2 + j] * scale;
    return;
  }
  if (kind == Q5_0 || kind == Q5_1) {
    get_codes(kind, s, 0, c);
  } else {
    const u8* q = s + (kind == Q4_1 ? 4 : 2);
    for (int j = 0; j < 16; j++) c[j] = q[j] & 15, c[j + 16] = q[j] >> 4;
  }
  if (kind == Q4_1 || kind == Q5_1) {
    const float low = half_to_float(s + 2);
    for (int j = 0; j < 32; j++) out[j] = (float)c[j] * scale + low;
  } else {
    for (int j = 0; j < 32; j++)
      out[j] = (kind == IQ4_NL ? (float)IQ4_VALUES[c[j]] : (float)c[j] - (kind == Q5_0 ? 16 : 8)) * scale;
  }
}

// 256 columns: `put_scales` knows where the scales of 16 or 32 of them lie, here they are those of row 0 of a tile.
AI void unpack_large(const int kind, const u8* s, float* out) {
  u8 scales[64 + 16 * 32] __attribute__((aligned(64)));
  put_scales(kind, s, scales, 0);
  const int has_minimum = kind == Q2_K || kind == Q4_K || kind == Q5_K;
  const int per_scale = kind >= Q4_K && kind != Q6_K ? 32 : 16;
  const float d = half_to_float(scales), least = has_minimum ? half_to_float(scales + 2 * ROWS) : 0;
  for (int sub = 0; sub < 8; sub++) {
    u8 c[32];
    get_codes(kind, s, sub, c);
    for (int j = 0; j < 32; j++) {
      const int at = (sub * 32 + j) / per_scale;
      const u8 scale = scales[64 + 16 * at];
      float* o = out + sub * 32 + j;
      if (has_minimum) {
        const float low = least * (float)scales[64 + 16 * (256 / per_scale + at)];
        *o = d * (float)scale * (float)c[j] - low;
      } else {
        const float code = kind == IQ4_XS ? (float)IQ4_VALUES[c[j]] : (float)c[j] - (kind == Q6_K ? 32 : 4);
        *o = d * (float)(i8)scale * code;
      }
    }
  }
}

NI void unpack_rows(int kind, const u8* src, const i64* rows, i64 count, i64 columns, float* out) {
  const i64 unit = source_columns(kind), step = source_bytes(kind), blocks = columns / unit;
  for (i64 i = 0; i < count * blocks; i++) {
    const u8* s = src + (rows[i / blocks] * blocks + i % blocks) * step;
    float* o = out + i * unit;
#define SMALL(k) case k: unpack_small(k, s, o); break;
#define LARGE(k) case k: unpack_large(k, s, o); break;
    switch (kind) {
      SMALL(F32) SMALL(F16) SMALL(BF16) SMALL(Q4_0) SMALL(Q4_1) SMALL(Q5_0) SMALL(Q5_1) SMALL(Q8_0) SMALL(IQ4_NL)
      LARGE(Q2_K) LARGE(Q3_K) LARGE(Q4_K) LARGE(Q5_K) LARGE(Q6_K) LARGE(IQ4_XS)
    }
#undef SMALL
#undef LARGE
  }
}
#endif
