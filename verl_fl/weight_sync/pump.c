/* The loops that move buckets between plain host memory and a socket or a ring, without Python in between.
 *
 * The frames are those of link.py, byte for byte; docs/weight-sync.md describes them. Only whole buckets (no deltas)
 * pass here; at anything else the functions return and Python goes on. Sockets block and have kernel timeouts, so each
 * call returns at the latest when nothing has moved for one of them. xxh3 comes from the package xxhash, by pointer.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { HEADER = 64, BUCKET = 16, RELEASE = 17, IN_RING = 2, TRAILER = 4, IOV = 256, CHUNK = 256 << 10 };
enum { DONE = 0, TICK = -1, CLOSED = -2, STRANGE = -3, TWICE = -4, WRONG_SIZE = -5, DAMAGED = -6, BAD_HEADER = -7, NO_SLOT = -8 };
enum { UNKNOWN = 0, TAKEN = 1, KNOWN = 2 };

typedef struct {
    void *state;
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    uint64_t (*digest)(const void *);
} hash_api;

/* Where the buckets lie: parts[first[k]] .. parts[first[k + 1]] are the bytes of bucket k, in order. */
typedef struct {
    uint64_t num_buckets, bucket_bytes, num_bytes;
    const int64_t *first;
    const struct iovec *parts;
    uint64_t *checksum;
    uint8_t *state;
    int64_t missing; /* buckets that a receiver still lacks, all its connections together */
} layout;

typedef struct {
    uint8_t *base;
    uint64_t slot_bytes, num_slots;
} ring;

typedef struct {
    uint8_t header[HEADER];
    uint64_t at;     /* bytes of the header, then of the payload, that have moved */
    uint64_t bucket; /* being moved */
    uint64_t hashed; /* bytes of the payload that the checksum covers */
    uint8_t trailer[8];
    int32_t inside;  /* whether the header is through */
    int32_t unused;
} progress;

static uint64_t size_of(const layout *l, uint64_t k) {
    uint64_t rest = l->num_bytes - k * l->bucket_bytes;
    return rest < l->bucket_bytes ? rest : l->bucket_bytes;
}

static uint64_t hash_bytes(const hash_api *h, const void *bytes, size_t size) {
    h->reset(h->state);
    h->update(h->state, bytes, size);
    return h->digest(h->state);
}

static uint64_t load64(const uint8_t *at) { uint64_t v; memcpy(&v, at, 8); return v; }
static void store64(uint8_t *at, uint64_t v) { memcpy(at, &v, 8); }

static void make_header(const hash_api *h, uint8_t *out, uint8_t kind, uint8_t flags, uint64_t sync, uint64_t size,
                        uint64_t index, uint64_t value, uint64_t checksum) {
    memset(out, 0, HEADER);
    memcpy(out, "VFLF", 4);
    out[4] = kind;
    out[5] = flags;
    store64(out + 8, sync);
    store64(out + 16, size);
    store64(out + 24, index);
    store64(out + 32, value);
    store64(out + 48, checksum);
    store64(out + 56, hash_bytes(h, out, 56));
}

/* The parts of bucket k from byte `at` on, at most IOV of them and at most `most` bytes. */
static int remaining(const layout *l, uint64_t k, uint64_t at, uint64_t most, struct iovec *out) {
    int n = 0;
    for (int64_t i = l->first[k]; i < l->first[k + 1] && n < IOV && most; i++) {
        uint64_t size = l->parts[i].iov_len;
        if (at >= size) { at -= size; continue; }
        size = size - at < most ? size - at : most;
        out[n].iov_base = (char *)l->parts[i].iov_base + at;
        out[n++].iov_len = size;
        most -= size;
        at = 0;
    }
    return n;
}

void pump_mark(layout *l, uint64_t k, uint64_t checksum) {
    l->checksum[k] = checksum;
    __atomic_store_n(&l->state[k], KNOWN, __ATOMIC_RELEASE);
    __atomic_sub_fetch(&l->missing, 1, __ATOMIC_ACQ_REL);
}

/* Hash `count` bytes of bucket k from byte `at` on. */
static void hash_range(const hash_api *h, const layout *l, uint64_t k, uint64_t at, uint64_t count) {
    for (int64_t i = l->first[k]; count; i++) {
        uint64_t size = l->parts[i].iov_len;
        if (at >= size) { at -= size; continue; }
        size = size - at < count ? size - at : count;
        h->update(h->state, (char *)l->parts[i].iov_base + at, size);
        count -= size;
        at = 0;
    }
}

/* Send buckets index[*next] .. index[n - 1]; `p` keeps what one call began for the next.
 *
 * A bucket whose checksum is not known is hashed chunk by chunk, each just before it is sent, while it is in the core's
 * cache; the checksum then follows the payload. */
int pump_send(int fd, const hash_api *h, const layout *l, uint64_t sync, const uint64_t *index, int64_t n, int64_t *next,
              progress *p) {
    struct iovec parts[IOV + 2];
    while (*next < n) {
        uint64_t k = index[*next], size = size_of(l, k);
        if (p->at == 0) {
            int known = __atomic_load_n(&l->state[k], __ATOMIC_ACQUIRE) == KNOWN;
            make_header(h, p->header, BUCKET, known ? 0 : TRAILER, sync, size, k, 0, known ? l->checksum[k] : 0);
            h->reset(h->state);
            p->hashed = known ? size : 0;
        }
        uint64_t trailer = p->header[5] & TRAILER ? 8 : 0, total = HEADER + size + trailer;
        while (p->at < total) {
            uint64_t at = p->at < HEADER ? 0 : p->at - HEADER; /* in the payload, then in the trailer */
            if (trailer && at == p->hashed && at < size) {
                uint64_t count = size - at < CHUNK ? size - at : CHUNK;
                hash_range(h, l, k, at, count);
                p->hashed += count;
                if (p->hashed == size) {
                    l->checksum[k] = h->digest(h->state);
                    store64(p->trailer, l->checksum[k]);
                    __atomic_store_n(&l->state[k], KNOWN, __ATOMIC_RELEASE);
                }
            }
            int count = 0;
            if (p->at < HEADER) parts[count++] = (struct iovec){p->header + p->at, HEADER - p->at};
            if (at < p->hashed) count += remaining(l, k, at, p->hashed - at, parts + count);
            uint64_t queued = at;
            for (int i = p->at < HEADER; i < count; i++) queued += parts[i].iov_len;
            if (trailer && p->hashed == size && queued >= size)
                parts[count++] = (struct iovec){p->trailer + (queued - size), 8 - (queued - size)};
            struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
            ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
            if (sent < 0) {
                if (errno == EINTR) continue;
                return errno == EAGAIN || errno == EWOULDBLOCK ? TICK : errno;
            }
            p->at += sent;
        }
        p->at = 0;
        ++*next;
    }
    return DONE;
}

static int read_some(int fd, void *into, uint64_t size, uint64_t *got) {
    while (*got < size) {
        ssize_t count = recv(fd, (char *)into + *got, size - *got, MSG_WAITALL);
        if (count == 0) return CLOSED;
        if (count < 0) {
            if (errno == EINTR) continue;
            return errno == EAGAIN || errno == EWOULDBLOCK ? TICK : errno;
        }
        *got += count;
    }
    return DONE;
}

static int write_all(int fd, const uint8_t *bytes, uint64_t size) {
    for (uint64_t at = 0; at < size;) {
        ssize_t count = send(fd, bytes + at, size - at, MSG_NOSIGNAL);
        if (count < 0) {
            if (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK) continue; /* 64 bytes always find room */
            return errno;
        }
        at += count;
    }
    return DONE;
}

/* Read a bucket in chunks that are still in the core's cache when they are hashed. */
static int read_payload(int fd, const hash_api *h, const layout *l, progress *p) {
    struct iovec parts[IOV];
    uint64_t size = size_of(l, p->bucket), total = size + (p->header[5] & TRAILER ? 8 : 0);
    if (p->at == 0) h->reset(h->state);
    while (p->at < total) {
        int n = p->at < size ? remaining(l, p->bucket, p->at, CHUNK - p->at % CHUNK, parts) : 0;
        uint64_t queued = p->at;
        for (int i = 0; i < n; i++) queued += parts[i].iov_len;
        if (queued >= size && queued < total)
            parts[n++] = (struct iovec){p->trailer + (queued - size), total - queued};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = n};
        ssize_t count = recvmsg(fd, &message, MSG_WAITALL);
        if (count == 0) return CLOSED;
        if (count < 0) {
            if (errno == EINTR) continue;
            return errno == EAGAIN || errno == EWOULDBLOCK ? TICK : errno;
        }
        if (p->at < size) {
            uint64_t here = (uint64_t)count < size - p->at ? (uint64_t)count : size - p->at;
            hash_range(h, l, p->bucket, p->at, here);
        }
        p->at += count;
    }
    return DONE;
}

static void scatter(const layout *l, uint64_t k, const uint8_t *from) {
    for (int64_t i = l->first[k]; i < l->first[k + 1]; i++) {
        memcpy(l->parts[i].iov_base, from, l->parts[i].iov_len);
        from += l->parts[i].iov_len;
    }
}

/* Receive up to `most` buckets, or until none is missing; *got counts them. A frame that is no whole bucket of this sync stays in p->header. */
int pump_receive(int fd, const hash_api *h, layout *l, uint64_t sync, const ring *r, int64_t most, int64_t *got,
                 progress *p) {
    while (*got < most) {
        int code;
        uint64_t k, value = 0;
        if (!p->inside) {
            if ((code = read_some(fd, p->header, HEADER, &p->at)) != DONE) return code;
            int flags = p->header[5] | p->header[6] << 8;
            uint32_t meta;
            memcpy(&meta, p->header + 40, 4);
            if (memcmp(p->header, "VFLF", 4) || p->header[4] != BUCKET || (flags & ~(IN_RING | TRAILER)) || flags == (IN_RING | TRAILER) || meta ||
                load64(p->header + 8) != sync)
                return STRANGE;
            if (load64(p->header + 56) != hash_bytes(h, p->header, 56)) return BAD_HEADER;
            k = load64(p->header + 24);
            value = load64(p->header + 32);
            uint64_t size = flags & IN_RING ? value & 0xffffffff : load64(p->header + 16);
            p->bucket = k;
            if (k >= l->num_buckets || size != size_of(l, k)) return WRONG_SIZE;
            if (flags & IN_RING && (!r->base || value >> 32 >= r->num_slots || size > r->slot_bytes)) return NO_SLOT;
            uint8_t fresh = UNKNOWN;
            if (!__atomic_compare_exchange_n(&l->state[k], &fresh, TAKEN, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return TWICE;
            p->at = 0;
            p->inside = 1;
        }
        k = p->bucket;
        uint64_t expected = load64(p->header + 48), found;
        if (p->header[5] & IN_RING) {
            uint64_t slot = load64(p->header + 32) >> 32;
            const uint8_t *from = r->base + slot * r->slot_bytes;
            found = hash_bytes(h, from, size_of(l, k));
            if (found == expected) scatter(l, k, from);
            uint8_t release[HEADER];
            make_header(h, release, RELEASE, 0, sync, 0, slot, 0, 0);
            if (found == expected && (code = write_all(fd, release, HEADER)) != DONE) return code;
        } else {
            if ((code = read_payload(fd, h, l, p)) != DONE) return code;
            found = h->digest(h->state);
            if (p->header[5] & TRAILER) expected = load64(p->trailer);
        }
        if (found != expected) return DAMAGED;
        p->at = 0;
        p->inside = 0;
        ++*got;
        pump_mark(l, k, found);
        if (!__atomic_load_n(&l->missing, __ATOMIC_ACQUIRE)) return DONE;
    }
    return DONE;
}

/* Copy bucket k into `to` and return its checksum: what a ring's writer does, and whoever needs the bytes in one piece. */
uint64_t pump_gather(const hash_api *h, const layout *l, uint64_t k, uint8_t *to) {
    uint8_t *at = to;
    for (int64_t i = l->first[k]; i < l->first[k + 1]; i++) {
        memcpy(at, l->parts[i].iov_base, l->parts[i].iov_len);
        at += l->parts[i].iov_len;
    }
    if (__atomic_load_n(&l->state[k], __ATOMIC_ACQUIRE) != KNOWN) {
        l->checksum[k] = hash_bytes(h, to, size_of(l, k));
        __atomic_store_n(&l->state[k], KNOWN, __ATOMIC_RELEASE);
    }
    return l->checksum[k];
}

/* Tell `n` readers that a slot of the ring is full. */
int pump_announce(const int *fds, int n, const hash_api *h, const layout *l, uint64_t sync, uint64_t k, uint64_t slot) {
    uint8_t header[HEADER];
    make_header(h, header, BUCKET, IN_RING, sync, 0, k, slot << 32 | size_of(l, k), l->checksum[k]);
    for (int i = 0; i < n; i++) {
        int code = write_all(fds[i], header, HEADER);
        if (code != DONE) return code;
    }
    return DONE;
}

/* Read one release of `slot` from each of `n` readers; p->bucket counts those that have given it. */
int pump_collect(const int *fds, int n, const hash_api *h, uint64_t sync, uint64_t slot, progress *p) {
    while (p->bucket < (uint64_t)n) {
        int code = read_some(fds[p->bucket], p->header, HEADER, &p->at);
        if (code != DONE) return code;
        if (memcmp(p->header, "VFLF", 4) || p->header[4] != RELEASE || load64(p->header + 8) != sync ||
            load64(p->header + 24) != slot || load64(p->header + 56) != hash_bytes(h, p->header, 56))
            return STRANGE;
        p->at = 0;
        p->bucket++;
    }
    return DONE;
}
