// From GGUF blocks to tiles: no number changes, only its place (and -128..127 becomes 0..255).
#ifndef SMQ_REPACK_H
#define SMQ_REPACK_H
#include "tiles.h"

AI int source_columns(int kind) { return kind >= Q2_K ? 256 : 32; }
AI i64 source_bytes(int kind) {  // of so many columns in one row of the file
  static const i16 bytes[KINDS] = {128, 64, 64, 18, 20, 22, 24, 34, 18, 84, 110, 144, 176, 210, 136};
  return bytes[kind];
}

AI void put_codes(u8* dst, int row, const u8* c, int bits) {  // c: 32 codes
  if (bits == 8) {
    for (int i = 0; i < 8; i++) *(u32_u*)(dst + 64 * i + 4 * row) = *(const u32_u*)(c + 4 * i);
    return;
  }
  u8 nib[16];
  for (int j = 0; j < 16; j++) nib[j] = (u8)((c[j] & 15) | ((c[j + 16] & 15) << 4));
  for (int i = 0; i < 4; i++) *(u32_u*)(dst + 64 * i + 4 * row) = *(const u32_u*)(nib + 4 * i);
  for (int k = 0; k < 4 && bits > 4; k++) {
    u8 a = 0, b = 0;
    for (int i = 0; i < 8; i++) {
      int high = c[4 * i + k] >> 4;
      if (bits == 5) a |= (u8)(high << i);
      else if (i < 4) a |= (u8)(high << 2 * i);
      else b |= (u8)(high << (2 * i - 8));
    }
    dst[256 + 4 * row + k] = a;
    if (bits == 6) dst[320 + 4 * row + k] = b;
  }
}

AI void get_scale_min(const u8* q, int j, u8* scale, u8* low) {  // the 6-bit pairs of Q4_K and Q5_K
  if (j < 4) {
    *scale = q[j] & 63, *low = q[j + 4] & 63;
  } else {
    *scale = (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4), *low = (q[j + 4] >> 4) | ((q[j] >> 6) << 4);
  }
}

// The codes of columns 32 * sub.. of a unit as the kernels want them: unsigned, offset as code_offset says.
AI void get_codes(const int kind, const u8* s, int sub, u8* c) {
  u32 high;
  switch (kind) {
    case Q5_0:
    case Q5_1:
      s += kind == Q5_0 ? 2 : 4;
      high = *(const u32_u*)s;
      for (int j = 0; j < 16; j++) {
        c[j] = (s[4 + j] & 15) | (u8)((high >> j & 1) << 4);
        c[j + 16] = (s[4 + j] >> 4) | (u8)((high >> (j + 16) & 1) << 4);
      }
      return;
    case Q4_K:
    case Q5_K: {
      const u8* q = s + 16 + (kind == Q5_K ? 32 : 0) + sub / 2 * 32;
      for (int j = 0; j < 32; j++) c[j] = sub & 1 ? q[j] >> 4 : q[j] & 15;
      if (kind == Q5_K)
        for (int j = 0; j < 32; j++) c[j] |= (u8)((s[16 + j] >> sub & 1) << 4);
      return;
    }
    case Q6_K: {
      const u8 *q = s + sub / 4 * 64 + (sub & 1) * 32, *h = s + 128 + sub / 4 * 32;
      for (int j = 0; j < 32; j++) c[j] = (sub & 2 ? q[j] >> 4 : q[j] & 15) | (u8)((h[j] >> 2 * (sub & 3) & 3) << 4);
      return;
    }
    case Q2_K: {
      const u8* q = s + 16 + sub / 4 * 32;
      for (int j = 0; j < 32; j++) c[j] = q[j] >> 2 * (sub & 3) & 3;
      return;
    }
    case Q3_K: {
      const u8* q = s + 32 + sub / 4 * 32;
      for (int j = 0; j < 32; j++) c[j] = (q[j] >> 2 * (sub & 3) & 3) | (u8)((s[j] >> sub & 1) << 2);
      return;
    }
    case IQ4_XS: {
      const u8* q = s + 8 + sub * 16;
      for (int j = 0; j < 16; j++) c[j] = q[j] & 15, c[j + 16] = q[j] >> 4;
      return;
    }
    default: return;
  }
}

// Scales of one row's block. `at` is the start of the unit's scales; of the second half's where a unit has two.
AI void put_scales(const int kind, const u8* s, u8* at, int row) {
  u16_u* half = (u16_u*)at;
  if (kind == Q4_K || kind == Q5_K) {
    half[row] = *(const u16_u*)s, half[ROWS + row] = *(const u16_u*)(s + 2);
    for (int j = 0; j < 8; j++) get_scale_min(s + 4, j, at + 64 + 16 * j + row, at + 192 + 16 * j + row);
  } else if (kind == Q2_K) {
    half[row] = *(const u16_u*)(s + 80), half[ROWS + row] = *(const u16_u*)(s + 82);
    for (int j = 0; j < 16; j++) at[64 + 16 * j + row] = s[j] & 15, at[320 + 16 * j + row] = s[j] >> 4;
  } else if (kind == Q6_K) {
    half[row] = *(const u16_u*)(s + 208);
    for (int j = 0; j < 16; j++) at[64 + 16 * j + row] = s[192 + j];
  } else if (kind == Q3_K) {
    const u8* q = s + 96;
    half[row] = *(const u16_u*)(s + 108);
    for (int j = 0; j < 16; j++) {
      int low = j < 8 ? q[j] & 15 : q[j - 8] >> 4, high = q[8 + (j & 3)] >> 2 * (j >> 2) & 3;
      at[64 + 16 * j + row] = (u8)((low | high << 4) - 32);
    }
  } else if (kind == IQ4_XS) {
    half[row] = *(const u16_u*)s;
    for (int j = 0; j < 8; j++) {
      int low = s[4 + j / 2] >> 4 * (j & 1) & 15, high = *(const u16_u*)(s + 2) >> 2 * j & 3;
      at[64 + 16 * j + row] = (u8)((low | high << 4) - 32);
    }
  } else {
    half[row] = *(const u16_u*)s;
    if (kind == Q4_1 || kind == Q5_1) half[ROWS + row] = *(const u16_u*)(s + 2);
  }
}

// Block `block` of a row; `d` is its unit in the tile.
AI void repack_block(const int kind, const u8* s, u8* d, i64 block, int row) {
  const int codes = code_bytes(kind), subs = unit_columns(kind) / 32;
  u8* scales = d;
  d += scale_bytes(kind);
  if (subs == 2 && block % 2) d += codes, scales += 32;
  if (kind <= BF16) {
    for (int k = 0; k < 32; k++) {
      if (kind == F32) ((u32_u*)d)[k * ROWS + row] = ((const u32_u*)s)[k];
      else ((u16_u*)d)[k * ROWS + row] = ((const u16_u*)s)[k];
    }
    return;
  }
  if (kind == Q4_0 || kind == Q4_1 || kind == IQ4_NL) {
    const u8* q = s + (kind == Q4_1 ? 4 : 2);
    for (int i = 0; i < 4; i++) *(u32_u*)(d + 64 * i + 4 * row) = *(const u32_u*)(q + 4 * i);
  } else if (kind == Q8_0) {
    for (int i = 0; i < 8; i++) *(u32_u*)(d + 64 * i + 4 * row) = *(const u32_u*)(s + 2 + 4 * i) ^ 0x80808080u;
  } else {
    for (int sub = 0; sub < source_columns(kind) / 32; sub++) {
      u8 c[32];
      get_codes(kind, s, sub, c);
      put_codes(d + sub * codes, row, c, kind == IQ4_XS ? 4 : code_bits(kind));
    }
  }
  put_scales(kind, s, scales, row);
}

// Row `r` of the tiles comes from this row of the file: neighbours of a rotary pair move into the two halves of
// their head, so that the kernels know one kind of rotation. head_dim 0: rows keep their places.
AI i64 source_row(i64 r, i64 head_dim, i64 rope_dim) {
  if (!head_dim) return r;
  i64 at = r % head_dim, half = rope_dim / 2;
  if (at >= rope_dim) return r;
  return r - at + (at < half ? 2 * at : 2 * (at - half) + 1);
}

NI void repack(int kind, const u8* src, u8* dst, i64 rows, i64 columns, i64 head_dim, i64 rope_dim) {
  const i64 blocks = columns / source_columns(kind), step = source_bytes(kind), bytes = unit_bytes(kind);
  const i64 units = units_of(kind, columns), of_unit = unit_columns(kind) / source_columns(kind);
  for (i64 t = 0; t * ROWS < rows; t++) {
    u8* tile_at = dst + t * units * bytes;
    for (int r = 0; r < ROWS; r++) {
      i64 row = t * ROWS + r;
      static const u8 nothing[256];
      for (i64 b = 0; b < units * of_unit; b++) {
        const i64 at = source_row(row, head_dim, rope_dim) * blocks + b;
        const u8* s = row < rows && b < blocks ? src + at * step : nothing;
        u8* d = tile_at + b / of_unit * bytes;
#define CASE(k) case k: repack_block(k, s, d, b, r); break;
        switch (kind) {
          CASE(F32) CASE(F16) CASE(BF16) CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(IQ4_NL)
          CASE(Q2_K) CASE(Q3_K) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K) CASE(IQ4_XS)
        }
#undef CASE
      }
    }
  }
}
#endif
