/* The delta codec's inner loops. The format is described in delta.py, byte by byte.
 *
 * Each function exists once, with the element's width w in bytes as a constant after inlining. n bytes hold e = n / w
 * elements. Nothing is allocated and no state is kept. Addresses need no alignment.
 */
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the delta codec is written for little-endian processors"
#endif

/* What this processor can do; tests ask for less. Decided before immintrin.h, which changes what is defined. */
#ifndef DELTA_LEVEL
#define DELTA_LEVEL 2
#endif
#if DELTA_LEVEL >= 1 && defined(__AVX2__)
#define USE_AVX2
#endif
#if DELTA_LEVEL >= 1 && defined(__BMI2__)
#define USE_BMI2
#endif
#if DELTA_LEVEL >= 2 && defined(__AVX512BW__)
#define USE_AVX512
#endif
#if DELTA_LEVEL >= 2 && defined(__AVX512BW__) && defined(__AVX512VBMI2__)
#define USE_AVX512_COMPRESS
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define CHUNK 2048 /* elements whose changed places are listed before they are encoded; a multiple of 512 */
#define AHEAD 8192 /* bytes */

enum { SAME, FULL, LIST, BITMAP, STEPS };
enum { BAD_ENCODING = 1, BAD_SIZE, BAD_ORDER, BAD_INDEX, BAD_PADDING, TRUNCATED };
enum { MEDIUM = 224, STEP = 252, VALUE = 253, FAR_STEP = 254, FAR_VALUE = 255, SHORT_GAPS = 112, MEDIUM_GAPS = 3696 };

INLINE uint64_t load(const uint8_t *p, const int w) {
    uint64_t x = 0;
    memcpy(&x, p, w);
    return x;
}

INLINE uint32_t load32(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}

/* Bit i: byte i of 64 differs. */
INLINE uint64_t differing_bytes(const uint8_t *a, const uint8_t *b) {
#if defined(USE_AVX512)
    return _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
#elif defined(USE_AVX2)
    uint64_t equal[2];
    for (int i = 0; i < 2; i++) {
        const __m256i x = _mm256_loadu_si256((const __m256i *)a + i), y = _mm256_loadu_si256((const __m256i *)b + i);
        equal[i] = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, y));
    }
    return ~(equal[1] << 32 | equal[0]);
#else
    uint64_t x[8], any = 0, mask = 0;
    for (int i = 0; i < 8; i++) any |= x[i] = load(a + 8 * i, 8) ^ load(b + 8 * i, 8);
    if (!any) return 0;
    for (int i = 0; i < 8; i++) {
        uint64_t high = ((((x[i] & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F) | x[i]) >> 7) & 0x0101010101010101;
        mask |= ((high * 0x0102040810204080) >> 56) << (8 * i);
    }
    return mask;
#endif
}

/* Bit i of the result: bit 2i or 2i + 1 of m. */
INLINE uint64_t halved(uint64_t m) {
#if defined(USE_BMI2)
    return _pext_u64(m | m >> 1, 0x5555555555555555);
#else
    m = (m | m >> 1) & 0x5555555555555555;
    m = (m | m >> 1) & 0x3333333333333333;
    m = (m | m >> 2) & 0x0F0F0F0F0F0F0F0F;
    m = (m | m >> 4) & 0x00FF00FF00FF00FF;
    m = (m | m >> 8) & 0x0000FFFF0000FFFF;
    return (m | m >> 16) & 0x00000000FFFFFFFF;
#endif
}

INLINE uint64_t differing_elements(const uint8_t *a, const uint8_t *b, const int w) {
    uint64_t mask = differing_bytes(a, b);
    if (mask)
        for (int width = w; width > 1; width /= 2) mask = halved(mask);
    return mask;
}

/* The same for the last `size` < 64 bytes. */
INLINE uint64_t differing_tail(const uint8_t *a, const uint8_t *b, int64_t size, const int w) {
    uint8_t x[64] = {0}, y[64] = {0};
    memcpy(x, a, size);
    memcpy(y, b, size);
    return differing_elements(x, y, w);
}

/* Fills one chunk's bitmap, up to a multiple of 64 bits; returns whether anything differs. */
INLINE int compare(const uint8_t *a, const uint8_t *b, int64_t size, uint8_t *bitmap, const int w) {
    const int share = 8 / w; /* bytes of the bitmap for 64 bytes of data */
    uint64_t any = 0, mask;
    int64_t at = 0;
    for (; at + 64 <= size; at += 64, bitmap += share) {
        /* Processors stop fetching ahead at the end of a page and while a chunk is encoded. Beyond the piece's end a
         * prefetch does nothing. */
        __builtin_prefetch((const void *)((uintptr_t)a + at + AHEAD));
        __builtin_prefetch((const void *)((uintptr_t)b + at + AHEAD));
        any |= mask = differing_elements(a + at, b + at, w);
        memcpy(bitmap, &mask, share);
    }
    if (at < size) {
        any |= mask = differing_tail(a + at, b + at, size - at, w);
        memcpy(bitmap, &mask, share);
        bitmap += share;
    }
    const int64_t blocks = (size + 63) / 64;
    for (int64_t rest = -(blocks * share) & 7; rest > 0; rest--) *bitmap++ = 0;
    return any != 0;
}

#if defined(USE_AVX512_COMPRESS)
static const uint8_t numbers[64] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
    16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
    32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
    48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63,
};

INLINE void store_places(uint16_t *places, __m256i bits, int base) {
    _mm512_storeu_si512(places, _mm512_add_epi16(_mm512_cvtepu8_epi16(bits), _mm512_set1_epi16(base)));
}
#endif

/* Lists the bits that are set in `words` words, ascending; `places` has room for 64 * words. */
INLINE int64_t list(const uint8_t *bitmap, int64_t words, uint16_t *places) {
    int64_t count = 0;
    for (int64_t i = 0; i < words; i++) {
        uint64_t m = load(bitmap + 8 * i, 8);
        if (!m) continue;
        uint16_t *next = places + count;
        count += __builtin_popcountll(m);
#if defined(USE_AVX512_COMPRESS)
        const __m512i bits = _mm512_maskz_compress_epi8(m, _mm512_loadu_si512(numbers));
        store_places(next, _mm512_castsi512_si256(bits), 64 * i);
        if (next + 32 < places + count) store_places(next + 32, _mm512_extracti64x4_epi64(bits, 1), 64 * i);
#else
        /* Eight at a time, whether there are eight or not: no branch to guess wrong. The surplus is overwritten. */
        do {
            for (int k = 0; k < 8; k++, m &= m - 1) *next++ = 64 * i + __builtin_ctzll(m | 1ull << 63);
        } while (m);
#endif
    }
    return count;
}

#if defined(USE_AVX512_COMPRESS)
/* Sixteen tokens at once where each of them has one to three bytes; returns how many bytes, or 0 where some need more.
 * `previous` is the place before the first; new and old can be read for four bytes at each place. */
INLINE int64_t sixteen_steps(const uint8_t *new, const uint8_t *old, const uint16_t *places, int64_t previous,
                             uint8_t *out, const int w) {
    const __m512i one = _mm512_set1_epi32(1), unused = _mm512_set1_epi32(32 - 8 * w);
    const __m512i place = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)places));
    const __m512i before = _mm512_mask_mov_epi32(_mm512_alignr_epi32(place, place, 15), 1, _mm512_set1_epi32(previous));
    const __m512i gap = _mm512_sub_epi32(_mm512_sub_epi32(place, before), one);
    const __m512i at = _mm512_sllv_epi32(place, _mm512_set1_epi32(w / 2));
    __m512i step = _mm512_sub_epi32(_mm512_i32gather_epi32(at, new, 1), _mm512_i32gather_epi32(at, old, 1));
    step = _mm512_srav_epi32(_mm512_sllv_epi32(step, unused), unused);
    const __mmask16 unit = _mm512_cmpeq_epi32_mask(_mm512_abs_epi32(step), one);
    const __m512i beyond = _mm512_sub_epi32(gap, _mm512_set1_epi32(SHORT_GAPS));
    const __mmask16 is_short = unit & _mm512_cmplt_epu32_mask(gap, _mm512_set1_epi32(SHORT_GAPS));
    const __mmask16 is_medium = unit & _mm512_cmplt_epu32_mask(gap, _mm512_set1_epi32(MEDIUM_GAPS));
    const __mmask16 is_near = _mm512_cmplt_epu32_mask(gap, _mm512_set1_epi32(256));
    const __m512i shifted = _mm512_add_epi32(step, _mm512_set1_epi32(128));
    const __mmask16 is_step = _mm512_cmplt_epu32_mask(shifted, _mm512_set1_epi32(256));
    if ((is_medium | (is_near & is_step)) != 0xFFFF) return 0;
    /* Each lane is 252, gap, step, of which the lowest three bytes count, or a shorter token. */
    const __m512i down = _mm512_srli_epi32(step, 31);
    __m512i token = _mm512_add_epi32(_mm512_set1_epi32(STEP), _mm512_slli_epi32(gap, 8));
    token = _mm512_add_epi32(token, _mm512_slli_epi32(step, 16));
    __m512i two = _mm512_add_epi32(down, _mm512_slli_epi32(_mm512_srli_epi32(beyond, 8), 1));
    two = _mm512_add_epi32(two, _mm512_slli_epi32(_mm512_and_si512(beyond, _mm512_set1_epi32(255)), 8));
    token = _mm512_mask_add_epi32(token, unit, two, _mm512_set1_epi32(MEDIUM));
    token = _mm512_mask_add_epi32(token, is_short, _mm512_slli_epi32(gap, 1), down);
    __m512i ends = _mm512_set1_epi32(0x00FFFFFF);
    ends = _mm512_mask_mov_epi32(ends, unit, _mm512_set1_epi32(0x0000FFFF));
    ends = _mm512_mask_mov_epi32(ends, is_short, _mm512_set1_epi32(0x000000FF));
    const __mmask64 used = _mm512_movepi8_mask(ends);
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(used, token));
    return __builtin_popcountll(used);
}
#endif

/* Appends one token for each of the changed places of a chunk that starts at element `start`; `*next` is the element
 * after the last token's. `is_inside`: four bytes can be read at each place. NULL once `out` has reached `end`: then
 * the tokens are no shorter than the data. */
INLINE uint8_t *steps(const uint8_t *new, const uint8_t *old, int64_t start, const uint16_t *places, int64_t count,
                      int64_t *next, uint8_t *out, const uint8_t *end, int is_inside, const int w) {
    int64_t expected = *next;
    (void)is_inside;
    for (int64_t i = 0; i < count; i++) {
#if defined(USE_AVX512_COMPRESS)
        while (w <= 4 && is_inside && i + 16 <= count && out + 64 <= end) {
            const int64_t before = expected - 1 - start;
            const int64_t size = sixteen_steps(new + w * start, old + w * start, places + i, before, out, w);
            if (!size) break;
            expected = start + places[i + 15] + 1;
            out += size;
            i += 16;
        }
        if (i == count) break;
#endif
        if (out >= end) return NULL;
        const int64_t element = start + places[i];
        const int64_t gap = element - expected;
        const uint64_t value = load(new + w * element, w);
        const int64_t step = (int64_t)((value - load(old + w * element, w)) << (64 - 8 * w)) >> (64 - 8 * w);
        expected = element + 1;
        if (step == 1 || step == -1) {
            const int down = step < 0;
            if (gap < SHORT_GAPS) {
                *out++ = 2 * gap + down;
                continue;
            }
            if (gap < MEDIUM_GAPS) {
                *out++ = MEDIUM + 2 * ((gap - SHORT_GAPS) >> 8) + down;
                *out++ = gap - SHORT_GAPS;
                continue;
            }
        }
        const int is_step = step >= -128 && step <= 127, is_far = gap > 255;
        *out++ = is_step ? (is_far ? FAR_STEP : STEP) : (is_far ? FAR_VALUE : VALUE);
        memcpy(out, &gap, 4);
        out += is_far ? 4 : 1;
        memcpy(out, &value, w);
        if (is_step) *out = step;
        out += is_step ? 1 : w;
    }
    *next = expected;
    return out;
}

INLINE int64_t write_list(const uint8_t *new, const uint8_t *bitmap, int64_t elements, int64_t changed, uint8_t *out,
                          const int w) {
    uint8_t *values = out + 4 * changed;
    for (int64_t base = 0; base < elements; base += 64)
        for (uint64_t m = load(bitmap + base / 8, 8); m; m &= m - 1) {
            const uint32_t index = base + __builtin_ctzll(m);
            memcpy(out, &index, 4);
            memcpy(values, new + w * (int64_t)index, w);
            out += 4, values += w;
        }
    return changed * (4 + w);
}

INLINE int64_t write_bitmap(const uint8_t *new, const uint8_t *bitmap, int64_t elements, int64_t changed, uint8_t *out,
                            const int w) {
    const int64_t size = (elements + 7) / 8;
    uint8_t *values = out + size;
    for (int64_t base = 0; base < elements; base += 64)
        for (uint64_t m = load(bitmap + base / 8, 8); m; m &= m - 1, values += w)
            memcpy(values, new + w * (base + __builtin_ctzll(m)), w);
    memcpy(out, bitmap, size);
    return size + changed * w;
}

/* `out` has room for n bytes of a result, 16 that a token may write beyond, and 8 for every 64 of n for the bitmap. */
INLINE int64_t encode(const uint8_t *new, uint8_t *old, int64_t n, uint8_t *out, int64_t *encoding, int64_t *size,
                      const int w) {
    const int64_t elements = n / w;
    uint8_t *const bitmap = out + n + 16;
    uint8_t *tokens = out;
    int64_t changed = 0, next = 0;
    uint16_t places[CHUNK];
    for (int64_t start = 0; start < elements; start += CHUNK) {
        const int64_t count = elements - start < CHUNK ? elements - start : CHUNK;
        if (!compare(new + w * start, old + w * start, w * count, bitmap + start / 8, w)) continue;
        const int64_t found = list(bitmap + start / 8, (count + 63) / 64, places);
        changed += found;
        const int is_inside = w * (start + CHUNK) + 4 <= n;
        if (tokens) tokens = steps(new, old, start, places, found, &next, tokens, out + n, is_inside, w);
        if (found * 32 > count)
            memcpy(old + w * start, new + w * start, w * count);
        else
            for (int64_t i = 0; i < found; i++) {
                const int64_t at = w * (start + places[i]);
                memcpy(old + at, new + at, w);
            }
    }
    const int64_t sizes[] = {0, n, changed * (4 + w), (elements + 7) / 8 + changed * w, tokens ? tokens - out : n};
    int best = changed ? FULL : SAME;
    for (int other = LIST; changed && other <= STEPS; other++)
        if (sizes[other] < sizes[best]) best = other;
    if (best == FULL) memcpy(out, new, n);
    if (best == LIST) write_list(new, bitmap, elements, changed, out, w);
    if (best == BITMAP) write_bitmap(new, bitmap, elements, changed, out, w);
    *encoding = best;
    *size = sizes[best];
    return changed;
}

/* Everything below returns the number of elements set, or -(reason + 16 * the byte of the payload). */
INLINE int64_t bad(int reason, int64_t at) { return -(reason + 16 * at); }

INLINE int64_t apply_full(uint8_t *target, int64_t n, const uint8_t *payload, int64_t size, const int w) {
    int64_t changed = 0, at = 0;
    if (size != n) return bad(BAD_SIZE, size);
    for (; at + 64 <= n; at += 64) changed += __builtin_popcountll(differing_elements(target + at, payload + at, w));
    if (at < n) changed += __builtin_popcountll(differing_tail(target + at, payload + at, n - at, w));
    memcpy(target, payload, n);
    return changed;
}

INLINE int64_t apply_list(uint8_t *target, int64_t n, const uint8_t *payload, int64_t size, const int w) {
    const int64_t count = size / (4 + w), elements = n / w;
    const uint8_t *values = payload + 4 * count;
    int64_t last = -1;
    if (size % (4 + w)) return bad(BAD_SIZE, size);
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = load32(payload + 4 * i);
        if (index <= last) return bad(BAD_ORDER, 4 * i);
        if (index >= elements) return bad(BAD_INDEX, 4 * i);
        memcpy(target + w * index, values + w * i, w);
        last = index;
    }
    return count;
}

INLINE int64_t apply_bitmap(uint8_t *target, int64_t n, const uint8_t *payload, int64_t size, const int w) {
    const int64_t elements = n / w, length = (elements + 7) / 8;
    const uint8_t *values = payload + length;
    int64_t count = 0;
    if (size < length) return bad(BAD_SIZE, size);
    if (elements % 8 && payload[length - 1] >> elements % 8) return bad(BAD_PADDING, length - 1);
    for (int64_t at = 0; at < length; at += 8)
        count += __builtin_popcountll(load(payload + at, length - at < 8 ? length - at : 8));
    if (size != length + w * count) return bad(BAD_SIZE, size);
    for (int64_t at = 0; at < length; at += 8)
        for (uint64_t m = load(payload + at, length - at < 8 ? length - at : 8); m; m &= m - 1, values += w)
            memcpy(target + w * (8 * at + __builtin_ctzll(m)), values, w);
    return count;
}

INLINE int64_t apply_steps(uint8_t *target, int64_t n, const uint8_t *payload, int64_t size, const int w) {
    const int64_t elements = n / w;
    int64_t element = 0, at = 0, count = 0;
    for (; at < size; count++, element++) {
        const int64_t token = at;
        const int kind = payload[at++];
        uint64_t step, value;
        if (kind < MEDIUM) {
            element += kind >> 1;
            step = kind & 1 ? -1 : 1;
        } else if (kind < STEP) {
            if (size - at < 1) return bad(TRUNCATED, token);
            element += SHORT_GAPS + 256 * ((kind - MEDIUM) >> 1) + payload[at++];
            step = kind & 1 ? -1 : 1;
        } else {
            const int gap = kind >= FAR_STEP ? 4 : 1, rest = kind & 1 ? w : 1;
            if (size - at < gap + rest) return bad(TRUNCATED, token);
            element += gap == 4 ? load32(payload + at) : payload[at];
            at += gap;
            if (kind & 1) {
                if (element >= elements) return bad(BAD_INDEX, token);
                memcpy(target + w * element, payload + at, w);
                at += w;
                continue;
            }
            step = (int64_t)(int8_t)payload[at++];
        }
        if (element >= elements) return bad(BAD_INDEX, token);
        value = load(target + w * element, w) + step;
        memcpy(target + w * element, &value, w);
    }
    return count;
}

INLINE int64_t apply(uint8_t *target, int64_t n, const uint8_t *payload, int64_t size, int64_t encoding, const int w) {
    switch (encoding) {
    case SAME: return size ? bad(BAD_SIZE, size) : 0;
    case FULL: return apply_full(target, n, payload, size, w);
    case LIST: return apply_list(target, n, payload, size, w);
    case BITMAP: return apply_bitmap(target, n, payload, size, w);
    case STEPS: return apply_steps(target, n, payload, size, w);
    default: return bad(BAD_ENCODING, 0);
    }
}

int64_t delta_encode(const uint8_t *new, uint8_t *old, int64_t n, int64_t width, uint8_t *out, int64_t *result) {
    switch (width) {
    case 1: return encode(new, old, n, out, result, result + 1, 1);
    case 2: return encode(new, old, n, out, result, result + 1, 2);
    case 4: return encode(new, old, n, out, result, result + 1, 4);
    default: return encode(new, old, n, out, result, result + 1, 8);
    }
}

int64_t delta_apply(uint8_t *target, int64_t n, int64_t width, const uint8_t *payload, int64_t size, int64_t encoding) {
    switch (width) {
    case 1: return apply(target, n, payload, size, encoding, 1);
    case 2: return apply(target, n, payload, size, encoding, 2);
    case 4: return apply(target, n, payload, size, encoding, 4);
    default: return apply(target, n, payload, size, encoding, 8);
    }
}
