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

#if defined(DELTA_PORTABLE) /* for tests: what a processor without these instructions runs */
#undef __AVX512BW__
#undef __AVX2__
#undef __BMI2__
#endif
#if defined(__AVX512BW__) || defined(__AVX2__) || defined(__BMI2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define CHUNK 2048 /* elements whose changed places are listed before they are encoded; a multiple of 512 */

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
#if defined(__AVX512BW__)
    return _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
#elif defined(__AVX2__)
    uint64_t low = (uint32_t)_mm256_movemask_epi8(
        _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)a), _mm256_loadu_si256((const __m256i *)b)));
    uint64_t high = (uint32_t)_mm256_movemask_epi8(
        _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(a + 32)), _mm256_loadu_si256((const __m256i *)(b + 32))));
    return ~(high << 32 | low);
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
#if defined(__BMI2__)
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

/* Lists the bits that are set in `words` words, ascending; `places` has room for 64 * words + 8. */
INLINE int64_t list(const uint8_t *bitmap, int64_t words, uint16_t *places) {
    int64_t count = 0;
    for (int64_t i = 0; i < words; i++) {
        uint64_t m = load(bitmap + 8 * i, 8);
        if (!m) continue;
        uint16_t *next = places + count;
        count += __builtin_popcountll(m);
        /* Eight at a time, whether there are eight or not: no branch to guess wrong. What is too much is overwritten. */
        do {
            for (int k = 0; k < 8; k++, m &= m - 1) *next++ = 64 * i + __builtin_ctzll(m | 1ull << 63);
        } while (m);
    }
    return count;
}

/* Appends one token for each of the changed places of a chunk that starts at element `start`; `*next` is the element
 * after the last token's. NULL once `out` has reached `end`: then the tokens are no shorter than the data. */
INLINE uint8_t *steps(const uint8_t *new, const uint8_t *old, int64_t start, const uint16_t *places, int64_t count,
                      int64_t *next, uint8_t *out, const uint8_t *end, const int w) {
    int64_t expected = *next;
    for (int64_t i = 0; i < count; i++) {
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
    uint16_t places[CHUNK + 8];
    for (int64_t start = 0; start < elements; start += CHUNK) {
        const int64_t count = elements - start < CHUNK ? elements - start : CHUNK;
        if (!compare(new + w * start, old + w * start, w * count, bitmap + start / 8, w)) continue;
        const int64_t found = list(bitmap + start / 8, (count + 63) / 64, places);
        changed += found;
        if (tokens) tokens = steps(new, old, start, places, found, &next, tokens, out + n, w);
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
